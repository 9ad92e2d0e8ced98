"""Bytes of the pool's file system that are kept from everybody else.

Tables are had whole at the start. What grows with use (the registry, and files that are written
anew beside the old ones) grows into the file `reserve`, which shrinks by as much: so a file system
that others fill stops nothing for a long time. Once it is used up, a write fails with ENOSPC, and
whoever wanted it tries again later. What was given is taken back when there is room again.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from kvd.pool.config import FULL, START_BYTES, PoolError, what_is_short

_PAGE = mmap.PAGESIZE


def have_all(fd: int, size: int, path: Path) -> None:
    """Make the file so long, with memory behind all of it; PoolError where there is none.

    Without that the first touch of a page on a full file system would be a SIGBUS.
    """
    try:
        os.ftruncate(fd, size)
        if os.fstat(fd).st_blocks * 512 < size:
            os.posix_fallocate(fd, 0, size)
    except OSError as error:
        full = "the file system of the pool is full; enlarge it or keep others' files out of it"
        raise PoolError(
            f"no memory for the {size} bytes of {path} ({error.strerror}):"
            f" {what_is_short(error, full)}"
        ) from error


class Reserve:
    """A file that keeps room for the registry, and is given up bit by bit."""

    def __init__(self, path: Path, whole: int) -> None:
        """Begins with what the last owner held: what is let go a neighbour may take at once.

        The last START_BYTES are given to nobody but the next start.
        """
        self._whole = -(-whole // _PAGE) * _PAGE
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        found = os.fstat(self._fd)
        held = min(self._whole, found.st_size, found.st_blocks * 512)
        self.held = held - held % _PAGE
        if self.held != found.st_size:
            os.ftruncate(self._fd, self.held)

    def let_go(self) -> None:
        """Give all of it up, for a pool that is made anew."""
        os.ftruncate(self._fd, 0)
        self.held = 0

    def close(self) -> None:
        os.close(self._fd)

    @property
    def whole(self) -> bool:
        """Whether it has all that it should."""
        return self.held == self._whole

    def fill(self) -> bool:
        """Take back what there is room for; whether that is all of it."""
        wanted = self._whole - self.held
        while wanted >= _PAGE:
            wanted -= wanted % _PAGE
            try:
                os.posix_fallocate(self._fd, self.held, wanted)
            except OSError:
                wanted //= 2
                continue
            self.held += wanted
            break
        return self.whole

    def write(self, size: int, work: Callable[[], None]) -> None:
        """Do work that writes about so many bytes; on a full file system it gets the reserve's.

        The work is done again then, from its beginning. OSError where that wasn't enough.
        """
        try:
            work()
        except OSError as error:
            if error.errno not in FULL or not self._give(size):
                raise
            work()

    def _give(self, size: int) -> bool:
        """Let go of that many bytes and two pages; False where there is nothing left."""
        if self.held <= START_BYTES:
            return False
        self.held = max(START_BYTES, self.held - (size // _PAGE + 2) * _PAGE)
        os.ftruncate(self._fd, self.held)
        return True
