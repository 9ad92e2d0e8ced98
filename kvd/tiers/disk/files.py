"""What the disk tier asks of the kernel: a seam, so that tests can have it fail."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kvd.linux import calls
from kvd.tiers.disk.options import ALIGN

MAX_PARTS_AT_ONCE = 512  # views in one call to the kernel, which takes up to IOV_MAX = 1024
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

Buffers = Sequence[memoryview]
Step = Callable[[int, Buffers, int], int]


class DiskFiles(Protocol):
    """Calls on slab files. Each may raise OSError; reads and writes may do less than asked."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor, the file made with mode 0600 where the flags say so."""

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        """preadv(2)."""

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        """pwritev(2)."""

    def reserve(self, fd: int, size: int) -> None:
        """Have room for so many bytes from the file's beginning, as far as can be had."""

    def zero(self, fd: int, offset: int, size: int) -> None:
        """Have zeros there, and keep the room."""

    def sync(self, fd: int) -> None:
        """Have all that was written on the disk."""


class SystemFiles:
    """The kernel's own."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def reserve(self, fd: int, size: int) -> None:
        calls.allocate(fd, 0, 0, size)

    def zero(self, fd: int, offset: int, size: int) -> None:
        keep = calls.FALLOC_FL_KEEP_SIZE
        try:
            calls.allocate(fd, calls.FALLOC_FL_ZERO_RANGE | keep, offset, size)
        except OSError as error:
            if not is_unsupported(error):
                raise
            calls.allocate(fd, calls.FALLOC_FL_PUNCH_HOLE | keep, offset, size)
            with contextlib.suppress(OSError):  # the zeros are there, if not the room
                calls.allocate(fd, keep, offset, size)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


def are_the_kernels(files: DiskFiles) -> bool:
    """Whether reads and writes are the kernel's own calls: the native library may make them."""
    kind = type(files)
    return kind.read is SystemFiles.read and kind.write is SystemFiles.write


def move_all(step: Step, fd: int, buffers: Buffers, offset: int) -> None:
    """Read or write every byte, again where the kernel did less. OSError where it does nothing."""
    left = list(buffers)
    while left:
        count = step(fd, left[:MAX_PARTS_AT_ONCE], offset)
        if count <= 0:
            raise OSError(errno.EIO, "the file ends too early")
        offset += count
        done = 0
        while count and count >= left[done].nbytes:
            count -= left[done].nbytes
            done += 1
        del left[:done]
        if count:
            left[0] = left[0][count:]


def is_unsupported(error: OSError) -> bool:
    """Whether it says that there is no such operation here, and not that it failed."""
    return error.errno in _UNSUPPORTED


def rounded_up(size: int) -> int:
    """To a multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN
