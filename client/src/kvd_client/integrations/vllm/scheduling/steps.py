"""The scheduler side's one message of a step, and the jobs that it has sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvd_client.draft import ALONE, BlockRun, JobDraft, StepDraft, in_parts
from kvd_client.integrations.vllm.scheduling.requests import TrackedRequest, offered_runs
from kvd_client.scheduler.hand_offs import HandOffQueue
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.scheduler.sent_jobs import NEVER_SENT, SentJob, SentJobs
from kvd_client.scheduler.store_pause import StorePause
from kvd_client.session import Connection, SessionView
from kvd_proto.limits import MAX_PARTS_PER_STEP

RENEWED_EACH = 0.25  # of a lease's time
MAX_FINISHED = 4096  # requests that ended while no session was usable; of older ones nobody hears
MAX_WAITING_ENDS = 256


@dataclass(slots=True, kw_only=True)
class TrackedJob(SentJob):
    """A job of vLLM's, and whose it is."""

    tracked: TrackedRequest
    is_load: bool


@dataclass(slots=True)
class StepJobs:
    """What vLLM scheduled in one step, joined with its engine blocks, as kvd's jobs.

    Each has the next number of `ids`; a job of vLLM's that is too large for one is several.
    """

    ids: Iterator[int]
    loads: list[JobDraft] = field(default_factory=list)
    stores: list[JobDraft] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)  # kvd's job id -> vLLM's
    by_number: dict[int, TrackedJob] = field(default_factory=dict)  # by vLLM's job id

    def add(
        self,
        vllm_job: int,
        tracked: TrackedRequest,
        runs: list[BlockRun],
        *,
        is_load: bool,
        ready_together: int = ALONE,
    ) -> None:
        """`ready_together`: of a store, which others its ranks are ready for with it."""
        request = tracked.request
        job = TrackedJob(generation=NEVER_SENT, parts=[], tracked=tracked, is_load=is_load)
        self.by_number[vllm_job] = job
        for part in in_parts(runs):
            job_id = next(self.ids)
            draft = JobDraft(job_id, request.context, part, request.request_level, ready_together)
            self.owners[job_id] = vllm_job
            job.parts.append(job_id)
            (self.loads if is_load else self.stores).append(draft)


class StepSender:
    """Collects what goes with the next step, sends it, and follows vLLM's jobs to their end."""

    def __init__(
        self, connection: Connection, options: SchedulerOptions, clock: Callable[[], float]
    ) -> None:
        self._connection = connection
        self._clock = clock
        self.jobs = SentJobs[TrackedJob](connection.world_size)  # by vLLM's job id
        self.pause = StorePause(clock)
        self._hand_offs = HandOffQueue(self.jobs, options)
        self.sent_s = float("-inf")  # when the last message left
        self.draft = StepDraft()

    @property
    def has_pending_work(self) -> bool:
        """Whether a step must be taken for what waits to be sent."""
        return bool(self._hand_offs)

    def hand_off(self, tracked: TrackedRequest) -> None:
        """The request has ended here and goes on elsewhere: hold what it stored."""
        self._hand_offs.add(tracked.request, offered_runs(tracked))

    def send(self, jobs: StepJobs, session: SessionView | None) -> bool:
        """Send the step. False: no session, none of its jobs will ever run.

        A step that gives no orders is sent only now and then, to renew the leases and to say
        what has ended: that can wait, and a message costs more than all that it says.
        """
        was_sent = session is not None and self._send(jobs, session)
        if session is None:
            self._postpone()
        for vllm_job, job in jobs.by_number.items():
            job.generation = self.jobs.generation if was_sent else NEVER_SENT
            self.jobs.add(vllm_job, job)
            if not job.is_load:
                job.tracked.request.store_jobs.add(vllm_job)
        return was_sent

    def _send(self, jobs: StepJobs, session: SessionView) -> bool:
        step = self.draft
        step.loads, step.stores = jobs.loads, jobs.stores
        self._hand_offs.put_into(step)
        now = self._clock()
        if _can_wait(step) and now - self.sent_s < session.lease_ttl_s * RENEWED_EACH:
            return True
        self.draft = StepDraft()
        step.generation = session.generation
        try:
            was_sent = self._connection.send_step(step)
        except BaseException:  # what a signal's handler raises: the daemon may not have heard it
            self.draft.released_leases += step.released_leases
            self.draft.preempted += step.preempted
            self.draft.finished += step.finished
            self.draft.lookups.add(step.lookups)
            raise
        self._hand_offs.have_left()
        if was_sent:
            self.sent_s = now
        else:
            self.draft.lookups.add(step.lookups)
        return was_sent

    def _postpone(self) -> None:
        """Keep what the session must still hear should it be usable again; no more than that."""
        draft = self.draft
        draft.touches.clear()
        draft.preempted.clear()
        del draft.finished[:-MAX_FINISHED]
        self._hand_offs.clear()

    def report(self, vllm_job: int, ranks: int, *, failed: bool) -> TrackedJob | None:
        """So many more ranks acknowledge vLLM's job. The job once all have; None before."""
        job = self.jobs.report(vllm_job, ranks, failed=failed)
        if job is not None:
            job.tracked.request.store_jobs.discard(vllm_job)
        return job

    def enter(self, generation: int) -> bool:
        """A session is there. True: a new one, to which nothing collected before means a thing."""
        if not self.jobs.enter(generation):
            return False
        self.draft.finished.clear()
        self.draft.released_leases.clear()
        self.pause.end()
        return True

    def lost_jobs(self) -> list[int]:
        """Jobs that no rank's mover will ever end: of an earlier session, or long told ended."""
        now = self._clock()
        self.jobs.told(self._connection.take_ended(), now)
        overdue = [job_id for job_id, _ in self.jobs.overdue(now)]
        return overdue + self.jobs.of_earlier_sessions()

    @property
    def is_full(self) -> bool:
        """Whether no more stores may be in flight; loads may have the rest."""
        return self.jobs.free <= MAX_PARTS_PER_STEP

    def clear(self) -> None:
        """The cache was reset: nothing is handed off any more."""
        self._hand_offs.clear()


def _can_wait(step: StepDraft) -> bool:
    """Whether the step only says what has ended."""
    orders = (step.loads, step.stores, step.touches, step.hand_offs)
    if any(orders) or step.preempted or step.released_leases:
        return False
    return len(step.finished) < MAX_WAITING_ENDS
