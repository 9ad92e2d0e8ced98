"""The engine-neutral worker side: what each rank of an engine calls, in this order.

once                 register
in every step        start_step, (the engine runs the model), finish_step, get_finished
before KV moves      unregister

On a GPU what was launched has not run yet: there every step brings a `wait_for_compute` to both
calls, which blocks until it has. The engine does not wait for it; a thread of the client's does.

Nothing raises for an absent, slow or broken daemon. A load that this rank has submitted ends
only by the board or by its mover's death: until then its blocks may be written. A store can be
given up at any time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypedDict, Unpack

from kvd_client.arguments import require_kind, require_path, require_seconds, require_whole
from kvd_client.forks import FORKED, keep_from_children
from kvd_client.identity import EngineIdentity
from kvd_client.scheduler.plan import StepPlan, WorkerReport
from kvd_client.worker.jobs import Half, JobLedger
from kvd_client.worker.memory import CudaTensor, DeviceSpan, GroupLayout, SharedMemory
from kvd_client.worker.rank_memory import RegisteredMemory, take_memory
from kvd_client.worker.registrar import RankPlace, Registrar
from kvd_client.worker.registration import Registration
from kvd_proto.limits import MAX_RANKS

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 1.0
LOAD_FLUSH_TIMEOUT_S = 5.0
LOAD_DEADLINE_S = 10.0
LOOK_AT_DEADLINES_S = 0.25
END_MOVER_TIMEOUT_S = 5.0
POLL_S = 0.0002
POLL_SHARE = 1 / 16  # of the time waited so far: a long wait looks less often
POLL_MAX_S = 0.005
REST_SHARE = 1 / 8  # of the time that an engine has had nothing to run
REST_FOR_A_LOAD_S = 0.001  # at least: a step of the engine's costs more than these looks
REST_FOR_A_NEW_LOAD_S = 0.004  # since it began: most end by then, and need no step to be seen
REST_MAX_S = 0.01  # what a request that arrives meanwhile may wait
ARRIVAL_WAIT_S = 0.05  # of a registration that the scheduler knows of already
POLL_TO_BURY_S = 1.0  # for the registrar's thread to see that a mover has ended

WaitForCompute = Callable[[], None]


class WorkerOptions(TypedDict, total=False):
    """What most ranks leave at its default."""

    shard: int  # which shard's bytes this rank holds; its own number
    writer: bool  # False where another rank writes that shard (a replicated layout)
    flush_timeout_s: float  # then flushed stores are given up
    load_flush_timeout_s: float  # then the mover that still loads is ended
    load_deadline_s: float  # the same for a load that nobody flushes


def _check_options(options: WorkerOptions) -> None:
    """TypeError for an option that there is not, ValueError for a value that it can't have."""
    known = WorkerOptions.__annotations__.keys()
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"a Worker has no option {name}; it has {', '.join(known)}")
        if name == "shard":
            require_whole(name, value, 0, MAX_RANKS - 1)
        elif name == "writer":
            require_kind(name, value, bool)
        else:
            require_seconds(name, value)


