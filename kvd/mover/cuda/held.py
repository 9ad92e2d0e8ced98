"""Keeps what queued work still needs, until its stream has passed it."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from cupy.cuda import runtime

Thing = TypeVar("Thing")

_CUDA_SUCCESS = 0


class HeldUntilPassed(Generic[Thing]):
    """Keeps things alive that work queued on streams may still use. Any thread."""

    def __init__(self) -> None:
        self._held: list[tuple[int, Thing]] = []
        self._events: list[int] = []  # that nothing waits for
        self._lost: list[Thing] = []
        self._lock = threading.Lock()

    def hold(self, thing: Thing, stream: int) -> None:
        """Keep the thing until all that is queued on the stream by now has run.

        Where the device answers with an error, which the next call tells anyway, the thing is
        kept for good: nothing is known to have run.
        """
        with self._lock:
            try:
                event = self._events.pop() if self._events else _new_event()
                runtime.eventRecord(event, stream)
            except runtime.CUDARuntimeError:
                self._lost.append(thing)
            else:
                self._held.append((event, thing))

    def release(self) -> list[Thing]:
        """Give back what no queued work uses any more. Never waits."""
        with self._lock:
            passed = [runtime.eventQuery(event) == _CUDA_SUCCESS for event, _ in self._held]
            held, self._held = self._held, []
            free: list[Thing] = []
            for (event, thing), is_free in zip(held, passed, strict=True):
                if is_free:
                    self._events.append(event)
                    free.append(thing)
                else:
                    self._held.append((event, thing))
        return free


def _new_event() -> int:
    event: int = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
    return event
