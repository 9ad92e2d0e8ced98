"""generations.table: which names of blocks in tiers are still good, over the daemon's lives.

Stores outlive the daemon, and a namespace that is cleared may be forgotten. So what was cleared
stands here by its fingerprint: a block's name has its namespace's generation in it, which is 0, and
another number, at random, after each clear. Where there is no room for another fingerprint, what
tiers hold of every namespace gets another name: the first record is for all.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import numpy as np

from kvd.core.keys import U64
from kvd.pool.mapped_table import MappedTable

MAX_CLEARED_FINGERPRINTS = 255
_RECORD_BYTES = 32
_GENERATION = 2  # stored last: 0 is nobody's record
_ALL = 0


class Generations(MappedTable):
    """Each fingerprint's generation; a change stands there before the call returns."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MAX_CLEARED_FINGERPRINTS + 1, _RECORD_BYTES)
        used = np.flatnonzero(self._words[1:, _GENERATION]) + 1
        self._rows = {self._words[row, :_GENERATION].tobytes(): row for row in used.tolist()}

    def of(self, fingerprint: str) -> tuple[int, int]:
        """That of all, and its own."""
        row = self._rows.get(_name(fingerprint).tobytes())
        own = 0 if row is None else self._generation(row)
        return self._generation(_ALL), own

    def clear(self, fingerprint: str) -> None:
        """What tiers hold of this namespace has another name than what it stores from now on."""
        name = _name(fingerprint)
        row = self._rows.get(name.tobytes())
        if row is None:
            used = set(self._rows.values())
            row = next((n for n in range(1, len(self._words)) if n not in used), None)
            if row is None:
                self.clear_all()
                return
            self._words[row, :_GENERATION] = name
            self._rows[name.tobytes()] = row
        self._words[row, _GENERATION] = _fresh()

    def clear_all(self) -> None:
        """What tiers hold of any namespace."""
        self._words[_ALL, _GENERATION] = _fresh()
        self._words[1:, _GENERATION] = 0
        self._rows.clear()

    def _generation(self, row: int) -> int:
        return int(self._words[row, _GENERATION])


def _name(fingerprint: str) -> U64:
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=16, person=b"kvd-generation")
    name: U64 = np.frombuffer(digest.digest(), dtype=np.uint64)
    return name


def _fresh() -> int:
    return secrets.randbits(64) or 1
