"""Orders of one tier from control's word to their end, and which a free thread takes next.

Questions come before reads, reads before writes. Beyond that, writes leave room: one kind never
takes all the calls that a store takes at once while another may come. So a read waits for no write
where a store takes two calls, and a question for no copy where it takes three.

A delete waits for the writes that were ordered before it, running ones too: what it deletes is not
written again by them.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from dataclasses import dataclass

from kvd.core.lifecycle import step
from kvd.tiers.frames import Order, OrderId, TierFrame


class WorkState(enum.Enum):
    """How far an order has come in the tier's process."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


WORK_STEPS: frozenset[tuple[WorkState, WorkState]] = frozenset(
    {
        (WorkState.QUEUED, WorkState.RUNNING),
        (WorkState.QUEUED, WorkState.ENDED),
        (WorkState.RUNNING, WorkState.ENDED),
    }
)


@dataclass(slots=True, eq=False)
class Work:
    """One order and how far it has come. `extents`: what it keeps mapped."""

    order: Order
    extents: frozenset[int] = frozenset()
    state: WorkState = WorkState.QUEUED


class Lanes:
    """The orders that wait and run. Any thread; the sender of orders bounds how many there are."""

    def __init__(self, calls: int) -> None:
        self._most_copies = calls - 1 if calls > 2 else calls
        self._most_writes = max(1, self._most_copies - 1)
        self._free = calls
        self._running = {TierFrame.READ: 0, TierFrame.WRITE: 0}
        self._open: dict[OrderId, Work] = {}
        self._questions: deque[Work] = deque()
        self._reads: deque[Work] = deque()
        self._changes: deque[Work] = deque()  # writes and deletes, in their order
        self._closed = False
        self._changed = threading.Condition()

    def put(self, work: Work) -> None:
        """An order is there."""
        with self._changed:
            assert work.order.order not in self._open, "an order came twice"
            self._open[work.order.order] = work
            self._lane(work).append(work)
            self._changed.notify()

    def take(self) -> Work | None:
        """Wait for the next order that may run now; it does from here on. None: closed."""
        with self._changed:
            while not self._closed:
                work = self.take_now()
                if work is not None:
                    return work
                self._changed.wait()
            return None

    def take_now(self) -> Work | None:
        """Likewise, without waiting. None: none may run now."""
        with self._changed:
            work = self._next()
            if work is not None:
                work.state = step(WORK_STEPS, work.state, WorkState.RUNNING)
                self._free -= 1
                if work.order.kind in self._running:
                    self._running[work.order.kind] += 1
            return work

    def end(self, work: Work) -> None:
        """One that ran has ended."""
        with self._changed:
            work.state = step(WORK_STEPS, work.state, WorkState.ENDED)
            del self._open[work.order.order]
            self._free += 1
            if work.order.kind in self._running:
                self._running[work.order.kind] -= 1
            # Its end may let one of each lane run, and whoever waits can't know which.
            self._changed.notify_all()

    def withdraw(self, order: OrderId) -> Work | None:
        """Take an order back that has not started; None when it's too late."""
        with self._changed:
            work = self._open.get(order)
            if work is None or work.state is not WorkState.QUEUED:
                return None
            work.state = step(WORK_STEPS, work.state, WorkState.ENDED)
            del self._open[order]
            self._lane(work).remove(work)
            self._changed.notify_all()  # a delete may have waited for it, or others for a delete
            return work

    def close(self) -> None:
        """Send the threads home; what is queued is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _lane(self, work: Work) -> deque[Work]:
        match work.order.kind:
            case TierFrame.EXISTS:
                return self._questions
            case TierFrame.READ:
                return self._reads
            case _:
                return self._changes

    def _next(self) -> Work | None:
        if self._free == 0:
            return None
        if self._questions:
            return self._questions.popleft()
        copies = sum(self._running.values())
        if self._reads and copies < self._most_copies:
            return self._reads.popleft()
        if not self._changes:
            return None
        writing = self._running[TierFrame.WRITE]
        if self._changes[0].order.kind is TierFrame.WRITE:
            may = writing < self._most_writes and copies < self._most_copies
        else:
            may = writing == 0
        return self._changes.popleft() if may else None