class Worker:
    """The worker side of one rank. Calls come from one thread."""

    def __init__(
        self,
        socket_path: str,
        identity: EngineIdentity,
        rank: int = 0,
        world_size: int = 1,
        **options: Unpack[WorkerOptions],
    ) -> None:
        require_kind("identity", identity, EngineIdentity)
        require_whole("world_size", world_size, 1, MAX_RANKS)
        require_whole("rank", rank, 0, world_size - 1)
        _check_options(options)
        self._socket_path = require_path("socket_path", socket_path)
        self._identity = identity
        shard, writer = options.get("shard", rank), options.get("writer", True)
        self._place = RankPlace(rank, world_size, shard, writer)
        self._flush_timeout_s = options.get("flush_timeout_s", FLUSH_TIMEOUT_S)
        self._load_flush_timeout_s = options.get("load_flush_timeout_s", LOAD_FLUSH_TIMEOUT_S)
        self._load_deadline_s = options.get("load_deadline_s", LOAD_DEADLINE_S)
        self._looked_s = 0.0  # when loads were last looked at for their deadline
        self._resting_since_s: float | None = None
        self._registrar: Registrar | None = None
        self._memory: RegisteredMemory | None = None
        self._lock = threading.Lock()  # guards what the helper thread sees too
        self._jobs = JobLedger()
        self._computing: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._aside: threading.Thread | None = None
        keep_from_children(self)

    def leave_to_parent(self) -> None:
        """In a forked process it has no jobs, and no memory to take back."""
        self._lock = threading.Lock()
        self._jobs = JobLedger()
        self._computing = SimpleQueue()
        self._aside = None
        self._memory = None

    # -- registration -----------------------------------------------------------------------

    def register(
        self,
        memories: Sequence[SharedMemory | DeviceSpan | CudaTensor],
        groups: Sequence[GroupLayout],
    ) -> None:
        """Offer this rank's KV memory to the daemon, now and whenever it comes back.

        Returns at once. Descriptors are duplicated. GPU memory, given as torch tensors on CUDA
        or as raw pointers, stays the caller's: it must stay allocated until `unregister`
        returned True, and CUDA must be set up on this thread. CudaMemoryRefused, with a reason
        and a fix, for what can't be shared. Register again after `unregister` only.
        """
        if self._registrar is not None:
            is_forked = self._registrar.problem == FORKED
            raise ValueError(
                FORKED if is_forked else "this rank is registered; unregister it first"
            )
        self._memory = take_memory(memories, groups)
        try:
            self._registrar = Registrar(
                self._socket_path, self._identity, self._place, self._memory
            )
            self._registrar.start()
        except BaseException:  # a signal's handler raises, or no thread is to be had
            self.unregister()
            raise

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until the daemon has this rank's memory; for start-up and tests.

        False at the timeout, and as soon as the rank is unregistered.
        """
        return self._registrar is not None and self._registrar.wait_registered(timeout_s)

    @property
    def problem(self) -> str:
        """Why the rank is not registered; empty when it is."""
        return "register was not called" if self._registrar is None else self._registrar.problem

    def unregister(self, timeout_s: float = 5.0) -> bool:
        """Take the memory back. True: no copy can touch it any more, its jobs are failed.

        False only when the daemon hangs so that neither it nor the mover's end could be had.
        Before other memory is registered, call `Scheduler.reset_cache`: of blocks that the old one
        held a store may be planned yet.
        """
        registrar, memory = self._registrar, self._memory
        if memory is None:
            return True
        if registrar is not None and not registrar.stop(timeout_s):
            return False
        self._poll()
        # A signal's handler may raise in between: the next call goes on from here.
        memory.close()
        self._registrar = None
        self._memory = None
        return True

    def close(self) -> None:
        """Unregister and end the threads."""
        self.unregister()
        if self._aside is not None:
            self._computing.put(None)
            self._aside.join(timeout=2.0)
            self._aside = None

    # -- the step ---------------------------------------------------------------------------

    def start_step(self, plan: StepPlan, wait_for_compute: WaitForCompute | None = None) -> None:
        """Before the model runs: flush what must end, then let loads begin.

        `wait_for_compute` blocks until all that was launched before this call has run; None says
        that it has. It may be called for each of the two.
        """
        self.flush_step(plan, wait_for_compute)
        self.start_loads(plan, wait_for_compute)

    def flush_step(self, plan: StepPlan, wait_for_compute: WaitForCompute | None = None) -> None:
        """Before any block of the step is overwritten: end what the plan says must end.

        Earlier steps have written the KV of its `computed_stores` once `wait_for_compute` returns.
        Waits for flushed stores, at most `flush_timeout_s`; what has not ended then is given up.
        So are all stores of a mover of which no end was heard meanwhile.
        A flushed load may be writing its blocks: one that has not ended `load_flush_timeout_s`
        later is ended with its mover, and the rank registers again.
        """
        with self._lock:
            self._jobs.forget(plan.forget)
        if plan.computed_stores:
            begun = self._begin(plan.computed_stores, self._store_half)
            self._mark_ready_after(wait_for_compute, begun)
        if not plan.flush:
            return
        began = time.monotonic()
        left = self.wait(plan.flush, self._flush_timeout_s)
        with self._lock:
            if self._flush_timeout_s:
                self._jobs.give_up_late(left, began)
            else:
                self._jobs.give_up(left)  # nobody has waited
        self._tell_by_call()
        loads = self.wait(left, self._load_flush_timeout_s)
        if loads:
            self._end_mover_of(loads)

    def start_loads(self, plan: StepPlan, wait_for_compute: WaitForCompute | None = None) -> None:
        """Let the plan's loads begin; their blocks are the movers' until they are reported.

        They begin once `wait_for_compute` returns: whoever had those blocks before may have
        launched a step that still writes them. Where that wait fails they expire as failed.
        """
        if plan.loads:
            self._mark_ready_after(wait_for_compute, self._begin(plan.loads, Half.LOAD))

    def begin_again(self, job_ids: Sequence[int]) -> None:
        """Let loads begin of which a signal's handler may have kept that from their mover.

        To hear it twice does no harm. Otherwise they would last until their deadline.
        """
        self._mark_ready(job_ids)

    def write_off(self, job_ids: Iterable[int]) -> None:
        """Report as failed what is open of jobs that nobody will end: their session is gone.

        A load whose mover may still run stays open until that is dead.
        """
        registrar = self._registrar
        self._poll()
        with self._lock:
            self._jobs.write_off(job_ids, None if registrar is None else registrar.current)
        self._tell_by_call()

    def finish_step(self, plan: StepPlan, wait_for_compute: WaitForCompute | None = None) -> None:
        """After the model was launched: let the step's stores begin once it has computed.

        `wait_for_compute` blocks until the step's KV is written; a helper thread calls it.
        None says that it is written already.
        """
        if not plan.stores:
            return
        self._mark_ready_after(wait_for_compute, self._begin(plan.stores, self._store_half))

    def give_up_stores(self, job_ids: Sequence[int]) -> None:
        """In place of `finish_step`: report stores as failed whose KV no step has computed."""
        self._begin(job_ids, self._store_half)
        with self._lock:
            self._jobs.give_up(job_ids)
        self._tell_by_call()

    def get_finished(self) -> WorkerReport:
        """What ended since the last call. Never waits.

        A load that has not ended `load_deadline_s` after it began ends with its mover, and is
        reported as failed once that is dead; the rank registers again.
        """
        self._poll()
        self._end_overdue_loads()
        with self._lock:
            ended = self._jobs.take_ended()
        if ended:
            self._resting_since_s = None
        report = WorkerReport(self._place.rank, ended)
        self._jobs.told()  # last: where a signal's handler raises before, the next call has them
        return report

    def rest(self, *, has_run: bool = False) -> None:
        """For every step, before `get_finished`: where it ran nothing, wait until a job ends here.

        At most an eighth of the time since the last step that ran something or brought an end,
        and REST_MAX_S: an engine that waits for a load that takes long, or for an answer of the
        daemon's, doesn't spin. For a load REST_FOR_A_LOAD_S at least, and until the newest one is
        REST_FOR_A_NEW_LOAD_S old, from the first such step on.
        """
        if has_run:
            self._resting_since_s = None
            return
        now = time.monotonic()
        if self._resting_since_s is None:
            self._resting_since_s = now
        rest_s = (now - self._resting_since_s) * REST_SHARE
        with self._lock:
            load_began_s = self._jobs.newest_load_s
        pause_s = POLL_MAX_S
        if load_began_s is not None:
            least_s = max(REST_FOR_A_LOAD_S, load_began_s + REST_FOR_A_NEW_LOAD_S - now)
            if rest_s <= least_s:
                rest_s, pause_s = least_s, POLL_S
        deadline = now + min(REST_MAX_S, rest_s)
        self._poll()
        while now < deadline and not self._jobs.has_ended:
            time.sleep(min(pause_s, deadline - now))
            self._poll()
            now = time.monotonic()

    def wait(self, job_ids: Iterable[int], timeout_s: float) -> set[int]:
        """Wait until this rank's half of the jobs has ended; those that have not at the timeout."""
        began = time.monotonic()
        left = set(job_ids)
        while True:
            self._poll()
            left = {job_id for job_id in left if self._jobs.touches_memory(job_id)}
            waited = time.monotonic() - began
            if not left or waited >= timeout_s:
                return left
            time.sleep(min(max(POLL_S, waited * POLL_SHARE), POLL_MAX_S, timeout_s - waited))

    def _end_overdue_loads(self) -> None:
        now = time.monotonic()
        if now - self._looked_s < min(LOOK_AT_DEADLINES_S, self._load_deadline_s):
            return
        self._looked_s = now
        with self._lock:
            late = self._jobs.end_overdue_loads(now, self._load_deadline_s)
        for registration in late:
            if not registration.is_unwanted:
                log.warning("kvd: a load has not ended in time; ending its mover")
            registration.kill()  # again each time, until it is dead

    def _end_mover_of(self, loads: set[int]) -> None:
        """Returns when no load of these can write any more, however long that takes."""
        registrar = self._registrar
        log.warning("kvd: %d loads have not ended in time; ending their mover", len(loads))
        while registrar is not None:
            registrar.end_mover(END_MOVER_TIMEOUT_S)
            loads = self.wait(loads, POLL_TO_BURY_S)
            if not loads:
                return
            log.error("kvd: the mover of %d loads does not end; waiting for it", len(loads))

    # -- halves -----------------------------------------------------------------------------

    @property
    def _store_half(self) -> Half:
        return Half.STORE if self._place.writer else Half.NONE

    def _begin(self, job_ids: Iterable[int], half: Half) -> list[int]:
        registrar = self._registrar
        registration = None if registrar is None else registrar.awaited(ARRIVAL_WAIT_S)
        self._resting_since_s = None
        with self._lock:
            return self._jobs.begin(job_ids, half, registration)

    def _mark_ready_after(self, wait: WaitForCompute | None, job_ids: Sequence[int]) -> None:
        if wait is None:
            self._mark_ready(job_ids)
        elif job_ids:
            self._do_aside(partial(self._wait_and_mark_ready, wait, job_ids))

    def _mark_ready(self, job_ids: Sequence[int]) -> None:
        """Tell the mover. Jobs that were given up meanwhile, or go to a dead one, are left out."""
        by_registration: dict[int, tuple[Registration, list[int]]] = {}
        with self._lock:
            for job_id in job_ids:
                job = self._jobs.open_job(job_id)
                if job is not None and job.half is not Half.NONE:
                    job.is_ready = True
                    registration = job.registration
                    by_registration.setdefault(id(registration), (registration, []))[1].append(
                        job_id
                    )
            for registration, ids in by_registration.values():
                if not registration.is_dead:
                    self._jobs.mark_ready(registration, ids)
        self._tell_by_call()

    def _tell_by_call(self) -> None:
        """Tell movers whose rings are full. The calls take time, which is not the engine's."""
        with self._lock:
            untold = self._jobs.take_untold()
        for registration, ids in untold:
            self._do_aside(partial(self._mark_by_call, registration, ids))

    def _mark_by_call(self, registration: Registration, job_ids: Sequence[int]) -> None:
        registrar = self._registrar
        if registrar is not None:
            registrar.mark_ready_by_call(registration, job_ids)

    def _do_aside(self, task: Callable[[], None]) -> None:
        if self._aside is None:
            thread = threading.Thread(target=self._do_tasks, name="kvd-compute", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread is to be had
                log.warning("kvd: the engine waits for its own compute: %s", str(error))
                self._do(task)
                return
            self._aside = thread
        self._computing.put(task)

    def _wait_and_mark_ready(self, wait: WaitForCompute, job_ids: Sequence[int]) -> None:
        try:
            wait()
        except Exception:
            log.exception("the step's compute failed; its stores are given up, its loads expire")
            with self._lock:
                self._jobs.give_up(job_ids)
            self._tell_by_call()
            return
        self._mark_ready(job_ids)

    def _do_tasks(self) -> None:
        while (task := self._computing.get()) is not None:
            self._do(task)

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception:
            # Whatever it was for expires; a dead thread would end every store to come.
            log.exception("the helper thread's task failed; it goes on")

    # -- ends -------------------------------------------------------------------------------

    def _poll(self) -> None:
        registrar = self._registrar
        if registrar is None:
            return
        with self._lock:
            current = registrar.current
            if current is not None:
                current.take_ends(self._jobs.take)
            for lost in list(registrar.lost):
                is_dead = lost.is_dead  # asked before the board: then nothing comes after
                lost.take_ends(self._jobs.take)
                if is_dead:
                    # In this order: a signal's handler may raise in between.
                    self._jobs.bury(lost)
                    lost.close()
                    registrar.lost.remove(lost)
