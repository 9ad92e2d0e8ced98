"""The seam through which time comes in."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock that never goes back."""

    def now_ns(self) -> int:
        """Nanoseconds since some fixed moment."""


# Between two readings the daemon's ticks leave a quarter of a second. Whoever read the clock
# later than this did not run: it was stopped, starved, or busy with one thing.
MOST_AWAKE_NS = 1_000_000_000


class AwakeClock:
    """A clock that stands still while this process does not run.

    What others did meanwhile waits to be heard. Judged by a clock that ran on, copies that had
    long ended would be late, and their movers ended for it. It is read at every tick; what
    lies between two readings counts as a sleep where it is longer than MOST_AWAKE_NS.
    """

    def __init__(self) -> None:
        self._read_ns = time.monotonic_ns()
        self._slept_ns = 0

    def now_ns(self) -> int:
        now_ns = time.monotonic_ns()
        gap_ns = now_ns - self._read_ns
        self._read_ns = now_ns
        if gap_ns > MOST_AWAKE_NS:
            self._slept_ns += gap_ns
        return now_ns - self._slept_ns
