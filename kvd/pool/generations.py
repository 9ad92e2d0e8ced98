"""generations.table: what of tiers is cleared, over the daemon's lives.

Stores outlive the daemon, and a namespace that is cleared may be forgotten. So what was cleared
stands here, by the name that tiers know the namespace by.

- A store of this node is told another name: a block's has its namespace's *generation* in it, which
  is 0, and another number, at random, after each clear. Where there is no room for another
  namespace, what stores hold of every one gets another name: the first record is for all.
- Stores that nodes share keep the names, or nodes would find nothing of one another's any more.
  There a clear is *unsettled* until they have deleted what they hold, each of them: a record has
  two bits for each such store, of its tier's name and of where it is. A store that is not in the
  file now is asked when it is again, under one of the two. Other stores may have the same bit, so
  all are asked once more when the first record tells of other stores than there are.

Each record stands there twice, with one seal for both: nothing else knows what was cleared. The
second copy is written first, then the seal, then the first copy. So whatever was altered, or left
half-written, one copy fits the seal. The first copies and nothing else are what earlier releases
read and wrote: they cut off the rest.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64
from kvd.pool.config import PoolError
from kvd.pool.mapped_table import MappedTable, checksums
from kvd.pool.reserve import Reserve

log = logging.getLogger(__name__)

MAX_CLEARED_NAMESPACES = 255
NAME_BYTES = 16
EVERY = b""  # names all namespaces
_RECORD_BYTES = 32
_RECORDS = MAX_CLEARED_NAMESPACES + 1
_EARLIER_BYTES = _RECORDS * _RECORD_BYTES  # of earlier releases' table: without copies and seals
_SEALS = 2 * _RECORDS  # the record in which they begin
_SEAL_SEED = np.uint64(0x6B76642D67656E73)
_GENERATION = 2  # of a first copy it is stored last: 0 is nobody's record
_UNSETTLED = 3
_OF_ANY = 1  # as earlier releases say it: of whichever stores there are
_BITS_EACH = 31  # for names; as many for places
_ALL_BITS = (1 << 64) - 1
_ALL = 0

Rows = npt.NDArray[np.int64]


def bits_of(name: str, place: str) -> int:
    """Of a store that nodes share: of its tier's name, and of where it is."""
    by_name, by_place = (
        int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        for word in (name, place)
    )
    return 2 << by_name % _BITS_EACH | 2 << (_BITS_EACH + by_place % _BITS_EACH)


