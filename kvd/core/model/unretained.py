"""What may go of a class in which nearly all is retained by hints.

A policy finds those blocks only behind all that is retained, and a class may have a quarter of the
pool. So where a search passed by that many, what it found stands here, and so does what comes in
from then on. It goes before what is retained, the first that came first; the policy is asked again
after a while.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvd.core.keys import NO_SLOTS, U64, Bools, Slots
from kvd.core.model.slots import READY, RESERVED, SlotTable

MANY_PASSED = 4096  # retained blocks that a search may pass by, and go on so
SEARCHED_AGAIN_NS = 1_000_000_000
MAX_UNRETAINED_BLOCKS = 16384  # of a class; the next search finds what is beyond
PIECE_BLOCKS = 512
PIECES_AT_ONCE = 16  # looked at for one store


class Unretained:
    """Blocks by slot and tag; those that are gone, or retained since, are left out when met."""

    def __init__(self, until_ns: int) -> None:
        self.until_ns = until_ns  # then the policy is asked again
        self._pieces: deque[tuple[Slots, U64]] = deque()
        self._blocks = 0

    def __len__(self) -> int:
        return self._blocks

    def add(self, slots: Slots, tags: U64) -> None:
        """These are not retained."""
        room = MAX_UNRETAINED_BLOCKS - self._blocks
        slots, tags = slots[:room], tags[:room]
        self._blocks += len(slots)
        if self._pieces and len(self._pieces[-1][0]) < PIECE_BLOCKS:
            before = self._pieces.pop()
            slots, tags = np.concatenate([before[0], slots]), np.concatenate([before[1], tags])
        for start in range(0, len(slots), PIECE_BLOCKS):
            piece = slice(start, start + PIECE_BLOCKS)
            self._pieces.append((slots[piece], tags[piece]))

    def take(self, table: SlotTable, count: int, stamp: np.uint32) -> Slots:
        """Up to so many distinct slots that can be evicted and are not retained at this time."""
        taken = [NO_SLOTS]
        for _ in range(min(PIECES_AT_ONCE, len(self._pieces))):
            slots, tags = self._pieces.popleft()
            self._blocks -= len(slots)
            states = table.state[slots]
            there = (states == READY) | (states == RESERVED)
            there &= (table.tags[slots] == tags) & (table.retained[slots] < stamp)
            slots, tags, states = slots[there], tags[there], states[there]
            may_go = np.flatnonzero((states == READY) & (table.pins[slots] == 0))[:count]
            taken.append(slots[may_go])
            count -= len(may_go)
            left = np.ones(len(slots), dtype=np.bool_)
            left[may_go] = False
            if left.any():
                rest = slots[left], tags[left]
                self._blocks += len(rest[0])
                # What can't go yet is looked at again after the others.
                put = self._pieces.append if count else self._pieces.appendleft
                put(rest)
            if not count:
                break
        return table.distinct(np.concatenate(taken))


class Sparing:
    """As `evictable`: what is unpinned, and not retained. Counts what a search passed by."""

    def __init__(self, table: SlotTable, stamp: np.uint32) -> None:
        self._table, self._stamp = table, stamp
        self._found: list[Slots] = []
        self.passed = 0  # retained ones, each as often as it was looked at

    def __call__(self, slots: Slots) -> Bools:
        unretained: Bools = self._table.retained.take(slots) < self._stamp
        if some := int(np.count_nonzero(unretained)):
            self._found.append(slots[unretained])
        self.passed += len(slots) - some
        may_go: Bools = unretained & (self._table.pins.take(slots) == 0)
        return may_go

    def found(self) -> Slots:
        """What is not retained, pinned or not, distinct, in the order of the search."""
        return self._table.distinct(np.concatenate([NO_SLOTS, *self._found]))
