"""The engine-neutral worker side: what each rank of an engine calls, in this order.

once                 register
in every step        start_step, (the engine runs the model), finish_step, get_finished
before KV moves      unregister

Nothing raises for an absent, slow or broken daemon. A load that this rank has submitted ends
only by the board or by its mover's death: until then its blocks may be written. A store can be
given up at any time.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TypedDict, Unpack

from kvd_client.identity import EngineIdentity
from kvd_client.scheduler.plan import JobReport, StepPlan, WorkerReport
from kvd_client.worker.memory import GroupLayout, SharedMemory
from kvd_client.worker.registrar import RankMemory, RankPlace, Registrar
from kvd_client.worker.registration import Registration
from kvd_proto import layout
from kvd_proto.board import BoardRecord
from kvd_proto.v1 import common_pb2

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 1.0
POLL_S = 0.0002
MAX_EARLY = layout.BOARD_RECORDS

WaitForCompute = Callable[[], None]


class Half(enum.Enum):
    """What a job may do to this rank's memory."""

    STORE = "store"  # read it, once computed
    LOAD = "load"  # write it
    NONE = "none"  # a store that another rank makes: only its end is heard


class WorkerOptions(TypedDict, total=False):
    """What most ranks leave at its default."""

    shard: int  # which shard's bytes this rank holds; its own number
    writer: bool  # False where another rank writes that shard (a replicated layout)
    flush_timeout_s: float  # then flushed stores are given up


@dataclass(slots=True)
class OpenJob:
    half: Half
    registration: Registration


