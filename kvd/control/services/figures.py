"""The daemon's figures for whoever asks for its status: gathered seldom where that takes long."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvd.core.upkeep.statistics import Statistics

# With thousands of tenants and namespaces it takes ten milliseconds, and any user may ask.
GATHER_SHARE = 0.1  # of the event loop's time
GATHER_AT_ONCE_SECONDS = 0.002  # what takes no longer is gathered for each who asks


class RecentFigures:
    """Figures of this moment, or where gathering them takes long, of a moment ago."""

    def __init__(
        self,
        gather: Callable[[], Statistics],
        now: Callable[[], float] = time.perf_counter,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """`spent`: processor time, so that a busy machine makes no figure older."""
        self._gather = gather
        self._now, self._spent = now, spent
        self._gathered: Statistics | None = None
        self._good_until = 0.0

    def get(self) -> Statistics:
        """At most ten times as old as gathering them takes."""
        if self._gathered is None or self._now() >= self._good_until:
            before = self._spent()
            self._gathered = self._gather()
            took = self._spent() - before
            is_long = took > GATHER_AT_ONCE_SECONDS
            self._good_until = self._now() + took / GATHER_SHARE if is_long else 0.0
        return self._gathered
