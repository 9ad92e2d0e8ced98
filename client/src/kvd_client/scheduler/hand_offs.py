"""Requests that ended here and go on in a decode engine: their blocks are handed off.

A hand-off leaves with the first step in which none of the request's stores is in flight any
more. Without a daemon there is nothing to hand off: it is dropped, as the stores were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, replace

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
        self._staying = self._waiting  # what waits once the step has left

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, runs: list[BlockRun]) -> None:
        """The request has ended with these blocks; its last stores may still have to be sent."""
        if runs:
            deadline_ms = request.params.hand_off_ms(self._options)
            self._waiting.append(_Waiting(request, deque(runs), deadline_ms))

    def put_into(self, step: StepDraft) -> None:
        """Give a step whose stores are all in what may leave, as far as there is room.

        It waits on until `have_left`: where a signal's handler raises before, the next step has it.
        """
        step.hand_offs = []
        self._staying = self._waiting
        if not self._waiting:
            return
        room = max(0, MAX_KEYS_PER_MESSAGE - step.count_keys())
        staying: list[_Waiting] = []
        for waiting in self._waiting:
            stores = waiting.request.store_jobs
            if any(job_id in self._jobs for job_id in stores):
                staying.append(waiting)
                continue
            left = waiting.runs.copy()
            while left and room and len(step.hand_offs) < MAX_PARTS_PER_STEP:
                runs = _take(left, room)
                room -= sum(len(run.block_hashes) for run in runs)
                draft = HandOffDraft(waiting.request.context, runs, waiting.deadline_ms)
                step.hand_offs.append(draft)
            if left:
                staying.append(replace(waiting, runs=left))
        self._staying = deque(staying, maxlen=MAX_WAITING)

    def have_left(self) -> None:
        """The step that `put_into` was given last has left, or never will."""
        self._waiting = self._staying

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
