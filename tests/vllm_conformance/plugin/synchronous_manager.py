"""An offloading manager whose every verb is a call to the daemon, answered before it returns.

For conformance: what vLLM's tests pin of vLLM's own manager is asked of the daemon itself, with
nothing decided on this side. It serves one engine of one rank, which it drives by hand. An engine
that serves requests wants `KvdManager`, which makes hardly a call.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingMetrics
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client.draft import BlockRun, JobDraft, request_context
from kvd_client.integrations.vllm.scheduling.requests import LOOKUP_RESULTS, hints_of, policy_of
from kvd_proto.key_status import HIT, MISS, STATUS_BITS
from kvd_proto.v1 import common_pb2, events_pb2, operator_pb2
from synchronous_jobs import (
    Capacity,
    ChunkNames,
    OpenJob,
    Rank,
    runs_of,
    unwired,
    wire,
)
from verb_session import ChangeTail, VerbSession

ADMITTED = 4  # beside MISS: a store would be admitted
ANONYMOUS = "-"


@dataclass(slots=True, eq=False)
class Observed:
    """Keys that one request has used, in the order of use."""

    owner: object
    generation: int
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    has_ended: bool = False


class SynchronousManager(OffloadingManager):
    """vLLM's offloading verbs, each carried out by the daemon while vLLM waits."""

    medium = Medium.CPU

    def __init__(
        self, session: VerbSession, changes: ChangeTail, rank: Rank, capacity: Capacity
    ) -> None:
        """`session` is usable; `changes` follows the same daemon. Neither is closed here."""
        self._session = session
        self._changes = changes
        self._rank = rank
        self._capacity = capacity
        self._names = ChunkNames()
        self._open: dict[int, OpenJob] = {}
        self._events: list[OffloadingEvent] | None = [] if capacity.enable_events else None
        self._generation = 0
        self._anonymous = 0
        self._allocations: list[int] = []
        self._skipped = 0

    # -- requests ---------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._observed(req_context)
        return RequestOffloadingContext(policy=policy_of(req_context.kv_transfer_params or {}))

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Commit the request's recency. The daemon knows the order of keys with positions."""
        observed = req_context.get_state(Observed)
        if observed is None or not self._is_ours(observed) or observed.has_ended:
            return
        observed.has_ended = True
        keys = sorted(observed.keys, key=lambda key: key[-4:])  # group by group, else as used
        if keys and any(req_context.get_offload_key_position(key) is None for key in keys):
            self.touch(keys, req_context)
        self._session.end_step(finished=[req_context.req_id or ANONYMOUS])

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._session.end_step(preempted=list(context.preempted_req_ids))

    def _observed(self, req_context: ReqContext) -> Observed:
        observed = req_context.get_state(Observed)
        if observed is None or not self._is_ours(observed):
            observed = Observed(self, self._generation)
            req_context.set_state(observed)
        return observed

    def _is_ours(self, observed: Observed) -> bool:
        return observed.owner is self and observed.generation == self._generation

    # -- lookups and touches ----------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        (found,) = self._session.lookup(self._context(req_context), [BlockRun(0, 0, [wire(key)])])
        return LOOKUP_RESULTS[found.statuses[0] & STATUS_BITS]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """The first of the keys is the youngest afterwards."""
        if keys:
            run = BlockRun(0, 0, [wire(key) for key in keys])
            self._session.touch(self._context(req_context), [run])

    def _context(self, req_context: ReqContext, request_id: str = "") -> common_pb2.ReqContext:
        extras = [
            ("kv_transfer_params", req_context.kv_transfer_params or {}),
            ("hints", hints_of(req_context)),
        ]
        return request_context(request_id or req_context.req_id or ANONYMOUS, "", 0, extras)

    def _in_prompt_order(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> tuple[common_pb2.ReqContext, list[OffloadKey], list[int]]:
        """The keys, head of the prompt first, with numbers that rise along it.

        Keys without positions stand in no prompt: the daemon shall know no more of them than
        that the first is the oldest, so they go the other way round, and for nobody.
        """
        positions = [req_context.get_offload_key_position(key) for key in keys]
        known = [position for position in positions if position is not None]
        if len(known) < len(keys):
            self._anonymous += 1
            context = self._context(req_context, f"{ANONYMOUS}{self._anonymous}")
            return context, list(reversed(keys)), list(range(len(keys)))
        order = sorted(range(len(keys)), key=known.__getitem__)
        places = [known[i] for i in order]
        return self._context(req_context), [keys[i] for i in order], places

    # -- loads ------------------------------------------------------------------------------

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> CPULoadStoreSpec:
        """Every key must be readable; the load's own transfer pins it from here on."""
        if not keys:
            return CPULoadStoreSpec([])
        context, ordered, places = self._in_prompt_order(list(dict.fromkeys(keys)), req_context)
        found = self._session.lookup(context, runs_of(ordered, places), lease=True)
        statuses = b"".join(answer.statuses for answer in found)
        missing = [
            key
            for key, status in zip(ordered, statuses, strict=True)
            if status & STATUS_BITS != HIT
        ]
        job = self._new_job(context, ordered, is_load=True)
        if not missing:
            blocks = self._rank.begin(job.job_id, ordered, load=True)
            draft = JobDraft(job.job_id, context, runs_of(ordered, places, blocks))
            verdict = self._session.prepare_load(draft)
            assert verdict.accepted, f"the load was refused: {verdict.reason}"
            self._open[job.job_id] = job
        self._session.release_leases([answer.lease_id for answer in found if answer.lease_id])
        assert not missing, f"{missing} can't be read"
        self._observed(req_context).keys.update(dict.fromkeys(keys))
        return CPULoadStoreSpec([self._names.by_key[key] for key in keys])

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in keys:
            assert self._complete(key, is_load=True), f"nobody loads {key!r}"

    # -- stores -----------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """What of these the daemon stores now, and what it evicted for them."""
        keys = list(dict.fromkeys(keys))
        if not keys:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        context, ordered, places = self._in_prompt_order(keys, req_context)
        (found,) = self._session.lookup(context, [BlockRun(0, 0, [wire(key) for key in keys])])
        status_of = dict(zip(keys, found.statuses, strict=True))
        fresh = [key for key in keys if status_of[key] == MISS | ADMITTED]
        ready = {key for key in keys if status_of[key] & STATUS_BITS == HIT}
        self._skipped += sum(status == MISS for status in found.statuses)
        used = [key for key in keys if key in ready or status_of[key] == MISS | ADMITTED]
        self._observed(req_context).keys.update(dict.fromkeys(used))
        job = self._new_job(context, fresh, is_load=False)
        blocks = self._rank.begin(job.job_id, ordered, load=False)
        draft = JobDraft(job.job_id, context, runs_of(ordered, places, blocks))
        verdict = self._session.prepare_store(draft)
        if fresh:
            self._allocations.append(len(fresh))
        if not verdict.accepted or not fresh:
            self._rank.ended(job.job_id, done=False)
            return None if fresh else PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        assert verdict.blocks == len(fresh), "somebody else stored or removed meanwhile"
        self._open[job.job_id] = job
        evicted = self._catch_up()
        chunk_names = self._names.give(fresh, self._capacity.num_chunks)
        return PrepareStoreOutput(fresh, CPULoadStoreSpec(chunk_names), evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """A job ends when all of its keys are completed, and fails as a whole."""
        failed = [key for key in keys if self._complete(key, has_failed=not success)]
        if success or not failed:
            return
        self._catch_up()
        self._names.take_back(failed)
        if self._events is not None:
            self._events.append(
                OffloadingEvent(failed, self.medium, removed=True, metadata_only=True)
            )

    # -- jobs -------------------------------------------------------------------------------

    def _new_job(
        self, context: common_pb2.ReqContext, keys: Sequence[OffloadKey], *, is_load: bool
    ) -> OpenJob:
        return OpenJob(self._session.next_job_id(), context, is_load, set(keys))

    def _complete(
        self, key: OffloadKey, *, is_load: bool = False, has_failed: bool = False
    ) -> bool:
        """Take the key from the oldest job of the kind that holds it. False: there is none."""
        for job in self._open.values():
            if job.is_load is is_load and key in job.left:
                job.left.discard(key)
                job.has_failed |= has_failed
                if not job.left:
                    self._end(job)
                return True
        return False

    def _end(self, job: OpenJob) -> None:
        """Let the rank do its half, and wait until the daemon has done all that follows."""
        del self._open[job.job_id]
        if job.has_failed:
            self._rank.abandon(job.job_id)
        else:
            self._rank.finish(job.job_id)
        (ended,) = self._session.flush([job.job_id])
        done = ended.status == common_pb2.JOB_STATUS_DONE
        assert done is not job.has_failed, f"job {job.job_id} ended otherwise: {ended.reason}"
        self._rank.ended(job.job_id, done=done)
        if job.is_load:
            self._session.complete_load(job.context)

    # -- events and figures -----------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is None:
            return
        self._catch_up()
        events, self._events = self._events, []
        for event in events:
            if event.metadata_only:
                # A store that was tried again may own the key by now.
                keys = [key for key in event.keys if self._is_absent(key)]
                if not keys:
                    continue
                event = replace(event, keys=keys)  # noqa: PLW2901 - as is meant
            yield event

    def _is_absent(self, key: OffloadKey) -> bool:
        return self.lookup(key, ReqContext(req_id=ANONYMOUS)) is LookupResult.MISS

    def _catch_up(self) -> list[OffloadKey]:
        """Note every change up to now; the keys that were removed since the last time."""
        removed: list[OffloadKey] = []
        for change in self._changes.take(self._session.status().event_sequence):
            ours = (self._session.namespace_id, self._session.epoch)
            if (change.namespace_id, change.epoch) != ours:
                continue
            is_removal = change.kind == events_pb2.CacheEvent.KIND_REMOVED
            keys = unwired(change.hashes)
            if is_removal:
                removed += keys
            if self._events is not None:
                self._events.append(OffloadingEvent(keys, self.medium, removed=is_removal))
        self._names.take_back(removed)
        return removed

    def tenant_status(self) -> operator_pb2.TenantStatus:
        """The figures of the tenant that this engine stores for."""
        status = self._session.status()
        (mine,) = [n for n in status.namespaces if n.namespace_id == self._session.namespace_id]
        (tenant,) = [t for t in status.tenants if t.tenant == mine.tenant]
        return tenant

    def get_stats(self) -> OffloadingConnectorStats:
        tenant = self.tenant_status()
        whole = self._capacity.num_chunks * self._capacity.block_bytes
        in_use = (tenant.bytes_used - tenant.bytes_evictable) / whole if whole else 0.0
        writing = tenant.bytes_reserved / whole if whole else 0.0
        stats = OffloadingConnectorStats()
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC, in_use)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC, writing)
        stats.set_gauge(CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC, max(in_use - writing, 0.0))
        for size in self._allocations:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, size)
        self._allocations.clear()
        if self._session.store_threshold > 1:
            stats.increase_counter(CPUOffloadingMetrics.STORES_SKIPPED, self._skipped)
            self._skipped = 0
        return stats

    def config_info(self) -> Sequence[Mapping[str, Any]]:
        return [self._capacity.config_info]

    # -- life -------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Give up what is under way, and go on in a new epoch."""
        self.shutdown()
        self._session.reset_cache(os.urandom(16).hex())
        self._generation += 1
        self._names = ChunkNames()

    def shutdown(self) -> None:
        """End every job: loads are let through, stores come to nothing."""
        for job in list(self._open.values()):
            job.has_failed = not job.is_load
            self._end(job)
