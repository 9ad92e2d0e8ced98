"""The index finds what was put in, whatever the tags."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.keys import U64, Slots
from kvd.core.model.admission import ReuseFilter
from kvd.core.model.index import NOWHERE, Index
from kvd.core.model.slots import STEPS, SlotState, SlotTable

TraceFunction = Callable[[FrameType, str, Any], Any]


def filled(size: int, tags: U64) -> tuple[SlotTable, Index, Slots]:
    table = SlotTable(size)
    slots = np.arange(len(tags), dtype=np.int64)
    table.tags[slots] = tags
    table.keys(1)[slots, 0] = slots.astype(np.uint64)
    table.scopes[slots] = 1
    index = Index(table)
    return table, index, slots


def test_grows_bucket_by_bucket_and_finds_everything() -> None:
    generator = np.random.default_rng(1)
    tags = generator.integers(1, 2**63, 50_000, dtype=np.uint64)
    table, index, slots = filled(60_000, tags)
    for start in range(0, len(slots), 700):
        index.insert(slots[start : start + 700], 1)
    assert len(index) == len(slots)
    assert np.array_equal(index.find(tags, table.keys(1)[slots], 1), slots)
    assert set(index.find(tags[:9], table.keys(1)[slots[:9]], 2)) == {NOWHERE}


def test_stays_found_through_removals_and_new_insertions() -> None:
    generator = np.random.default_rng(2)
    tags = generator.integers(1, 2**63, 20_000, dtype=np.uint64)
    table, index, slots = filled(20_000, tags)
    index.insert(slots[:10_000], 1)
    for start in range(0, 10_000, 500):
        index.remove(slots[start : start + 500])
        index.insert(slots[10_000 + start : 10_500 + start], 1)
        held = slots[start + 500 : start + 10_500]
        assert np.array_equal(index.find(tags[held], table.keys(1)[held], 1), held)
    gone = slots[:10_000]
    assert set(index.find(tags[gone], table.keys(1)[gone], 1)) == {NOWHERE}


def test_keys_that_share_a_tag_are_told_apart_even_when_their_buckets_overflow() -> None:
    tags = np.full(50, 7, dtype=np.uint64)
    table, index, slots = filled(4096, tags)
    index.insert(slots, 1)
    assert np.array_equal(index.find(tags, table.keys(1)[slots], 1), slots)
    index.remove(slots[10:40])
    left = np.concatenate([slots[:10], slots[40:]])
    assert np.array_equal(np.sort(index.slots()), left)
    assert np.array_equal(index.find(tags[left], table.keys(1)[left], 1), left)
    assert set(index.find(tags[:30], table.keys(1)[slots[10:40]], 1)) == {NOWHERE}


class Steps:
    """Counts the lines of Python that run within it."""

    def __init__(self) -> None:
        self.lines = 0

    def _trace(self, frame: FrameType, event: str, _argument: object) -> TraceFunction:
        self.lines += event == "line"
        return self._trace

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


@pytest.mark.parametrize("share_buckets_only", [False, True])
def test_any_number_of_keys_of_one_tag_costs_a_search_no_more(share_buckets_only: bool) -> None:
    """Who knows a scope's seed can make them, and would have all others wait."""
    count = 2000
    tags = np.full(count, 7, dtype=np.uint64)
    if share_buckets_only:
        tags += np.arange(count, dtype=np.uint64) << np.uint64(64 - 11)
    table, index, slots = filled(2 * count, tags)
    with Steps() as to_insert:
        for start in range(0, count, 100):
            index.insert(slots[start : start + 100], 1)
    absent = np.arange(count, count + 50, dtype=np.uint64)[:, None]
    with Steps() as to_find:
        assert set(index.find(tags[:50], absent, 1)) == {NOWHERE}
    assert np.array_equal(index.find(tags, table.keys(1)[slots], 1), slots)
    with Steps() as to_remove:
        for start in range(0, count, 100):
            index.remove(slots[start : start + 100])
    assert not len(index.slots())
    assert to_find.lines < 50 * 20
    assert to_insert.lines < count * 40
    assert to_remove.lines < count * 20


def test_a_batch_that_wants_few_buckets_is_found_whole() -> None:
    generator = np.random.default_rng(4)
    few = generator.integers(1, 2**63, 30, dtype=np.uint64)
    tags = np.concatenate([few.repeat(20), generator.integers(1, 2**63, 9_400, dtype=np.uint64)])
    table, index, slots = filled(10_000, tags)
    index.insert(slots[:600], 1)  # most find both of their buckets full
    for start in range(600, 10_000, 940):  # their buckets are split meanwhile
        index.insert(slots[start : start + 940], 1)
        held = slots[: start + 940]
        assert np.array_equal(index.find(tags[held], table.keys(1)[held], 1), held)
    index.remove(slots[::2])
    assert np.array_equal(np.sort(index.slots()), slots[1::2])
    assert np.array_equal(index.find(tags[1::2], table.keys(1)[slots[1::2]], 1), slots[1::2])
    assert set(index.find(tags[::2], table.keys(1)[slots[::2]], 1)) == {NOWHERE}


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 9])
def test_keys_of_any_width_are_compared_whole(width: int) -> None:
    table = SlotTable(100)
    slots = np.arange(50, dtype=np.int64)
    words = np.random.default_rng(5).integers(0, 2**63, (50, width), dtype=np.uint64)
    table.write_keys(slots[::-1], words[::-1])  # also from rows that don't lie one by one
    assert np.array_equal(table.keys(width)[slots], words)
    table.tags[slots], table.scopes[slots] = 9, 1
    index = Index(table)
    index.insert(slots, width)
    assert np.array_equal(index.find(table.tags[slots], words, 1), slots)
    words[:, -1] ^= np.uint64(1)
    assert set(index.find(table.tags[slots], words, 1)) == {NOWHERE}