class Generations(MappedTable):
    """Each namespace's generation; a change stands there before the call returns."""

    def __init__(self, path: Path, *, was_here: bool = False) -> None:
        """`was_here`: a daemon had it here before. What it said is lost where it is missing."""
        found = path.stat().st_size if path.exists() else 0
        super().__init__(path, _SEALS + _RECORDS * 8 // _RECORD_BYTES, _RECORD_BYTES)
        try:
            self._records, lost = self._read()
            # A start that found no room, or was killed, may have left it long and empty.
            is_lost = was_here and found != _EARLIER_BYTES and not self._words.any()
            if is_lost or lost.size or 0 < found < _EARLIER_BYTES:
                how = "lost" if is_lost else "damaged"
                log.warning("%s is %s: what tiers of this node hold is found no longer", path, how)
                self._records[lost] = 0
                self._records[_ALL, _GENERATION] = _fresh()
            self._write(np.arange(_RECORDS))
        except BaseException:
            self.close()
            raise
        self._present = ~0  # bits of stores that are asked
        used = np.flatnonzero(self._records[1:, _GENERATION]) + 1
        self._rows = {self._records[row, :_GENERATION].tobytes(): row for row in used.tolist()}

    @classmethod
    def open(cls, directory: Path, reserve: Reserve) -> Self:
        """A pool's, before it gets a new header: where there is one, this table was here, too.

        On a full file system with what the reserve keeps for a start; PoolError without.
        """
        path, was_here = directory / "generations.table", (directory / "pool.header").exists()
        try:
            return cls(path, was_here=was_here)
        except PoolError:
            reserve.let_go()
            return cls(path, was_here=was_here)

    @property
    def of_all(self) -> int:
        """Changes when what stores hold of every namespace gets another name."""
        return self._generation(_ALL)

    def of(self, name: bytes) -> tuple[int, int]:
        """That of all, and its own."""
        row = self._rows.get(name)
        own = 0 if row is None else self._generation(row)
        return self.of_all, own

    def begin(self, present: int, stores: bytes) -> None:
        """Stores with these bits are asked; `stores`, 16 bytes, are the same for the same ones.

        What an earlier release left unsettled is theirs. So is what stores have yet to delete that
        are not here, where these are others than last time: one of them may be such a store under
        another name, whose bit for its place another store with the same bit has settled.
        """
        self._present = present
        if not present:
            return
        words = self._records[:, _UNSETTLED]
        them = np.frombuffer(stores, dtype=np.uint64)
        theirs = _OF_ANY
        if (self._records[_ALL, :_GENERATION] != them).any():
            theirs |= ~present & _ALL_BITS
        old = np.flatnonzero(words & np.uint64(theirs))
        if old.size:
            self._records[old, _UNSETTLED] = words[old] & ~np.uint64(_OF_ANY) | np.uint64(present)
            self._write(old)
        self._records[_ALL, :_GENERATION] = them  # behind that: a start that is cut short does both
        self._write(np.array([_ALL]))

    def clear(self, name: bytes, *, unsettled: int) -> bytes:
        """What stores hold of this namespace has another name than what they get from now on.

        `unsettled`: the bits of those that have yet to delete it. Gives the name that is to be
        settled: this one, or EVERY where there is no room for it.
        """
        row = self._rows.get(name)
        if row is None:
            row = self._free_row()
            if row is None:
                self.clear_all(unsettled=unsettled)
                return EVERY
            self._records[row, :_GENERATION] = np.frombuffer(name, dtype=np.uint64)
            self._rows[name] = row
        self._records[row, _UNSETTLED] |= np.uint64(unsettled)
        self._records[row, _GENERATION] = _fresh()
        self._write(np.array([row]))
        return name

    def clear_all(self, *, unsettled: int) -> None:
        """What stores hold of any namespace."""
        self._records[_ALL, _UNSETTLED] |= np.uint64(unsettled)
        self._rename_all(list(self._rows))

    def settle(self, name: bytes, bits: int) -> None:
        """A store with these bits has deleted what it held of it."""
        row = self._rows.get(name) if name else _ALL
        if row is not None:
            self._records[row, _UNSETTLED] &= ~np.uint64(bits)
            self._write(np.array([row]))

    def unsettled(self) -> list[tuple[bytes, int]]:
        """What is not deleted yet, and the bits of the stores that have yet to."""
        rows = [(EVERY, _ALL), *self._rows.items()]
        words = [(name, int(self._records[row, _UNSETTLED])) for name, row in rows]
        return [(name, bits) for name, bits in words if bits]

    def _free_row(self) -> int | None:
        used = set(self._rows.values())
        row = next((row for row in range(1, _RECORDS) if row not in used), None)
        if row is not None:
            return row
        # All get another name, so that those that no store here has to delete need their own no
        # longer. A store that is not here deletes all when it is.
        present = np.uint64(self._present & _ALL_BITS)
        needless = [
            name for name, row in self._rows.items() if not self._records[row, _UNSETTLED] & present
        ]
        return self._rename_all(needless) if needless else None

    def _rename_all(self, needless: list[bytes]) -> int:
        """All get another name. Frees the rows of those that need none of their own any more.

        Returns one of these, or 0.
        """
        rows = np.array([self._rows.pop(name) for name in needless], dtype=np.int64)
        left = np.bitwise_or.reduce(self._records[rows, _UNSETTLED], initial=np.uint64(0))
        self._records[_ALL, _UNSETTLED] |= left
        self._records[_ALL, _GENERATION] = _fresh()
        self._write(np.array([_ALL]))  # before they lose their own
        self._records[rows] = 0
        self._write(rows)
        return int(rows[-1]) if rows.size else _ALL

    def _generation(self, row: int) -> int:
        return int(self._records[row, _GENERATION])

    # -- the file -----------------------------------------------------------------------------

    def _read(self) -> tuple[U64, Rows]:
        """The records, and which of them no copy proves. What no seal was made for is believed."""
        every = np.arange(_RECORDS)
        first, second = np.array(self._words[:_RECORDS]), np.array(self._words[_RECORDS:_SEALS])
        seals = self._words[_SEALS:].reshape(-1)
        by_first = seals == _sealed(every, first)
        by_second = ~by_first & (seals == _sealed(every, second))
        first[by_second] = second[by_second]
        alike = (first == second).all(axis=1)
        unsealed = (seals == 0) & ~second.any(axis=1)  # an earlier release wrote it
        return first, np.flatnonzero(~by_first & ~by_second & ~alike & ~unsealed)

    def _write(self, rows: Rows) -> None:
        """Have these records stand in the file as they are known."""
        known = self._records[rows]
        self._words[rows + _RECORDS] = known
        self._words[_SEALS:].reshape(-1)[rows] = _sealed(rows, known)
        self._words[rows, :_GENERATION] = known[:, :_GENERATION]
        self._words[rows, _UNSETTLED] = known[:, _UNSETTLED]
        self._words[rows, _GENERATION] = known[:, _GENERATION]


def _sealed(rows: Rows, records: U64) -> U64:
    """What proves each record, its place included."""
    return checksums(_SEAL_SEED, [rows.astype(np.uint64), *records.T])


def _fresh() -> int:
    return secrets.randbits(64) or 1
