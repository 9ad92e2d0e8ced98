"""The extents: equal files in memory, every page of them there before the first store.

Pages are populated with MADV_POPULATE_WRITE: `fallocate` would reserve them too, but leaves
their zeroing to the first write, which then runs at a quarter of the speed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from kvd.pool.config import PoolConfig, PoolError

Progress = Callable[[int, int], None]  # bytes done, bytes in all

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
_ZEROS = bytes(1 << 20)

# By ctypes and not mmap.madvise, which keeps the GIL for as long as the kernel takes.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(mapping: mmap.mmap, offset: int, count: int, advice: int) -> None:
    """Have the kernel bring in [offset, offset + count) of a mapping; the GIL is released.

    OSError: ENOMEM or EFAULT where memory or file system is full, EINVAL on kernels before 5.14.
    """
    start = offset - offset % mmap.PAGESIZE
    anchor = ctypes.c_char.from_buffer(mapping)
    try:
        address = ctypes.addressof(anchor) + start
        while _libc.madvise(address, offset + count - start, advice) != 0:
            error = ctypes.get_errno()
            if error not in (errno.EINTR, errno.EAGAIN):
                raise OSError(error, os.strerror(error))
    finally:
        del anchor


class Extents:
    """Files `extents/NNNNN.kv` of one size, numbered from 0."""

    def __init__(self, config: PoolConfig) -> None:
        self.directory = config.directory / "extents"
        self.count = config.extents
        self.extent_bytes = config.extent_bytes
        self._threads = config.threads

    def path(self, extent: int) -> Path:
        return self.directory / f"{extent:05d}.kv"

    def inode(self, extent: int) -> int | None:
        """The file's inode number; None when there is no file."""
        try:
            return self.path(extent).stat().st_ino
        except FileNotFoundError:
            return None

    def missing(self) -> str:
        """Why the files are not the ones that the header promises; "" when they are."""
        for extent in range(self.count):
            try:
                found = self.path(extent).stat()
            except FileNotFoundError:
                return f"extent {extent} is missing"
            if found.st_size != self.extent_bytes:
                return f"extent {extent} has {found.st_size} bytes"
        return ""

    def remove_all(self) -> None:
        """Give the memory back, except what an undead mover still maps."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def create_all(self, progress: Progress) -> None:
        """Make and populate every extent, several at a time.

        PoolError when memory runs out; what was taken until then is given back.
        """
        self.directory.mkdir(mode=0o700, exist_ok=True)
        try:
            self._in_parallel(self.create, range(self.count), progress)
        except PoolError:
            self.remove_all()
            raise

    def create(self, extent: int) -> None:
        """Make one extent of zeros, populated, in the place of what was there."""
        self.path(extent).unlink(missing_ok=True)
        fd = os.open(self.path(extent), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, self.extent_bytes)
            with mmap.mmap(fd, self.extent_bytes) as mapping:
                populate(mapping, 0, self.extent_bytes, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which kernels before 5.14 say to the advice
                raise PoolError(
                    f"no memory for extent {extent} of {self.count} ({self.extent_bytes} bytes,"
                    f" {error.strerror}): the file system or the machine is full; lower the"
                    " pool's size"
                ) from error
            self._write_zeros(fd)
        finally:
            os.close(fd)

    def zero(self, extents: Iterable[int]) -> None:
        """Overwrite extents with zeros. May run beside everything else, in a thread."""
        for extent in extents:
            fd = os.open(self.path(extent), os.O_WRONLY)
            try:
                self._write_zeros(fd)
            finally:
                os.close(fd)

    def zero_all(self, extents: Iterable[int]) -> None:
        """Overwrite many extents with zeros, several at a time."""
        self._in_parallel(lambda extent: self.zero((extent,)), list(extents), lambda _a, _b: None)

    def _write_zeros(self, fd: int) -> None:
        offset = 0
        while offset < self.extent_bytes:
            piece = memoryview(_ZEROS)[: self.extent_bytes - offset]
            offset += os.pwrite(fd, piece, offset)

    def _in_parallel(
        self, work: Callable[[int], None], extents: range | list[int], progress: Progress
    ) -> None:
        total = len(extents) * self.extent_bytes
        done = 0
        with ThreadPoolExecutor(self._threads, thread_name_prefix="kvd-extents") as pool:
            futures = [pool.submit(work, extent) for extent in extents]
            try:
                for future in as_completed(futures):
                    future.result()
                    done += self.extent_bytes
                    progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