def test_a_slot_that_is_not_in_can_not_be_taken_out() -> None:
    tags = np.random.default_rng(6).integers(1, 2**63, 20, dtype=np.uint64)
    _, index, slots = filled(20, tags)
    index.insert(slots[:10], 1)
    with pytest.raises(AssertionError, match="not in"):
        index.remove(slots[9:11])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 40)), max_size=30))
def test_agrees_with_a_dict(steps: list[tuple[bool, int, int]]) -> None:
    generator = np.random.default_rng(3)
    tags = generator.integers(1, 30, 400, dtype=np.uint64) << np.uint64(20)
    table, index, slots = filled(400, tags)
    held: set[int] = set()
    for add, start, count in steps:
        batch = slots[start * 60 : start * 60 + count]
        chosen = [s for s in batch.tolist() if (s in held) != add]
        some = np.array(chosen, dtype=np.int64)
        index.insert(some, 1) if add else index.remove(some)
        held = held | set(chosen) if add else held - set(chosen)
        found = index.find(tags, table.keys(1)[slots], 1)
        assert found.tolist() == [s if s in held else NOWHERE for s in slots.tolist()]


def test_steps_that_the_table_does_not_list_are_our_own_fault() -> None:
    for old in SlotState:
        for new in SlotState:
            table = SlotTable(4)
            table.state[:] = old
            if (old, new) in STEPS:
                table.move(np.array([1]), old, new)
                assert table.state.tolist() == [old, new, old, old]
            else:
                with pytest.raises(AssertionError):
                    table.move(np.array([1]), old, new)


def test_ready_is_reached_only_from_a_finished_store_or_from_the_slot_table() -> None:
    assert {old for old, new in STEPS if new is SlotState.READY} == {
        SlotState.RESERVED,
        SlotState.FREE,
    }


def test_reuse_filter_is_bounded_and_forgets_the_oldest() -> None:
    tracked = ReuseFilter(threshold=2, tracker_blocks=8)
    first = np.arange(1, 5, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert not tracked.offer(first).any()
    assert tracked.would_admit(first).all()
    for start in range(100, 200, 4):
        tags = np.arange(start, start + 4, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
        tracked.offer(tags)
    assert not tracked.would_admit(first).any()


def test_reuse_filter_counts_to_its_threshold() -> None:
    tracked = ReuseFilter(threshold=3, tracker_blocks=64)
    tags = np.array([11, 12], dtype=np.uint64)
    assert [tracked.offer(tags).all() for _ in range(4)] == [False, False, True, True]


def test_reuse_filter_of_one_set_remembers_four_and_forgets_who_came_longest_ago() -> None:
    tracked = ReuseFilter(threshold=2, tracker_blocks=4)
    four = np.array([11, 12, 13, 14], dtype=np.uint64)
    for tag in four:
        assert not tracked.offer(np.array([tag])).any()
    assert tracked.would_admit(four).all()
    assert tracked.offer(four[:1]).all(), "it is renewed"
    assert not tracked.offer(np.array([15], dtype=np.uint64)).any()
    assert tracked.would_admit(four).tolist() == [True, False, True, True]


def test_reuse_filter_counts_all_that_it_knows_and_of_a_crowd_no_more_than_a_set_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracked = ReuseFilter(threshold=2, tracker_blocks=4)  # one set
    crowd = np.arange(1, 1001, dtype=np.uint64)
    tracked.offer(crowd[-1:])
    turns = []
    count = tracked._count

    def counted(sets: Slots, tags: U64) -> None:
        turns.append(len(tags))
        count(sets, tags)

    monkeypatch.setattr(tracked, "_count", counted)
    assert tracked.offer(crowd).tolist() == [False] * 999 + [True]
    assert len(turns) <= 5
    assert tracked.offer(crowd).sum() >= 3


def test_reuse_filter_that_wants_no_second_sighting_remembers_none() -> None:
    tracked = ReuseFilter(threshold=1, tracker_blocks=1 << 16)
    tags = np.array([11, 12], dtype=np.uint64)
    assert tracked.would_admit(tags).all()
    assert tracked.offer(tags).all()
    assert tracked._tags.size < 16, "and takes no memory for it"


def test_reuse_filter_keeps_count_beyond_what_it_can_count() -> None:
    tracked = ReuseFilter(threshold=200, tracker_blocks=64)
    tags = np.array([11], dtype=np.uint64)
    seen = [bool(tracked.offer(tags)[0]) for _ in range(400)]
    assert seen == [False] * 199 + [True] * 201
