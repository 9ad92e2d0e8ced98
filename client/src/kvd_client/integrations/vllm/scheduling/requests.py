"""vLLM's requests and keys in kvd's terms.

A vLLM offload key is a block hash with four bytes of group number behind it. vLLM numbers all
its cache groups; kvd numbers those that are offloaded, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    TierFilter,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client.draft import BlockRun, read_only_from, request_context, stretches
from kvd_client.scheduler import RequestParams
from kvd_client.scheduler.request import Request
from kvd_proto.key_status import HIT, MISS, PENDING, RETRY, STATUS_BITS
from kvd_proto.v1 import common_pb2

GROUP_BYTES = 4

LOOKUP_RESULTS = {
    MISS: LookupResult.MISS,
    HIT: LookupResult.HIT,
    PENDING: LookupResult.HIT_PENDING,
    RETRY: LookupResult.RETRY,
}
# What vLLM calls the tiers of a daemon.
TIERS: dict[int, tuple[Medium, Locality]] = {
    common_pb2.TIER_DISK: (Medium.STORAGE, Locality.LOCAL),
    common_pb2.TIER_CLUSTER: (Medium.STORAGE, Locality.REMOTE),
}
# vLLM has no name for a store that nodes share.
SOURCES: dict[int, CacheHitSource] = {
    common_pb2.TIER_DISK: CacheHitSource.DISK,
    common_pb2.TIER_CLUSTER: CacheHitSource.EXTERNAL_UNSPECIFIED,
}


@dataclass(frozen=True, slots=True)
class OffloadGroup:
    """One offloaded cache group: vLLM's number, and the tokens of one kvd block of it."""

    index: int  # kvd's number
    vllm_index: int
    tokens_per_block: int
    hashes_per_block: int
    blocks_per_block: int


OffloadGroups = Mapping[int, OffloadGroup]  # by vLLM's number, in the order of kvd's


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A live request: kvd's record of it, and what vLLM's calls need beside it."""

    request: Request
    policy: OffloadPolicy
    verdicts: dict[OffloadKey, LookupResult] = field(default_factory=dict)  # made on demand
    # Of the hits that a tier brought up; None: to be made on demand.
    sources: dict[OffloadKey, CacheHitSource] | None = None
    offered: list[dict[int, bytes]] = field(default_factory=list)  # by group: block -> hash
    kept_out: dict[int, int] = field(default_factory=dict)  # by group: the next to be sighted
    has_ended: bool = False


def track(context: ReqContext, groups: int, account: str) -> TrackedRequest:
    """Begin to track a request; its hashes come with its first lookup."""
    params = dict(context.kv_transfer_params or {})
    hints = hints_of(context)
    policy = policy_of(params)
    extras = [("kv_transfer_params", params), ("hints", hints)]
    message = request_context(context.req_id, account, 0, extras)
    tiers = tiers_of(context.load_tier_filter)
    if tiers is not None:
        read_only_from(message, tiers)
    wants_all = policy is OffloadPolicy.REQUEST_LEVEL
    params["do_remote_decode"] = wants_all
    request = Request(
        context.req_id,
        0,
        [()] * groups,
        RequestParams(account=account, kv_transfer_params=params, hints=hints),
        account,
        message,
    )
    request.request_level = wants_all
    request.next_store = [0] * groups
    request.seen_blocks = [0] * groups
    return TrackedRequest(request, policy, offered=[{} for _ in range(groups)])


def tiers_of(allowed: TierFilter) -> list[int] | None:
    """The tiers that a request's `kv_load_tiers` lets it read from; None: every one."""
    tiers = [tier for tier, (medium, place) in TIERS.items() if allowed.allows(medium, place)]
    return None if len(tiers) == len(TIERS) else tiers


def hints_of(context: ReqContext) -> dict[str, Any]:
    """The request's hints as plain values; what can't be made plain means nothing to the daemon."""
    if context.kv_hints is None:
        return {}
    try:
        hints = msgspec.to_builtins(context.kv_hints)
    except TypeError:
        return {}
    return hints if isinstance(hints, dict) else {}


def policy_of(params: Mapping[str, Any]) -> OffloadPolicy:
    """REQUEST_LEVEL for a prefill that feeds a remote decode, however it says so."""
    remote = params.get("remote_decoder")
    names_decoder = isinstance(remote, Mapping) and bool(remote.get("kv_request_id"))
    if params.get("do_remote_decode") or names_decoder:
        return OffloadPolicy.REQUEST_LEVEL
    return OffloadPolicy.CHUNK_LEVEL


def by_group(keys: Sequence[OffloadKey]) -> Iterator[tuple[int, list[bytes]]]:
    """Keys in runs of one vLLM group number each: (number, block hashes)."""
    if len(keys) == 1:
        yield get_offload_group_idx(keys[0]), [keys[0][:-GROUP_BYTES]]
        return
    if keys and keys[0][-GROUP_BYTES:] == keys[-1][-GROUP_BYTES:]:
        suffix = keys[0][-GROUP_BYTES:]
        if {key[-GROUP_BYTES:] for key in keys} == {suffix}:
            yield get_offload_group_idx(keys[0]), [key[:-GROUP_BYTES] for key in keys]
            return
    for suffix, run in groupby(keys, key=itemgetter(slice(-GROUP_BYTES, None))):
        yield int.from_bytes(suffix, "big"), [key[:-GROUP_BYTES] for key in run]


def verdicts_of(request: Request, groups: OffloadGroups) -> dict[OffloadKey, LookupResult]:
    """What the lookup found out, by vLLM's keys."""
    found: dict[OffloadKey, LookupResult] = {}
    statuses = request.lookup.statuses
    for group, row, hashes in zip(groups.values(), statuses, request.hashes, strict=True):
        suffix = group.vllm_index.to_bytes(GROUP_BYTES, "big")
        results = [LOOKUP_RESULTS[status] for status in (row & np.uint8(STATUS_BITS)).tolist()]
        keys = (OffloadKey(block_hash + suffix) for block_hash in hashes)
        found.update(zip(keys, results, strict=False))
    return found


def sources_of(request: Request, groups: OffloadGroups) -> dict[OffloadKey, CacheHitSource]:
    """From where a tier brought up what the lookup found, by vLLM's keys."""
    found: dict[OffloadKey, CacheHitSource] = {}
    for group in groups.values():
        row = request.lookup.sources.get(group.index)
        if row is None:
            continue
        suffix = group.vllm_index.to_bytes(GROUP_BYTES, "big")
        hashes = request.hashes[group.index]
        for block in np.flatnonzero(row).tolist():
            source = SOURCES.get(int(row[block]), CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[OffloadKey(hashes[block] + suffix)] = source
    return found


def offered_runs(tracked: TrackedRequest) -> list[BlockRun]:
    """All blocks that the request has offered for storing, for its hand-off."""
    runs = []
    for group, offered in enumerate(tracked.offered):
        blocks = sorted(offered)
        for start, end in stretches(blocks):
            hashes = [offered[block] for block in blocks[start:end]]
            runs.append(BlockRun(group, blocks[start], hashes))
    return runs
