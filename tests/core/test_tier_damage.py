"""A block whose bytes have changed in host memory before they could go to a tier."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import MoverId, NamespaceId, TierId
from kvd.core.model.tiers import TierTerms
from tests.core.bench import Bench, numbers_of, only, small
from tests.core.replaying import replay

DISK = TierTerms("disk")


def with_a_tier(count: int) -> tuple[Bench, act.WriteToTier]:
    """Blocks 0.. are stored, and on their way down."""
    bench = small(4, tiers=(DISK,))
    bench.open()
    bench.feed(ev.TierStarted(TierId(0), MoverId(9000)))
    (order,) = only(bench.finish(bench.store(range(count))), act.WriteToTier)
    return bench, order


def end(bench: Bench, order: act.WriteToTier, *damaged: int) -> list[act.Action]:
    wrong = np.array([number in damaged for number in numbers_of(order.keys)])
    return bench.feed(ev.TierCopyEnded(order.tier, order.copy, ~wrong, wrong))


def test_a_damaged_block_is_found_no_more_and_the_others_are_below() -> None:
    bench, order = with_a_tier(4)
    made = end(bench, order, 2)
    assert [n for gone in only(made, act.AnnounceRemoved) for n in numbers_of(gone.keys)] == [2]
    assert bench.statuses(range(4))[:2] == "HH"
    statistics = bench.machine.statistics()
    assert statistics.counters.damaged == 1
    assert statistics.slots.quarantined == 0
    counters = bench.machine.state.below.tiers[0].counters
    assert (counters.written, counters.failed_writes) == (3, 1)
    replay(bench)


def test_a_damaged_block_that_is_stored_anew_is_written_again() -> None:
    bench, order = with_a_tier(2)
    end(bench, order, 0, 1)
    (again,) = only(bench.finish(bench.store([0])), act.WriteToTier)
    assert numbers_of(again.keys) == [0]
    end(bench, again)
    assert bench.statuses([0]) == "H"


def test_a_damaged_block_under_a_load_is_not_given_out_before_it_ends() -> None:
    bench, order = with_a_tier(1)
    load = bench.load([0])
    end(bench, order, 0)
    assert bench.machine.statistics().slots.quarantined == 1
    bench.finish(load)
    assert bench.machine.statistics().slots.quarantined == 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_word_of_damage_of_another_length_means_nothing(count: int) -> None:
    bench, order = with_a_tier(2)
    done, wrong = np.ones(2, dtype=np.bool_), np.ones(count, dtype=np.bool_)
    bench.feed(ev.TierCopyEnded(order.tier, order.copy, done, wrong))
    assert bench.statuses(range(2)) == "HH"


def test_a_block_that_was_cleared_meanwhile_is_not_counted_as_damaged() -> None:
    bench, order = with_a_tier(2)
    bench.feed(ev.NamespaceCleared(900, NamespaceId(1)))
    bench.work_off()
    end(bench, order, 0)
    assert bench.machine.statistics().counters.damaged == 0
    assert bench.machine.statistics().slots.quarantined == 0
