"""A disk tier on a disk that is ill in the ways that a file says, for as long as it is there.

The file has a share of the calls, and names of ills: "0.2 eio torn". Some of them a disk confesses,
others not: what is lost, torn, rotten or gone astray was written without an error.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from kvd.tiers.disk.files import Buffers, SystemFiles
from kvd.tiers.disk.index_file import Changes, IndexFile
from kvd.tiers.disk.options import ALIGN
from kvd.tiers.disk.slab import HEADER_BYTES
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import TierOptions

ERRORS = {"eio": errno.EIO, "enospc": errno.ENOSPC}
# What each call may suffer.
ILLS = {
    "read": ("eio", "short", "slow", "rotten", "astray"),
    "write": ("eio", "enospc", "short", "slow", "rotten", "astray", "lost", "torn"),
    "reserve": ("enospc",),
    "zero": ("eio", "slow", "lost"),
    "sync": ("eio", "slow", "lost"),
    "index": ("eio", "enospc", "slow"),
}
EVERY_ILL = tuple(sorted({ill for ills in ILLS.values() for ill in ills}))
SLOW_SECONDS = 0.3
ASTRAY_BYTES = 16 * ALIGN


class Illness:
    """What a call suffers now. Any thread may ask."""

    def __init__(self, word: Path) -> None:
        self._word = word

    def of(self, call: str) -> str:
        """The name of an ill; none where the call is to go well, late perhaps."""
        try:
            share, *ills = self._word.read_text().split()
        except (OSError, ValueError):
            return ""
        possible = [ill for ill in ills if ill in ILLS[call]]
        if not possible or random.random() >= float(share):
            return ""
        ill = random.choice(possible)
        if ill == "slow":
            time.sleep(SLOW_SECONDS)
        if ill in ERRORS:
            raise OSError(ERRORS[ill], os.strerror(ERRORS[ill]))
        return ill


class IllFiles(SystemFiles):
    """The kernel's calls, some of which go wrong."""

    def __init__(self, illness: Illness) -> None:
        self._illness = illness

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        match self._illness.of("read"):
            case "short":
                return super().read(fd, half_of(buffers), offset)
            case "astray":
                return super().read(fd, buffers, elsewhere(offset))
            case "rotten":
                done = super().read(fd, buffers, offset)
                buffers[0][random.randrange(buffers[0].nbytes)] ^= 1 << random.randrange(8)
                return done
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        whole = sum(each.nbytes for each in buffers)
        match self._illness.of("write"):
            case "short":
                return super().write(fd, half_of(buffers), offset)
            case "astray":
                return super().write(fd, buffers, elsewhere(offset))
            case "lost":
                return whole
            case "torn":
                super().write(fd, half_of(buffers), offset)
                return whole
            case "rotten":
                done = super().write(fd, buffers, offset)
                rot(fd, offset)
                return done
        return super().write(fd, buffers, offset)

    def reserve(self, fd: int, size: int) -> None:
        self._illness.of("reserve")
        super().reserve(fd, size)

    def zero(self, fd: int, offset: int, size: int) -> None:
        if self._illness.of("zero") != "lost":
            super().zero(fd, offset, size)

    def sync(self, fd: int) -> None:
        if self._illness.of("sync") != "lost":
            super().sync(fd)


def half_of(buffers: Buffers) -> Buffers:
    """A part of them that may be moved past the page cache, and not all where that can be."""
    if len(buffers) > 1:
        return buffers[: len(buffers) // 2]
    size = buffers[0].nbytes // 2 // ALIGN * ALIGN
    return [buffers[0][: size or buffers[0].nbytes]]


def elsewhere(offset: int) -> int:
    """Another place of the slab, neither in its header nor behind its end."""
    return offset - ASTRAY_BYTES if offset >= HEADER_BYTES + ASTRAY_BYTES else offset


def rot(fd: int, offset: int) -> None:
    """Turn a bit over on the disk."""
    with closing(mmap.mmap(-1, ALIGN)) as buffer:
        os.preadv(fd, [buffer], offset)
        buffer[random.randrange(ALIGN)] ^= 1 << random.randrange(8)
        os.pwritev(fd, [buffer], offset)


def opened(options: TierOptions) -> DiskStore:
    """The store that the options describe; `word` is the file's path."""
    illness = Illness(Path(str(options["word"])))
    commit = IndexFile.commit

    def commit_perhaps(self: IndexFile, changes: Changes, *, durable: bool = False) -> None:
        try:
            illness.of("index")
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        commit(self, changes, durable=durable)

    IndexFile.commit = commit_perhaps  # type: ignore[method-assign]
    rest = {name: value for name, value in options.items() if name != "word"}
    return DiskStore(rest, IllFiles(illness))
