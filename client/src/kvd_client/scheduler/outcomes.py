"""How jobs end, and what an end means for the request and for the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvd_client.draft import BlockRun
from kvd_client.scheduler.doubts import Doubts
from kvd_client.scheduler.fences import Fences
from kvd_client.scheduler.jobs import JobTable, Load, RequestJob
from kvd_client.scheduler.lookup import LookupQueue
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.scheduler.plan import StepOutcome, StoredKeys, WorkerReport
from kvd_client.scheduler.request import Request


class JobEnds:
    """Collects the ends of jobs, until the engine takes the outcome.

    A job that has ended is among `_due` until all that follows from it is done, and only then is it
    out of the table. Where a signal's handler raises amid it, the next call does it anew.
    """

    def __init__(
        self,
        jobs: JobTable,
        queue: LookupQueue,
        fences: Fences,
        options: SchedulerOptions,
        requests: Mapping[str, Request],
        doubts: Doubts,
    ) -> None:
        self._jobs = jobs
        self._queue = queue
        self._fences = fences
        self._options = options
        self._requests = requests
        self._doubts = doubts
        self.loading_ended: set[str] = set()  # ended requests that an outcome will name
        self._forget: list[int] = []
        self._due: dict[int, RequestJob] = {}
        # By request, without values: what is done anew is said once.
        self._finished_loads: dict[str, None] = {}
        self._failed_loads: dict[str, None] = {}
        self._stored: list[StoredKeys] = []
        self._events: list[StoredKeys] = []

    @property
    def has_news(self) -> bool:
        """Whether a request waits to hear of its load."""
        return bool(self._finished_loads or self._failed_loads)

    # -- for the step -----------------------------------------------------------------------

    def will_name(self, request_id: str) -> bool:
        """Whether the next outcome says how a load of this request has ended."""
        return request_id in self._finished_loads or request_id in self._failed_loads

    def take_outcome(self) -> StepOutcome:
        finished, failed = self._finished_loads, self._failed_loads
        outcome = StepOutcome(tuple(finished), tuple(failed), tuple(self._stored))
        self.loading_ended.difference_update(finished, failed)
        # Last: where a signal's handler raises before, the next outcome has them.
        self._finished_loads, self._failed_loads, self._stored = {}, {}, []
        return outcome

    def take_events(self) -> list[StoredKeys]:
        events, self._events = self._events, []
        return events

    def take_forget(self) -> tuple[int, ...]:
        """Jobs that ended in another way than by the ranks' reports."""
        forget, self._forget = self._forget, []
        return tuple(forget)

    # -- ends -------------------------------------------------------------------------------

    def enter_session(self) -> None:
        """There is a new one: jobs of earlier sessions end."""
        self._doubts.session_lost()
        self._end_strays()

    def told(self, ended: Iterable[tuple[int, bool]], now: float) -> None:
        """The daemon's word on ended jobs; those that some rank does not report end by it."""
        self._jobs.told(ended, now)
        self._end_due()
        self._end_strays()
        self._doubts.look_again(now, self._note_stored)
        for job_id, done in self._jobs.overdue(now):
            self._end_unreported(job_id, is_done=done)

    def report(self, reports: Iterable[WorkerReport]) -> None:
        """The workers' word. A job ends once every rank has spoken."""
        self._end_due()
        for report in reports:
            for ended in report.ended:
                job = self._jobs.hear(report.rank, ended)
                if job is not None:
                    self._due[ended.job_id] = job
                    self._end_due()

    def fail(self, job_ids: Sequence[int]) -> None:
        """These will never run: no worker was told of them."""
        for job_id in job_ids:
            self._jobs[job_id].has_failed = True
            self._due[job_id] = self._jobs[job_id]
        self._end_due()

    def _end_strays(self) -> None:
        for job_id in self._jobs.of_earlier_sessions():
            self._end_unreported(job_id, is_done=False)

    def _end_unreported(self, job_id: int, *, is_done: bool) -> None:
        """A job has ended but a rank's report of it was lost with its board."""
        job = self._jobs[job_id]
        job.has_failed |= not is_done
        self._forget.append(job_id)
        self._due[job_id] = job
        self._end_due()

    def _end_due(self) -> None:
        while self._due:
            job_id, job = next(iter(self._due.items()))
            self._end(job)
            if job_id in self._jobs:
                self._jobs.drop(job_id)
            del self._due[job_id]

    def _end(self, job: RequestJob) -> None:
        """May be called again with the same one."""
        self._fences.ended(job.draft.job_id)
        request = self._requests.get(job.request_id)
        if job.load is not None:
            self._end_load(job, job.load, request)
        else:
            self._end_store(job, request)

    def _end_store(self, job: RequestJob, request: Request | None) -> None:
        """`request` is None once it has finished."""
        if request is not None:
            request.store_jobs.discard(job.draft.job_id)
        if job.stale:
            return
        if job.has_failed:
            if request is not None:
                self._store_again(request, job)
            return
        if request is not None and not request.request_level:
            request.failed_stores = 0
            for run in job.draft.runs:
                request.note_stored(run)
        if job.left:
            self._doubts.add(job, self._note_stored)
            return
        for run in job.draft.runs:
            self._note_stored(job, run)

    def _end_load(self, job: RequestJob, load: Load, request: Request | None) -> None:
        if not load.end_part(job.draft.job_id, failed=job.has_failed or job.stale):
            return  # the others may still write to the request's blocks
        failed = load.has_failed
        (self._failed_loads if failed else self._finished_loads)[job.request_id] = None
        if request is None or request.loading_job != load.first_job:
            return
        if failed:
            # It computes everything now; another lookup could find the same bad block again.
            self._queue.load_failed(request)
            request.store_from_start()
        request.loading_job = 0  # last: until then it is done anew

    def _note_stored(self, job: RequestJob, run: BlockRun) -> None:
        stored = StoredKeys(job.request_id, run.group, tuple(run.block_hashes))
        self._stored.append(stored)
        if self._options.collect_events:
            self._events.append(stored)

    def _store_again(self, request: Request, job: RequestJob) -> None:
        """Offer from the job's first block on again: at once where a request must be whole."""
        if not request.request_level:
            self._doubts.add_failed(job, request)
        elif request.store_attempt_failed(self._options):
            for run in job.draft.runs:
                request.offer_again(run.group, run.first_block)
