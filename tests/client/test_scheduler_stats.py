"""Figures of the scheduler side are bounded, and taken once."""

from __future__ import annotations

from kvd_client.scheduler.stats import MAX_SAMPLES, SchedulerStats, StatsCollector


def test_of_delays_that_nobody_takes_the_youngest_are_kept() -> None:
    stats = StatsCollector()
    for number in range(MAX_SAMPLES + 1):
        stats.lookup(float(number))
        stats.deferral(float(-number))
    taken = stats.take()
    assert taken.lookup_delays_s == tuple(map(float, range(1, MAX_SAMPLES + 1)))
    assert taken.deferral_delays_s[0] == -1.0
    assert len(taken.deferral_delays_s) == MAX_SAMPLES


def test_what_was_taken_is_not_told_again() -> None:
    stats = StatsCollector()
    stats.lookup(1.0)
    stats.shared_load()
    stats.without_room(3)
    assert stats.take() == SchedulerStats((1.0,), (), 1, 3)
    assert stats.take() == SchedulerStats()
