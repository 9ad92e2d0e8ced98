"""Jobs that have not been reported by every rank, and the engine blocks they still touch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvd_client.draft import BlockRun, JobDraft
from kvd_client.scheduler.plan import JobReport
from kvd_proto import layout

_GROUP_SHIFT = 32  # engine block ids are 32-bit

Key = tuple[int, str, bytes]  # group, account, block hash


class Kind(enum.Enum):
    """Whether a job stores or loads."""

    STORE = "store"
    LOAD = "load"


@dataclass(slots=True)
class Load:
    """What one request loads, in as many jobs as it needs; the first one's id names it."""

    first_job: int
    parts_left: int
    has_failed: bool = False

    def end_part(self, *, failed: bool) -> bool:
        """One more of its jobs has ended. True: that was the last."""
        self.parts_left -= 1
        self.has_failed |= failed
        return not self.parts_left


@dataclass(slots=True)
class Job:
    """One store or load of a request, from its creation to the last rank's report."""

    draft: JobDraft
    kind: Kind
    request_id: str
    account: str
    generation: int  # of the session that it was sent in
    ranks_left: int = 0  # bit r set = rank r has not reported
    failed: bool = False
    left: bool = False  # some of its keys were left to other stores
    stale: bool = False  # of before a reset
    load: Load | None = None  # that it is a part of


class JobTable:
    """The engine's jobs in flight, at most MAX_JOBS_IN_FLIGHT; their ids rise for ever."""

    def __init__(self, world_size: int) -> None:
        self._every_rank = (1 << world_size) - 1
        self._jobs: dict[int, Job] = {}
        self._last_job_id = 0
        self._storing: dict[Key, int] = {}
        self._reading: dict[int, tuple[int, ...]] = {}  # engine block -> store jobs that read it
        self._loading: dict[tuple[int, str], dict[bytes, int]] = {}  # by group and account

    def __len__(self) -> int:
        return len(self._jobs)

    def has_room(self, jobs: int) -> bool:
        """Whether so many more may be in flight."""
        return len(self._jobs) + jobs <= layout.MAX_JOBS_IN_FLIGHT

    def next_id(self) -> int:
        self._last_job_id += 1
        return self._last_job_id

    def add(self, job: Job) -> None:
        job.ranks_left = self._every_rank
        job_id = job.draft.job_id
        self._jobs[job_id] = job
        if job.kind is Kind.LOAD:
            for run in job.draft.runs:
                loading = self._loading.setdefault((run.group, job.account), {})
                loading.update(dict.fromkeys(run.block_hashes, job_id))
            return
        for run in job.draft.runs:
            self._storing.update(dict.fromkeys(_keys(run, job.account), job_id))
            readers: dict[int, tuple[int, ...]] = dict.fromkeys(_places(run), (job_id,))
            for place in self._reading.keys() & readers.keys():
                readers[place] += self._reading[place]
            self._reading.update(readers)

    def drop(self, job_id: int) -> Job:
        """Forget a job: it has ended, or never left."""
        job = self._jobs.pop(job_id)
        if job.kind is Kind.LOAD:
            for run in job.draft.runs:
                self._forget_loading(run, job)
            return job
        for run in job.draft.runs:
            for key in _keys(run, job.account):
                if self._storing.get(key) == job_id:
                    del self._storing[key]
            for place in _places(run):
                others = tuple(reader for reader in self._reading[place] if reader != job_id)
                if others:
                    self._reading[place] = others
                else:
                    del self._reading[place]
        return job

    def _forget_loading(self, run: BlockRun, job: Job) -> None:
        loading = self._loading.get((run.group, job.account), {})
        for block_hash in run.block_hashes:
            if loading.get(block_hash) == job.draft.job_id:
                del loading[block_hash]
        if not loading:
            self._loading.pop((run.group, job.account), None)

    def report(self, rank: int, report: JobReport) -> Job | None:
        """One rank's word. The job once all ranks have spoken; None before, or if unknown."""
        job = self._jobs.get(report.job_id)
        if job is None or not job.ranks_left >> rank & 1:
            return None
        job.ranks_left &= ~(1 << rank)
        job.failed |= not report.done
        job.left |= report.left
        return None if job.ranks_left else self.drop(report.job_id)

    def is_storing(self, group: int, account: str, block_hash: bytes) -> bool:
        return (group, account, block_hash) in self._storing

    def loader(self, group: int, account: str, block_hashes: Sequence[bytes]) -> int:
        """A load in flight of any of these blocks; 0 where there is none."""
        loading = self._loading.get((group, account))
        if not loading or loading.keys().isdisjoint(block_hashes):
            return 0
        return next(loading[each] for each in block_hashes if each in loading)

    def touches(self, account: str, run: BlockRun) -> bool:
        """Whether any of these keys or engine blocks belongs to a store in flight."""
        if not self._reading:
            return False
        return not (
            self._storing.keys().isdisjoint(_keys(run, account))
            and self._reading.keys().isdisjoint(_places(run))
        )

    def readers(self, group: int, engine_blocks: Sequence[int]) -> set[int]:
        """Store jobs in flight that read any of these engine blocks."""
        if not self._reading:
            return set()
        places = (self._reading.get(group << _GROUP_SHIFT | block, ()) for block in engine_blocks)
        return {job_id for readers in places for job_id in readers}

    def of_earlier_sessions(self, generation: int) -> list[int]:
        """Jobs that were sent in another session than this."""
        return [i for i, job in self._jobs.items() if job.generation != generation]

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def invalidate(self) -> list[int]:
        """The cache was reset: what is in flight counts for nothing. Ids of the stores."""
        for job in self._jobs.values():
            job.stale = True
        self._storing.clear()
        self._loading.clear()
        return [job_id for job_id, job in self._jobs.items() if job.kind is Kind.STORE]


def _keys(run: BlockRun, account: str) -> list[Key]:
    group = run.group
    return [(group, account, block_hash) for block_hash in run.block_hashes]


def _places(run: BlockRun) -> list[int]:
    base = run.group << _GROUP_SHIFT
    return [base | block for block in run.engine_blocks]
