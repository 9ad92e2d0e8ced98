"""Where a key's block is: a hash from 64-bit tags to slots, in arrays, for whole batches.

Buckets of eight entries, two candidate buckets a tag, the emptier one taken, entries moved
only when their bucket splits. The table grows by linear hashing (W. Litwin, "Linear hashing: a
new tool for file and table addressing", VLDB 1980): bucket after bucket is split in two as
entries come, so there is no pause in which everything is hashed anew. Tags are only hints:
`find` compares every key and scope in full.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.core.block import SlotTable
from kvd.core.keys import U64, Slots

WAYS = 8
_FIRST_BUCKETS = 64
_LOAD_NUMERATOR, _LOAD_DENOMINATOR = 1, 2  # entries per way at which a bucket is split
_SECOND_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SPLIT_AT_ONCE = 4096
NOWHERE = -1  # in arrays of slots: no such block


def _running(marks: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Running counts along rows of eight marks: a multiplication sums all bytes up to each."""
    sums = np.ascontiguousarray(marks).view(np.uint64) * np.uint64(0x0101010101010101)
    return sums.view(np.uint8)


class Index:
    """Holds the slots whose tag, key and scope stand in the slot table."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        buckets = _FIRST_BUCKETS
        while buckets * WAYS * _LOAD_NUMERATOR < (table.size + 1) * _LOAD_DENOMINATOR:
            buckets *= 2
        # Touched from the front on as buckets are split: huge pages waste nothing here, and
        # they make the random probes of a large index a tenth faster.
        self._tags = np.zeros((buckets, WAYS), np.uint64)  # 0 = empty entry
        self._slots = np.zeros((buckets, WAYS), np.uint32)
        self._round = _FIRST_BUCKETS  # buckets at the start of this round of splits
        self._split = 0  # next bucket to split
        self._count = 0
        self._spill: dict[int, list[int]] = {}  # tag -> slots that found both buckets full
        self._spilled = np.empty(0, dtype=np.uint64)  # its tags

    def __len__(self) -> int:
        return self._count

    def find(self, tags: U64, words: U64, scope: int) -> Slots:
        """The slot of each key in this scope, NOWHERE where there is none. Shape [n]."""
        first, second = self._buckets(tags)
        found = np.full(len(tags), NOWHERE, dtype=np.int64)
        keys = self._table.keys(words.shape[1])
        # In most calls every key is in its first bucket with a hit, or in neither.
        for bucket in (first, second):
            missing = np.flatnonzero(found == NOWHERE)
            if not len(missing):
                return found
            match = self._tags[bucket[missing]] == tags[missing, None]
            rows, ways = np.nonzero(match)
            if not len(rows):
                continue
            asked = missing[rows]
            slots = self._slots[bucket[asked], ways].astype(np.int64)
            right = self._table.scopes[slots] == scope
            right &= (keys[slots] == words[asked]).all(axis=1)
            found[asked[right]] = slots[right]
        if self._spill:
            self._find_spilled(found, tags, words, scope)
        return found

    def insert(self, slots: Slots) -> None:
        """Add distinct slots, none of them in the index, by the tags in the slot table."""
        self._count += len(slots)
        self._grow()
        tags = self._table.tags[slots]
        for _ in range(3):
            slots, tags = self._place(slots, tags)
            if not len(slots):
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
            match = self._tags[at] == tags[left, None]
            match &= self._slots[at] == slots[left, None].astype(np.uint32)
            rows, ways = np.nonzero(match)
            self._tags[at[rows], ways] = 0
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
        used = self._tags[: self._round + self._split] != 0
        inside = self._slots[: self._round + self._split][used].astype(np.int64)
        spilled = [slot for slots in self._spill.values() for slot in slots]
        return np.concatenate([inside, np.array(spilled, dtype=np.int64)])

    def _buckets(self, tags: U64) -> tuple[Slots, Slots]:
        return self._address(tags), self._address((tags >> np.uint64(32)) * _SECOND_FACTOR)

    def _address(self, hashes: U64) -> Slots:
        # The product's high bits are the mixed ones; the tag's own are all mixed.
        hashes = hashes ^ (hashes >> np.uint64(33))
        wide = (hashes & np.uint64(2 * self._round - 1)).astype(np.int64)
        narrow = wide & (self._round - 1)
        return np.where(narrow < self._split, wide, narrow)

    def _place(self, slots: Slots, tags: U64) -> tuple[Slots, U64]:
        """Put each slot in the emptier of its buckets; the ones that found no way come back."""
        first, second = self._buckets(tags)
        empty_first, empty_second = self._tags[first] == 0, self._tags[second] == 0
        better = _running(empty_second)[:, -1] > _running(empty_first)[:, -1]
        bucket = np.where(better, second, first)
        order = np.argsort(bucket, kind="stable")
        bucket = bucket[order]
        empty = np.where(better[:, None], empty_second, empty_first)[order]
        # Several of one batch may want one bucket: the k-th of them takes the k-th empty way.
        starts = np.flatnonzero(np.r_[True, bucket[1:] != bucket[:-1]])
        rank = np.arange(len(bucket)) - np.repeat(starts, np.diff(np.r_[starts, len(bucket)]))
        choice = empty & (_running(empty) == rank[:, None] + 1)
        rows, ways = np.nonzero(choice)
        self._tags[bucket[rows], ways] = tags[order[rows]]
        self._slots[bucket[rows], ways] = slots[order[rows]].astype(np.uint32)
        if len(rows) == len(bucket):
            return slots[:0], tags[:0]
        unplaced = order[~choice.any(axis=1)]
        return slots[unplaced], tags[unplaced]

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
        slots, tags = self._place(slots, self._table.tags[slots])
        self._spill = {}
        for tag, slot in zip(tags.tolist(), slots.tolist(), strict=True):
            self._spill.setdefault(tag, []).append(slot)
        self._note_spill()

    def _split_next(self, count: int) -> None:
        """Split the next `count` buckets: an entry stays, or goes to the same way of the twin."""
        old = np.arange(self._split, self._split + count)
        new = old + self._round
        tags, slots = self._tags[old], self._slots[old]
        first = self._wide(tags)
        second = self._wide((tags >> np.uint64(32)) * _SECOND_FACTOR)
        by_first = (first & (self._round - 1)) == old[:, None]
        moves = (np.where(by_first, first, second) != old[:, None]) & (tags != 0)
        self._tags[new] = np.where(moves, tags, 0)
        self._slots[new] = slots
        self._tags[old] = np.where(moves, 0, tags)
        self._split += count
        if self._split == self._round:
            self._round *= 2
            self._split = 0

    def _wide(self, hashes: U64) -> npt.NDArray[np.int64]:
        hashes = hashes ^ (hashes >> np.uint64(33))
        return (hashes & np.uint64(2 * self._round - 1)).astype(np.int64)

    def _find_spilled(self, found: Slots, tags: U64, words: U64, scope: int) -> None:
        keys = self._table.keys(words.shape[1])
        missing = np.flatnonzero(found == NOWHERE)
        # A handful of tags: numpy compares with each rather than a dict probe for each key.
        for row in missing[np.isin(tags[missing], self._spilled)].tolist():
            for slot in self._spill[int(tags[row])]:
                same = bool((keys[slot] == words[row]).all())
                if same and int(self._table.scopes[slot]) == scope:
                    found[row] = slot
