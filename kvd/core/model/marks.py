"""A bit for each tag, in a table of one size: of what somebody was told."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64, Bools
from kvd.core.sparse import sparse_zeros

MARKS = 1 << 26  # a power of two; 8 MiB of bits, which take memory where they are set
_EIGHT = np.uint64(3)  # bits of a number that say which bit of a byte

_Bytes = npt.NDArray[np.uint8]


class TagMarks:
    """Tags that share a bit are marked, and are not, together."""

    def __init__(self) -> None:
        self.any = False  # one is set, or was
        self._bytes: _Bytes = sparse_zeros(MARKS // 8, np.uint8)

    def set(self, tags: U64) -> None:
        """These are marked."""
        places, bits = _bits(tags)
        np.bitwise_or.at(self._bytes, places, bits)
        self.any = True

    def clear(self, tags: U64) -> None:
        """These are not, any more."""
        places, bits = _bits(tags)
        np.bitwise_and.at(self._bytes, places, ~bits)

    def has(self, tags: U64) -> Bools:
        """Which of these are marked."""
        places, bits = _bits(tags)
        marked: Bools = (self._bytes[places] & bits) != 0
        return marked


def _bits(tags: U64) -> tuple[npt.NDArray[np.int64], _Bytes]:
    numbers = tags & np.uint64(MARKS - 1)
    places = (numbers >> _EIGHT).astype(np.int64)
    bits: _Bytes = np.left_shift(np.uint8(1), (numbers & np.uint64(7)).astype(np.uint8))
    return places, bits
