"""Which pages of a memory file are there, so that a copy need not make those that are not.

To read a page of a mapped memory file that was never written is to make it: it counts against
this process's control group, and stays. A copy reads such places through the file instead,
where a hole is zeros and nothing is made.

What is known here is a hint. A page that was there and is a hole by now is made again, a page
that is there by now is read through the file: the bytes are right either way.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np
import numpy.typing as npt

from kvd.linux.calls import present_pages

I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.uint8]

# Pages that are asked about together, when one of them is missing: its neighbours come next. And
# what is there as a whole is looked up by this unit.
_STRETCH = 256


class Presence:
    """Which pages of one mapped file the kernel has in memory. Any thread."""

    def __init__(self, address: int, size: int) -> None:
        self.full = False  # every page is known to be there
        self._address = address
        self._pages = -(-size // mmap.PAGESIZE)
        self._missing = self._pages
        # A byte a page, and no memory for those that nobody has asked about.
        self._known: Flags = _sparse_flags(self._pages)
        self._whole: Flags = _sparse_flags(-(-self._pages // _STRETCH))
        self._lock = threading.Lock()

    def learn(self, first: int, count: int) -> Flags:
        """Ask the kernel about these pages; 1 for those that are there."""
        count = min(count, self._pages - first)
        found: Flags = np.zeros(count, dtype=np.uint8)
        start = self._address + first * mmap.PAGESIZE
        if not present_pages(start, count * mmap.PAGESIZE, found.ctypes.data):
            return np.zeros(count, dtype=np.uint8)
        found &= 1
        if not found.any():
            return found  # to note that would take memory for holes, of which there is no end
        with self._lock:
            known = self._known[first : first + count]
            self._missing -= int(np.count_nonzero(found > known))
            known |= found
            for stretch in range(first // _STRETCH, -(-(first + count) // _STRETCH)):
                begin = stretch * _STRETCH
                self._whole[stretch] = self._known[begin : begin + _STRETCH].all()
            self.full = self._missing == 0
        return found

    def is_told(self) -> bool:
        """Whether the kernel answers at all here; a filter of system calls may refuse."""
        found = np.zeros(1, dtype=np.uint8)  # which must outlive the call
        return present_pages(self._address, mmap.PAGESIZE, found.ctypes.data)

    def covers(self, starts: I64, size: int) -> bool:
        """Whether every page of these stretches of `size` bytes is there."""
        if self.full:
            return True
        if self._whole[_units_of(starts, size, _STRETCH * mmap.PAGESIZE)].all():
            return True
        pages = _units_of(starts, size, mmap.PAGESIZE)
        missing = pages[self._known[pages] == 0]
        if not len(missing):
            return True
        for stretch in np.unique(missing // _STRETCH).tolist():
            self.learn(stretch * _STRETCH, _STRETCH)
        return bool(self._known[missing].all())


def _sparse_flags(count: int) -> Flags:
    """So many zeros, of which only pages that are written take memory.

    numpy asks the kernel for huge pages: one flag would take 2 MiB, 512 times the engine's page.
    """
    kept = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        kept.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(kept, dtype=np.uint8)


def _units_of(starts: I64, size: int, unit: int) -> I64:
    """Numbers of the pages, or stretches of them, that are touched; some stand there twice."""
    first = starts // unit
    last = (starts + size - 1) // unit
    most = int((last - first).max()) + 1
    numbers: I64 = np.minimum(first[:, None] + np.arange(most), last[:, None]).ravel()
    return numbers
