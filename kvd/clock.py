"""The seam through which time comes in."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock that never goes back."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed moment."""


class MonotonicClock:
    """The machine's own monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class ManualClock:
    """A clock that moves when told to; for tests and simulation."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, nanoseconds: int) -> None:
        """Move forward; a negative step is refused."""
        assert nanoseconds >= 0, "time does not go back"
        self._now_ns += nanoseconds
