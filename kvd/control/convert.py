"""Between kvd.v1 messages and the core's events, with every limit of the protocol enforced.

Nothing here keeps state. A message that passes can't surprise the core: lengths fit, groups
exist, counts are bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import cast

import numpy as np

from kvd.control import errors, hints
from kvd.control.errors import cut_short
from kvd.control.namespace import check_string
from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.claims.hand_off import MAX_HAND_OFF_NS
from kvd.core.errors import InvalidArgument, KvdError
from kvd.core.keys import U32, JobId, KeyBatch, LeaseId, RequestId, SessionId
from kvd.core.model.tiers import Reach, TierTerms
from kvd.core.spec import NamespaceSpec
from kvd.core.told import MissedBlock, ToldRequest, Unasked
from kvd.runtime.event_log import Change, ChangeKind, Delivery
from kvd.runtime.told_lookups import MAX_COUNTED, LookupFigures
from kvd.runtime.turns import Pace
from kvd_proto.limits import (
    MAX_EPOCH_BYTES,
    MAX_IDS,
    MAX_KEYS_PER_MESSAGE,
    MAX_QUERIES,
    MAX_REQUESTS_TOLD,
    MAX_RUNS,
    MAX_STRING_BYTES,
    MAX_STRUCT_BYTES,
    MAX_TIERS,
)
from kvd_proto.v1 import common_pb2, events_pb2
from kvd_proto.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

STRUCT_BYTES_A_UNIT = 256  # of a pace: a structure of many small values is slow to encode
NAMES_A_UNIT = 16
DEFAULT_HAND_OFF_MS = 60_000
EVENT_KEYS = 2048  # in one message to a watcher; one that reads nothing costs us two of them

_LEASES: dict[int, ev.LeaseMode] = {
    pb.LEASE_MODE_UNSPECIFIED: ev.LeaseMode.NONE,
    pb.LEASE_MODE_PREFIX: ev.LeaseMode.PREFIX,
    pb.LEASE_MODE_ALL: ev.LeaseMode.ALL,
}
_CHANGE_KINDS = {
    ChangeKind.STORED: events_pb2.CacheEvent.KIND_STORED,
    ChangeKind.REMOVED: events_pb2.CacheEvent.KIND_REMOVED,
    ChangeKind.CLEARED: events_pb2.CacheEvent.KIND_CLEARED,
    ChangeKind.TIER_LOST: events_pb2.CacheEvent.KIND_TIER_LOST,
}
# vLLM's names in KV events of host memory, of what lies below it, and of where that is found.
MEDIUM_HOST, MEDIUM_TIER = "CPU", "STORAGE"
_LOCALITIES = {Reach.DISK: "LOCAL", Reach.CLUSTER: "REMOTE"}


class KeyBudget:
    """Counts the keys of one message against the limit of all its runs together."""

    def __init__(self) -> None:
        self._left = MAX_KEYS_PER_MESSAGE

    def spend(self, keys: int) -> None:
        """Take so many; InvalidArgument when the message has more than it may."""
        self._left -= keys
        if self._left < 0:
            raise InvalidArgument(
                f"more than {MAX_KEYS_PER_MESSAGE} keys in one message: send several",
                "hashes",
                errors.TOO_MANY_KEYS,
            )


def check_count(count: int, limit: int, field: str, least: int = 0) -> None:
    """Raise InvalidArgument unless a repeated field has least..limit elements."""
    if not least <= count <= limit:
        raise InvalidArgument(
            f"{field} has {count} elements, not {least}..{limit}", field, errors.TOO_MANY_PARTS
        )


# -- in ---------------------------------------------------------------------------------------


def request_context(message: common_pb2.ReqContext) -> ev.RequestContext:
    """A request's context. What else it says is checked, and said in the log at level debug."""
    if not message.request_id:
        raise InvalidArgument("context.request_id is required", "context.request_id")
    check_string(message.request_id, "context.request_id")
    check_string(message.account, "context.account")
    check_count(len(message.tiers_allowed), MAX_TIERS, "context.tiers_allowed")
    said = len(message.tiers_allowed)
    for name in ("kv_transfer_params", "hints"):
        if message.HasField(name):
            said += check_struct(getattr(message, name).ByteSize(), name)
    if said and log.isEnabledFor(logging.DEBUG):
        log.debug("request %s: %s", message.request_id, message)
    tiers = tuple(message.tiers_allowed)
    awaits = False
    if message.HasField("kv_transfer_params"):
        params = message.kv_transfer_params.fields
        awaits = "do_remote_prefill" in params and params["do_remote_prefill"].bool_value
    advice, prefetch = None, False
    if message.HasField("hints"):
        advice = hints.advice_of(message.hints)
        prefetch = hints.wants_prefetch(message.hints)
    request = RequestId(message.request_id)
    return ev.RequestContext(request, message.account, tiers, awaits, advice, prefetch)


