"""Memory in small stretches, set aside before two sides are timed beside each other.

Linux hands out the smallest free stretches of memory first. On a machine that has run for a while,
who starts first gets pages that lie scattered, who starts later gets them side by side. In a
virtual machine the first one's copies then take up to a tenth longer. Who measures two daemons,
or a daemon and memcpy, takes the scattered pages away first, so that all get the same kind.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

from kvd.linux.control_groups import memory_limit
from kvd.linux.proc import memory_bytes

_FREE = Path("/proc/buddyinfo")
_WHOLE_ORDER = 9  # 2 MiB in pages of 4 KiB: what one entry of a page table's next level maps
_LEFT_FREE = 0.5  # of the memory that is available, whatever is scattered


def scattered_bytes(text: str) -> int:
    """Bytes that are free in stretches below 2 MiB, by the lines of /proc/buddyinfo."""
    total = 0
    for line in text.splitlines():
        counts = [int(word) for word in line.split("zone", 1)[1].split()[1:]]
        total += sum(count << order for order, count in enumerate(counts[:_WHOLE_ORDER]))
    return total * mmap.PAGESIZE


@contextlib.contextmanager
def set_aside() -> Iterator[int]:
    """Hold the scattered memory for as long as this lasts; how many bytes. None where unknown: 0.

    At most half of what is available, and of the memory limit, is held.
    """
    try:
        wanted = scattered_bytes(_FREE.read_text())
    except OSError:
        wanted = 0
    available = memory_bytes("MemAvailable") or 0
    most = _LEFT_FREE * min(available, memory_limit() or available)
    size = int(min(wanted, most)) // mmap.PAGESIZE * mmap.PAGESIZE
    if not size:
        yield 0
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.madvise(mmap.MADV_NOHUGEPAGE)
        for start in range(0, size, mmap.PAGESIZE):
            held[start] = 1
        yield size
