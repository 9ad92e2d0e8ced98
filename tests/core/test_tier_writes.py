"""What is written to tiers: how much at once, what follows later, and by which rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvd.core import events as ev
from kvd.core.keys import NamespaceId, ScopeName, TierId
from kvd.core.model.tiers import TierTerms, WriteWhen
from kvd.core.tiers import writing
from tests.core.bench import BLOCK, MS, keys, numbers_of, spec
from tests.core.test_tiers import DISK, FAR, Stage, stage


def test_what_is_written_down_is_pinned_and_bounded_and_the_rest_follows() -> None:
    rule = TierTerms("disk", max_write_bytes=8 * BLOCK)
    on = stage(rule)
    on.store(*range(1, 7))
    (write,) = on.writes
    assert numbers_of(write.keys) == [1, 2, 3, 4]  # half: the rest is left to other tenants
    assert on.counters().dropped == 0
    pins = on.bench.machine.state.slots.pins
    assert pins[write.slots].tolist() == [1, 1, 1, 1]
    on.write(failing=(2,))
    assert on.counters().failed_writes == 1
    (rest,) = on.writes
    assert numbers_of(rest.keys) == [5, 6]
    on.write()
    assert pins.sum() == 0
    on.store(*range(1, 7))  # all are there: what the tier lacks is offered to it again
    (again,) = on.writes
    assert numbers_of(again.keys) == [2]


def test_a_store_larger_than_the_bound_is_below_before_it_can_be_evicted() -> None:
    on = stage(TierTerms("disk", max_write_bytes=8 * BLOCK))
    on.store(*range(1, 41))
    while on.writes:
        on.write()
    on.store(*range(100, 164))  # evicts all of them at once
    assert on.look(*range(1, 41)) == "P" * 40
    on.answer()
    assert on.counters().hits == 40


def test_of_blocks_larger_than_the_bound_one_is_written_at_a_time() -> None:
    on = stage(TierTerms("disk", max_write_bytes=BLOCK // 2))
    on.store(1, 2, 3)
    for number in (1, 2, 3):
        (write,) = on.writes
        assert numbers_of(write.keys) == [number]
        on.write()
    assert on.bench.machine.state.below.tiers[0].behind_blocks.whole == 0
    assert on.counters().dropped == 0


def test_what_waits_to_be_written_is_bounded_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_BEHIND_BLOCKS", 12)
    on = stage(TierTerms("disk", max_write_bytes=8 * BLOCK))
    on.store(*range(1, 17))
    for _ in range(3):  # 4 are on their way, 6 of 12 wait
        on.write()
    assert {number for _, number in on.held[0]} == set(range(1, 11))
    assert not on.writes
    assert on.bench.machine.state.below.tiers[0].behind_blocks.whole == 0


def test_a_block_that_leaves_before_it_could_be_written_is_counted_once() -> None:
    on = stage(TierTerms("disk", max_write_bytes=8 * BLOCK))
    on.store(*range(1, 65))  # the whole pool, of which 4 are on their way
    for _ in range(8):
        on.tick(250 * MS)
    assert on.counters().dropped == 0  # all others wait
    on.store(*range(101, 111))
    for _ in range(8):
        on.tick(250 * MS)
    assert on.counters().dropped == 10
    while on.writes:
        on.write()
    assert on.counters().dropped == 10
    assert len(on.held[0]) == 64


def test_what_waits_is_written_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "CAUGHT_UP_AT_ONCE", 2)
    monkeypatch.setattr(writing, "LATE_AT_ONCE", 3)
    on = stage(TierTerms("disk", max_write_bytes=32 * BLOCK))
    for first in range(1, 33, 4):
        on.store(*range(first, first + 4))
    # As much is on its way as may be, so the rest waits, each store's by itself.
    assert sum(len(write.slots) for write in on.writes) == 16
    del on.writes[1:]
    for write in list(on.writes):
        on.writes.remove(write)
        on.feed(ev.TierCopyEnded(write.tier, write.copy, np.ones(len(write.slots), dtype=np.bool_)))
    assert sum(len(write.slots) for write in on.writes) <= 3


def test_a_batch_that_waits_goes_on_where_it_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LATE_AT_ONCE", 3)
    on = stage(TierTerms("disk", max_write_bytes=8 * BLOCK))
    on.store(*range(1, 21))
    for _ in range(20):
        on.write()
        on.tick(250 * MS)
    assert {number for _, number in on.held[0]} == set(range(1, 21))
    assert on.counters().dropped == 0


def test_what_waits_and_has_left_meanwhile_is_not_written() -> None:
    on = stage(TierTerms("disk", max_write_bytes=8 * BLOCK))
    on.store(*range(1, 65))  # the whole pool
    assert len(on.writes) == 1
    on.feed(ev.NamespaceCleared(1, NamespaceId(1)))
    on.take(on.bench.work_off())
    on.write()
    assert not on.writes
    on.tick(250 * MS)
    assert not on.bench.machine.state.below.tiers[0].behind


def test_what_waits_of_a_namespace_that_goes_is_not_written() -> None:
    on = stage(TierTerms("disk", max_write_bytes=8 * BLOCK))
    on.bench.open(2, replace(spec("private"), unshared=True))
    on.store(*range(1, 17), session=2)
    assert len(on.writes) == 1
    on.take(on.bench.leave(2, gone=True))
    assert on.bench.machine.knows(NamespaceId(2)), "a tier reads its slots"
    on.write()
    on.tick(250 * MS)
    assert not on.bench.machine.knows(NamespaceId(2))
    on.tick(250 * MS)
    assert not on.writes
    tier = on.bench.machine.state.below.tiers[0]
    assert (len(tier.behind), tier.behind_blocks.whole) == (0, 0)


def test_what_waits_is_forgotten_with_the_tiers_process() -> None:
    on = stage(TierTerms("disk", max_write_bytes=8 * BLOCK))
    on.store(*range(1, 17))
    on.feed(ev.TierGone(TierId(0)))
    on.take(on.bench.work_off())
    on.writes.clear()
    on.start()
    on.tick(250 * MS)
    assert not on.writes


def test_a_block_brought_up_is_not_written_back() -> None:
    on = stage()
    on.order_up(1)
    on.read()
    on.store(1)
    assert not on.writes


def test_what_a_tier_forgot_is_written_again() -> None:
    on = stage()
    on.store(1)
    (order,) = on.writes
    on.write()
    on.feed(ev.TierForgot(TierId(0), order.name, order.keys))
    on.store(1)
    assert len(on.writes) == 1


@pytest.mark.parametrize("why", ["failed", "forgot", "doubted"])
def test_what_one_tier_lacks_says_nothing_of_another(why: str) -> None:
    on = stage(DISK, FAR)
    on.store(1)
    ours, theirs = on.writes
    well = np.array([why != "failed"])
    on.feed(ev.TierCopyEnded(ours.tier, ours.copy, well))
    on.feed(ev.TierCopyEnded(theirs.tier, theirs.copy, np.array([False])))
    if why == "forgot":
        on.feed(ev.TierForgot(ours.tier, ours.name, ours.keys))
    elif why == "doubted":
        on.feed(ev.TierDoubted(ours.tier))
        on.take(on.bench.work_off())
    on.writes.clear()
    on.store(1)
    assert [write.tier for write in on.writes] == [0, 1], "both lack it"


def fill_and_write(on: Stage) -> ScopeName:
    """A pool full of the blocks 1 to 16, the coldest first, which are below, too."""
    for number in range(1, 17):
        on.store(number)
    on.tick(250 * MS)
    on.write()
    assert not on.writes
    return next(iter(on.held[0]))[0]


def test_what_left_a_tier_is_written_again_when_it_is_about_to_leave_host_memory() -> None:
    on = stage(extents=1)
    name = fill_and_write(on)
    on.feed(ev.TierForgot(TierId(0), name, keys(9)))
    on.tick(250 * MS)
    assert not on.writes
    for number in range(17, 30):
        on.store(number)
        on.tick(250 * MS)
        written = [n for order in on.writes for n in numbers_of(order.keys)]
        if 9 in written:
            break
        on.write()
    else:
        pytest.fail("it left without a word to the tier")
    assert written.count(9) == 1


def test_a_tier_with_little_room_is_not_given_the_coldest_blocks_for_ever() -> None:
    on = stage(extents=1)
    name = fill_and_write(on)
    for number in (1, 2):  # the tenth of the class that leaves next
        on.feed(ev.TierForgot(TierId(0), name, keys(number)))
        on.tick(250 * MS)
        assert not on.writes


def test_on_reuse_a_block_is_written_once_it_was_used_so_often() -> None:
    on = stage(TierTerms("disk", write=WriteWhen.REUSE, reuses=2, tracker_blocks=64))
    on.store(1)
    assert on.look(1, request="a") == "H"
    assert not on.writes
    assert on.look(1, request="b") == "H"
    assert len(on.writes) == 1
    on.write()
    assert on.look(1, request="c") == "H"
    assert not on.writes


def test_on_demotion_the_coldest_are_written_when_room_is_nearly_gone() -> None:
    on = stage(TierTerms("disk", write=WriteWhen.DEMOTION), extents=2)
    on.store(*range(1, 17))
    on.tick(250 * MS)
    assert not on.writes
    on.store(*range(17, 33))
    on.tick(250 * MS)
    (write,) = on.writes
    assert sorted(numbers_of(write.keys)) == [13, 14, 15, 16]  # a tenth; tails go first
    on.tick(250 * MS)
    on.write()
    on.tick(250 * MS)
    assert not on.writes
    on.store(33)  # evicts one that is below
    on.tick(250 * MS)
    (write,) = on.writes
    assert numbers_of(write.keys) == [12]
