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
        self, gather: Callable[[], Statistics], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._gather = gather
        self._now = now
        self._gathered: Statistics | None = None
        self._good_until = 0.0

    def get(self) -> Statistics:
        """At most ten times as old as gathering them takes."""
        began = self._now()
        if self._gathered is None or began >= self._good_until:
            self._gathered = self._gather()
            ended = self._now()
            took = ended - began
            self._good_until = ended + took / GATHER_SHARE if took > GATHER_AT_ONCE_SECONDS else 0.0
        return self._gathered
