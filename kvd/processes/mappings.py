"""Whole files mapped shared and writable, and their memory mapped ahead of use."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.linux import calls

Bytes = npt.NDArray[np.uint8]

WARM_BYTES = 16 << 20  # between two looks at keep_going


@dataclass(slots=True)
class Mapping:
    """A whole file, mapped shared and writable."""

    mapped: mmap.mmap
    view: Bytes

    @classmethod
    def of(cls, fd: int, size: int) -> Mapping:
        mapped = mmap.mmap(fd, size)
        return cls(mapped, np.frombuffer(mapped, dtype=np.uint8))

    @property
    def address(self) -> int:
        return self.view.ctypes.data

    def close(self) -> None:
        """Unmap it. Nobody else may hold a view."""
        del self.view
        self.mapped.close()


@dataclass(frozen=True, slots=True)
class ExtentFiles:
    """Where a pool's extents lie, and how large each is.

    inode: of the directory; another one there is another pool's. 0: any.
    """

    directory: Path
    inode: int
    extent_bytes: int

    def path(self, extent: int) -> Path:
        """File of one extent."""
        return self.directory / f"{extent:05d}.kv"


def map_extent(files: ExtentFiles, extent: int) -> Mapping:
    """The extent's file, mapped. OSError where it can't be had, is too short or another pool's.

    Whatever this process forks has it not: only this process's end must prove that nobody writes.
    """
    path = files.path(extent)
    place = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if files.inode not in {0, os.fstat(place).st_ino}:
            raise OSError(f"{path.parent} is another pool's by now")
        fd = os.open(path.name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=place)
    finally:
        os.close(place)
    try:
        size = os.fstat(fd).st_size
        if size < files.extent_bytes:
            raise OSError(f"{path} has {size} bytes, not {files.extent_bytes}")
        mapping = Mapping.of(fd, files.extent_bytes)
        mapping.mapped.madvise(mmap.MADV_DONTFORK)
        return mapping
    finally:
        os.close(fd)


def populate(address: int, size: int) -> None:
    """Map these pages now. Where the kernel is too old first uses are slower, nothing else.

    Reading maps 16 present pages a fault, writable at once in a shared mapping. Populating for
    writing maps one: 3 to 4 x slower.
    """
    with contextlib.suppress(OSError):
        calls.advise(address, size, calls.MADV_POPULATE_READ)


def warm(mapping: Mapping, keep_going: Callable[[], bool]) -> bool:
    """Map every page of it, in steps. False: told to stop before the end."""
    size = len(mapping.view)
    for start in range(0, size, WARM_BYTES):
        if not keep_going():
            return False
        populate(mapping.address + start, min(WARM_BYTES, size - start))
    return True
