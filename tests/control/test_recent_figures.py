"""Who asks for the status takes no more of the daemon's time than a share."""

from __future__ import annotations

import pytest

from kvd.control.services.figures import GATHER_AT_ONCE_SECONDS, GATHER_SHARE, RecentFigures
from kvd.core.machine import Machine, MachineConfig
from kvd.core.upkeep.statistics import Statistics


class Slow:
    """Gathers figures in so many seconds of its own clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.clock_s, self.times = seconds, 0.0, 0
        self._machine = Machine(MachineConfig(1, 1 << 20))

    def now(self) -> float:
        return self.clock_s

    def gather(self) -> Statistics:
        self.times += 1
        self.clock_s += self.seconds
        return self._machine.statistics()


def test_figures_that_take_long_to_gather_are_gathered_seldom() -> None:
    slow = Slow(5 * GATHER_AT_ONCE_SECONDS)
    recent = RecentFigures(slow.gather, slow.now, slow.now)
    asked = 0
    while slow.clock_s < 100 * slow.seconds:
        first = recent.get()
        assert recent.get() is first, "of a moment ago"
        slow.clock_s += GATHER_AT_ONCE_SECONDS
        asked += 2
    assert slow.times * slow.seconds == pytest.approx(GATHER_SHARE * slow.clock_s, rel=0.2)
    assert asked > 10 * slow.times


def test_figures_that_are_quick_to_gather_are_those_of_this_moment() -> None:
    quick = Slow(GATHER_AT_ONCE_SECONDS / 2)
    recent = RecentFigures(quick.gather, quick.now, quick.now)
    assert recent.get() is not recent.get()
    assert quick.times == 2


def test_figures_are_no_older_where_the_machine_is_busy() -> None:
    preempted = Slow(50 * GATHER_AT_ONCE_SECONDS)
    recent = RecentFigures(preempted.gather, preempted.now, lambda: 0.0)
    assert recent.get() is not recent.get()
