"""The core's index by the native library: keys are sought and slots put in one by one, in one call.

`kvd/core/model/index.py` says what the arrays are, and does the same with numpy where this is not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.native import I64, U32, U64, Library, address_of, library, start_of

_ALL_BITS = (1 << 64) - 1


class _Index(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("tags", ctypes.c_void_p),
        ("scopes", ctypes.c_void_p),
        ("round", ctypes.c_uint64),
        ("split", ctypes.c_uint64),
    )


class KeyIndex:
    """Reads and writes the arrays of one index; they are C-contiguous, and stay where they are."""

    def __init__(self, library: Library, entries: U64, places: I64, tags: U64, scopes: U32) -> None:
        """entries: shape [buckets, ways]; the others: one element a slot."""
        assert entries.dtype == tags.dtype == np.uint64
        assert places.dtype == np.int64
        assert scopes.dtype == np.uint32
        self._slots = len(places)
        self._arrays: tuple[npt.NDArray[Any], ...] = (entries, places, tags, scopes)
        assert all(each.flags.c_contiguous for each in self._arrays)
        self._index = _Index(*map(address_of, self._arrays))
        self._at = ctypes.addressof(self._index)
        self._keys: dict[int, tuple[U64, int]] = {}  # by width, and where they begin
        self._find, self._insert = library.find_keys, library.insert_keys

    def resize(self, first_buckets: int, split: int) -> None:
        """Buckets at the start of this round of splits, and how many of them were split."""
        assert first_buckets.bit_count() == 1
        assert 0 <= split <= first_buckets
        assert first_buckets + split <= len(self._arrays[0])
        self._index.round, self._index.split = first_buckets, split

    def find(self, keys: U64, words: U64, seed: int, scope: int) -> tuple[U64, I64]:
        """The tag and the slot of each key in the scope with this seed, -1 where there is none.

        keys: of all slots, shape [slots, width], the same array for each width; words: those
        sought, shape [n, width], n > 0. Holds the interpreter's lock.
        """
        count, width = words.shape
        known = self._keys.get(width)
        if known is None:
            assert keys.flags.c_contiguous
            assert keys.shape == (self._slots, width)
            known = self._keys[width] = keys, address_of(keys)
        words = np.ascontiguousarray(words)
        assert words.dtype == np.uint64
        found = np.empty((2, count), dtype=np.uint64)
        at = address_of(found)
        self._find(
            self._at,
            known[1],
            width,
            start_of(words),
            count,
            seed & _ALL_BITS,
            scope,
            at,
            at + 8 * count,
        )
        return found[0], found[1].view(np.int64)

    def insert(self, slots: I64) -> I64:
        """Put slots in, of which none is in, each in the emptier of its buckets.

        Those that found both full; none of them has a place then.
        """
        slots = np.ascontiguousarray(slots)
        assert slots.dtype == np.int64
        full = np.empty(len(slots), dtype=np.int64)
        if not len(slots):
            return full
        went = self._insert(self._at, start_of(slots), len(slots), address_of(full))
        return full[:went]


def maker() -> Callable[[U64, I64, U64, U32], KeyIndex] | None:
    """What makes one for an index's arrays; None where there is no library."""
    loaded = library()
    return None if loaded is None else lambda *arrays: KeyIndex(loaded, *arrays)
