"""What requests looked for and found, told to the daemon: it hears of no miss otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from kvd_client.draft import LookupCounts, MissedDraft, RequestLookup
from kvd_client.identity import NamespaceFields
from kvd_client.scheduler.request import Request
from kvd_proto.groups import GroupKind
from kvd_proto.key_status import HIT, MISS, STATUS_BITS


def count_found(
    counts: LookupCounts,
    request: Request,
    namespace: NamespaceFields,
    external_tokens: int,
    *,
    tells_prompt: bool = False,
) -> None:
    """The request has its place on the device, and loads so many tokens. It counts once.

    What the device had of it is not looked for. `tells_prompt`: somebody records a trace.
    """
    if request.was_counted:
        return
    request.was_counted = True
    boundary_tokens = namespace.boundary_tokens
    computed = request.computed_tokens
    whole = max(computed, request.num_tokens)
    begun = computed // boundary_tokens
    found = (computed + external_tokens) // boundary_tokens - begun
    missed = _first_missed(request, namespace, computed + external_tokens)
    told = RequestLookup(
        request.context,
        whole,
        computed,
        external_tokens,
        missed,
        request.gave_up if missed is not None and request.gave_up else "",
    )
    if tells_prompt:
        told.prompt = _prompt_of(request, namespace)
    counts.add(
        LookupCounts(
            requests=1,
            requests_found=int(found > 0),
            blocks=whole // boundary_tokens - begun,
            blocks_found=found,
            tokens=whole - computed,
            tokens_found=external_tokens,
            told=[told],
        )
    )


def _first_missed(
    request: Request, namespace: NamespaceFields, end_tokens: int
) -> MissedDraft | None:
    """The first block beyond what is there, of the group that lacks it; None: there is none.

    At least one token is always computed, so that the last block may be none to look for.
    """
    if end_tokens + namespace.boundary_tokens >= request.num_tokens:
        return None
    found = None
    for group, spec in enumerate(namespace.groups):
        block = end_tokens // spec.tokens_per_block
        if block >= request.known_blocks(group, spec.tokens_per_block):
            continue
        status = _status_of(request, group, block)
        if found is None or (found.status == HIT and status != HIT):
            found = MissedDraft(group, block, request.hashes[group][block], status)
    return found


def _prompt_of(request: Request, namespace: NamespaceFields) -> Sequence[bytes]:
    """The prompt's blocks, of a group that has them all where there is one."""
    kinds = [group.kind for group in namespace.groups]
    full = GroupKind.FULL_ATTENTION
    group = kinds.index(full) if full in kinds else 0
    width = namespace.groups[group].tokens_per_block
    return request.hashes[group][: request.known_blocks(group, width)]


def _status_of(request: Request, group: int, block: int) -> int:
    statuses = request.lookup.statuses
    if group >= len(statuses) or block >= len(statuses[group]):
        return MISS
    return int(statuses[group][block]) & STATUS_BITS
