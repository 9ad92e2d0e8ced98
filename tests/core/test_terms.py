"""Settings that change while the daemon runs: what is decided next follows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import MoverId
from tests.core.bench import MS, SECOND, Bench, only, small, spec

PREFIX = ev.LeaseMode.PREFIX


@pytest.fixture
def bench() -> Bench:
    """One row of 16 slots, half of which may be leased."""
    bench = small(extents=1, lease_share=0.5)
    bench.open()
    bench.stored(range(16))
    return bench


def change(
    bench: Bench, share: float = 0.5, submit_s: int = 30, copy_s: int = 30, grace_s: int = 60
) -> None:
    assert not bench.feed(
        ev.TermsChanged(share, submit_s * SECOND, copy_s * SECOND, grace_s * SECOND)
    )


def test_a_larger_share_lets_more_be_leased_at_once(bench: Bench) -> None:
    assert bench.leased(bench.lookup(range(16), lease=PREFIX)) == 8
    change(bench, share=0.75)
    assert bench.leased(bench.lookup(range(16), lease=PREFIX, request="s")) == 12


def test_a_smaller_share_takes_no_lease_away_and_gives_no_more(bench: Bench) -> None:
    held = bench.lookup(range(8), lease=PREFIX)
    change(bench, share=0.25)
    assert bench.machine.statistics().leases == 1
    assert bench.leased(bench.lookup(range(16), lease=PREFIX, request="s")) == 8, "held already"
    assert not bench.leased(bench.lookup([12], lease=PREFIX, request="t"))
    assert held.lease
    bench.release(held.lease)
    bench.tick(3 * SECOND)  # and the other's
    assert bench.leased(bench.lookup(range(16), lease=PREFIX, request="u")) == 4


def test_a_copy_under_way_has_the_deadlines_of_now() -> None:
    bench = small(extents=1)
    bench.open()
    (order,) = only(bench.store([1]), act.StartTransfer)
    bench.tick(2 * SECOND)
    change(bench, submit_s=1, copy_s=5)
    assert bench.tick(1 * MS) == [act.RevokeTransfer(MoverId(100), order.transfer)]
    change(bench, submit_s=1, copy_s=600)
    assert not bench.tick(500 * SECOND), "the longer one counts, though it was late by the other"
    assert only(bench.tick(200 * SECOND), act.KillMover)


def test_who_leaves_from_now_on_has_the_grace_of_now() -> None:
    bench = small(extents=1)
    bench.open(1, replace(spec("private"), unshared=True))
    bench.stored([1])
    change(bench, grace_s=5)
    bench.leave(1)
    bench.tick(4 * SECOND)
    assert bench.machine.statistics().slots.ready == 1
    bench.tick(2 * SECOND)
    assert bench.machine.statistics().slots.ready == 0
