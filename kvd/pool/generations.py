"""generations.table: what of tiers is cleared, over the daemon's lives.

Stores outlive the daemon, and a namespace that is cleared may be forgotten. So what was cleared
stands here, by the name that tiers know the namespace by.

- A store of this node is told another name: a block's has its namespace's *generation* in it, which
  is 0, and another number, at random, after each clear. Where there is no room for another
  namespace, what stores hold of every one gets another name: the first record is for all.
- Stores that nodes share keep the names, or nodes would find nothing of one another's any more.
  There a clear is *unsettled* until they have deleted what they hold.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Self

import numpy as np

from kvd.core.keys import U64
from kvd.pool.config import PoolError
from kvd.pool.mapped_table import MappedTable
from kvd.pool.reserve import Reserve

MAX_CLEARED_NAMESPACES = 255
NAME_BYTES = 16
EVERY = b""  # names all namespaces
_RECORD_BYTES = 32
_GENERATION = 2  # stored last: 0 is nobody's record
_UNSETTLED = 3
_ALL = 0


class Generations(MappedTable):
    """Each namespace's generation; a change stands there before the call returns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MAX_CLEARED_NAMESPACES + 1, _RECORD_BYTES)
        used = np.flatnonzero(self._words[1:, _GENERATION]) + 1
        self._rows = {self._words[row, :_GENERATION].tobytes(): row for row in used.tolist()}

    @classmethod
    def open(cls, path: Path, reserve: Reserve) -> Self:
        """On a full file system with what the reserve keeps for a start; PoolError without."""
        try:
            return cls(path)
        except PoolError:
            reserve.let_go()
            return cls(path)

    @property
    def of_all(self) -> int:
        """Changes when what stores hold of every namespace gets another name."""
        return self._generation(_ALL)

    def of(self, name: bytes) -> tuple[int, int]:
        """That of all, and its own."""
        row = self._rows.get(name)
        own = 0 if row is None else self._generation(row)
        return self.of_all, own

    def clear(self, name: bytes, *, unsettled: bool) -> bytes:
        """What stores hold of this namespace has another name than what they get from now on.

        Gives the name that is to be settled: this one, or EVERY where there is no room for it.
        """
        row = self._rows.get(name)
        if row is None:
            row = self._free_row()
            if row is None:
                self.clear_all(unsettled=unsettled)
                return EVERY
            words: U64 = np.frombuffer(name, dtype=np.uint64)
            self._words[row, :_GENERATION] = words
            self._rows[name] = row
        self._words[row, _UNSETTLED] = unsettled
        self._words[row, _GENERATION] = _fresh()
        return name

    def clear_all(self, *, unsettled: bool) -> None:
        """What stores hold of any namespace."""
        self._words[_ALL, _UNSETTLED] = unsettled
        self._words[_ALL, _GENERATION] = _fresh()
        self._words[1:, _GENERATION] = 0
        self._rows.clear()

    def settle(self, name: bytes) -> None:
        """Stores that nodes share have deleted what they held of it."""
        row = self._rows.get(name) if name else _ALL
        if row is not None:
            self._words[row, _UNSETTLED] = 0

    def unsettled(self) -> list[bytes]:
        """What they have not deleted yet."""
        every = [EVERY] if self._words[_ALL, _UNSETTLED] else []
        return every + [name for name, row in self._rows.items() if self._words[row, _UNSETTLED]]

    def _free_row(self) -> int | None:
        used = set(self._rows.values())
        row = next((row for row in range(1, len(self._words)) if row not in used), None)
        if row is not None:
            return row
        # All get another name, so that the settled ones need their own no longer.
        settled = [name for name, row in self._rows.items() if not self._words[row, _UNSETTLED]]
        if not settled:
            return None
        self._words[_ALL, _GENERATION] = _fresh()
        for name in settled:
            row = self._rows.pop(name)
            self._words[row, _GENERATION] = 0
        return row

    def _generation(self, row: int) -> int:
        return int(self._words[row, _GENERATION])


def _fresh() -> int:
    return secrets.randbits(64) or 1
