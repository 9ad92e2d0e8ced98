"""One preallocated file that blocks lie in, opened past the page cache where that is possible."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
import struct
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path

from kvd.linux.limits import most_file_bytes
from kvd.tiers.disk.files import (
    Buffers,
    DiskFiles,
    are_the_kernels,
    is_unsupported,
    move_all,
    rounded_up,
)
from kvd.tiers.disk.options import ALIGN, DiskOptions
from kvd.tiers.disk.owner import NOT_PLAIN
from kvd.tiers.store import TierUnusable

log = logging.getLogger(__name__)

HEADER_BYTES = 1 << 20  # before the first region
BUFFER_BYTES = 1 << 20  # of one thread's buffer for what can't go past the page cache as it lies
_MAGIC = b"kvd slab"
_VERSION = 1
_HEADER = struct.Struct("<8sQQ16s")


class Slab:
    """The file `slab` of a directory.

    `identity` is drawn anew whenever it is remade: rows of another slab say nothing about it. One
    that is among those `taken` is remade: by the disks' identities blocks are spread over them.
    """

    def __init__(
        self, path: Path, options: DiskOptions, files: DiskFiles, taken: Collection[bytes] = ()
    ) -> None:
        self._path, self._files = path, files
        self._region_bytes = options.region_bytes
        self.regions = options.directory_bytes // options.region_bytes
        self.notes: list[str] = []
        self._zeros = mmap.mmap(-1, BUFFER_BYTES)
        self._fd, self.is_direct = self._open(options.direct)
        try:
            self._reserve()
            self.identity = self._begin(taken)
        except BaseException:
            self.close()
            raise

    def start_of(self, region: int) -> int:
        """Where a region begins in the file."""
        return HEADER_BYTES + region * self._region_bytes

    def read(self, buffers: Buffers, offset: int) -> None:
        """Fill them all. OSError."""
        move_all(self._files.read, self._fd, buffers, offset)

    def write(self, buffers: Buffers, offset: int) -> None:
        """Write them all. OSError."""
        move_all(self._files.write, self._fd, buffers, offset)

    @property
    def kernel_fd(self) -> int | None:
        """For who calls the kernel itself, past the page cache; None: nobody may."""
        return self._fd if self.is_direct and are_the_kernels(self._files) else None

    def wipe(self, offset: int, size: int) -> None:
        """Have zeros there. OSError."""
        try:
            self._files.zero(self._fd, offset, size)
        except OSError as error:
            if not is_unsupported(error):
                raise
            view = memoryview(self._zeros)
            for at in range(offset, offset + size, BUFFER_BYTES):
                self.write([view[: min(BUFFER_BYTES, offset + size - at)]], at)

    def sync(self) -> None:
        """Have all that was written and wiped on the disk. OSError."""
        self._files.sync(self._fd)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._zeros.close()

    def _open(self, direct: bool) -> tuple[int, bool]:
        """A descriptor, and whether it goes past the page cache."""
        flags = os.O_RDWR | os.O_CREAT
        for extra in (os.O_DIRECT, 0) if direct else (0,):
            try:
                fd = self._files.open(self._path, flags | extra)
            except OSError as error:
                if extra and error.errno == errno.EINVAL:
                    continue
                if error.errno == errno.EISDIR:
                    raise TierUnusable(NOT_PLAIN.format(self._path)) from error
                raise self._unusable("can't be opened", error) from error
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise TierUnusable(NOT_PLAIN.format(self._path))
            if extra and not self._takes_direct(fd):
                os.close(fd)
                continue
            if not extra:
                self.notes.append(f"{self._path}: through the page cache, without O_DIRECT")
            return fd, bool(extra)
        raise AssertionError("a file is open, or why not was raised")

    def _takes_direct(self, fd: int) -> bool:
        """Whether blocks of ALIGN bytes may be read so: some disks want larger ones."""
        with contextlib.closing(mmap.mmap(-1, ALIGN)) as buffer, memoryview(buffer) as view:
            try:
                self._files.read(fd, [view], 0)
            except OSError as error:
                return error.errno != errno.EINVAL
        return True

    def _reserve(self) -> None:
        size, had = self.start_of(self.regions), os.fstat(self._fd).st_size
        try:
            self._files.reserve(self._fd, HEADER_BYTES)
            self._require_room(size)
            self._files.reserve(self._fd, size)
        except OSError as error:
            if not is_unsupported(error):
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, had)  # what could be had fills the disk for nothing
                raise self._without_room(size, error) from error
            self.notes.append(f"{self._path}: the file system can't reserve room, and may run out")
        try:
            if os.fstat(self._fd).st_size != size:
                os.ftruncate(self._fd, size)
        except OSError as error:
            raise self._without_room(size, error) from error

    def _without_room(self, size: int, error: OSError) -> TierUnusable:
        is_ill = error.errno in (errno.EIO, errno.EROFS)  # of whatever size
        fix = "" if is_ill else "; lower directory_bytes"
        limit = most_file_bytes()
        if error.errno == errno.EFBIG and limit is not None and limit < size:
            fix += f", or raise LimitFSIZE= in the unit (ulimit -f), which is {limit} bytes"
        return self._unusable(f"can't have {size} bytes{fix}", error)

    def _require_room(self, size: int) -> None:
        """OSError where there can't be so much: to try would fill the file system meanwhile."""
        there = os.fstatvfs(self._fd)
        free = there.f_bfree if os.geteuid() == 0 else there.f_bavail
        has = os.fstat(self._fd).st_blocks * 512
        if size - has > free * there.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _begin(self, taken: Collection[bytes]) -> bytes:
        """The slab's identity; a new one where it has none that counts."""
        identity: bytes
        with self._one_block() as view:
            try:
                self.read([view], 0)
            except OSError as error:
                raise self._unusable("can't be read", error) from error
            magic, version, region_bytes, identity = _HEADER.unpack_from(view)
            known = (magic, version, region_bytes) == (_MAGIC, _VERSION, self._region_bytes)
            if known and any(identity) and identity not in taken:
                return identity
            if identity in taken:
                log.warning("%s is a copy of another disk's: its blocks are lost", self._path)
            elif any(view):
                log.warning("%s is of another kind or release: its blocks are lost", self._path)
            identity = uuid.uuid4().bytes
            view[:] = bytes(ALIGN)
            _HEADER.pack_into(view, 0, _MAGIC, _VERSION, self._region_bytes, identity)
            try:
                self.write([view], 0)
                self.sync()
            except OSError as error:
                raise self._unusable("can't be written to", error) from error
        return identity

    @contextlib.contextmanager
    def _one_block(self) -> Iterator[memoryview]:
        buffer = mmap.mmap(-1, rounded_up(_HEADER.size))
        with contextlib.closing(buffer), memoryview(buffer) as view:
            yield view

    def _unusable(self, what: str, error: OSError) -> TierUnusable:
        return TierUnusable(f"{self._path} {what}: {error.strerror}")
