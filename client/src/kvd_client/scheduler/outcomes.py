"""What a job's end means for its request and for the engine."""

from __future__ import annotations

from kvd_client.scheduler.jobs import Job, Kind
from kvd_client.scheduler.lookup import LookupDesk
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.scheduler.plan import StepOutcome, StoredKeys
from kvd_client.scheduler.request import LookupState, Request


class JobEnds:
    """Collects ends until the engine takes the outcome."""

    def __init__(self, desk: LookupDesk, options: SchedulerOptions) -> None:
        self._desk = desk
        self._options = options
        self._finished_loads: list[str] = []
        self._failed_loads: list[str] = []
        self._stored: list[StoredKeys] = []
        self._events: list[StoredKeys] = []

    @property
    def has_loads(self) -> bool:
        """Whether a request waits to hear of its load."""
        return bool(self._finished_loads or self._failed_loads)

    def take_outcome(self) -> StepOutcome:
        outcome = StepOutcome(
            tuple(self._finished_loads), tuple(self._failed_loads), tuple(self._stored)
        )
        self._finished_loads, self._failed_loads, self._stored = [], [], []
        return outcome

    def take_events(self) -> list[StoredKeys]:
        events, self._events = self._events, []
        return events

    def end(self, job: Job, request: Request | None) -> None:
        """Every rank has spoken. `request` is None once it has finished."""
        if job.kind is Kind.LOAD:
            self._end_load(job, request)
            return
        if request is not None:
            request.store_jobs.discard(job.draft.job_id)
        if job.stale:
            return
        if not job.failed:
            self._note_stored(job)
        elif request is not None and request.request_level:
            self._store_again(request, job)

    def _end_load(self, job: Job, request: Request | None) -> None:
        failed = job.failed or job.stale
        (self._failed_loads if failed else self._finished_loads).append(job.request_id)
        if request is None or request.loading_job != job.draft.job_id:
            return
        request.loading_job = 0
        if failed:
            # It computes everything now; another lookup could find the same bad block again.
            self._desk.forget(request)
            request.lookup.state = LookupState.CLOSED
            request.store_from_start()

    def _note_stored(self, job: Job) -> None:
        for run in job.draft.runs:
            stored = StoredKeys(job.request_id, run.group, tuple(run.block_hashes))
            self._stored.append(stored)
            if self._options.collect_events:
                self._events.append(stored)

    def _store_again(self, request: Request, job: Job) -> None:
        """A request-level store must be whole: offer from the job's first block on again."""
        request.failed_stores += 1
        if request.failed_stores < self._options.request_level_attempts:
            for run in job.draft.runs:
                first = min(request.next_store[run.group], run.first_block)
                request.next_store[run.group] = first
            request.offer_at = 0
