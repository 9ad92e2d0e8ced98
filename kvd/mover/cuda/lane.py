"""One direction's way to the GPU: a stream, a staging buffer, and the copies that go over it."""

from __future__ import annotations

import threading
from collections import deque

from cupy.cuda import runtime

from kvd.mover.copy_engine import DeviceLost
from kvd.mover.cuda.copiers import Copier, CopyList
from kvd.mover.cuda.pinned import Staging

MAX_IN_FLIGHT = 2  # of a copy: one piece that is copied, and one behind it

# Streams are non-blocking: they don't wait for the legacy stream, nor it for them. Events put
# their waiter to sleep, since a thread that spins for 32 MiB would take a core from the engine.
_STREAM_FLAGS = runtime.streamNonBlocking
_EVENT_FLAGS = runtime.eventBlockingSync | runtime.eventDisableTiming


class Lane:
    """Copies of one direction, in order.

    Each copy is a `Flight` in a thread of its own. A thread that submits has the `turn`, until its
    last piece is submitted; then the next one submits behind it, while it waits. So the link
    never waits for a processor between two copies.
    """

    def __init__(self, copier: Copier, staging: Staging) -> None:
        self.copier, self.staging = copier, staging  # of whoever has the turn
        self.turn = threading.Lock()
        self.stream = int(runtime.streamCreateWithFlags(_STREAM_FLAGS))
        self._events: list[int] = []  # that nothing waits for

    def take_event(self) -> int:
        """An event that nothing waits for."""
        try:
            return self._events.pop()
        except IndexError:
            return int(runtime.eventCreateWithFlags(_EVENT_FLAGS))

    def give_back(self, event: int) -> None:
        """Nothing waits for it any more."""
        self._events.append(event)

    def settle(self) -> None:
        """Return once nothing is under way, whatever became of it. DeviceLost: that can't be
        known."""
        try:
            # The stream, not events: a submission may have failed half-way, before its event.
            runtime.streamSynchronize(self.stream)
        except runtime.CUDARuntimeError as error:
            raise DeviceLost(f"copies under way are not known to have ended: {error}") from error

    def close(self) -> None:
        """Let go of everything; nothing may be in flight."""
        self.staging.close()
        while self._events:
            runtime.eventDestroy(self._events.pop())
        runtime.streamDestroy(self.stream)


class Flight:
    """What one copy has under way on a lane, at most two pieces. For one thread.

    In a `with` of it: whatever is raised there, nothing of it is under way afterwards.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._pieces: deque[int] = deque()  # the event behind each

    def submit(self, copies: CopyList, most_bytes: int) -> int:
        """Have one more piece of the list copied; its bytes. With the lane's turn; waits while
        MAX_IN_FLIGHT are under way."""
        if len(self._pieces) == MAX_IN_FLIGHT:
            self._wait_for_oldest()
        lane = self._lane
        copied = copies.submit(most_bytes, lane.stream)
        event = lane.take_event()
        self._pieces.append(event)
        runtime.eventRecord(event, lane.stream)
        return copied

    def wait(self) -> None:
        """Return once nothing of it is in flight: all bytes have landed."""
        while self._pieces:
            self._wait_for_oldest()

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error: return once nothing is under way, as `Lane.settle`."""
        if kind is None:
            return
        self._lane.settle()
        while self._pieces:
            self._lane.give_back(self._pieces.popleft())

    def _wait_for_oldest(self) -> None:
        runtime.eventSynchronize(self._pieces[0])
        self._lane.give_back(self._pieces.popleft())
