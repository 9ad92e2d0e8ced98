"""The index by the native library, beside the one by numpy: the same is found in both."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import native
from kvd.core.keys import U64, Slots
from kvd.core.model.index import NOWHERE, Index
from kvd.core.model.slots import SlotTable
from kvd.native import key_index
from kvd_proto.tags import tags_of

pytestmark = pytest.mark.skipif(
    native.library() is None, reason=f"no native library: {native.why_not()}"
)
SEEDS = (5, 2**64 - 1)  # by scope, from 0


def words_of(numbers: list[int], width: int) -> U64:
    """Keys of so many words; those of two numbers differ in the last word."""
    words = np.full((len(numbers), width), 3, dtype=np.uint64)
    words[:, -1] = numbers
    return words


class Pair:
    """Both indexes over one slot table: number n of scope s stands in slot 1000 * s + n."""

    def __init__(self, width: int, tag_bits: int) -> None:
        self.table = SlotTable(2000)
        self.width = width
        numbers = list(range(1000))
        for scope, seed in enumerate(SEEDS):
            slots = 1000 * scope + np.arange(1000)
            words = words_of(numbers, width)
            tags = tags_of(words, seed)
            self.table.write_keys(slots, words)
            self.table.scopes[slots] = scope
            # Few bits: many share a tag, and find their buckets full.
            self.table.tags[slots] = tags & np.uint64((1 << tag_bits) - 1 << 32 | 1)
        self.by_numpy, self.by_library = Index(self.table), Index(self.table, key_index.maker())
        self.held: set[int] = set()

    def change(self, adds: bool, slots: list[int]) -> None:
        chosen = sorted(slot for slot in set(slots) if (slot in self.held) != adds)
        for index in (self.by_numpy, self.by_library):
            of_these = np.array(chosen, dtype=np.int64)
            index.insert(of_these, self.width) if adds else index.remove(of_these)
        self.held = self.held | set(chosen) if adds else self.held - set(chosen)

    def agree(self) -> None:
        assert len(self.by_library) == len(self.by_numpy) == len(self.held)
        assert set(self.by_library.slots().tolist()) == self.held
        for index in (self.by_numpy, self.by_library):
            for scope in range(len(SEEDS)):
                slots = 1000 * scope + np.arange(1000)
                words = self.table.keys(self.width)[slots]
                found = index.find(self.table.tags[slots], words, scope)
                assert found.tolist() == [s if s in self.held else NOWHERE for s in slots.tolist()]


STEPS = st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 1999), max_size=80)), max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4, 5]), st.sampled_from([1, 3, 20]), STEPS)
def test_what_is_put_in_is_found_by_either(
    width: int, tag_bits: int, steps: list[tuple[bool, list[int]]]
) -> None:
    pair = Pair(width, tag_bits)
    for adds, slots in steps:
        pair.change(adds, slots)
        pair.agree()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 4, 5]), STEPS, st.lists(st.integers(0, 1200), max_size=70))
def test_keys_are_located_by_the_library_as_by_numpy(
    width: int, steps: list[tuple[bool, list[int]]], asked: list[int]
) -> None:
    pair = Pair(width, 20)
    for scope, seed in enumerate(SEEDS):
        slots = 1000 * scope + np.arange(1000)
        pair.table.tags[slots] = tags_of(pair.table.keys(width)[slots], seed)
    words = words_of(asked, width)
    words.flags.writeable = False
    for adds, some_slots in steps:
        pair.change(adds, some_slots)
        for scope, seed in enumerate(SEEDS):
            for some in (words, words[::2]):
                tags, found = pair.by_library.locate(some, seed, scope)
                right, wanted = pair.by_numpy.locate(some, seed, scope)
                assert tags.tolist() == right.tolist()
                assert found.tolist() == wanted.tolist()
                named = [1000 * scope + int(number) for number in some[:, -1]]
                held = pair.held
                assert found.tolist() == [
                    n if n in held and n < 1000 * scope + 1000 else NOWHERE for n in named
                ]


def test_grows_as_numpys_does_and_finds_everything_in_the_midst_of_a_round() -> None:
    table, count = SlotTable(40_000), 30_000
    slots: Slots = np.random.default_rng(1).permutation(count)
    words = np.random.default_rng(2).integers(0, 2**63, (count, 4), dtype=np.uint64)
    table.write_keys(np.arange(count), words)
    table.tags[:count] = tags_of(words, 9)
    table.scopes[:count] = 1
    index = Index(table, key_index.maker())
    for start in range(0, count, 700):
        index.insert(slots[start : start + 700], 4)
        held = np.sort(slots[: start + 700])
        tags, found = index.locate(words[held], 9, 1)
        assert np.array_equal(tags, table.tags[held])
        assert np.array_equal(found, held)
    assert set(index.locate(words, 9, 2)[1].tolist()) == {NOWHERE}
    index.remove(slots[::2])
    assert np.array_equal(np.sort(index.slots()), np.sort(slots[1::2]))
    assert np.array_equal(
        index.locate(words, 9, 1)[1] != NOWHERE, np.isin(np.arange(count), slots[1::2])
    )


def test_arrays_that_can_not_be_an_indexs_are_refused() -> None:
    table, library = SlotTable(100), native.library()
    assert library is not None
    entries, places = np.zeros((64, 4), np.uint64), np.zeros(100, np.int64)
    with pytest.raises(AssertionError):
        key_index.KeyIndex(library, entries[:, ::2], places, table.tags, table.scopes)
    with pytest.raises(AssertionError):
        key_index.KeyIndex(library, entries, places.view(np.uint64), table.tags, table.scopes)
    right = key_index.KeyIndex(library, entries, places, table.tags, table.scopes)
    for first_buckets, split in ((64, 1), (64, 65), (48, 0)):
        with pytest.raises(AssertionError):
            right.resize(first_buckets, split)
    right.resize(64, 0)
    words = np.zeros((3, 2), np.uint64)
    with pytest.raises(AssertionError):
        right.find(np.zeros((99, 2), np.uint64), words, 1, 1)
    with pytest.raises(AssertionError):
        right.find(table.keys(2), words.view(np.float64), 1, 1)
    with pytest.raises(AssertionError):
        right.insert(np.zeros(3, np.int32))
