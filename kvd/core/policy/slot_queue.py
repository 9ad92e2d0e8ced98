"""An ordered queue of slots in arrays: what every policy is built from.

The queue is an append-only sequence of slots, oldest first, numbered by position. The array
`places` says for each slot at which position (and in which queue) it stands now; an older
mention of the slot is thereby stale and is skipped when it is met. So moving a slot to the
young end is one append, forgetting it one store, and no batch needs a loop per slot.

Stale mentions are squeezed out a bounded piece at a time, young end first, so that order is
kept: the live slots of a piece slide up against those squeezed before. The sequence lies in
stretches: a new one is begun where the last one ends, and the oldest goes when all before it was
squeezed out. So memory follows what is in use, and no call ever copies or makes more than a piece.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.core.keys import NO_SLOTS, U64, Bools, Slots
from kvd.core.policy.base import Evictable, MakeGhostProbe
from kvd.core.sparse import sparse_zeros

Positions = npt.NDArray[np.int64]
Capacity = Callable[[], int]  # slots that the size class may have in use now

PIECE = 65536  # most positions that are looked at in one go
STRETCH = 256  # positions of a small queue's stretches; one that holds nothing has none
LEAST_SQUEEZED = 1024  # positions in one go: fewer take as long
LEAST_TRIMMED = 128  # mentions of the old end that are looked at in one go
SLACK = 256  # stale mentions that are not worth squeezing out
# A place is a position and the number of its queue. Positions go round: they only have to differ
# within one queue, which holds fewer than 2**31 slots.
NUMBER_BITS = 24
NUMBER_MASK = (1 << NUMBER_BITS) - 1
POSITION_MASK = (1 << 63 - NUMBER_BITS) - 1
NEXT_PLACE = 1 << NUMBER_BITS  # from one position to the next


class Scan(NamedTuple):
    """What a queue would give up: victims in order, and the slots passed over on the way."""

    victims: Slots
    passed: Slots
    end: int  # the position after the last one looked at


class Places:
    """Where slots 0 .. max_slots - 1 stand, in the queues that share it; 0: in none.

    Memory is taken where it is touched. A queue's number is free again when the queue is gone.
    """

    def __init__(self, max_slots: int) -> None:
        assert 0 < max_slots < 2**31, "slot numbers must fit in 31 bits"
        self.array: npt.NDArray[np.int64] = sparse_zeros(max_slots, np.int64)
        self._queues: weakref.WeakValueDictionary[int, SlotQueue] = weakref.WeakValueDictionary()
        self._last = 0

    def number(self, queue: SlotQueue) -> int:
        """A number for the queue that no other has."""
        assert len(self._queues) < NUMBER_MASK, "too many queues"
        while True:
            self._last = self._last % NUMBER_MASK + 1
            if self._last not in self._queues:
                self._queues[self._last] = queue
                return self._last


class PolicyMemory:
    """Arrays by slot that all policies of one pool share: a slot is of one size class at a time."""

    def __init__(self, max_slots: int, make_ghost_probe: MakeGhostProbe | None = None) -> None:
        self.max_slots = max_slots
        self.make_ghost_probe = make_ghost_probe
        self.places = Places(max_slots)

    @cached_property
    def tags(self) -> U64:
        """The tag of the block that the slot holds."""
        return sparse_zeros(self.max_slots, np.uint64)

    @cached_property
    def words(self) -> npt.NDArray[np.int64]:
        """What a policy of turns knows of the block, in one word."""
        return sparse_zeros(self.max_slots, np.int64)

    @cached_property
    def eras(self) -> npt.NDArray[np.uint8]:
        """Since which switch of policy the block is where it is."""
        return sparse_zeros(self.max_slots, np.uint8)

    @cached_property
    def marks(self) -> npt.NDArray[np.uint16]:
        """What says whether the block is in a duel's sample."""
        return sparse_zeros(self.max_slots, np.uint16)

    @cached_property
    def uses(self) -> npt.NDArray[np.uint8]:
        """How often it was used."""
        return sparse_zeros(self.max_slots, np.uint8)


