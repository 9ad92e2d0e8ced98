"""The rank side of the connector: vLLM's hooks in each worker process.

The daemon has the jobs and their blocks; a rank says when its half of each is ready and tells
vLLM how it ended. Each job of a plan is acknowledged once, failed or not. Nothing here raises
for an absent, killed, hung or slow daemon.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec

from kvd_client.integrations.vllm.identity.kv_layout import describe_rank
from kvd_client.integrations.vllm.identity.namespace import engine_identity
from kvd_client.integrations.vllm.metadata import (
    KvdConnectorMetadata,
    KvdWorkerMetadata,
    RankHandshake,
)
from kvd_client.integrations.vllm.options import KvdOptions
from kvd_client.integrations.vllm.rank.gpu_rules import check_devices, start_up_error
from kvd_client.integrations.vllm.rank.memory import (
    RankKv,
    SharedAllocation,
    SharedBuffer,
    compute_end,
    device_spans,
    rank_kv,
    with_stand_ins,
)
from kvd_client.scheduler import JobReport
from kvd_client.worker import CudaMemoryRefused, DeviceSpan, Worker
from kvd_client.worker.worker import WaitForCompute

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)

STEPS_REMEMBERED = 4  # vLLM has at most two at once
UNREGISTER_TIMEOUT_S = 5.0


class Phase(enum.Enum):
    """What of a step's plan is carried out in which hook."""

    NOTED = "noted"  # its jobs are known here
    FLUSH = "flush"
    LOADS = "loads"
    COMPUTED = "computed"  # its forward has returned
    STORES = "stores"


@dataclass(slots=True)
class VllmJob:
    """A job of vLLM's on this rank, until the last of its parts, kvd's jobs, has ended."""

    request_id: str | None  # a load's
    parts: int
    ends: dict[int, JobReport] = field(default_factory=dict)  # of parts, by kvd's job id

    @property
    def has_failed(self) -> bool:
        return False in {end.done for end in self.ends.values()}


class StepPhases:
    """Which phases of the last steps' plans have run, so that none runs twice."""

    def __init__(self) -> None:
        self._steps: deque[tuple[KvdConnectorMetadata, set[Phase]]] = deque(maxlen=STEPS_REMEMBERED)

    def done(self, step: KvdConnectorMetadata) -> set[Phase]:
        """Those of the step; who has carried one out adds it.

        Only then: where a signal's handler raises amid one, the next hook carries it out again.
        """
        for known, done in self._steps:
            if known is step:
                return done
        fresh = set[Phase]()
        self._steps.append((step, fresh))
        return fresh


