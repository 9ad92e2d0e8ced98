"""States of a slot, the steps between them, and the arrays that hold all slots.

FREE -> RESERVED -> READY -> FREE, and QUARANTINED for a slot that nobody may find any more but
whose copies are not known to have ended. ABSENT is a slot number that no granted row holds.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U32, U64, Bools, Slots
from kvd.core.model.story import BrokenSlots, Story
from kvd.core.sparse import sparse_zeros


class SlotState(enum.IntEnum):
    """What a slot holds, and who may touch it."""

    ABSENT = 0
    FREE = 1
    RESERVED = 2
    READY = 3
    QUARANTINED = 4


# As arrays hold them: with a member of an enum numpy takes eight times as long to compare.
ABSENT, FREE, RESERVED, READY, QUARANTINED = map(np.uint8, SlotState)

# The only steps there are. Everything else is a broken invariant of ours.
STEPS: frozenset[tuple[SlotState, SlotState]] = frozenset(
    {
        (SlotState.ABSENT, SlotState.FREE),  # its row was granted
        (SlotState.FREE, SlotState.ABSENT),  # its row is being taken back
        (SlotState.FREE, SlotState.RESERVED),  # a store was admitted
        (SlotState.RESERVED, SlotState.READY),  # every writing shard is done
        (SlotState.RESERVED, SlotState.QUARANTINED),  # the store failed
        (SlotState.READY, SlotState.FREE),  # evicted or cleared
        (SlotState.READY, SlotState.QUARANTINED),  # cleared while pinned, or found damaged
        (SlotState.QUARANTINED, SlotState.FREE),  # the last pin ended
        (SlotState.FREE, SlotState.READY),  # read back from the slot table
        (SlotState.FREE, SlotState.QUARANTINED),  # read back; an orphaned mover may write it
    }
)

_STEP_NAMES = {(old, new): f"{old.name} -> {new.name}" for old, new in STEPS}

# Coarse recency: 2**24 ns (17 ms) fit 2.3 years into 32 bits.
STAMP_SHIFT = 24
STAMP_MASK = np.uint64((1 << STAMP_SHIFT) - 1)
SECONDS_A_STAMP = (1 << STAMP_SHIFT) / 1e9


def coarse_stamp(now_ns: int) -> np.uint32:
    return np.uint32((now_ns >> STAMP_SHIFT) & 0xFFFFFFFF)


def in_order_of_stores(now_ns: int, before: int, count: int) -> U64:
    """Stamps for the records of blocks stored now, `before` of which were stored earlier.

    Below what a coarse stamp has they say in which order: of blocks that are used together, as
    those of a prompt are, the one that was stored first is the youngest for the next incarnation.
    """
    later = np.arange(before, before + count, dtype=np.uint64) & STAMP_MASK
    return np.uint64(now_ns >> STAMP_SHIFT << STAMP_SHIFT) | (STAMP_MASK - later)


class SlotTable:
    """One element a slot. Preallocated at the upper bound; memory is used only where touched."""

    def __init__(self, slots: int, story: Story | None = None) -> None:
        self.size = slots
        self.story = story or Story()
        self.state: npt.NDArray[np.uint8] = sparse_zeros(slots, np.uint8)
        self.pins: npt.NDArray[np.int32] = sparse_zeros(slots, np.int32)  # claims + transfers
        self.leases: npt.NDArray[np.int32] = sparse_zeros(slots, np.int32)  # of those, claims
        self.tags: U64 = sparse_zeros(slots, np.uint64)
        self.scopes: U32 = sparse_zeros(slots, np.uint32)
        self.stamps: U32 = sparse_zeros(slots, np.uint32)
        self.fillings: Slots = sparse_zeros(slots, np.int64)  # of RESERVED ones: by whom
        self.noted: U32 = sparse_zeros(slots, np.uint32)  # of the stamps, as the pool has them
        # A bit for each tier that has the block, or is being given it.
        self.below: npt.NDArray[np.uint8] = sparse_zeros(slots, np.uint8)
        # The reach of the tier that brought the block up, until it is loaded; 0: none did.
        self.sources: npt.NDArray[np.uint8] = sparse_zeros(slots, np.uint8)
        # Until when hints retain the block; 0: they don't.
        self.retained: U32 = sparse_zeros(slots, np.uint32)
        self._marks: npt.NDArray[np.int32] = sparse_zeros(slots, np.int32)  # scratch of a call
        self._keys: dict[int, U64] = {}

    def keys(self, width: int) -> U64:
        """Key words by slot for keys of `width` words: shape [slots, width]."""
        keys = self._keys.get(width)
        if keys is None:
            keys = self._keys[width] = sparse_zeros((self.size, width), np.uint64)
        return keys

    def write_keys(self, slots: Slots, words: U64) -> None:
        """Note the keys of these slots. Shape [n, width]."""
        width = words.shape[1]
        # As one element each: rows take three times as long.
        whole = self.keys(width).view(f"V{8 * width}").ravel()
        whole.put(slots, np.ascontiguousarray(words).view(whole.dtype).ravel())

    def firsts(self, slots: Slots) -> Bools:
        """Marks each slot's first place among these; the rest are repeats."""
        numbers = np.arange(len(slots), dtype=np.int32)
        # Written backwards, so that the first of equal slots is the last to be written.
        self._marks[slots[::-1]] = numbers[::-1]
        return np.asarray(self._marks.take(slots) == numbers)

    def distinct(self, slots: Slots) -> Slots:
        """These slots without repeats, each where it comes first."""
        firsts = self.firsts(slots)
        return slots if np.count_nonzero(firsts) == len(slots) else slots[firsts]

    def among(self, slots: Slots, others: Slots) -> Bools:
        """Marks those of the slots that are among the others."""
        self._marks[others] = -1
        found = np.asarray(self._marks[slots] == -1)
        self._marks[others] = 0
        return found

    def without(self, slots: Slots, others: Slots) -> Slots:
        """Those of the slots that are not among the others, in their order."""
        fresh: Slots = slots[~self.among(slots, others)]
        return fresh

    def move(self, slots: Slots, old: SlotState, new: SlotState) -> None:
        """Take a step of the table with all of these slots; anything else is our own fault."""
        assert (old, new) in STEPS, f"no step from {old.name} to {new.name}"
        self.story.changed(_STEP_NAMES[old, new], slots)
        right = self.state.take(slots) == np.uint8(old)
        if np.count_nonzero(right) < len(slots):
            raise BrokenSlots(f"a slot was not {old.name}", slots[~right])
        self.state[slots] = new
