"""What an epoch that nobody is in holds goes in sweeps, each of bounded size."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core.keys import are_among
from kvd.core.model.turn import Turn
from kvd.core.room import expiry
from tests.core.bench import small
from tests.core.replaying import replay
from tests.core.test_expiry import GRACE, reset


def test_epochs_that_end_together_go_a_few_in_each_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expiry, "EPOCHS_SWEPT_AT_ONCE", 3)
    monkeypatch.setattr(expiry, "SCOPES_SWEPT_AT_ONCE", 5)
    bench = small(extents=8)
    for number in range(1, 9):
        bench.open(number)
        reset(bench, f"mine {number}", number)
        for account in range(1 if number < 5 else 4):  # and a scope without an account
            bench.stored([10 * number + account], number, account=f"account {account}")
    for number in range(1, 9):
        bench.leave(number)
    begin, sweeps = expiry._begin_sweep, []

    def noted(turn: Turn) -> None:
        begin(turn)
        sweep = turn.state.expiring.sweep
        assert sweep is not None
        if sweep.epochs:
            sweeps.append((len(sweep.epochs), len(sweep.scopes)))

    monkeypatch.setattr(expiry, "_begin_sweep", noted)
    bench.tick(GRACE)
    for _ in range(20):
        bench.work_off()
        bench.tick()
    state = bench.machine.state
    assert (len(state.expiring.epochs), len(state.scopes)) == (0, 1)
    assert bench.machine.statistics().slots.ready == 0
    assert sweeps == [(2, 4), (2, 4), (1, 5), (1, 5), (1, 5), (1, 5)]
    replay(bench)


def test_epoch_of_a_copy_under_way_waits_for_its_end_and_the_others_do_not() -> None:
    bench = small(extents=8)
    for session in (1, 2):
        bench.open(session)
        reset(bench, f"mine {session}", session)
        bench.stored([session], session)
    started = bench.store([11], 1)
    for session in (1, 2):
        reset(bench, "", session)
    bench.work_off()
    state = bench.machine.state
    assert [epoch for _, epoch in state.expiring.epochs] == ["mine 1"]
    assert len(state.in_flight) == 1
    bench.finish(started)
    bench.tick()
    bench.work_off()
    assert not state.expiring.epochs
    assert not state.in_flight
    assert bench.machine.statistics().slots.ready == 0
    replay(bench)


def test_scopes_are_found_among_those_of_a_sweep() -> None:
    ascending = np.array([2, 3, 7, 70_000], dtype=np.int64)
    numbers = np.array([0, 2, 3, 4, 7, 69_999, 70_000, 70_001], dtype=np.uint32)
    found = are_among(numbers, ascending)
    assert found.tolist() == np.isin(numbers, ascending).tolist()
    assert not are_among(numbers, ascending[:0]).any()
    assert are_among(numbers[:0], ascending).tolist() == []
