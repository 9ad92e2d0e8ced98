"""Blocks of a class that are to go first, unless they were used since they were given back.

They lie in pieces: one for each request would take a kilobyte a block where requests have few, and
an eviction would go through all of them.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from kvd.core.keys import U32, U64, Bools, Slots
from kvd.core.model.slots import READY, SlotTable

PIECE_BLOCKS = 512  # with fewer the last piece takes what comes next, too


class _Piece(NamedTuple):
    """In the order in which they are to go."""

    slots: Slots
    tags: U64
    stamps: U32  # of their last uses


class Unwanted:
    """Those that were given back first go first; of one request the tail before the head."""

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque()
        self._blocks = 0
        self.offered = 0  # blocks, since stale ones were looked for

    def __len__(self) -> int:
        return self._blocks

    def add(self, table: SlotTable, slots: Slots) -> None:
        """These distinct slots, in the order of a prompt, were given back."""
        last_first = slots[::-1]
        added = _Piece(last_first, table.tags[last_first], table.stamps[last_first])
        self._blocks += len(slots)
        if self._pieces and len(self._pieces[-1].slots) < PIECE_BLOCKS:
            last = self._pieces.pop()
            added = _Piece(
                np.concatenate([last.slots, added.slots]),
                np.concatenate([last.tags, added.tags]),
                np.concatenate([last.stamps, added.stamps]),
            )
        self._pieces.append(added)

    def forget_stale(self, table: SlotTable) -> None:
        """Forget those that are not to go any more, and all but the first place of each."""
        self.offered = 0
        if not self._pieces:
            return
        slots, tags, stamps = (np.concatenate(each) for each in zip(*self._pieces, strict=True))
        still = np.flatnonzero(_are_still(table, _Piece(slots, tags, stamps)))
        still = still[table.firsts(slots[still])]
        self._blocks = len(still)
        self._pieces = deque(
            _Piece(slots[some], tags[some], stamps[some])
            for start in range(0, len(still), PIECE_BLOCKS)
            for some in (still[start : start + PIECE_BLOCKS],)
        )

    def take(self, table: SlotTable, count: int) -> Slots:
        """Up to so many distinct slots that can be evicted, of the first piece; there is one."""
        first = self._pieces.popleft()
        slots, tags, stamps = first
        self._blocks -= len(slots)
        still = _are_still(table, first) & (table.pins[slots] == 0) & table.firsts(slots)
        left, tags, stamps = slots[still], tags[still], stamps[still]
        if len(left) > count:
            self._pieces.appendleft(_Piece(left[count:], tags[count:], stamps[count:]))
            self._blocks += len(left) - count
        taken: Slots = left[:count]
        return taken


def _are_still(table: SlotTable, piece: _Piece) -> Bools:
    """Which of them are the same blocks as then, and were neither used nor retained since.

    A use shows in the stamp, but for one so soon that it has the same.
    """
    slots, tags, stamps = piece
    same = (table.state[slots] == READY) & (table.tags[slots] == tags)
    same &= table.retained[slots] == 0
    return np.asarray(same & (table.stamps[slots] == stamps))
