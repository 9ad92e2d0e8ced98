"""A rank's jobs, from the plan that names them to their one report."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvd_client.scheduler.plan import JobReport
from kvd_client.worker.registration import Registration
from kvd_proto import layout
from kvd_proto.board import BoardRecord
from kvd_proto.v1 import common_pb2

DONE, PARTIAL = common_pb2.JOB_STATUS_DONE, common_pb2.JOB_STATUS_PARTIAL
MAX_UNASKED = layout.BOARD_RECORDS
MOST_DEADLINES = 4  # so many times the deadline a load may take while others come to their end


class Half(enum.Enum):
    """What a job may do to this rank's memory: read it, write it, or neither."""

    STORE = "store"  # read it, once computed
    LOAD = "load"  # write it
    NONE = "none"  # a store that another rank makes: only its end is heard


@dataclass(slots=True)
class OpenJob:
    """A job that this rank has heard of and that has not ended."""

    half: Half
    registration: Registration
    since_s: float
    is_ready: bool = False  # the mover was told: from then on it may touch the job's memory

    @property
    def is_at_mover(self) -> bool:
        """Whether it is a store that only its mover has yet to end."""
        return self.half is Half.STORE and self.is_ready


class JobLedger:
    """What one rank knows of its jobs.

    It reports each job once, and none before its plan came, whatever the boards say. A board may
    tell of a job before its plan does (a refusal), and again after it was given up or buried (the
    daemon's own word, on the next registration's board). Where a signal's handler raises, nothing
    is lost: the same call again goes on from there. Not thread-safe.
    """

    def __init__(self) -> None:
        self._open: dict[int, OpenJob] = {}
        self._ended: dict[int, JobReport] = {}  # not reported yet
        self._reporting: dict[int, JobReport] = {}  # nor do these count as reported before `told`
        self._unasked: dict[int, JobReport] = {}  # of jobs that no plan has named, or no longer
        self._untold: list[tuple[Registration, list[int]]] = []  # for want of room in a ring

    def begin(
        self, job_ids: Iterable[int], half: Half, registration: Registration | None
    ) -> list[int]:
        """Take note of a plan's jobs; those whose half this rank has to make.

        Without a registration they fail here and now: no mover knows of them. Of jobs that were
        begun before, for a signal's handler raised then, it names those that are still open.
        """
        begun, now = [], time.monotonic()
        for job_id in job_ids:
            if job_id in self._open:
                begun.append(job_id)
                continue
            if job_id in self._ended or job_id in self._reporting:
                continue
            early = self._unasked.get(job_id)
            if early is not None:
                self._ended[job_id] = early
                del self._unasked[job_id]
            elif registration is None:
                self._ended[job_id] = JobReport(job_id, done=False)
            else:
                self._open[job_id] = OpenJob(half, registration, now)
                begun.append(job_id)
        return begun

    def open_job(self, job_id: int) -> OpenJob | None:
        return self._open.get(job_id)

    @property
    def newest_load_s(self) -> float | None:
        """When the last of the loads began that have not ended; None: there is none."""
        since = (job.since_s for job in self._open.values() if job.half is Half.LOAD)
        return max(since, default=None)

    @property
    def has_ended(self) -> bool:
        """Whether there is something to report."""
        return bool(self._ended)

    def end_overdue_loads(self, now: float, deadline_s: float) -> list[Registration]:
        """Movers that have held a load for too long: only their end frees its blocks.

        A load's time runs from when it began, and from the last end that its mover's board told
        (it may stand behind others), MOST_DEADLINES times at most. One whose mover was never told
        that it may begin fails here: it never will.
        """
        late: dict[int, Registration] = {}
        for job_id, job in list(self._open.items()):
            if job.half is not Half.LOAD or job.registration.is_dead:
                continue
            latest_s = job.since_s + (MOST_DEADLINES - 1) * deadline_s
            if now - max(job.since_s, min(job.registration.heard_s, latest_s)) <= deadline_s:
                continue
            if job.is_ready:
                late[id(job.registration)] = job.registration
            else:
                self._fail(job_id)
        return list(late.values())

    def touches_memory(self, job_id: int) -> bool:
        job = self._open.get(job_id)
        return job is not None and job.half is not Half.NONE

    def forget(self, job_ids: Iterable[int]) -> None:
        """Nobody wants to hear of these any more."""
        for job_id in job_ids:
            self._open.pop(job_id, None)
            self._unasked.pop(job_id, None)

    def mark_ready(self, registration: Registration, job_ids: Sequence[int]) -> None:
        """Tell the mover by its ring; `take_untold` names what that has no room for."""
        if registration.mark_ready(job_ids):
            return
        if self._untold and self._untold[-1][0] is registration:
            self._untold[-1][1].extend(job_ids)
        else:
            self._untold.append((registration, list(job_ids)))

    def take_untold(self) -> list[tuple[Registration, list[int]]]:
        """Jobs that are ready, and whose movers have yet to be told."""
        untold, self._untold = self._untold, []
        return untold

    def give_up_late(self, job_ids: Iterable[int], since_s: float) -> None:
        """Give up stores that have not ended, for which somebody has waited since then.

        Where the board has told of no end since then, all stores at that mover go with them: who
        waits for one of these later would wait as much in vain.
        """
        named = set(job_ids)
        at_movers = [job for i, job in self._open.items() if i in named and job.is_at_mover]
        stuck = {id(job.registration) for job in at_movers if job.registration.heard_s < since_s}
        late = [
            job_id
            for job_id, job in self._open.items()
            if job.is_at_mover and id(job.registration) in stuck
        ]
        self.give_up(late, are_late=True)
        self.give_up(named)

    def give_up(self, job_ids: Iterable[int], *, are_late: bool = False) -> None:
        """Report stores as failed: from now on their blocks may be overwritten.

        A mover that waits for the job's ready hears it now, and gives the copy up: others may be
        copied with it.
        """
        for job_id in job_ids:
            job = self._open.get(job_id)
            if job is not None and job.half is not Half.LOAD:
                if not job.registration.is_dead:
                    job.registration.abandon(job_id)
                    if job.half is Half.STORE and not job.is_ready:
                        self.mark_ready(job.registration, (job_id,))
                self._fail(job_id, given_up=are_late)

    def write_off(self, job_ids: Iterable[int], current: Registration | None) -> None:
        """Report as failed what is open of jobs that nobody will end.

        A load of an earlier registration stays open until its mover is dead.
        """
        job_ids = list(job_ids)
        self.give_up(job_ids)
        for job_id in job_ids:
            job = self._open.get(job_id)
            if job is not None and job.registration is current:
                self._fail(job_id)

    def bury(self, registration: Registration) -> None:
        """Its mover is dead and its last words are taken: its open jobs have failed."""
        for job_id in [i for i, job in self._open.items() if job.registration is registration]:
            self._fail(job_id)

    def take(self, records: Iterable[BoardRecord]) -> None:
        """What a board says."""
        for job_id, _kind, status, bytes_copied, duration_ns in records:
            left = status == PARTIAL
            if job_id in self._ended:  # it was taken already
                self._open.pop(job_id, None)
                continue
            report = JobReport(job_id, left or status == DONE, bytes_copied, duration_ns, left)
            if job_id in self._open:
                self._ended[job_id] = report
                del self._open[job_id]
                continue
            self._unasked[job_id] = report
            if len(self._unasked) > MAX_UNASKED:
                del self._unasked[next(iter(self._unasked))]

    def take_ended(self) -> tuple[JobReport, ...]:
        """Reports since `told` was last called."""
        self._reporting = {**self._reporting, **self._ended}
        self._ended = {}
        return tuple(self._reporting.values())

    def told(self) -> None:
        """Who asked for the reports has them."""
        self._reporting = {}

    def _fail(self, job_id: int, *, given_up: bool = False) -> None:
        self._ended[job_id] = JobReport(job_id, done=False, given_up=given_up)
        self._open.pop(job_id, None)
