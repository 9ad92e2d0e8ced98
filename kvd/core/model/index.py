"""Where a key's block is: a hash from 64-bit tags to slots, in arrays, for whole batches.

Buckets of eight entries, two candidate buckets a tag, the emptier one taken, entries moved
only when their bucket splits. The table grows by linear hashing (W. Litwin, "Linear hashing: a
new tool for file and table addressing", VLDB 1980): bucket after bucket is split in two as
entries come, so there is no pause in which everything is hashed anew. Tags are only hints:
`find` compares every key and scope in full.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U32, U64, Slots

WAYS = 8
_FIRST_BUCKETS = 64
_LOAD_NUMERATOR, _LOAD_DENOMINATOR = 1, 2  # entries per way at which a bucket is split
# Arrays without an axis: a call of numpy takes them twice as fast as its scalars.
_SECOND_FACTOR = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
_HALF = np.array(32, dtype=np.uint64)
_FOLD = np.array(33, dtype=np.uint64)
_SPLIT_AT_ONCE = 4096
NOWHERE = -1  # in arrays of slots: no such block


def _counts(marks: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint64]:
    """Marks in each row of eight: a multiplication sums its bytes into the highest."""
    sums = marks.view(np.uint64).ravel() * np.uint64(0x0101010101010101)
    return sums >> np.uint64(56)


def _all_of_each(marks: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Rows whose marks are all set; a row of 2, 4 or 8 is compared as one word."""
    width = marks.shape[1]
    if width in (2, 4, 8):
        whole = (1 << 8 * width) // 255  # every byte 1
        return np.asarray(marks.view(f"u{width}").ravel() == whole)
    return np.asarray(marks.all(axis=1))


class KeyTable(Protocol):
    """What the index reads of a slot: arrays, one element a slot."""

    @property
    def size(self) -> int:
        """Slots that there can be."""

    @property
    def tags(self) -> U64:
        """A hash of key and scope, all its bits mixed."""

    @property
    def scopes(self) -> U32:
        """The number of the scope."""

    def keys(self, width: int) -> U64:
        """The key, of so many words. Shape [slots, width]."""


