"""One direction's way to the GPU: a stream, the pieces in flight on it, and a staging buffer."""

from __future__ import annotations

from collections import deque

from cupy.cuda import runtime

from kvd.core.events import JobKind
from kvd.mover.copy_engine import DeviceLost
from kvd.mover.cuda.copiers import Copier
from kvd.mover.cuda.pinned import Staging
from kvd.mover.cuda.runs import Runs

MAX_IN_FLIGHT = 2  # one that is copied, and one behind it, so that the link never waits for us

# Streams are non-blocking: they don't wait for the legacy stream, nor it for them. Events put
# their waiter to sleep, since a thread that spins for 32 MiB would take a core from the engine.
_STREAM_FLAGS = runtime.streamNonBlocking
_EVENT_FLAGS = runtime.eventBlockingSync | runtime.eventDisableTiming


class Lane:
    """Copies of one direction, in order, at most two pieces in flight. For one thread at a time.

    Whatever a call raises, `settle` must follow before anything else.
    """

    def __init__(self, kind: JobKind, copier: Copier, staging: Staging) -> None:
        self._kind = kind
        self._copier = copier
        self._stream = int(runtime.streamCreateWithFlags(_STREAM_FLAGS))
        self._events = deque(
            int(runtime.eventCreateWithFlags(_EVENT_FLAGS)) for _ in range(MAX_IN_FLIGHT)
        )
        self._in_flight: deque[int] = deque()
        self.staging = staging

    def submit(self, runs: Runs) -> None:
        """Have one more piece copied; waits while there are MAX_IN_FLIGHT."""
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._wait_for_oldest()
        self._copier.submit(self._kind, runs, self._stream)
        runtime.eventRecord(self._events[0], self._stream)
        self._in_flight.append(self._events.popleft())

    def wait(self) -> None:
        """Return once nothing is in flight: all bytes have landed."""
        while self._in_flight:
            self._wait_for_oldest()

    def settle(self) -> None:
        """After an error: return once nothing is under way, whatever became of it.

        DeviceLost: that can't be known.
        """
        self._events.extend(self._in_flight)
        self._in_flight.clear()
        try:
            # The stream, not the events: a submission may have failed half-way, before its event.
            runtime.streamSynchronize(self._stream)
        except runtime.CUDARuntimeError as error:
            raise DeviceLost(f"copies under way are not known to have ended: {error}") from error

    def close(self) -> None:
        """Let go of everything; nothing may be in flight."""
        self.staging.close()
        while self._events:
            runtime.eventDestroy(self._events.pop())
        runtime.streamDestroy(self._stream)

    def _wait_for_oldest(self) -> None:
        runtime.eventSynchronize(self._in_flight[0])
        self._events.append(self._in_flight.popleft())