class Mentions:
    """Slots by position, in stretches that follow each other without a gap."""

    __slots__ = ("_arrays", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []  # position of each stretch's first mention
        self._arrays: list[npt.NDArray[np.int32]] = []

    @property
    def bytes_used(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    def __getitem__(self, position: int) -> int:
        at = bisect_right(self._starts, position) - 1
        return int(self._arrays[at][position - self._starts[at]])

    def read(self, start: int, size: int) -> npt.NDArray[np.int32]:
        """Those of `size` positions, which there are; not to be written to."""
        parts = list(self._spans(start, size))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write(self, start: int, slots: npt.NDArray[np.integer]) -> None:
        done = 0
        for part in self._spans(start, int(slots.size)):
            part[:] = slots[done : done + part.size]
            done += part.size

    def make(self, first: int, end: int, size: int) -> None:
        """Have all positions before `end`, in new stretches of `size`; from `first` on at first."""
        have = self._starts[-1] + self._arrays[-1].size if self._arrays else first
        while have < end:
            self._starts.append(have)
            self._arrays.append(np.zeros(size, np.int32))
            have += size

    def let_go(self, before: int) -> None:
        """Forget stretches with nothing at this position or behind it."""
        old = 0
        while old < len(self._arrays) and self._starts[old] + self._arrays[old].size <= before:
            old += 1
        if old:
            del self._starts[:old], self._arrays[:old]

    def clear(self) -> None:
        self._starts, self._arrays = [], []

    def _spans(self, start: int, size: int) -> Iterator[npt.NDArray[np.int32]]:
        """Views of these positions, one a stretch."""
        at = bisect_right(self._starts, start) - 1
        offset = start - self._starts[at] if size else 0
        while size > 0:
            part = self._arrays[at][offset : offset + size]
            yield part
            size -= part.size
            at, offset = at + 1, 0


class SlotQueue:
    """Slots in order of leaving. A slot stands in at most one of the queues that share `places`.

    Batches may hold a slot twice: the last mention counts.
    """

    __slots__ = (
        "__weakref__",
        "_first",
        "_live",
        "_mentions",
        "_next",
        "_owed",
        "_places",
        "_squeeze",
        "number",
    )

    def __init__(self, places: Places) -> None:
        self._places = places.array
        self.number = places.number(self)  # never 0, so that no place of ours is
        self._mentions = Mentions()
        self._first = 1  # position of the oldest mention
        self._next = 1
        self._live = 0
        # (read, write): [first, read) is to be squeezed, [read, write) is stale, [write, …) done
        self._squeeze: tuple[int, int] | None = None
        self._owed = 0  # positions that are to be squeezed for what has come

    def __len__(self) -> int:
        return self._live

    @property
    def bytes_used(self) -> int:
        """Bytes of the mentions (the places belong to whoever made them)."""
        return self._mentions.bytes_used

    def holds(self, slots: Slots) -> Bools:
        """Which of these slots stand in this queue."""
        held: Bools = self._places.take(slots) & NUMBER_MASK == self.number
        return held

    def _places_from(self, start: int, size: int) -> Positions:
        """What `places` says of slots at these positions, one after the other."""
        first = start & POSITION_MASK
        if first + size <= POSITION_MASK:
            first = first << NUMBER_BITS | self.number
            return np.arange(first, first + size * NEXT_PLACE, NEXT_PLACE)
        positions = np.arange(start, start + size)
        return ((positions & POSITION_MASK) << NUMBER_BITS) | self.number

    def append(self, slots: Slots) -> None:
        """Put slots that stand in no queue at the young end, the first of them oldest."""
        if slots.size == 0:
            return
        assert not np.count_nonzero(self._places.take(slots)), "a queue holds an appended slot"
        self._write(slots)
        self._live += int(slots.size)
        assert _are_all(self._stand_last(slots)), "a slot was appended twice in one batch"
        self._tidy(int(slots.size))

    def renew(self, slots: Slots) -> None:
        """Move slots of this queue to the young end, the first of them oldest."""
        if slots.size == 0:
            return
        assert _are_all(self.holds(slots)), "a slot was renewed that the queue does not hold"
        self._write(slots)
        self._tidy(int(slots.size))

    def drop(self, slots: Slots) -> None:
        """Forget slots of this queue; no slot twice."""
        if slots.size == 0:
            return
        assert _are_all(self.holds(slots)), "a slot was dropped that the queue does not hold"
        self._places[slots] = 0
        self.lose(int(slots.size))

    def first(self, count: int) -> Slots:
        """Up to `count` slots from the old end, oldest first; changes nothing."""
        found: list[Slots] = []
        missing = count
        for _, _, slots in self.pieces(count):
            if missing <= 0:
                break
            found.append(slots[:missing])
            missing -= int(found[-1].size)
        return joined(found)

    def pieces(self, count: int) -> Iterator[tuple[int, Positions, Slots]]:
        """The queue from its old end: (position of the piece, positions from there, slots) of live
        mentions, a piece at a time.

        Pieces start near `count` and grow to PIECE. The queue must not change meanwhile.
        """
        at, size = self._first, max(count + count // 8, 256)
        seen = 0 if count > 0 else self._live
        while at < self._next and seen < self._live:
            size = min(size, PIECE, self._next - at)
            live, slots = self._live_mentions(at, size)
            seen += int(slots.size)
            if slots.size:
                yield at, live, slots
            at += size
            size *= 2

    def scan(self, count: int, evictable: Evictable) -> Scan:
        """The `count` oldest evictable slots, or as many as there are; changes nothing."""
        taken: list[Slots] = []
        passed: list[Slots] = []
        missing, end = count, self._first
        for start, live, slots in self.pieces(count):
            if missing == 0:
                break
            may_go = evictable(slots[:missing])
            if np.count_nonzero(may_go) == may_go.size:
                upto = int(may_go.size)
                taken.append(slots[:upto])
            else:
                may_go = np.concatenate([may_go, evictable(slots[missing:])])
                upto = nth_true(may_go, missing) + 1
                taken.append(slots[:upto][may_go[:upto]])
                passed.append(slots[:upto][~may_go[:upto]])
            missing -= int(taken[-1].size)
            end = start + int(live[upto - 1]) + 1
        return Scan(joined(taken), joined(passed), end)

    def commit(self, scan: Scan) -> Slots:
        """Take the victims of a scan out; nothing may have changed since.

        Slots passed over move to the young end in their order, so that a heap of pinned
        slots is passed over once and not at every call.
        """
        self._first = max(self._first, scan.end)
        self.drop(scan.victims)
        self.renew(scan.passed)
        return scan.victims

    def drop_oldest(self, count: int) -> None:
        """Forget so many of the old end, or all."""
        slots = self.first(count)
        self._places[slots] = 0
        self.lose(int(slots.size))

    def oldest(self, count: int) -> Slots:
        """At least one and up to about `count` slots of the old end; none when it is empty."""
        return next((slots for _, _, slots in self.pieces(count)), NO_SLOTS)

    def receive(self, slots: Slots, source: SlotQueue) -> None:
        """Move slots of this queue or of `source` to the young end, the first of them oldest."""
        from_source = source.holds(slots)
        assert _are_all(from_source | self.holds(slots)), "a slot was received from nowhere"
        self._write(slots)
        moved = int(np.count_nonzero(self._stand_last(slots) & from_source))
        self._live += moved
        source.lose(moved)
        self._tidy(int(slots.size))

    def head(self) -> int:
        """The slot at the old end; the queue is not empty."""
        if self._is_live(self._first):
            return self._mentions[self._first]
        return int(self.oldest(1)[0])

    def take_in(self, slots: Slots) -> Bools:
        """Move slots of this queue or of any other to the young end, the first of them oldest.

        Marks the last mention of each. Whose they were is told by `lose`, this one too.
        """
        self._write(slots)
        last = self._stand_last(slots)
        self._live += int(np.count_nonzero(last))
        return last

    def lose(self, count: int) -> None:
        """So many of its slots are not here any more: dropped, or moved by `take_in`."""
        self._live -= count
        assert self._live >= 0
        if self._live:
            self._tidy(count)
        else:
            self._mentions.clear()
            self._first, self._squeeze, self._owed = self._next, None, 0

    # -- mentions -----------------------------------------------------------------------------

    def _stand_last(self, slots: Slots) -> Bools:
        """Of slots that were just written: which stand where they did, and not at a later one."""
        count = int(slots.size)
        written = self._places_from(self._next - count, count)
        last: Bools = self._places.take(slots) == written
        return last

    def _live_mentions(self, start: int, size: int) -> tuple[Positions, Slots]:
        """Positions counted from `start`, and the slots there."""
        slots = self._mentions.read(start, size).astype(np.int64)
        (live,) = (self._places.take(slots) == self._places_from(start, size)).nonzero()
        return live, slots if live.size == size else slots.take(live)

    def _is_live(self, position: int) -> bool:
        slot = self._mentions[position]
        place = ((position & POSITION_MASK) << NUMBER_BITS) | self.number
        return bool(self._places[slot] == place)

    def _write(self, slots: Slots) -> None:
        count = int(slots.size)
        if not count:
            return
        size = min(max(STRETCH, self._live), PIECE)
        self._mentions.make(self._next, self._next + count, size)
        self._mentions.write(self._next, slots)
        self._places[slots] = self._places_from(self._next, count)
        self._next += count

    # -- stale mentions -----------------------------------------------------------------------

    def _tidy(self, count: int) -> None:
        """Pay for `count` new mentions: drop stale ones, in work bounded by a few times count."""
        self._trim(min(PIECE, 2 * count + 64))
        used = self._next - self._first
        if self._squeeze is not None or used > 2 * self._live + SLACK:
            self._owed += 4 * count + 64
            if self._owed >= LEAST_SQUEEZED:
                self._squeeze_piece(min(PIECE, self._owed))
                self._owed = 0
        self._mentions.let_go(self._first)

    def _trim(self, size: int) -> None:
        """Drop stale mentions at the old end, looking at up to `size`."""
        end = min(self._first + size, self._next)
        if self._first == end or self._is_live(self._first):
            return
        step = LEAST_TRIMMED  # mostly few are stale, and those behind them need not be looked at
        while self._first < end:
            step = min(step, end - self._first)
            live, _ = self._live_mentions(self._first, step)
            if live.size:
                self._first += int(live[0])
                return
            self._first += step
            step *= 4

    def _squeeze_piece(self, size: int) -> None:
        """Slide the live mentions of the next `size` positions up; ends the pass at the old end."""
        read, write = self._squeeze or (self._next, self._next)
        start = max(read - size, self._first)
        if start < read:
            _, slots = self._live_mentions(start, read - start)
            write -= int(slots.size)
            self._mentions.write(write, slots)
            self._places[slots] = self._places_from(write, int(slots.size))
        if start > self._first:
            self._squeeze = (start, write)
        else:
            self._first = max(self._first, write)
            self._squeeze = None


def _are_all(marks: Bools) -> bool:
    """As marks.all(), in a third of the time."""
    return int(np.count_nonzero(marks)) == marks.size


def whoever(slots: Slots) -> Bools:
    """As `evictable`: each of them may go."""
    return np.ones(slots.size, np.bool_)


def joined(batches: list[Slots]) -> Slots:
    """The batches as one, in order."""
    if len(batches) == 1:
        return batches[0]
    return np.concatenate(batches) if batches else NO_SLOTS


def nth_true(mask: Bools, count: int) -> int:
    """Index of the `count`-th True, or of the last element when there are fewer."""
    where = np.flatnonzero(mask)
    return int(where[count - 1]) if 0 < count <= where.size else int(mask.size) - 1