class Worker:
    """One rank's worker side. Calls come from one thread."""

    def __init__(
        self,
        socket_path: str,
        identity: EngineIdentity,
        rank: int = 0,
        world_size: int = 1,
        **options: Unpack[WorkerOptions],
    ) -> None:
        if not 0 <= rank < world_size <= layout.MAX_RANKS:
            raise ValueError(f"rank {rank} of {world_size}")
        self._socket_path = socket_path
        self._identity = identity
        shard, writer = options.get("shard", rank), options.get("writer", True)
        self._place = RankPlace(rank, world_size, shard, writer)
        self._flush_timeout_s = options.get("flush_timeout_s", FLUSH_TIMEOUT_S)
        self._registrar: Registrar | None = None
        self._memory: RankMemory | None = None
        self._lock = threading.Lock()  # guards what the helper thread sees too
        self._open: dict[int, OpenJob] = {}
        self._ended: list[JobReport] = []
        self._early: dict[int, None] = {}  # ended on the board before their plan came
        self._computing: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._aside: threading.Thread | None = None

    # -- registration -----------------------------------------------------------------------

    def register(self, memories: Sequence[SharedMemory], groups: Sequence[GroupLayout]) -> None:
        """Offer this rank's KV memory to the daemon, now and whenever it comes back.

        Returns at once; the descriptors are duplicated. Register again after `unregister` only.
        """
        if self._registrar is not None:
            raise ValueError("this rank is registered already")
        for group in groups:
            if any(fragment.memory >= len(memories) for fragment in group.fragments):
                raise ValueError("a fragment names a memory that is not in the list")
        regions = tuple(SharedMemory(os.dup(m.fd), m.offset, m.bytes) for m in memories)
        self._memory = RankMemory(regions, tuple(groups))
        self._registrar = Registrar(self._socket_path, self._identity, self._place, self._memory)

    def wait_registered(self, timeout_s: float) -> bool:
        """Wait until the daemon has this rank's memory; for start-up and tests."""
        return self._registrar is not None and self._registrar.wait_registered(timeout_s)

    @property
    def problem(self) -> str:
        """Why the rank is not registered; empty when it is."""
        return "register was not called" if self._registrar is None else self._registrar.problem

    def unregister(self, timeout_s: float = 5.0) -> bool:
        """Take the memory back. True: no copy can touch it any more, its jobs are failed.

        False only when the daemon hangs so that neither it nor the mover's end could be had.
        """
        registrar, memory = self._registrar, self._memory
        if registrar is None or memory is None:
            return True
        is_safe = registrar.stop(timeout_s)
        if is_safe:
            self._poll()
            self._registrar = self._memory = None
            for region in memory.regions:
                os.close(region.fd)
        return is_safe

    def close(self) -> None:
        """Unregister and end the threads."""
        self.unregister()
        if self._aside is not None:
            self._computing.put(None)
            self._aside.join(timeout=2.0)
            self._aside = None

    # -- the step ---------------------------------------------------------------------------

    def start_step(self, plan: StepPlan) -> None:
        """Before the model runs: flush what must end, then let loads begin.

        Waits for flushed stores, at most `flush_timeout_s`; what has not ended then is given up.
        """
        with self._lock:
            for job_id in plan.forget:
                self._open.pop(job_id, None)
        if plan.computed_stores:
            self._mark_ready(self._begin(plan.computed_stores, self._store_half))
        if plan.flush:
            self._abandon(self.wait(plan.flush, self._flush_timeout_s))
        if plan.loads:
            self._mark_ready(self._begin(plan.loads, Half.LOAD))

    def finish_step(self, plan: StepPlan, wait_for_compute: WaitForCompute | None = None) -> None:
        """After the model was launched: let the step's stores begin once it has computed.

        `wait_for_compute` blocks until the step's KV is written; a helper thread calls it.
        None says that it is written already.
        """
        if not plan.stores:
            return
        begun = self._begin(plan.stores, self._store_half)
        if wait_for_compute is None:
            self._mark_ready(begun)
            return
        self._do_aside(lambda: self._store_computed(begun, wait_for_compute))

    def get_finished(self) -> WorkerReport:
        """What ended since the last call. Never waits."""
        self._poll()
        with self._lock:
            ended, self._ended = self._ended, []
        return WorkerReport(self._place.rank, tuple(ended))

    def wait(self, job_ids: Iterable[int], timeout_s: float) -> set[int]:
        """Wait until this rank's half of the jobs has ended; those that have not at the timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._poll()
            left = {job_id for job_id in job_ids if self._touches_memory(job_id)}
            if not left or time.monotonic() >= deadline:
                return left
            time.sleep(POLL_S)

    # -- halves -----------------------------------------------------------------------------

    @property
    def _store_half(self) -> Half:
        return Half.STORE if self._place.writer else Half.NONE

    def _begin(self, job_ids: Iterable[int], half: Half) -> list[int]:
        """Take note of jobs; those whose half this rank has to make.

        Without a registration they fail here and now: no mover knows of them.
        """
        registration = None if self._registrar is None else self._registrar.current
        begun = []
        with self._lock:
            for job_id in job_ids:
                if job_id in self._early:
                    del self._early[job_id]
                elif registration is None:
                    self._ended.append(JobReport(job_id, done=False))
                else:
                    self._open[job_id] = OpenJob(half, registration)
                    begun.append(job_id)
        return begun

    def _mark_ready(self, job_ids: Sequence[int]) -> None:
        """Tell the mover. Jobs that were given up meanwhile, or go to a dead one, are left out."""
        by_registration: dict[int, tuple[Registration, list[int]]] = {}
        with self._lock:
            for job_id in job_ids:
                job = self._open.get(job_id)
                if job is not None and job.half is not Half.NONE:
                    registration = job.registration
                    by_registration.setdefault(id(registration), (registration, []))[1].append(
                        job_id
                    )
            full = [
                (registration, ids)
                for registration, ids in by_registration.values()
                if not registration.is_dead and not registration.mark_ready(ids)
            ]
        for registration, ids in full:
            # The call takes its time, which is not the engine's.
            self._do_aside(partial(self._mark_by_call, registration, ids))

    def _mark_by_call(self, registration: Registration, job_ids: Sequence[int]) -> None:
        registrar = self._registrar
        if registrar is not None:
            registrar.mark_ready_by_call(registration, job_ids)

    def _do_aside(self, task: Callable[[], None]) -> None:
        if self._aside is None:
            self._aside = threading.Thread(target=self._do_tasks, name="kvd-compute", daemon=True)
            self._aside.start()
        self._computing.put(task)

    def _store_computed(self, job_ids: Sequence[int], wait_for_compute: WaitForCompute) -> None:
        try:
            wait_for_compute()
        except Exception:
            log.exception("the step's compute failed; its stores are given up")
            self._abandon(job_ids)
            return
        self._mark_ready(job_ids)

    def _abandon(self, job_ids: Iterable[int]) -> None:
        """Give stores up: from now on their blocks may be overwritten."""
        with self._lock:
            for job_id in job_ids:
                job = self._open.get(job_id)
                if job is not None and job.half is not Half.LOAD:
                    if not job.registration.is_dead:
                        job.registration.abandon(job_id)
                    del self._open[job_id]
                    self._ended.append(JobReport(job_id, done=False))

    def _do_tasks(self) -> None:
        while (task := self._computing.get()) is not None:
            task()

    # -- ends -------------------------------------------------------------------------------

    def _poll(self) -> None:
        registrar = self._registrar
        if registrar is None:
            return
        with self._lock:
            current = registrar.current
            if current is not None:
                self._take(current.poll())
            for lost in list(registrar.lost):
                is_dead = lost.is_dead  # asked before the board: then nothing comes after
                self._take(lost.poll())
                if is_dead:
                    registrar.lost.remove(lost)
                    self._bury(lost)

    def _take(self, records: Iterable[BoardRecord]) -> None:
        for record in records:
            if self._open.pop(record.job_id, None) is None:
                self._early[record.job_id] = None
                if len(self._early) > MAX_EARLY:
                    del self._early[next(iter(self._early))]
            done = record.status == common_pb2.JOB_STATUS_DONE
            self._ended.append(
                JobReport(record.job_id, done, record.bytes_copied, record.duration_ns)
            )

    def _bury(self, registration: Registration) -> None:
        """The mover is dead and its last words are read: its open jobs have failed."""
        for job_id in [i for i, job in self._open.items() if job.registration is registration]:
            del self._open[job_id]
            self._ended.append(JobReport(job_id, done=False))
        registration.close()

    def _touches_memory(self, job_id: int) -> bool:
        job = self._open.get(job_id)
        return job is not None and job.half is not Half.NONE
