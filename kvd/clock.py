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