def check_struct(size: int, name: str) -> int:
    """The encoded bytes of a context's structure; InvalidArgument where they are too many."""
    if size > MAX_STRUCT_BYTES:
        raise InvalidArgument(
            f"context.{name} takes more than {MAX_STRUCT_BYTES} bytes",
            f"context.{name}",
            errors.STRING_TOO_LONG,
        )
    return size


def context_units(message: common_pb2.ReqContext) -> int:
    """What it takes to look at a request's context, in a pace's units."""
    return 1 + message.ByteSize() // STRUCT_BYTES_A_UNIT


def key_batch(hashes: bytes, spec: NamespaceSpec, budget: KeyBudget) -> KeyBatch:
    """View the hashes of one run; at least one key."""
    if not hashes or len(hashes) % spec.hash_bytes:
        raise InvalidArgument(
            f"hashes has {len(hashes)} bytes, not a positive multiple of {spec.hash_bytes}",
            "hashes",
            errors.HASH_BYTES,
        )
    budget.spend(len(hashes) // spec.hash_bytes)
    return KeyBatch.from_bytes(hashes, spec.hash_bytes)


def group_number(group: int, spec: NamespaceSpec) -> int:
    """The group, if the namespace has it."""
    if group >= len(spec.groups):
        raise InvalidArgument(
            f"group {group} is not one of the namespace's {len(spec.groups)}", "group"
        )
    return group


async def queries(
    messages: Sequence[pb.Query], spec: NamespaceSpec, pace: Pace
) -> tuple[ev.Query, ...]:
    """1..1024 queries with at most 8192 keys together."""
    check_count(len(messages), MAX_QUERIES, "queries", least=1)
    budget = KeyBudget()
    checked = []
    for message in messages:
        await pace.spend(1 + context_units(message.context))
        checked.append(_query(message, spec, budget))
    return tuple(checked)


def _query(message: pb.Query, spec: NamespaceSpec, budget: KeyBudget) -> ev.Query:
    lease = _LEASES.get(message.lease)
    if lease is None:
        raise InvalidArgument(f"lease mode {message.lease} is not known", "lease")
    return ev.Query(
        request_context(message.context),
        group_number(message.run.group, spec),
        key_batch(message.run.hashes, spec, budget),
        lease,
        first_block=message.run.first_block,
    )


_GIVEN_UP = {
    pb.GIVEN_UP_UNSPECIFIED: Unasked.NOT,
    pb.GIVEN_UP_NO_SESSION: Unasked.NO_SESSION,
    pb.GIVEN_UP_UNANSWERED: Unasked.UNANSWERED,
    pb.GIVEN_UP_RETRY: Unasked.RETRY,
    pb.GIVEN_UP_PENDING: Unasked.PENDING,
}


def told_requests(step: pb.Step, spec: NamespaceSpec) -> tuple[ToldRequest, ...]:
    """What the step tells of single requests; those that can't be meant are passed over."""
    told = (_told_request(message, spec) for message in islice(step.requests, MAX_REQUESTS_TOLD))
    return tuple(each for each in told if each is not None)


def _told_request(message: pb.RequestLookup, spec: NamespaceSpec) -> ToldRequest | None:
    missed = None
    if message.HasField("missed"):
        block = message.missed
        if block.group >= len(spec.groups) or len(block.hash) != spec.hash_bytes:
            return None
        words = KeyBatch.from_bytes(block.hash, spec.hash_bytes).words
        missed = MissedBlock(block.group, block.block, words, block.status & 3)
    names = (message.request_id, message.account)
    if not message.request_id or max(len(n.encode()) for n in names) > MAX_STRING_BYTES:
        return None
    return ToldRequest(
        RequestId(message.request_id),
        message.account,
        min(message.prompt_tokens, MAX_COUNTED),
        min(message.device_tokens, MAX_COUNTED),
        min(message.found_tokens, MAX_COUNTED),
        missed,
        _GIVEN_UP.get(message.given_up, Unasked.NOT),
    )


def lookup_figures(step: pb.Step) -> LookupFigures | None:
    """What the step tells of lookups; None: nothing, as an older client."""
    if not step.HasField("lookups"):
        return None
    told = step.lookups
    return LookupFigures(
        told.requests, told.requests_found,
        told.blocks, told.blocks_found,
        told.tokens, told.tokens_found,
    )  # fmt: skip


def transfer_runs(
    messages: Sequence[common_pb2.TransferRun], spec: NamespaceSpec, budget: KeyBudget
) -> tuple[ev.Run, ...]:
    """1..64 runs, each with its matrix of engine block ids."""
    check_count(len(messages), MAX_RUNS, "runs", least=1)
    return tuple(_run(message, spec, budget) for message in messages)


def _run(message: common_pb2.TransferRun, spec: NamespaceSpec, budget: KeyBudget) -> ev.Run:
    group = group_number(message.group, spec)
    keys = key_batch(message.hashes, spec, budget)
    width = spec.groups[group].blocks_per_block
    if len(message.engine_blocks) != len(keys) * width * 4:
        raise InvalidArgument(
            f"engine_blocks has {len(message.engine_blocks)} bytes; {len(keys)} keys of"
            f" {width} engine blocks take {len(keys) * width * 4}",
            "engine_blocks",
            errors.BLOCKS_PER_BLOCK,
        )
    blocks: U32 = np.frombuffer(message.engine_blocks, dtype="<u4").reshape(len(keys), width)
    return ev.Run(group, keys, blocks, message.first_block)


def store_event(
    session: SessionId, message: pb.StoreJob, spec: NamespaceSpec, budget: KeyBudget
) -> ev.StoreRequested:
    """A store."""
    return ev.StoreRequested(
        session=session,
        job=job_id(message.job_id),
        context=request_context(message.context),
        runs=transfer_runs(message.runs, spec, budget),
        request_level=message.request_level,
        ready_together=message.ready_together,
    )


def load_event(
    session: SessionId, message: pb.LoadJob, spec: NamespaceSpec, budget: KeyBudget
) -> ev.LoadRequested:
    """A load."""
    return ev.LoadRequested(
        session=session,
        job=job_id(message.job_id),
        context=request_context(message.context),
        runs=transfer_runs(message.runs, spec, budget),
    )


def touch_events(
    session: SessionId, message: pb.Touch, spec: NamespaceSpec, budget: KeyBudget
) -> tuple[ev.Touched, ...]:
    """One event a run."""
    check_count(len(message.runs), MAX_RUNS, "touch.runs", least=1)
    context = request_context(message.context)
    return tuple(
        ev.Touched(
            session,
            context,
            group_number(run.group, spec),
            key_batch(run.hashes, spec, budget),
            run.first_block,
        )
        for run in message.runs
    )


def hand_off_events(
    session: SessionId, message: pb.HandOff, spec: NamespaceSpec, budget: KeyBudget
) -> tuple[ev.HandOffRequested, ...]:
    """One event a run; they make one hand-off."""
    check_count(len(message.runs), MAX_RUNS, "hand_offs.runs", least=1)
    context = request_context(message.context)
    lasting_ns = (message.deadline_ms or DEFAULT_HAND_OFF_MS) * 1_000_000
    if lasting_ns > MAX_HAND_OFF_NS:
        raise InvalidArgument(
            f"deadline_ms is {message.deadline_ms}, at most {MAX_HAND_OFF_NS // 1_000_000}",
            "deadline_ms",
        )
    return tuple(
        ev.HandOffRequested(
            session,
            context,
            group_number(run.group, spec),
            key_batch(run.hashes, spec, budget),
            lasting_ns,
        )
        for run in message.runs
    )


def epoch_name(epoch: str, least: int = 0) -> str:
    """An epoch's name of at most 64 bytes."""
    if len(epoch) < least:
        raise InvalidArgument("epoch is required", "epoch")
    return check_string(epoch, "epoch", MAX_EPOCH_BYTES)


def job_id(number: int) -> JobId:
    """A job id; 0 is none."""
    if number == 0:
        raise InvalidArgument("job_id is 0", "job_id")
    return JobId(number)


def job_ids(numbers: Sequence[int], field: str) -> tuple[JobId, ...]:
    check_count(len(numbers), MAX_IDS, field)
    return cast("tuple[JobId, ...]", tuple(numbers))


def lease_ids(numbers: Sequence[int]) -> tuple[LeaseId, ...]:
    check_count(len(numbers), MAX_IDS, "released_leases")
    return cast("tuple[LeaseId, ...]", tuple(numbers))


async def request_ids(names: Sequence[str], field: str, pace: Pace) -> tuple[RequestId, ...]:
    check_count(len(names), MAX_IDS, field)
    checked = []
    for number, name in enumerate(names):
        if number % NAMES_A_UNIT == 0:
            await pace.spend(1)
        checked.append(RequestId(check_string(name, field, MAX_STRING_BYTES)))
    return tuple(checked)


# -- out --------------------------------------------------------------------------------------


def answer_message(answer: act.Answer) -> pb.Answer:
    lease = answer.lease or 0
    return pb.Answer(statuses=answer.statuses, lease_id=lease, sources=answer.sources)


def verdict_message(verdict: act.Verdict) -> pb.JobVerdict:
    return pb.JobVerdict(
        job_id=verdict.job,
        kind=common_pb2.JobKind.Name(verdict.kind),
        accepted=verdict.accepted,
        reason=verdict.reason,
        blocks=verdict.blocks,
        message=cut_short(verdict.message),
    )


def refusal_message(job: int, kind: ev.JobKind, error: KvdError) -> pb.JobVerdict:
    """The verdict on a job whose own message broke a rule."""
    return pb.JobVerdict(
        job_id=job,
        kind=common_pb2.JobKind.Name(kind),
        reason=error.reason,
        message=cut_short(str(error)),
    )


def ended_message(order: act.EndJob) -> pb.JobEnded:
    return pb.JobEnded(
        job_id=order.job,
        kind=common_pb2.JobKind.Name(order.kind),
        status=common_pb2.JobStatus.Name(order.status),
        reason=order.reason,
        blocks=order.blocks,
        bytes=order.bytes_copied,
        left=order.left,
    )


def epoch_message(opened: act.EpochOpened) -> pb.EpochOpened:
    return pb.EpochOpened(epoch=opened.epoch, group_seeds=opened.seeds)


def delivery_messages(
    delivery: Delivery, incarnation: bytes, previous: int
) -> Iterator[events_pb2.WatchEventsResponse]:
    """The delivery as messages of at most EVENT_KEYS keys each.

    A tail that takes several messages names `previous`, the sequence before this delivery, on
    all but the last: who resumes from there may hear a change twice but misses none. A snapshot
    names its own sequence throughout and counts only once its end has come.
    """
    unfinished = delivery.sequence if delivery.snapshot else previous
    events: list[events_pb2.CacheEvent] = []
    keys = 0
    for event in _cache_events(delivery.changes):
        count = len(event.hashes) // max(1, event.hash_bytes)
        if events and keys + count > EVENT_KEYS:
            yield events_pb2.WatchEventsResponse(
                incarnation=incarnation,
                sequence=unfinished,
                snapshot=delivery.snapshot,
                events=events,
            )
            events, keys = [], 0
        events.append(event)
        keys += count
    yield events_pb2.WatchEventsResponse(
        incarnation=incarnation,
        sequence=delivery.sequence,
        snapshot=delivery.snapshot,
        snapshot_end=delivery.snapshot_end,
        events=events,
    )


def _cache_events(changes: Iterable[Change]) -> Iterator[events_pb2.CacheEvent]:
    for change in changes:
        if change.keys is None:
            event = events_pb2.CacheEvent(
                kind=_CHANGE_KINDS[change.kind], namespace_id=change.namespace
            )
            if change.tier is not None:
                _name_tier(event, change.tier)
            yield event
            continue
        for start in range(0, len(change.keys), EVENT_KEYS):
            keys = change.keys[start : start + EVENT_KEYS]
            event = events_pb2.CacheEvent(
                kind=_CHANGE_KINDS[change.kind],
                namespace_id=change.namespace,
                epoch=change.epoch,
                group=change.group,
                hashes=keys.to_bytes(),
                hash_bytes=keys.hash_bytes,
                medium=MEDIUM_HOST,
                account=change.account,
            )
            if change.tier is not None:
                _name_tier(event, change.tier)
            yield event


def _name_tier(event: events_pb2.CacheEvent, tier: TierTerms) -> None:
    event.medium = MEDIUM_TIER
    event.locality = _LOCALITIES[tier.reach]
    event.tier = tier.name