class Index:
    """Holds the slots whose tag, key and scope stand in the slot table."""

    def __init__(self, table: KeyTable) -> None:
        self._table = table
        buckets = _FIRST_BUCKETS
        while buckets * WAYS * _LOAD_NUMERATOR < (table.size + 1) * _LOAD_DENOMINATOR:
            buckets *= 2
        # Touched from the front on as buckets are split: huge pages waste nothing here, and
        # they make the random probes of a large index a tenth faster.
        self._tags = np.zeros((buckets, WAYS), np.uint64)
        # Slot number + 1, 0 where the entry is empty; its tag then means nothing.
        self._entries = np.zeros((buckets, WAYS), np.uint32)
        self._claims = np.zeros(buckets, np.int32)  # who of a batch inserts into a bucket
        self._round = _FIRST_BUCKETS  # buckets at the start of this round of splits
        self._split = 0  # next bucket to split
        self._count = 0
        self._spill: dict[int, list[int]] = {}  # tag -> slots that found both buckets full
        self._spilled = np.empty(0, dtype=np.uint64)  # its tags

    def __len__(self) -> int:
        return self._count

    def find(self, tags: U64, words: U64, scope: int | U32) -> Slots:
        """The slot of each key in this scope, or in that of its own, NOWHERE where there is none.

        Shape [n].
        """
        count = len(tags)
        found = np.full(count, NOWHERE, dtype=np.int64)
        # Both buckets of every key at once: a call of numpy costs more than the rows it fetches,
        # and `take` fetches them at a quarter of what an array as index costs.
        buckets = self._buckets(tags).ravel()
        wanted = tags.repeat(WAYS).reshape(-1, WAYS)
        match = self._tags.take(buckets, axis=0).reshape(2, count, WAYS) == wanted
        at = np.flatnonzero(match)
        rows = at // WAYS
        slots = self._entries.ravel().take(buckets.take(rows) * WAYS + at % WAYS).astype(np.int64)
        slots -= 1
        rows %= count
        asked = words.take(rows, axis=0)
        right = _all_of_each(self._table.keys(words.shape[1]).take(slots, axis=0) == asked)
        wanted_scopes = scope if isinstance(scope, int) else scope.take(rows)
        right &= (slots >= 0) & (self._table.scopes.take(slots) == wanted_scopes)
        found[rows[right]] = slots[right]
        if self._spill:
            self._find_spilled(found, tags, words, scope)
        return found

    def insert(self, slots: Slots) -> None:
        """Add distinct slots, none of them in the index, by the tags in the slot table."""
        self._count += len(slots)
        self._grow()
        tags = self._table.tags[slots]
        while len(slots):
            left = self._place(slots, tags)
            if len(left) == len(slots):
                break
            slots, tags = slots[left], tags[left]
        else:
            return
        for tag, slot in zip(tags.tolist(), slots.tolist(), strict=True):
            self._spill.setdefault(tag, []).append(slot)
        self._note_spill()

    def remove(self, slots: Slots) -> None:
        """Take slots out that are in; their tags still stand in the slot table."""
        tags = self._table.tags[slots]
        left = np.arange(len(slots))
        for bucket in self._buckets(tags):
            at = bucket[left]
            match = self._entries[at] == (slots[left, None] + 1).astype(np.uint32)
            rows, ways = np.nonzero(match)
            self._entries[at[rows], ways] = 0
            gone = match.any(axis=1)
            left = left[~gone]
            if not len(left):
                break
        for row in left.tolist() if self._spill else ():
            spilled = self._spill[int(tags[row])]
            spilled.remove(int(slots[row]))
            if not spilled:
                del self._spill[int(tags[row])]
            self._note_spill()
        self._count -= len(slots)

    def slots(self) -> Slots:
        """Every slot in the index, in no order. For invariants: reads the whole table."""
        entries = self._entries[: self._round + self._split]
        inside = entries[entries != 0].astype(np.int64) - 1
        spilled = [slot for slots in self._spill.values() for slot in slots]
        return np.concatenate([inside, np.array(spilled, dtype=np.int64)])

    def _buckets(self, tags: U64) -> Slots:
        """The two candidates of each tag, shape [2, n]."""
        hashes = np.empty((2, len(tags)), dtype=np.uint64)
        hashes[0] = tags
        np.right_shift(tags, _HALF, hashes[1])
        np.multiply(hashes[1], _SECOND_FACTOR, hashes[1])
        # The product's high bits are the mixed ones; the tag's own are all mixed.
        np.bitwise_xor(hashes, hashes >> _FOLD, hashes)
        wide = np.bitwise_and(hashes, np.uint64(2 * self._round - 1), hashes).view(np.int64)
        narrow = wide & (self._round - 1)
        return np.where(narrow < self._split, wide, narrow)

    def _place(self, slots: Slots, tags: U64) -> Slots:
        """Put slots in the emptier of their buckets, one in each; the places of those left."""
        first, second = self._buckets(tags)
        empty_first = self._entries.take(first, axis=0) == 0
        empty_second = self._entries.take(second, axis=0) == 0
        better = _counts(empty_second) > _counts(empty_first)
        bucket = np.where(better, second, first)
        empty = np.where(better[:, None], empty_second, empty_first)
        # Several of one batch may want one bucket: the last to write its number there has it.
        numbers = np.arange(len(slots), dtype=np.int32)
        self._claims[bucket] = numbers
        way = empty.argmax(axis=1)
        won = (self._claims.take(bucket) == numbers) & empty[numbers, way]
        at, way = bucket[won], way[won]
        self._tags[at, way] = tags[won]
        self._entries[at, way] = (slots[won] + 1).astype(np.uint32)
        return np.flatnonzero(~won)

    def _grow(self) -> None:
        wanted = -(-self._count * _LOAD_DENOMINATOR // (WAYS * _LOAD_NUMERATOR))
        if self._round + self._split >= wanted:
            return
        while self._round + self._split < wanted:
            missing = wanted - self._round - self._split
            self._split_next(min(missing, self._round - self._split, _SPLIT_AT_ONCE))
        if self._spill:
            self._place_spilled()

    def _note_spill(self) -> None:
        self._spilled = np.array(list(self._spill), dtype=np.uint64)

    def _place_spilled(self) -> None:
        """Buckets were split: most of what found them full has a place now."""
        slots = np.array([s for held in self._spill.values() for s in held], dtype=np.int64)
        left = slots[self._place(slots, self._table.tags[slots])]
        self._spill = {}
        for tag, slot in zip(self._table.tags[left].tolist(), left.tolist(), strict=True):
            self._spill.setdefault(tag, []).append(slot)
        self._note_spill()

    def _split_next(self, count: int) -> None:
        """Split the next `count` buckets: an entry stays, or goes to the same way of the twin."""
        old = np.arange(self._split, self._split + count)
        new = old + self._round
        tags, entries = self._tags[old], self._entries[old]
        first = self._wide(tags)
        second = self._wide((tags >> np.uint64(32)) * _SECOND_FACTOR)
        by_first = (first & (self._round - 1)) == old[:, None]
        moves = np.where(by_first, first, second) != old[:, None]
        self._tags[new] = tags
        self._entries[new] = np.where(moves, entries, 0)
        self._entries[old] = np.where(moves, 0, entries)
        self._split += count
        if self._split == self._round:
            self._round *= 2
            self._split = 0

    def _wide(self, hashes: U64) -> npt.NDArray[np.int64]:
        hashes = hashes ^ (hashes >> np.uint64(33))
        return (hashes & np.uint64(2 * self._round - 1)).astype(np.int64)

    def _find_spilled(self, found: Slots, tags: U64, words: U64, scope: int | U32) -> None:
        keys = self._table.keys(words.shape[1])
        missing = np.flatnonzero(found == NOWHERE)
        # A handful of tags: numpy compares with each rather than a dict probe for each key.
        for row in missing[np.isin(tags[missing], self._spilled)].tolist():
            wanted = scope if isinstance(scope, int) else int(scope[row])
            for slot in self._spill[int(tags[row])]:
                same = bool((keys[slot] == words[row]).all())
                if same and int(self._table.scopes[slot]) == wanted:
                    found[row] = slot
