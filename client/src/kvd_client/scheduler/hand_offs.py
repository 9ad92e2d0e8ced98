"""Requests that ended here and go on in a decode engine: their blocks are handed off.

A hand-off leaves with the first step in which none of the request's stores is in flight any
more. Without a daemon there is nothing to hand off: it is dropped, as the stores were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass

from kvd_client.draft import BlockRun, HandOffDraft, StepDraft
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.scheduler.request import Request
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE, MAX_PARTS_PER_STEP, MAX_RUNS

MAX_WAITING = 16384  # ended requests; beyond it the oldest is not handed off


@dataclass(slots=True)
class _Waiting:
    request: Request
    runs: deque[BlockRun]
    deadline_ms: int


class HandOffQueue:
    """Hand-offs of ended requests that have not left yet, oldest first."""

    def __init__(self, jobs: Container[int], options: SchedulerOptions) -> None:
        self._jobs = jobs
        self._options = options
        self._waiting: deque[_Waiting] = deque(maxlen=MAX_WAITING)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, runs: list[BlockRun]) -> None:
        """The request has ended with these blocks; its last stores may still have to be sent."""
        if runs:
            deadline_ms = request.params.hand_off_ms(self._options)
            self._waiting.append(_Waiting(request, deque(runs), deadline_ms))

    def put_into(self, step: StepDraft) -> None:
        """Add what may leave to a step whose stores are all in, as far as there is room."""
        if not self._waiting:
            return
        room = max(0, MAX_KEYS_PER_MESSAGE - step.count_keys())
        left: list[_Waiting] = []
        for waiting in self._waiting:
            stores = waiting.request.store_jobs
            may_leave = not any(job_id in self._jobs for job_id in stores)
            while may_leave and waiting.runs and room and len(step.hand_offs) < MAX_PARTS_PER_STEP:
                runs = _take(waiting.runs, room)
                room -= sum(len(run.block_hashes) for run in runs)
                draft = HandOffDraft(waiting.request.context, runs, waiting.deadline_ms)
                step.hand_offs.append(draft)
            if waiting.runs:
                left.append(waiting)
        self._waiting = deque(left, maxlen=MAX_WAITING)

    def clear(self) -> None:
        self._waiting.clear()


def _take(runs: deque[BlockRun], room: int) -> list[BlockRun]:
    """Take runs of at most `room` keys together, as many as a message part has; the rest stays.

    What a request hands off in several parts is one hand-off to the daemon.
    """
    taken: list[BlockRun] = []
    while runs and room and len(taken) < MAX_RUNS:
        run = runs.popleft()
        if len(run.block_hashes) > room:
            group, first, hashes, _ = run
            runs.appendleft(BlockRun(group, first + room, hashes[room:]))
            run = BlockRun(group, first, hashes[:room])
        room -= len(run.block_hashes)
        taken.append(run)
    return taken
