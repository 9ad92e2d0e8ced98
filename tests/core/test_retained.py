"""Retained blocks go after all others, and a class that is full of them costs no store a search."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core.events import LeaseMode
from kvd.core.keys import Slots
from kvd.core.model import unretained
from kvd.core.model.size_class import SizeClass
from kvd.core.model.slots import QUARANTINED, READY, RESERVED, SlotTable
from kvd.core.policy.base import Evictable
from tests.core.bench import MS, SECOND, Bench, small
from tests.core.test_advice import RETAIN, hits, stored

KEPT = [1, 2, 3, 4]  # a quarter of the pool: no more may be retained
OTHERS = list(range(10, 22))  # the rest of it


def full(policy: str = "lru") -> Bench:
    """The retained blocks are the oldest."""
    bench = small(extents=1, policy=policy, lease_share=1.0)
    bench.open()
    stored(bench, KEPT, "kept", RETAIN)
    stored(bench, OTHERS, "others", None)
    return bench


def of(bench: Bench) -> SizeClass:
    (owner,) = bench.machine.state.classes.values()
    return owner


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> tuple[Bench, list[int]]:
    """A full pool, and how many blocks each search of the policy looked at."""
    monkeypatch.setattr("kvd.core.blocks.slot_lifecycle.MANY_PASSED", 2)
    bench = full()
    policy, looked = of(bench).policy, list[int]()
    evict = policy.evict

    def noted(count: int, evictable: Evictable, now_ns: int = 0) -> Slots | None:
        looked.append(0)

        def seen(slots: Slots) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
            looked[-1] += len(slots)
            return evictable(slots)

        return evict(count, seen, now_ns)

    monkeypatch.setattr(policy, "evict", noted)
    return bench, looked


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "turns", "auto"])
def test_of_what_is_retained_only_goes_what_others_are_too_few_for(policy: str) -> None:
    bench = full(policy)
    stored(bench, list(range(30, 44)), "more than the others", None)
    assert hits(bench, list(range(30, 44))) == 14
    assert hits(bench, KEPT) == 2


def test_a_class_full_of_them_is_not_searched_for_every_store(
    searches: tuple[Bench, list[int]],
) -> None:
    bench, looked = searches
    for number in range(30, 70):
        bench.now_ns += 10 * MS
        stored(bench, [number], f"r{number}", None)
    assert len(looked) == 1, "one a second"
    assert hits(bench, KEPT) == 4
    assert hits(bench, list(range(58, 70))) == 12, "the others go in their order"
    bench.now_ns += SECOND
    stored(bench, [70], "later", None)
    assert len(looked) == 2


def test_what_was_leased_then_goes_before_them_later(searches: tuple[Bench, list[int]]) -> None:
    bench, looked = searches
    answer = bench.lookup(OTHERS, lease=LeaseMode.ALL)
    stored(bench, [30], "one", None)
    assert hits(bench, KEPT) == 3, "there was no other"
    assert answer.lease is not None
    bench.release(answer.lease)
    stored(bench, list(range(31, 43)), "as many as were leased", None)
    assert (hits(bench, KEPT), hits(bench, [30, *OTHERS])) == (3, 1)
    assert len(looked) == 2, "what could go, and then what there was besides"


def test_what_another_has_taken_the_place_of_is_passed_over(
    searches: tuple[Bench, list[int]],
) -> None:
    bench, _ = searches
    stored(bench, [30], "one", None)
    bench.quota(2 * 4096)
    bench.quota(0)
    stored(bench, list(range(40, 54)), "again", RETAIN)
    stored(bench, list(range(60, 76)), "all", None)
    assert hits(bench, list(range(60, 76))) == 16


def test_with_the_time_of_the_last_one_it_is_over(searches: tuple[Bench, list[int]]) -> None:
    bench, _ = searches
    stored(bench, [30], "one", None)
    assert of(bench).unretained is not None
    bench.tick(61 * SECOND)
    stored(bench, [31], "two", None)
    assert of(bench).unretained is None


def test_what_is_noted_for_that_is_bounded(
    searches: tuple[Bench, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (unretained.MANY_PASSED, unretained.MAX_UNRETAINED_BLOCKS) == (4096, 16384)
    monkeypatch.setattr(unretained, "MAX_UNRETAINED_BLOCKS", 3)
    bench, _ = searches
    for number in range(30, 40):
        stored(bench, [number], f"r{number}", None)
        found = of(bench).unretained
        assert found is not None
        assert 0 < len(found) <= 3


def test_a_store_looks_at_some_of_it_only(
    searches: tuple[Bench, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the first ones are leased: those behind them have their turn with the next store."""
    monkeypatch.setattr(unretained, "PIECE_BLOCKS", 2)
    monkeypatch.setattr(unretained, "PIECES_AT_ONCE", 1)
    bench, _ = searches
    stored(bench, [30], "one", None)
    bench.lookup([19, 20], lease=LeaseMode.ALL)
    stored(bench, [31], "two", None)
    assert hits(bench, OTHERS) == 10, "by the policy: what was looked at is leased"
    stored(bench, [32], "three", None)
    assert hits(bench, OTHERS) == 9
    assert hits(bench, [19, 20]) == 2


def test_a_search_that_passes_by_few_notes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.blocks.slot_lifecycle.MANY_PASSED", 4)
    bench = full()
    stored(bench, [30], "one", None)
    assert of(bench).unretained is None


# -- what is noted ---------------------------------------------------------------------------------

NOW = np.uint32(7)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> tuple[unretained.Unretained, SlotTable]:
    """Eight slots with a block each, all noted, in pieces of two."""
    monkeypatch.setattr(unretained, "PIECE_BLOCKS", 2)
    table, slots = SlotTable(8), np.arange(8)
    table.state[slots] = READY
    table.tags[slots] = slots + 100
    made = unretained.Unretained(until_ns=0)
    assert not len(made)
    made.add(slots[:5], slots[:5].astype(np.uint64) + np.uint64(100))
    made.add(slots[5:], slots[5:].astype(np.uint64) + np.uint64(100))
    assert len(made) == 8
    return made, table


def test_they_are_taken_in_their_order_and_once(
    noted: tuple[unretained.Unretained, SlotTable],
) -> None:
    made, table = noted
    taken = []
    for count, left in ((1, 7), (4, 3), (2, 1), (9, 0), (1, 0)):
        taken.append(made.take(table, count, NOW).tolist())
        assert len(made) == left
    assert taken == [[0], [1, 2, 3, 4], [5, 6], [7], []]


def test_what_can_not_go_now_is_kept_and_what_is_gone_is_not(
    noted: tuple[unretained.Unretained, SlotTable],
) -> None:
    made, table = noted
    table.pins[0] = 1
    table.state[1] = RESERVED
    table.state[2] = QUARANTINED
    table.tags[3] = 999
    table.retained[4] = NOW
    assert made.take(table, 8, NOW).tolist() == [5, 6, 7]
    assert len(made) == 2
    table.pins[0], table.state[1:4] = 0, READY
    assert made.take(table, 8, NOW + np.uint32(1)).tolist() == [0, 1]


def test_a_slot_that_stands_twice_is_taken_once(
    noted: tuple[unretained.Unretained, SlotTable],
) -> None:
    made, table = noted
    made.add(np.arange(4), table.tags[:4])
    assert made.take(table, 12, NOW).tolist() == list(range(8))
