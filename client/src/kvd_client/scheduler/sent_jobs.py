"""Jobs on their way: ordered, and not yet reported by every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvd_proto.limits import MAX_JOBS_IN_FLIGHT

REPORT_GRACE_S = 1.0  # after the daemon told a job's end, for every rank to report it
NEVER_SENT = -1  # in place of a session's generation


@dataclass(slots=True, kw_only=True)
class SentJob:
    """What an engine ordered at once: one job to the daemon, or several where it is too large."""

    generation: int  # of the session that it was sent in
    parts: list[int]  # the daemon's jobs
    has_failed: bool = False
    reports_left: int = 0


JobT = TypeVar("JobT", bound=SentJob)


class SentJobs(Generic[JobT]):
    """Jobs by number, from the step that orders them until every rank has reported.

    A rank whose board was lost reports nothing. So the daemon's word counts where it was told and
    a rank has not spoken REPORT_GRACE_S later. Jobs of an earlier session have failed.

    That is sound: a session is usable when all ranks are registered in it, and a worker registers
    again only when its old mover is dead.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._jobs: dict[int, JobT] = {}
        self._owners: dict[int, int] = {}  # the daemon's job -> the one that it is a part of
        self._told: dict[int, tuple[bool, float]] = {}  # by the daemon: whether done, and when
        self.generation = 0
        self._may_have_strays = False  # of other sessions than this; else nobody need look

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, number: object) -> bool:
        return number in self._jobs

    @property
    def free(self) -> int:
        """How many more of the daemon's jobs may be in flight."""
        return MAX_JOBS_IN_FLIGHT - len(self._owners)

    def add(self, number: int, job: JobT) -> None:
        job.reports_left = self._world_size
        self._jobs[number] = job
        self._may_have_strays |= job.generation != self.generation
        self._owners.update(dict.fromkeys(job.parts, number))

    def drop(self, number: int) -> JobT:
        """Forget a job: it has ended, or never left."""
        job = self._jobs[number]
        for part in job.parts:
            self._told.pop(part, None)
            self._owners.pop(part, None)  # absent where a signal's handler cut `add` short
        del self._jobs[number]  # last: `told` and `overdue` name none that is not here
        return job

    def report(self, number: int, ranks: int, *, failed: bool) -> JobT | None:
        """So many more ranks have spoken. The job once all have; None before, or if unknown."""
        job = self._jobs.get(number)
        if job is None:
            return None
        job.reports_left -= ranks
        job.has_failed |= failed
        return None if job.reports_left > 0 else self.drop(number)

    def parts_of(self, numbers: Iterable[int]) -> set[int]:
        """The daemon's jobs of those among these that are on their way."""
        return {part for each in numbers if each in self._jobs for part in self._jobs[each].parts}

    def enter(self, generation: int) -> bool:
        """There is a session. True: a new one; what an earlier one told counts for nothing."""
        if generation == self.generation:
            return False
        self.generation = generation
        self._may_have_strays = bool(self._jobs)
        self._told.clear()
        return True

    def told(self, ended: Iterable[tuple[int, bool]], now: float) -> None:
        """The daemon's word on its jobs that have ended: whether they are done."""
        for job_id, done in ended:
            if job_id in self._owners:
                self._told[job_id] = (done, now)

    def overdue(self, now: float) -> list[tuple[int, bool]]:
        """The daemon's jobs that some rank has not reported in time, and its word on each.

        Named again, should this be lost too, when as much time has passed once more.
        """
        overdue = []
        for job_id, (done, told_s) in self._told.items():
            if now - told_s > REPORT_GRACE_S:
                self._told[job_id] = (done, now)
                overdue.append((job_id, done))
        return overdue

    def of_earlier_sessions(self) -> list[int]:
        """The daemon's jobs that were sent in another session than this."""
        if not self._may_have_strays:
            return []
        current = (self.generation, NEVER_SENT)
        strays = [
            part
            for job in self._jobs.values()
            if job.generation not in current
            for part in job.parts
        ]
        self._may_have_strays = bool(strays)
        return strays
