"""What the scheduler side can tell of its own work, for the engine's metrics."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_SAMPLES = 4096  # beyond it the oldest are lost


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What the scheduler side counted since the last time that this was taken.

    Delays are one for each question (`lookup_delays_s`: how long the scheduler's thread was
    held up in it) and one for each request that was put off at least once
    (`deferral_delays_s`: from its first 'ask again' to its answer).
    """

    lookup_delays_s: tuple[float, ...] = ()
    deferral_delays_s: tuple[float, ...] = ()
    shared_loads: int = 0  # requests that waited for another's load of the same blocks
    blocks_without_room: int = 0  # offered and not stored for now, each time


class StatsCollector:
    """Counts for `SchedulerStats` until they are taken."""

    def __init__(self) -> None:
        self._lookup_delays_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._deferral_delays_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._shared_loads = 0
        self._blocks_without_room = 0

    def lookup(self, delay_s: float) -> None:
        self._lookup_delays_s.append(delay_s)

    def deferral(self, delay_s: float) -> None:
        self._deferral_delays_s.append(delay_s)

    def shared_load(self) -> None:
        self._shared_loads += 1

    def without_room(self, blocks: int) -> None:
        self._blocks_without_room += blocks

    def take(self) -> SchedulerStats:
        taken = SchedulerStats(
            tuple(self._lookup_delays_s),
            tuple(self._deferral_delays_s),
            self._shared_loads,
            self._blocks_without_room,
        )
        self._lookup_delays_s.clear()
        self._deferral_delays_s.clear()
        self._shared_loads = self._blocks_without_room = 0
        return taken
