"""Where a key's block is: a hash from 64-bit tags to slots, in arrays, for whole batches.

Buckets of four entries, two candidate buckets a tag, the emptier one taken, entries moved
only when their bucket splits. The table grows by linear hashing (W. Litwin, "Linear hashing: a
new tool for file and table addressing", VLDB 1980): bucket after bucket is split in two as
entries come, so there is no pause in which everything is hashed anew. Tags are only hints:
`find` compares every key and scope in full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvd.core.keys import NO_SLOTS, U32, U64, Bools, Slots
from kvd.core.sparse import sparse_zeros
from kvd_proto.tags import tags_of

WAYS = 4
_FIRST_BUCKETS = 64
_LOAD_NUMERATOR, _LOAD_DENOMINATOR = 3, 8  # entries per way at which a bucket is split
# Arrays without an axis: a call of numpy takes them twice as fast as its scalars.
_SECOND_FACTOR = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)
_SECOND_SHIFT = np.array(36, dtype=np.uint64)
_SLOT_BITS = np.array(0xFFFFFFFF, dtype=np.uint64)
_TAG_BITS = np.array(0xFFFFFFFF00000000, dtype=np.uint64)
_FEW = 64  # are put in one by one, or sought a place for once more
_SPLIT_AT_ONCE = 4096
_SPILL_MARKS = 1 << 15
_SPILL_BITS = np.array(_SPILL_MARKS - 1, dtype=np.uint64)
NOWHERE = -1  # in arrays of slots: no such block

_Name = tuple[int, bytes]  # of a block: its scope and key

# Which ways of a bucket are empty, as the bits of a number: how many, and the first of them.
_GATHER = np.array(0x01020408, dtype=np.uint32)  # brings the four marks of a bucket together
_TOP = np.array(24, dtype=np.uint32)
_EMPTY_WAYS = np.array([n.bit_count() for n in range(1 << WAYS)], dtype=np.int8)
_FIRST_EMPTY = np.array([(n & -n).bit_length() - 1 for n in range(1 << WAYS)], dtype=np.int64)


def _empty(buckets: U64) -> U32:
    """Which ways of each bucket are empty, as bits. Shape [n] of [n, WAYS]."""
    marks: U32 = (buckets == 0).view(np.uint32).ravel()
    marks *= _GATHER
    marks >>= _TOP
    return marks


def _second(tags: U64) -> U64:
    """What tells a tag's second bucket; its first is told by the low bits, all of them mixed."""
    product: U64 = tags * _SECOND_FACTOR
    product >>= _SECOND_SHIFT
    return product


def _spill_mark(tags: U64) -> npt.NDArray[np.int64]:
    """Where a spilled tag leaves its mark."""
    return (tags & _SPILL_BITS).view(np.int64)


def _all_of_each(marks: Bools) -> Bools:
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


class KeyProbe(Protocol):
    """Does an index's work on its arrays, key by key: handed in, for numpy does it as well."""

    def resize(self, first_buckets: int, split: int) -> None:
        """Buckets at the start of this round of splits, and how many of them were split."""

    def find(self, keys: U64, words: U64, seed: int, scope: int) -> tuple[U64, Slots]:
        """`Index.locate` but for what was spilled. `keys`: of all slots. At least one is sought."""

    def insert(self, slots: Slots) -> Slots:
        """Give slots places; those that found both their buckets full, and have none."""


# Of entries and places, and of the slot table's tags and scopes.
MakeKeyProbe = Callable[[U64, Slots, U64, U32], KeyProbe]


