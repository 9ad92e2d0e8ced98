"""A policy's ghosts by the native library: sought and given places one by one, in one call.

`kvd/core/policy/ghosts.py` says what the table is, and does the same with numpy where this is not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvd.native import I64, U64, Library, address_of, library, start_of

BUCKET_WORDS = 16


class GhostTable:
    """Reads and writes one table, which stays where it is."""

    def __init__(self, library: Library, table: I64, bits: int) -> None:
        """table: 2**`bits` buckets, one after the other; bits: 1 to 63."""
        assert table.dtype == np.int64
        assert table.flags.c_contiguous
        assert 0 < bits < 64
        assert table.size == BUCKET_WORDS << bits
        self._table, self._shift = table, 64 - bits
        self._at = address_of(table)
        self._find, self._place = library.find_ghosts, library.place_ghosts

    def find(self, tags: U64) -> I64:
        """The number of each tag's ghost, -1 where there is none. Holds the interpreter's lock."""
        tags, numbers = np.ascontiguousarray(tags), np.empty(tags.size, np.int64)
        assert tags.dtype == np.uint64
        if tags.size:
            self._find(self._at, self._shift, start_of(tags), tags.size, address_of(numbers))
        return numbers

    def place(self, tags: U64) -> I64:
        """A number for each tag, -1 for what its bucket can't hold. Tags are written there."""
        tags, numbers = np.ascontiguousarray(tags), np.empty(tags.size, np.int64)
        assert tags.dtype == np.uint64
        if tags.size:
            at, spare = start_of(tags), np.empty(tags.size, np.uint64)
            self._place(
                self._at, self._shift, at, tags.size, address_of(numbers), address_of(spare)
            )
        return numbers


def maker() -> Callable[[I64, int], GhostTable] | None:
    """What makes one for a table; None where there is no library."""
    loaded = library()
    return None if loaded is None else lambda table, bits: GhostTable(loaded, table, bits)
