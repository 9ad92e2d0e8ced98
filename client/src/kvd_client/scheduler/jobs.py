"""The jobs of requests in flight, and the engine blocks that they still touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd_client.draft import BlockRun, JobDraft
from kvd_client.scheduler.plan import JobReport
from kvd_client.scheduler.request import Request
from kvd_client.scheduler.sent_jobs import SentJob, SentJobs

_GROUP_SHIFT = 32  # engine block ids are 32-bit

Key = tuple[int, str, bytes]  # group, account, block hash


@dataclass(slots=True)
class Load:
    """What one request loads, in as many jobs as it needs; the first one's id names it."""

    first_job: int
    parts_left: set[int]  # jobs
    has_failed: bool = False

    def end_part(self, job_id: int, *, failed: bool) -> bool:
        """One of its jobs has ended. True: none is left. May be called again with the same one."""
        self.has_failed |= failed
        self.parts_left.discard(job_id)
        return not self.parts_left


@dataclass(slots=True, kw_only=True)
class RequestJob(SentJob):
    """One store or load of a request, from its creation to the last rank's report."""

    draft: JobDraft
    request_id: str
    account: str
    load: Load | None = None  # that it is a part of; None for a store
    heard: int = 0  # bit r set = rank r has reported
    left: bool = False  # some of its keys were left to other stores
    stale: bool = False  # of before a reset


class JobTable(SentJobs[RequestJob]):
    """The engine's jobs in flight, at most MAX_JOBS_IN_FLIGHT; their ids rise for ever."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.last_id = 0  # that was given
        self._storing: dict[Key, int] = {}
        self._reading: dict[int, tuple[int, ...]] = {}  # engine block -> store jobs that read it
        self._loading: dict[tuple[int, str], dict[bytes, int]] = {}  # by group and account

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def begin(
        self, draft: JobDraft, request: Request, generation: int, load: Load | None = None
    ) -> None:
        """A job of the request will leave with the step; without a `load` it is a store."""
        job_id = draft.job_id
        self.add(
            job_id,
            RequestJob(
                generation=generation,
                parts=[job_id],
                draft=draft,
                request_id=request.request_id,
                account=request.account,
                load=load,
            ),
        )
        if load is not None:
            for run in draft.runs:
                loading = self._loading.setdefault((run.group, request.account), {})
                loading.update(dict.fromkeys(run.block_hashes, job_id))
            return
        for run in draft.runs:
            self._storing.update(dict.fromkeys(_keys(run, request.account), job_id))
            readers: dict[int, tuple[int, ...]] = dict.fromkeys(_places(run), (job_id,))
            for place in self._reading.keys() & readers.keys():
                readers[place] += self._reading[place]
            self._reading.update(readers)

    def __getitem__(self, job_id: int) -> RequestJob:
        return self._jobs[job_id]

    def drop(self, number: int) -> RequestJob:
        job = self._jobs[number]
        if job.load is not None:
            for run in job.draft.runs:
                self._forget_loading(run, job)
            return super().drop(number)
        for run in job.draft.runs:
            for key in _keys(run, job.account):
                if self._storing.get(key) == number:
                    del self._storing[key]
            for place in _places(run):
                # None of a job whose beginning a signal's handler cut short.
                readers = self._reading.get(place, ())
                if others := tuple(reader for reader in readers if reader != number):
                    self._reading[place] = others
                else:
                    self._reading.pop(place, None)
        return super().drop(number)

    def _forget_loading(self, run: BlockRun, job: RequestJob) -> None:
        loading = self._loading.get((run.group, job.account), {})
        for block_hash in run.block_hashes:
            if loading.get(block_hash) == job.draft.job_id:
                del loading[block_hash]
        if not loading:
            self._loading.pop((run.group, job.account), None)

    def begun_after(self, job_id: int) -> list[int]:
        """Jobs on their way whose ids were given after this one."""
        return [each for each in self._jobs if each > job_id]

    def hear(self, rank: int, report: JobReport) -> RequestJob | None:
        """One rank's word, which counts once. The job, still here, once all ranks have spoken."""
        job = self._jobs.get(report.job_id)
        if job is None or rank >= self._world_size or job.heard >> rank & 1:
            return None
        job.left |= report.left
        job.has_failed |= not report.done
        job.heard |= 1 << rank
        return job if job.heard + 1 == 1 << self._world_size else None

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

    def invalidate(self) -> list[int]:
        """The cache was reset: what is in flight counts for nothing. Ids of the stores."""
        for job in self._jobs.values():
            job.stale = True
        self._storing.clear()
        self._loading.clear()
        return [job_id for job_id, job in self._jobs.items() if job.load is None]


def _keys(run: BlockRun, account: str) -> list[Key]:
    group = run.group
    return [(group, account, block_hash) for block_hash in run.block_hashes]


def _places(run: BlockRun) -> list[int]:
    base = run.group << _GROUP_SHIFT
    return [base | block for block in run.engine_blocks]