class KvdConnectorWorker(OffloadingConnectorWorker):
    """The connector in one rank: it gives vLLM's account of its KV to the daemon and runs jobs."""

    def __init__(
        self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        parallel = spec.config.parallel
        self._options = KvdOptions.from_extra_config(spec.config.extra_config)
        self._rank, self._shard = parallel.rank, parallel.rank
        if spec.replicated_layout:
            self._shard = 0
        self._worker = Worker(
            self._options.socket_path,
            engine_identity(vllm_config),
            self._rank,
            parallel.world_size,
            shard=self._shard,
            writer=self._rank == self._shard,
            flush_timeout_s=self._options.flush_timeout_s,
            load_flush_timeout_s=self._options.load_flush_timeout_s,
            load_deadline_s=self._options.load_deadline_s,
        )
        self._engine = _current_engine()
        self._allocation: SharedAllocation | None = None
        self._caches: CanonicalKVCaches | None = None
        self._stand_ins: list[SharedBuffer] = []
        self._device = torch.device("cpu")
        self._kv = RankKv((), ())
        self._is_registered = False
        self._steps = StepPhases()
        self._launched: tuple[KvdConnectorMetadata, WaitForCompute | None] | None = None
        self._unfinalized: KvdConnectorMetadata | None = None  # its stores have not begun
        self._jobs: dict[int, VllmJob] = {}  # by vLLM's job id
        self._owners: dict[int, int] = {}  # kvd's job id -> vLLM's, of parts that have not ended
        self._refused: tuple[JobReport, ...] = ()
        self._reports: tuple[JobReport, ...] = ()  # of the worker's, not dealt with yet
        self._has_run = True  # the last step that began: its plan's own word
        self._error_before = id(None)  # what was being handled as that one began
        self._is_kv_wrong = False  # a forward has raised, and vLLM takes its KV for computed
        self._received: dict[str, bool] = {}  # requests to tell vLLM of: whether a load failed
        self._ended: dict[int, VllmJob] = {}  # by vLLM's job id: to be acknowledged

    # -- memory -----------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """On a CPU: where vLLM's KV tensor is made in shared memory. Else vLLM's own place."""
        self._check_engine()
        from vllm.platforms import current_platform  # noqa: PLC0415 - finds out the platform

        tensors = self.kv_cache_config.kv_cache_tensors
        if not tensors or not current_platform.is_cpu():
            return None
        self._allocation = SharedAllocation(least_bytes=max(tensor.size for tensor in tensors))
        return self._allocation

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Offer this rank's KV to the daemon, now and whenever it comes back.

        Raises for KV that can't be served, naming the way out.
        """
        self._check_engine()
        self._device = check_devices(kv_caches)
        self.unregister_kv_caches()
        super().register_kv_caches(kv_caches)
        self._is_kv_wrong = False

    def _check_engine(self) -> None:
        """Raise RuntimeError where the KV is another engine's.

        VLLM keeps one connector in a process, and hands the first engine's to the next. That one's
        memory would then be copied by the first one's jobs.
        """
        if _current_engine() not in (None, self._engine):
            raise RuntimeError(
                "kvd: this process has an engine already, and vLLM would give its KV connector to"
                " this one too. End the first engine before, or leave"
                " VLLM_ENABLE_V1_MULTIPROCESSING=0 out, so that each has a process of its own"
            )

    def _init_worker(self, kv_caches: CanonicalKVCaches) -> None:
        num_blocks = self.kv_cache_config.num_blocks
        self._caches, self._stand_ins = with_stand_ins(kv_caches, num_blocks, self._device)
        self.restore_kv_caches()

    def restore_kv_caches(self) -> None:
        """Offer the KV again; it may lie elsewhere than before."""
        if self._is_registered or self._caches is None:
            return
        buffers: Sequence[SharedBuffer | DeviceSpan] = ()
        if self._device.type != "cpu":
            buffers = device_spans(self._caches)
        elif self._allocation is not None:
            buffers = [*self._allocation.buffers(), *self._stand_ins]
        self._kv = rank_kv(self._caches, buffers, self.spec.blocks_per_chunk)
        try:
            self._worker.register(self._kv.regions, self._kv.groups)
        except CudaMemoryRefused as refused:
            raise start_up_error(refused) from refused
        self._is_registered = True

    def unregister_kv_caches(self) -> None:
        """Take the KV back: returns when no copy can touch it any more. Open jobs have failed."""
        while self._is_registered:
            if self._worker.unregister(UNREGISTER_TIMEOUT_S):
                self._is_registered = False
                return
            log.error("kvd: the daemon does not let go of the KV cache; waiting for it")

    def get_handshake_metadata(self) -> RankHandshake:
        """What this rank's memory is, and whether the daemon has it by now."""
        registered = self._worker.wait_registered(self._options.register_wait_s)
        problem = "" if registered else self._worker.problem
        layout = str(describe_rank(self.vllm_config, self.kv_cache_config))
        return RankHandshake(
            self._rank, self._shard, self._kv.shard_bytes, layout, registered, problem
        )

    # -- the step ---------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        """Before the step overwrites any block: end what reads or writes one of them."""
        step = kv_connector_metadata
        if not isinstance(step, KvdConnectorMetadata):
            return
        done = self._steps.done(step)
        if Phase.NOTED not in done:
            self._end_step_before()
            self._note(step, done)
        self._flush(step, done)

    def _flush(self, step: KvdConnectorMetadata, done: set[Phase]) -> None:
        if Phase.FLUSH in done:
            return
        if step.lost:
            self._worker.write_off(step.lost)
        computed = self._open_among(step.plan.computed_stores)
        if self._is_kv_wrong:
            self._worker.give_up_stores(computed)
            computed = ()
        plan = replace(step.plan, computed_stores=computed)
        self._worker.flush_step(plan, compute_end(self._device) if computed else None)
        done.add(Phase.FLUSH)

    def _note(self, step: KvdConnectorMetadata, done: set[Phase]) -> None:
        parts = Counter(step.owners.values())
        jobs = {each: VllmJob(step.load_requests.get(each), n) for each, n in parts.items()}
        refused = tuple(JobReport(job_id, done=False) for job_id in step.refused)
        self._error_before = id(sys.exception())
        # At once: from here to the last line no signal's handler runs.
        self._has_run = step.has_run
        self._jobs |= jobs
        self._owners |= step.owners
        self._refused += refused
        self._unfinalized = step
        done.add(Phase.NOTED)

    def _open_among(self, job_ids: Sequence[int]) -> tuple[int, ...]:
        """Those of which no end is known: a phase that runs again begins none of the others."""
        return tuple(job_id for job_id in job_ids if job_id in self._owners)

    def _end_step_before(self) -> None:
        """Carry out what is left of the last step.

        With a drafter, vLLM 0.33 finalizes no step on any but the last pipeline stage. That step's
        KV is computed by now, and the next one's flush may name its stores. Where vLLM went on
        after an exception, nobody may have called more than its first hook.
        """
        step = self._unfinalized
        if step is None:
            return
        done = self._steps.done(step)
        if Phase.COMPUTED not in done:
            self._forward_has_raised()
        self._flush(step, done)
        self._start_loads(step, done)
        self._finalize(step, done)

    def note_launched(self, metadata: OffloadingConnectorMetadata) -> None:
        """Between vLLM's zeroing and the step's forward: what was launched by now may still write
        the blocks of the step's loads, what comes later leaves them alone."""
        if isinstance(metadata, KvdConnectorMetadata) and metadata.plan.loads:
            self._launched = (metadata, compute_end(self._device))

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Let the step's loads begin; vLLM has zeroed and forgotten their blocks by now.

        On a GPU that is launched, not done: the loads wait for it. vLLM calls this after it has
        launched the forward, which they need not wait for, or before (`begins_with_loads`).
        """
        self.handle_preemptions(metadata)
        if isinstance(metadata, KvdConnectorMetadata):
            done = self._steps.done(metadata)
            if not metadata.begins_with_loads:
                self._look_at_forward(done)
            self._start_loads(metadata, done)

    def _start_loads(self, step: KvdConnectorMetadata, done: set[Phase]) -> None:
        if not step.plan.loads or Phase.LOADS in done:
            return
        launched, self._launched = self._launched, None
        if launched is None or launched[0] is not step:
            launched = (step, compute_end(self._device))
        plan = replace(step.plan, loads=self._open_among(step.plan.loads))
        self._worker.start_loads(plan, launched[1])
        done.add(Phase.LOADS)

    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """Let the step's stores begin, once its KV is computed."""
        self.handle_preemptions(metadata)
        if isinstance(metadata, KvdConnectorMetadata):
            done = self._steps.done(metadata)
            self._look_at_forward(done)
            self._finalize(metadata, done)

    def _finalize(self, step: KvdConnectorMetadata, done: set[Phase]) -> None:
        if step.plan.stores and Phase.STORES not in done:
            stores = self._open_among(step.plan.stores)
            if self._is_kv_wrong:
                self._worker.give_up_stores(stores)
            else:
                plan = replace(step.plan, stores=stores)
                self._worker.finish_step(plan, compute_end(self._device))
            done.add(Phase.STORES)
        if self._unfinalized is step:
            self._unfinalized = None

    @property
    def _is_raising(self) -> bool:
        """Whether vLLM calls this hook as an exception of the step's passes through."""
        error = sys.exception()
        return error is not None and id(error) != self._error_before

    def _look_at_forward(self, done: set[Phase]) -> None:
        """After the forward: vLLM's first model runner calls the hooks also where that raised."""
        if self._is_raising:
            self._forward_has_raised()
        done.add(Phase.COMPUTED)

    def _forward_has_raised(self) -> None:
        """The step's KV is not all there, and the scheduler does not hear of it.

        Should the engine go on, its own cache has these blocks, and whatever is computed after
        them is wrong, too.
        """
        was_wrong, self._is_kv_wrong = self._is_kv_wrong, True
        if not was_wrong:
            log.error(
                "kvd: a step of the engine's raised, and its KV can't be trusted any more: nothing"
                " more of it is stored; restart the engine"
            )

    # -- ends -------------------------------------------------------------------------------

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads have ended, and those among them that must be computed.

        Where a signal's handler raises amid it, or the step raises, the next call has them.
        """
        if self._unfinalized is not None:  # nor will it be, with a drafter, on most stages
            self._look_at_forward(self._steps.done(self._unfinalized))
        if not self._refused:
            self._worker.rest(has_run=self._has_run)
        self._reports += self._worker.get_finished().ended
        for report in (*self._refused, *self._reports):
            self._take_end(report)
        self._refused = self._reports = ()
        if self._is_raising:  # nobody will see what this returns
            return KVConnectorTransferResults()
        results = KVConnectorTransferResults()
        for request_id, has_failed in self._received.items():
            results.finished_recving.add(request_id)
            if has_failed:
                results.failed_recving.add(request_id)
        self._received = {}
        return results

    def _take_end(self, report: JobReport) -> None:
        """May be called again with the same one."""
        vllm_job = self._owners.get(report.job_id)
        if vllm_job is None:
            return  # it was acknowledged already
        job = self._jobs.get(vllm_job)
        if job is not None:
            job.ends[report.job_id] = report
            has_failed = job.has_failed
            # Until the last has ended, a copy of another part may still write to its blocks.
            if len(job.ends) == job.parts:
                if job.request_id is not None:
                    self._received[job.request_id] = has_failed
                self._ended[vllm_job] = job
                del self._jobs[vllm_job]
        del self._owners[report.job_id]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KvdWorkerMetadata | None:
        """Acknowledgements since the last call."""
        if not self._ended or self._is_raising:
            return None
        told = KvdWorkerMetadata()
        for job_id, job in self._ended.items():
            _acknowledge(told, job_id, job)
        self._ended = {}  # last: where a signal's handler raises before, the next call has them
        return told

    def shutdown(self) -> None:
        """Take the KV back if the daemon lets go of it in time; nothing is acknowledged after."""
        self._worker.close()
        self._is_registered = False
        self._caches = None
        self._stand_ins = []
        self._launched = self._unfinalized = None
        self._jobs.clear()
        self._owners.clear()
        self._refused = self._reports = ()
        self._received.clear()
        self._ended.clear()


def _acknowledge(told: KvdWorkerMetadata, job_id: int, job: VllmJob) -> None:
    ends = job.ends.values()
    told.mark_completed(job_id)
    told.gave_up |= any(end.given_up for end in ends)
    if any(end.left for end in ends):
        told.left_jobs.add(job_id)
    bytes_copied = sum(end.bytes_copied for end in ends)
    if job.has_failed:
        told.failed_jobs.add(job_id)
    elif bytes_copied:
        is_load = job.request_id is not None
        stats = told.transfer_stats.load if is_load else told.transfer_stats.store
        stats.record(bytes_copied, sum(end.duration_ns for end in ends) / 1e9)


def _current_engine() -> tuple[str | None, str] | None:
    """Id and start of the engine whose rank vLLM is setting up here: several may share an id."""
    config = get_current_vllm_config_or_none()
    if config is None or config.kv_transfer_config is None:
        return None
    return config.kv_transfer_config.engine_id, config.instance_id
