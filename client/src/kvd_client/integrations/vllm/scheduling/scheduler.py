"""The scheduler side: vLLM's own logic over kvd's manager, with one message a step.

vLLM's class keeps all that it knows: groups, windows, drafters, fences, preemption, reset. This
one sends the lookups at arrival, joins each job with its engine blocks when the step is
made, and carries failures, which vLLM's own side does not know.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    RequestOffloadState,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvd_client.draft import AFTER_THE_STEP, BEFORE_THE_STEP
from kvd_client.integrations.vllm.identity.named_inputs import NamedInputs
from kvd_client.integrations.vllm.metadata import (
    KvdConnectorMetadata,
    KvdWorkerMetadata,
)
from kvd_client.integrations.vllm.scheduling.beside import LoadsBeside
from kvd_client.integrations.vllm.scheduling.handed_states import within_bounds
from kvd_client.integrations.vllm.scheduling.jobs import (
    VLLM_NULL_BLOCK,
    AdjacentBlocks,
    adjacent_run,
    load_runs,
    store_runs,
)
from kvd_client.integrations.vllm.scheduling.lazy import BlocksOnDevice, blocks_ahead
from kvd_client.integrations.vllm.scheduling.lookups import Prompt
from kvd_client.integrations.vllm.scheduling.manager import KvdManager
from kvd_client.integrations.vllm.scheduling.never_computed import NeverComputed
from kvd_client.integrations.vllm.scheduling.one_group import DueRequests, OneGroupScheduler
from kvd_client.integrations.vllm.scheduling.prompt_times import PromptTimes
from kvd_client.integrations.vllm.scheduling.sessions import SpeculatedSessions
from kvd_client.integrations.vllm.scheduling.steps import StepJobs
from kvd_client.integrations.vllm.scheduling.stores import KEYS_PER_STEP, blocks_of
from kvd_client.scheduler import StepPlan
from kvd_client.scheduler.doubts import MAX_DOUBTS, WAIT_S
from kvd_client.scheduler.request import Knowledge

MANY_REQUESTS = 8  # from here on one probe of many is cheaper than many of one


class KvdConnectorScheduler(OneGroupScheduler):
    """The connector in vLLM's scheduler process, over a `KvdManager`."""

    manager: KvdManager

    def __init__(
        self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._kvd_groups = self.manager.groups
        self._width = self.config.blocks_per_chunk
        self._left: deque[tuple[float, RequestOffloadState, set[OffloadKey]]] = deque(
            maxlen=MAX_DOUBTS
        )
        self._ended_before: dict[str, str] = {}  # by its name now: the id that another one has
        self._names_given = itertools.count(1)
        self._named_inputs = NamedInputs()
        self._sessions = SpeculatedSessions(vllm_config)
        self._beside = LoadsBeside(vllm_config)
        self._never_computed = NeverComputed(vllm_config, self.config.tokens_per_hash)
        self._prompt_times = PromptTimes(time.monotonic)
        # Dense, as kvd wants them, and in the order in which a step names them.
        self._job_ids = itertools.count(1)
        if self._width > 1 or self._sliding_window_groups:
            self.manager.leave_out_gaps(self._is_whole)
        # By request: before this step, counted in `_steps_built`, a decoding one has no new block.
        self._next_look: dict[str, int] = {}
        self._steps_built = 0
        self._decode_tokens = 1 + vllm_config.num_speculative_tokens  # at most, in a step
        self._device: BlocksOnDevice | None = None
        if self.manager.stores_lazily:
            self._device = BlocksOnDevice(blocks_ahead(vllm_config, self.config))

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """VLLM's account of the device's blocks."""
        self._never_computed.bind(pool)
        if self._device is not None:
            self._device.bind(pool)

    def _is_whole(self, req_context: ReqContext, group: int, block: int) -> bool:
        """Whether the request holds every engine block of this one.

        vLLM 0.32 looks at the last of them only. Where the request began on a device hit, the
        block that its window begins in has null ones before that, and so has one whose first
        engine blocks the window has left and another request was given. It notes such a loss
        only from the next block to be stored on: one before that, which it considers again at
        the request's end, may be another request's by now.
        """
        config = self.config.kv_group_configs[group]
        if config.requires_cow_source:
            return True  # nothing but the last state counts, and vLLM names where that lies
        state, width = self._req_status[req_context.req_id].group_states[group], self._width
        if self._has_window(group) and block < state.next_stored_chunk_idx:
            return False
        row = state.block_ids[block * width : (block + 1) * width]
        return len(row) == width and VLLM_NULL_BLOCK not in row

    def _has_window(self, group: int) -> bool:
        """Whether the request may lose blocks of the group before it ends."""
        return self.config.kv_group_configs[group].sliding_window_size_in_chunks is not None

    # -- arrival and lookup -----------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._rename_ended(request.request_id)
        super().on_new_request(request)
        if request.mm_features:
            self._named_inputs.look_at(request)
        if not request.skip_reading_prefix_cache:
            context = self._req_status[request.request_id].req_context
            self.manager.arrive(context, self._prompt(request))

    def _rename_ended(self, req_id: str) -> None:
        """Give an ended request another name where its id comes again before all of it is stored.

        vLLM makes ids unique, unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set.
        """
        ended = self._req_status.pop(req_id, None)
        if ended is None:
            return
        names = (f"{req_id}#{number}" for number in self._names_given)
        name = next(each for each in names if each not in self._req_status)
        self._req_status[name] = ended
        ended.req_context.req_id = name
        for job_id in ended.transfer_jobs:
            self._jobs[job_id].req_id = name
        if not ended.finished_signaled:
            self._ended_before[name] = req_id

    def _with_renamed(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """The step, whose ended requests have the names that they have here."""
        renamed, self._ended_before = self._ended_before, {}
        if not renamed:
            return scheduler_output
        finished = scheduler_output.finished_req_ids | renamed.keys()
        for req_id in renamed.values():
            status = self._req_status.get(req_id)
            if status is None or not status.req.is_finished():
                finished.discard(req_id)
        return replace(scheduler_output, finished_req_ids=finished)

    def _prompt(self, request: Request, computed_tokens: int = 0) -> Prompt:
        hashes = [
            request.block_hashes[group.hashes_per_block - 1 :: group.hashes_per_block]
            for group in self._kvd_groups.values()
        ]
        return Prompt(hashes, request.num_tokens, computed_tokens)

    def get_num_new_matched_tokens(
        self, request: Request, *computed: int, **limit: int | None
    ) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, *computed, **limit
        )
        if request.skip_reading_prefix_cache:  # it looks nothing up, which would say so
            self.manager.begin_anew(self._req_status[request.request_id].req_context)
        self._beside.asked(request.request_id)
        return found

    def _lookup(self, req_status: RequestOffloadState, *limits: Any) -> int | None:
        context = req_status.req_context
        prompt = self._prompt(req_status.req, req_status.num_locally_computed_tokens)
        match self.manager.begin_lookup(context, prompt):
            case Knowledge.NOTHING if not (
                self.config.supports_partial_tail and self.manager.missed_page(context)
            ):
                req_status.partial_tail_boundary = None
                return 0
            case Knowledge.UNANSWERED:
                return None
        hit_tokens = self.manager.worth_loading(super()._lookup(req_status, *limits))
        if not hit_tokens:
            req_status.partial_tail_boundary = None
        return hit_tokens if self.manager.end_lookup(context, hit_tokens) else None

    def _maximal_prefix_lookup(
        self,
        keys: Iterable[OffloadKey],
        req_context: ReqContext,
        req: Request,
        group_config: GroupOffloadConfig,
        start_chunk_idx: int,
    ) -> int | None:
        """VLLM's scan, key by key, done in one go over the request's statuses."""
        keys = keys if isinstance(keys, Sequence) else list(keys)
        stretch = range(start_chunk_idx, start_chunk_idx + len(keys))
        return self.manager.hit_run(req_context, group_config.group_idx, stretch)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Where tiers had it, else host memory.

        Where every group loads all of its range, and from host memory, there is nothing to split.
        """
        if (
            not num_external_tokens
            or self._sliding_window_groups
            or self.manager.was_brought_up(self._req_status[request.request_id].req_context)
        ):
            sources: dict[CacheHitSource, int] = super().get_external_cache_hit_sources(
                request, num_external_tokens
            )
            return sources
        return {CacheHitSource.HOST: num_external_tokens}

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not num_external_tokens:
            # Under MultiConnector another one may load into these as this step begins, and vLLM
            # names them in no step before that load has ended.
            given = chain.from_iterable(blocks.blocks)
            self._current_batch_allocated_block_ids.update(block.block_id for block in given)
            self._current_batch_allocated_block_ids.discard(VLLM_NULL_BLOCK)
        if not request.skip_reading_prefix_cache:
            context = self._req_status[request.request_id].req_context
            self.manager.begin(context, num_external_tokens)

    def request_finished(self, request: Request, *tables: Any) -> Any:
        self._prompt_times.ended(request, self.manager.pace)
        self._next_look.pop(request.request_id, None)
        self._sessions.ended(request.request_id)
        for _, status, keys in self._left:
            if status.req is request:
                self._rewind(status, keys)
        return super().request_finished(request, *tables)

    # -- the step ---------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KvdConnectorMetadata:
        self._offer_left_again()
        self._never_computed.step(scheduler_output, self._req_status)
        wrong = self._sessions.gone_wrong(scheduler_output, self._req_status)
        for status in chain(wrong, self._beside.doubtful(scheduler_output, self._req_status)):
            self.manager.end_stores(status.req_context)
        made = super().build_connector_meta(
            self._with_renamed(self._without_reloaded(scheduler_output))
        )
        for req_id, keys in self.manager.cut:
            if req_id in self._req_status:
                self._offer_later(self._req_status[req_id], keys)
        jobs = self._join(made)
        self._store_leaving(jobs)
        has_run = scheduler_output.total_num_scheduled_tokens > 0
        was_sent, lost = self.manager.send_step(jobs, has_run=has_run)
        orders = self._orders(made, jobs, lost, was_sent=was_sent)
        orders.has_run = has_run
        orders.begins_with_loads = scheduler_output.has_sync_kv_loads
        self._prompt_times.step(
            (
                (self._req_status[new.req_id].req, new.num_computed_tokens)
                for new in scheduler_output.scheduled_new_reqs
                if new.req_id in self._req_status
            ),
            self.manager.pace,
        )
        return orders

    def _without_reloaded(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """The step without those preempted that it loads again already.

        A reset preempts what runs, and the next step may begin a load of it. vLLM takes the jobs
        of everyone preempted for stores that must be flushed, and asserts it; those of before
        have ended, or it would not load.
        """
        preempted = scheduler_output.preempted_req_ids or set()
        reloaded = {req_id for req_id in preempted if self._loads_now(req_id)}
        if not reloaded:
            return scheduler_output
        return replace(scheduler_output, preempted_req_ids=preempted - reloaded)

    def _loads_now(self, req_id: str) -> bool:
        status = self._req_status.get(req_id)
        jobs = () if status is None else status.transfer_jobs
        return any(not self._jobs[job_id].is_store for job_id in jobs)

    def _orders(
        self,
        made: OffloadingConnectorMetadata,
        jobs: StepJobs,
        lost: list[int],
        *,
        was_sent: bool,
    ) -> KvdConnectorMetadata:
        """What every worker is to do: job ids only."""
        steps = self.manager.steps
        flush = set[int]() if steps is None else steps.jobs.parts_of(made.jobs_to_flush or ())
        loads = tuple(draft.job_id for draft in jobs.loads)
        stores = tuple(draft.job_id for draft in jobs.stores)
        orders = KvdConnectorMetadata(load_jobs={}, store_jobs={}, lost=tuple(lost))
        orders.owners = jobs.owners
        orders.load_requests = {i: job.req_id for i, job in made.load_jobs.items()}
        if not was_sent:
            orders.refused = loads + stores
            flush = flush.difference(orders.refused)
            loads = stores = ()
        # What must be flushed now is of blocks that earlier steps have computed.
        orders.plan = StepPlan(
            flush=tuple(flush),
            loads=loads,
            stores=tuple(job_id for job_id in stores if job_id not in flush),
            computed_stores=tuple(job_id for job_id in stores if job_id in flush),
        )
        return orders

    def _build_partial_tail_store_jobs(
        self, scheduler_output: SchedulerOutput
    ) -> dict[int, TransferJob]:
        allowed = within_bounds(scheduler_output, self._req_status)
        jobs: dict[int, TransferJob] = super()._build_partial_tail_store_jobs(allowed)
        return jobs

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, Any]:
        """vLLM's, over those requests only that may have a whole new block; it looks at all.

        For the others it would do nothing, and it would take its time for that in every step.
        """
        began = (new.req_id for new in scheduler_output.scheduled_new_reqs)
        for req_id in (*began, *scheduler_output.scheduled_cached_reqs.resumed_req_ids):
            self._next_look.pop(req_id, None)  # it may have loaded any number of tokens
        due = self._due(scheduler_output.num_scheduled_tokens)
        made: dict[int, TransferJob] = {}
        if self._device is not None:
            self._note_computed(scheduler_output)
        else:
            are_many = len(due) >= MANY_REQUESTS
            if are_many:
                self.manager.expect_stores(self._next_keys(due))
            if self._stores_simply and due:
                made = self._store_new_blocks(due)
        return made | super()._build_store_jobs(DueRequests(due, scheduler_output.finished_req_ids))

    def _note_computed(self, scheduler_output: SchedulerOutput) -> None:
        """What the step computes, or ended requests had, lies on the device then.

        Those that ended first: what they had may be given to others already, who count.
        """
        assert self._device is not None
        for req_id in scheduler_output.finished_req_ids:
            status = self._req_status.get(req_id)
            if status is not None:
                req = status.req
                aborted = req.status is RequestStatus.FINISHED_ABORTED
                last = max(req.num_prompt_tokens, req.num_tokens - 1)  # as vLLM stores it
                self._note_up_to(status, req.num_computed_tokens if aborted else last)
        self._device.gave(self._current_batch_allocated_block_ids)
        for req_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            status = self._req_status.get(req_id)
            if status is not None:
                self._note_up_to(status, status.req.num_computed_tokens + scheduled)

    def _note_up_to(self, status: RequestOffloadState, tokens: int) -> None:
        assert self._device is not None
        request = self.manager.tracked(status.req_context).request
        if request.stores_end:
            return
        tokens = self._calc_num_offloadable_tokens(status, tokens)
        for place, (group, state) in enumerate(
            zip(self.config.kv_group_configs, status.group_states, strict=True)
        ):
            first = request.next_store[place]
            if tokens // group.tokens_per_chunk <= first:
                continue
            status.update_offload_keys()
            end = status.storable_chunks(group, state, tokens)
            self._device.note(state.block_ids[first:end], state.offload_keys[first:end])
            request.next_store[place] = max(first, end)

    def _store_leaving(self, jobs: StepJobs) -> None:
        """Add a store of what stands near the front of vLLM's queue of free blocks."""
        if self._device is None:
            return
        near = self._device.near()[:KEYS_PER_STEP]
        if not near:
            return
        number = self._generate_job_id()
        job = self.manager.prepare_leaving(near, number)
        if job is None:
            return
        self._device.deal_with([each for each in near if each[1] not in job.cut])
        if not job.keys:
            return
        self._device.jobs[number] = job
        for block in job.engine_blocks:
            self._block_id_to_pending_jobs.setdefault(block, set()).add(number)
        jobs.add(number, job.tracked, job.runs, is_load=False)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping: also until such a store is reported."""
        if self._device is not None and self._device.jobs:
            return True
        pending: bool = super().has_pending_push_work()
        return pending

    def reset_cache(self) -> None:
        super().reset_cache()
        self._next_look.clear()
        if self._device is not None:
            self._current_batch_jobs_to_flush.update(self._device.jobs)
            self._device.clear()

    def _next_keys(self, req_ids: Iterable[str]) -> list[OffloadKey]:
        """The block of each request and group that it will offer first."""
        return [
            state.offload_keys[state.next_stored_chunk_idx]
            for place in range(len(self._kvd_groups))
            for state in (self._req_status[req_id].group_states[place] for req_id in req_ids)
            if state.next_stored_chunk_idx < len(state.offload_keys)
        ]

    def _due(self, scheduled: Mapping[str, int]) -> dict[str, int]:
        """Of the tokens scheduled for each request, those of requests that may have a new block.

        Their keys are made. A block whose last token is not known yet can't be stored. One that
        decodes gets a few tokens a step at most: it is left alone until these can fill its block.
        """
        prompt_only = self.config.offload_prompt_only
        first, *others = (group.tokens_per_block for group in self._kvd_groups.values())
        self._steps_built += 1
        now, most, next_look = self._steps_built, self._decode_tokens, self._next_look
        looked = [
            (req_id, count)
            for req_id, count in scheduled.items()  # every running request, in every step
            if next_look.get(req_id, 0) <= now or count > most
        ]
        due: dict[str, int] = {}
        for req_id, count in looked:
            status = self._req_status.get(req_id)
            if status is None:
                continue
            request, states = status.req, status.group_states
            full = states[0].next_stored_chunk_idx * first + first  # tokens: then it has a new one
            for size, state in zip(others, states[1:], strict=True):
                full = min(full, state.next_stored_chunk_idx * size + size)
            lacking = full - request.num_computed_tokens - count
            if lacking > 0:
                next_look[req_id] = now - (-lacking // most)
                continue
            next_look.pop(req_id, None)  # until what is due is dealt with
            if full <= (request.num_prompt_tokens if prompt_only else request.num_tokens):
                status.update_offload_keys()
                due[req_id] = count
        return due

    def _join(self, made: OffloadingConnectorMetadata) -> StepJobs:
        """The step's jobs with their engine blocks."""
        jobs = StepJobs(self._job_ids)
        groups, manager = self._kvd_groups, self.manager
        for job_id, job in made.load_jobs.items():
            runs = load_runs(groups, blocks_of(job.src_spec), job.dst_spec)
            tracked = manager.tracked(self._req_status[job.req_id].req_context)
            jobs.add(job_id, tracked, runs, is_load=True)
        flushed = made.jobs_to_flush or set()
        # Those that the step waits for go first: of two that name a key the later one may end with
        # the earlier, which else may be ready only after this step.
        for job_id, job in sorted(made.store_jobs.items(), key=lambda item: item[0] not in flushed):
            status = self._req_status.get(job.req_id)
            assert status is not None, "a request with a job in flight is known"
            context, target = status.req_context, blocks_of(job.dst_spec)
            if isinstance(job.src_spec, AdjacentBlocks):
                runs = adjacent_run(job.src_spec, target)
            else:
                positions = context._offload_key_positions
                runs = store_runs(groups, job.src_spec, target, positions)
            ready = BEFORE_THE_STEP if job_id in flushed else AFTER_THE_STEP
            jobs.add(job_id, manager.tracked(context), runs, is_load=False, ready_together=ready)
        return jobs

    # -- ends -------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvdWorkerMetadata):
            self._end_jobs(meta)
        super().update_connector_output(connector_output)
        if connector_output.invalid_block_ids:  # another connector's: kvd names requests
            self._never_computed.not_loaded(connector_output.invalid_block_ids, self._req_status)
        self._events_tracker.drop_unused(self.manager.forget_failures())

    def _end_jobs(self, meta: KvdWorkerMetadata) -> None:
        """What the ranks say, before vLLM counts it: it takes every end for a success."""
        steps = self.manager.steps
        if steps is None:
            return
        steps.pause.note(
            gave_up=meta.gave_up, done=not meta.completed_jobs.keys() <= meta.failed_jobs
        )
        for job_id, ranks in list(meta.completed_jobs.items()):
            has_failed = job_id in meta.failed_jobs
            sent = steps.report(job_id, ranks, failed=has_failed)
            if self._device is not None and job_id in self._device.jobs:
                del meta.completed_jobs[job_id]  # vLLM knows nothing of it
                if sent is not None:
                    self._end_leaving(job_id, failed=sent.has_failed, left=job_id in meta.left_jobs)
                continue
            if sent is not None and sent.has_failed:
                self._fail(job_id)
            elif sent is not None and job_id in meta.left_jobs:
                self._leave(job_id)

    def _end_leaving(self, job_id: int, *, failed: bool, left: bool) -> None:
        assert self._device is not None
        job = self._device.jobs.pop(job_id)
        self._remove_pending_job(job_id, job.engine_blocks)
        missing = self.manager.end_leaving(job, failed=failed, left=left)
        self._device.not_stored(job.engine_blocks, missing)

    def _fail(self, job_id: int) -> None:
        """All ranks have spoken, and one of them had no success."""
        job = self._jobs.get(job_id)
        if job is None:  # of before a reset: vLLM has forgotten it
            return
        status = self._req_status[job.req_id]
        tracked = self.manager.tracked(status.req_context)
        if not job.is_store:
            self.manager.fail_load(tracked)
            for state in status.group_states:
                state.next_stored_chunk_idx = 0  # vLLM took for stored what was to be loaded
            return
        if not self.manager.fail_stores(tracked, job.keys):
            return
        if tracked.request.request_level:
            self._rewind(status, job.keys)  # it must be whole when it ends
        else:
            self._offer_later(status, job.keys)

    def _leave(self, job_id: int) -> None:
        """The job has ended, but some of its blocks were left to another engine's store."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        status = self._req_status[job.req_id]
        missing = self.manager.leave_stores(self.manager.tracked(status.req_context), job.keys)
        if missing:
            self._offer_later(status, missing)

    def _offer_later(self, status: RequestOffloadState, keys: set[OffloadKey]) -> None:
        """When there may be room, or another's store has ended; at the request's end at last."""
        self._left.append((time.monotonic() + WAIT_S, status, keys))

    def _offer_left_again(self) -> None:
        """Blocks that have had their time: the planner passes over those there by now."""
        while self._left and self._left[0][0] <= time.monotonic():
            _, status, missing = self._left.popleft()
            if not self.manager.tracked(status.req_context).has_ended:
                self._rewind(status, missing)

    def _rewind(self, status: RequestOffloadState, keys: set[OffloadKey]) -> None:
        """Offer from the first of these on again.

        Not in a group with a window: what was offered there may be another request's by now,
        and vLLM does not look back for that.
        """
        self._next_look.pop(status.req_context.req_id, None)
        for key in keys:
            group = self.manager.groups[get_offload_group_idx(key)].index
            if self._has_window(group):
                continue
            state = status.group_states[group]
            block = self.manager.block_of(key, status.req_context)
            state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, block)