class Index:
    """Holds the slots whose tag, key and scope stand in the slot table."""

    def __init__(self, table: KeyTable, make_probe: MakeKeyProbe | None = None) -> None:
        self._table = table
        buckets = _FIRST_BUCKETS
        while buckets * WAYS * _LOAD_NUMERATOR < (table.size + 1) * _LOAD_DENOMINATOR:
            buckets *= 2
        # A tag's high half above the slot's number + 1; 0 where the entry is empty. Touched from
        # the front on as buckets are split: huge pages waste nothing here, and they make the
        # random probes of a large index a tenth faster.
        self._entries = np.zeros((buckets, WAYS), np.uint64)
        self._places = sparse_zeros(table.size, np.int64)  # of each slot's entry, or NOWHERE
        self._round = _FIRST_BUCKETS  # buckets at the start of this round of splits
        self._split = 0  # next bucket to split
        self._count = 0
        # Slots that found both buckets full, and their scopes and keys. Who knows the seed can make
        # any number of keys of one tag, so a tag would not tell these apart.
        self._spilled: OrderedDict[int, _Name] = OrderedDict()
        self._spill: dict[_Name, int] = {}  # the other way round
        self._spill_marks = np.zeros(_SPILL_MARKS, np.uint32)  # how many, at their tags' low bits
        self._probe: KeyProbe | None = None
        if make_probe is not None:
            self._probe = make_probe(self._entries, self._places, table.tags, table.scopes)
            self._probe.resize(self._round, self._split)

    def __len__(self) -> int:
        return self._count

    def locate(self, words: U64, seed: int, scope: int) -> tuple[U64, Slots]:
        """Tags of keys in the scope with this seed, and their slots there, as `find` says them."""
        if self._probe is None or not len(words):
            tags = tags_of(words, seed)
            return tags, self.find(tags, words, scope)
        tags, found = self._probe.find(self._table.keys(words.shape[1]), words, seed, scope)
        if self._spilled:
            self._find_spilled(found, tags, words, scope)
        return tags, found

    def find(self, tags: U64, words: U64, scope: int | U32) -> Slots:
        """The slot of each key in this scope, or in that of its own, NOWHERE where there is none.

        Shape [n].
        """
        count = len(tags)
        # Both buckets of every key at once: a call of numpy costs more than the rows it fetches,
        # and `take` fetches them at a quarter of what an array as index costs.
        rows = self._entries.take(self._buckets(tags).ravel(), axis=0).reshape(2, -1)
        rows ^= (tags & _TAG_BITS).repeat(WAYS)
        entries = rows.ravel()
        (at,) = (entries <= _SLOT_BITS).nonzero()  # the halves of the tags are the same
        slots = entries.take(at).view(np.int64)
        slots -= 1
        at //= WAYS
        at[at.searchsorted(count) :] -= count  # the second buckets' rows
        asked = words.take(at, axis=0)
        right = _all_of_each(self._table.keys(words.shape[1]).take(slots, axis=0) == asked)
        wanted_scopes = scope if isinstance(scope, int) else scope.take(at)
        right &= (slots >= 0) & (self._table.scopes.take(slots) == wanted_scopes)
        if np.count_nonzero(right) < len(right):
            at, slots = at[right], slots[right]
        found = np.empty(count, dtype=np.int64)
        found.fill(NOWHERE)
        found[at] = slots
        if self._spilled:
            self._find_spilled(found, tags, words, scope)
        return found

    def insert(self, slots: Slots, width: int) -> None:
        """Add distinct slots, none of them in the index, by what stands in the slot table.

        Their keys are of so many words.
        """
        self._count += len(slots)
        self._grow()
        if self._probe is not None:
            self._spill_all(self._probe.insert(slots), width)
            return
        tags = self._table.tags[slots]
        while len(slots):
            count = len(slots)
            left = self._place(slots, tags)
            slots, tags = slots[left], tags[left]
            if len(slots) <= _FEW or len(slots) == count:
                break
        self._spill_all(self._place_each(slots, tags), width)

    def remove(self, slots: Slots) -> None:
        """Take slots out that are in; their tags still stand in the slot table."""
        self._count -= len(slots)
        places = self._places.take(slots)
        if self._spilled:
            inside = places != NOWHERE
            self._remove_spilled(slots[~inside])
            slots, places = slots[inside], places[inside]
        entries = self._entries.ravel()
        found = entries.take(places) & _SLOT_BITS
        right = found.view(np.int64) == slots + 1
        assert np.count_nonzero(right) == len(slots), "a slot was removed that is not in"
        entries[places] = 0

    def _remove_spilled(self, slots: Slots) -> None:
        for slot in slots.tolist():
            del self._spill[self._spilled.pop(slot)]
        np.subtract.at(self._spill_marks, _spill_mark(self._table.tags[slots]), 1)

    def slots(self) -> Slots:
        """Every slot in the index, in no order. For invariants: reads the whole table."""
        entries = self._entries[: self._round + self._split]
        inside = (entries[entries != 0] & _SLOT_BITS).astype(np.int64) - 1
        return np.concatenate([inside, np.array(list(self._spilled), dtype=np.int64)])

    def _buckets(self, tags: U64) -> Slots:
        """The two candidates of each tag, shape [2, n]."""
        both = np.empty((2, len(tags)), dtype=np.uint64)
        wider = np.uint64(2 * self._round - 1)
        np.bitwise_and(tags, wider, both[0])
        np.bitwise_and(_second(tags), wider, both[1])
        buckets = both.view(np.int64)
        if self._split:
            # Buckets whose twins are not made yet hold what will go there.
            buckets -= (buckets >= self._round + self._split) * np.int64(self._round)
        else:
            buckets &= self._round - 1
        return buckets

    def _place(self, slots: Slots, tags: U64) -> Slots:
        """Put slots in the emptier of their buckets, one in each; the places of those left."""
        count = len(slots)
        buckets = self._buckets(tags).ravel()
        empty = _empty(self._entries.take(buckets, axis=0))
        room = _EMPTY_WAYS.take(empty)
        chosen = (room[count:] > room[:count]) * np.int64(count)
        chosen += np.arange(count)
        empty = empty.take(chosen)
        places = buckets.take(chosen)
        places *= WAYS
        places += _FIRST_EMPTY.take(empty)
        entries = tags & _TAG_BITS
        entries |= (slots + 1).view(np.uint64)
        placed = empty != 0
        if np.count_nonzero(placed) == count:
            placed = self._write(places, entries)
        else:
            placed[placed] = self._write(places[placed], entries[placed])
        if np.count_nonzero(placed) == count:
            self._places[slots] = places
            return NO_SLOTS
        self._places[slots[placed]] = places[placed]
        left: Slots = (~placed).nonzero()[0]
        return left

    def _write(self, places: Slots, entries: U64) -> Bools:
        """Write entries to empty places; which are there. Of several for one place the last is."""
        table = self._entries.ravel()
        table[places] = entries
        return np.asarray(table.take(places) == entries)

    def _place_each(self, slots: Slots, tags: U64) -> Slots:
        """Put slots in one by one; those that find both buckets full."""
        full = []
        rows = (slots.tolist(), tags.tolist(), *self._buckets(tags).tolist())
        for slot, tag, first, second in zip(*rows, strict=True):
            ways, others = self._entries[first].tolist(), self._entries[second].tolist()
            bucket = first if ways.count(0) >= others.count(0) else second
            if bucket == second:
                ways = others
            if 0 in ways:
                way = ways.index(0)
                self._entries[bucket, way] = tag >> 32 << 32 | slot + 1
                self._places[slot] = bucket * WAYS + way
            else:
                full.append(slot)
                self._places[slot] = NOWHERE
        return np.array(full, dtype=np.int64)

    def _spill_all(self, slots: Slots, width: int) -> None:
        """Remember those that have no place."""
        if not len(slots):
            return
        keys = self._table.keys(width)[slots]
        scopes = self._table.scopes[slots].tolist()
        for slot, scope, key in zip(slots.tolist(), scopes, keys, strict=True):
            name = scope, key.tobytes()
            self._spilled[slot], self._spill[name] = name, slot
        np.add.at(self._spill_marks, _spill_mark(self._table.tags[slots]), 1)

    def _grow(self) -> None:
        wanted = -(-self._count * _LOAD_DENOMINATOR // (WAYS * _LOAD_NUMERATOR))
        if self._round + self._split >= wanted:
            return
        while self._round + self._split < wanted:
            missing = wanted - self._round - self._split
            self._split_next(min(missing, self._round - self._split, _SPLIT_AT_ONCE))
        if self._probe is not None:
            self._probe.resize(self._round, self._split)
        if self._spilled:
            self._place_spilled()

    def _place_spilled(self) -> None:
        """Buckets were split: most of what found them full has a place now. Some a time."""
        slots = np.array(list(islice(self._spilled, _FEW)), dtype=np.int64)
        names = [self._spilled.pop(slot) for slot in slots.tolist()]
        placed = np.ones(len(slots), np.bool_)
        placed[self._place(slots, self._table.tags[slots])] = False
        for slot, name, is_placed in zip(slots.tolist(), names, placed.tolist(), strict=True):
            if is_placed:
                del self._spill[name]
            else:
                self._spilled[slot] = name  # behind the others
        np.subtract.at(self._spill_marks, _spill_mark(self._table.tags[slots[placed]]), 1)

    def _split_next(self, count: int) -> None:
        """Split the next `count` buckets: an entry stays, or goes to the same way of the twin."""
        old = np.arange(self._split, self._split + count)
        new = old + self._round
        entries = self._entries[old]
        tags = self._table.tags.take((entries & _SLOT_BITS).astype(np.int64) - 1)  # of any, if 0
        wider = np.uint64(2 * self._round - 1)
        first, second = ((h & wider).view(np.int64) for h in (tags, _second(tags)))
        by_first = (first & (self._round - 1)) == old[:, None]
        moves = (np.where(by_first, first, second) != old[:, None]) & (entries != 0)
        self._entries[new] = np.where(moves, entries, 0)
        self._entries[old] = np.where(moves, 0, entries)
        row, way = np.nonzero(moves)
        self._places[(entries[row, way] & _SLOT_BITS).astype(np.int64) - 1] = new[row] * WAYS + way
        self._split += count
        if self._split == self._round:
            self._round *= 2
            self._split = 0

    def _find_spilled(self, found: Slots, tags: U64, words: U64, scope: int | U32) -> None:
        marked = self._spill_marks.take(_spill_mark(tags)) != 0
        marked &= found == NOWHERE
        for row in marked.nonzero()[0].tolist():
            wanted = scope if isinstance(scope, int) else int(scope[row])
            found[row] = self._spill.get((wanted, words[row].tobytes()), NOWHERE)
