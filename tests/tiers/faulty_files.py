"""Slab files that fail when told to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from kvd.tiers.disk.files import Buffers, SystemFiles

# Given the call's name and its offset: None to let it be, an errno, or 0 to do half of it.
Fault = Callable[[str, int], int | None]
HALF = 0


class FaultyFiles(SystemFiles):
    """The kernel's own, but for what `fault` says; `refuses_direct` is like a file system's."""

    def __init__(self, *, refuses_direct: bool = False) -> None:
        self.fault: Fault = lambda call, offset: None
        self._refuses_direct = refuses_direct

    def open(self, path: Path, flags: int) -> int:
        if self._refuses_direct and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return super().open(path, flags)

    def read(self, fd: int, buffers: Buffers, offset: int) -> int:
        return super().read(fd, self._limited("read", buffers, offset), offset)

    def write(self, fd: int, buffers: Buffers, offset: int) -> int:
        return super().write(fd, self._limited("write", buffers, offset), offset)

    def reserve(self, fd: int, size: int) -> None:
        self._limited("reserve", (), 0)
        super().reserve(fd, size)

    def zero(self, fd: int, offset: int, size: int) -> None:
        self._limited("zero", (), offset)
        super().zero(fd, offset, size)

    def sync(self, fd: int) -> None:
        self._limited("sync", (), 0)
        super().sync(fd)

    def _limited(self, call: str, buffers: Buffers, offset: int) -> Buffers:
        fault = self.fault(call, offset)
        if fault is None:
            return buffers
        if fault == HALF:
            size = buffers[0].nbytes // 2 // 4096 * 4096
            return [buffers[0][:size]] if size else buffers[:1]
        raise OSError(fault, os.strerror(fault))
