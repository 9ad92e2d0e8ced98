"""Blocks that a store left to another engine's, or failed to store: what became of them?

A store that ends as partial has copied what nobody else was storing. What it left is found once
the other store is done, and never if that fails. The index page tells; what it lacks after a
while is offered again as long as its request lives, and else is no loss but of a later hit. So is
what a failed store had, a few times: it was refused, a copy of it went wrong, or its session ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvd_client.draft import BlockRun
from kvd_client.scheduler.jobs import RequestJob
from kvd_client.scheduler.request import FAILURES, Request
from kvd_client.session import Connection

WAIT_S = 0.25  # for the other store, or for room, before a block is offered again
MAX_DOUBTS = 1024  # runs of blocks; beyond, the oldest is forgotten

Stored = Callable[[RequestJob, BlockRun], None]


@dataclass(slots=True)
class _Doubt:
    job: RequestJob
    run: BlockRun  # not shown by the page when last looked
    due_s: float | None = None  # from the first step after on


class Doubts:
    """Blocks left to other engines' stores that are to be looked at again, oldest first.

    And the live requests with failed stores, each once: these blocks the requests remember.
    """

    def __init__(self, connection: Connection, requests: Mapping[str, Request]) -> None:
        self._connection = connection
        self._requests = requests
        self._waiting: deque[_Doubt] = deque(maxlen=MAX_DOUBTS)
        self._failed: dict[str, float | None] = {}  # by request, since long ago first: due_s

    def clear(self) -> None:
        """The cache was reset: nothing is known of any block any more."""
        self._waiting.clear()
        self._failed.clear()
        for request in self._requests.values():
            request.failed_from.clear()

    def session_lost(self) -> None:
        """Of what was left to others nothing is known any more. What failed isn't stored."""
        self._waiting.clear()

    def add(self, job: RequestJob, stored: Stored) -> None:
        """A store has ended as partial: call `stored` for what is there of it, await the rest."""
        for run in job.draft.runs:
            missing = self._settle(job, run, stored)
            if missing is not None:
                self._waiting.append(_Doubt(job, missing))

    def add_failed(self, job: RequestJob, request: Request) -> None:
        """A store of a live request was refused, or has failed: one more with those that wait.

        Let be is what fails too often, beside others that succeed, and all once too many stores
        fail one after the other.
        """
        request_id = request.request_id
        again = [run for run in job.draft.runs if request.note_failed(run)]
        if request_id not in self._failed:
            request.failed_stores += 1
            if request.failed_stores >= FAILURES:
                return
            self._failed[request_id] = None
        for run in again:
            first = request.failed_from.get(run.group, run.first_block)
            request.failed_from[run.group] = min(first, run.first_block)

    def request_ends(self, request: Request) -> None:
        """What still waits is part of its last offers, where that is no sighting of its own."""
        if not self._is_filtering():
            request.offer_failed_again()

    def look_again(self, now_s: float, stored: Stored) -> None:
        """Once in a step: what is there by now is stored, what is overdue is offered again."""
        for doubt in self._waiting:
            if doubt.due_s is None:
                doubt.due_s = now_s + WAIT_S
        while self._waiting and (self._waiting[0].due_s or 0.0) <= now_s:
            doubt = self._waiting.popleft()
            missing = self._settle(doubt.job, doubt.run, stored)
            request = self._requests.get(doubt.job.request_id)
            if missing is not None and request is not None and not self._is_filtering():
                request.offer_again(missing.group, missing.first_block)
        self._offer_failed(now_s)

    def _offer_failed(self, now_s: float) -> None:
        for request_id, due_s in self._failed.items():
            if due_s is None:
                self._failed[request_id] = now_s + WAIT_S
        while self._failed:
            request_id, due_s = next(iter(self._failed.items()))
            if due_s is None or due_s > now_s:
                return
            del self._failed[request_id]
            request = self._requests.get(request_id)
            if request is not None:  # else its blocks are gone
                request.offer_failed_again()

    def _settle(self, job: RequestJob, run: BlockRun, stored: Stored) -> BlockRun | None:
        """Call `stored` for those of the blocks that the page shows; the others are given back."""
        session = self._connection.session
        if session is None or session.generation != job.generation:
            return None
        flags = session.present(run.group, job.account, run.block_hashes).tolist()
        named = list(zip(run.block_hashes, flags, strict=True))
        if any(flags):
            stored(job, BlockRun(run.group, run.first_block, [h for h, shown in named if shown]))
        if all(flags):
            return None
        first = run.first_block + flags.index(False)
        return BlockRun(run.group, first, [h for h, shown in named if not shown])

    def _is_filtering(self) -> bool:
        """Whether it may be the reuse filter that keeps blocks out."""
        session = self._connection.session
        return session is None or session.store_threshold > 1
