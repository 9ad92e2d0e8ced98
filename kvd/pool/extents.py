"""The extents: equal files in memory, every page of them there before the first store.

Pages are populated with MADV_POPULATE_WRITE: `fallocate` would reserve them too, but leaves
their zeroing to the first write, which then runs at a quarter of the speed. Files on hugetlbfs
can be mapped, but not written to: they are zeroed through a mapping.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

from kvd.linux import calls
from kvd.pool import nodes
from kvd.pool.config import FULL, PoolConfig, PoolError, what_is_short
from kvd.processes.mappings import ExtentFiles

Progress = Callable[[int, int], None]  # bytes done, bytes in all

_ZEROS = bytes(1 << 20)
_MARK = r"[0-9a-f]{32}\.pool"
_OURS = re.compile(rf"\d{{5,}}\.kv|{_MARK}")


def populate(mapping: mmap.mmap, offset: int, count: int, advice: int) -> None:
    """Have the kernel bring in [offset, offset + count) of a mapping; the GIL is released.

    OSError: ENOMEM or EFAULT where memory or file system is full, EINVAL on kernels before 5.14.
    """
    start = offset - offset % mmap.PAGESIZE
    with calls.address_of(mapping) as address:  # mmap.madvise would keep the GIL meanwhile
        calls.advise(address + start, offset + count - start, advice)


def _untold(_done: int, _total: int) -> None:
    pass


def remove_files(directory: Path) -> None:
    """Remove the extents in a directory and their mark, and nothing that is not a pool's.

    PoolError for one that is somebody else's to remove.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in directory.iterdir():
            if _OURS.fullmatch(path.name):
                _remove(path)


def first_stranger(directory: Path) -> Path | None:
    """What has the name of an extent and is no plain file, if anything has."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as found:
        for each in found:
            if _OURS.fullmatch(each.name) and not each.is_file(follow_symlinks=False):
                return Path(each.path)
    return None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise PoolError(
            f"{path} can't be removed: {error.strerror}; give the extents a directory of its own,"
            " which nobody but the daemon's user writes to"
        ) from error


def has_mark(directory: Path, mark: str) -> bool:
    """Whether the extents in a directory are those of the pool whose header says `mark`."""
    return (directory / f"{mark}.pool").exists()


def is_marked(directory: Path) -> bool:
    """Whether the extents of a pool of this user are in a directory, whichever pool that is."""
    own = os.geteuid()
    with contextlib.suppress(OSError), os.scandir(directory) as found:
        return any(
            re.fullmatch(_MARK, each.name) and each.stat(follow_symlinks=False).st_uid == own
            for each in found
        )
    return False


class Extents:
    """The pool's extents: files `NNNNN.kv` of one size, numbered from 0, in a directory of theirs.

    An empty file there is named by the mark of the pool that they belong to, so that another
    pool's bytes are never taken for this one's.
    """

    def __init__(
        self, config: PoolConfig, huge_page: int = 0, on: Sequence[nodes.Node] = ()
    ) -> None:
        """`huge_page`: size of the pages where they lie on hugetlbfs. `on`: the nodes there are."""
        self.files = ExtentFiles(config.extents_place, 0, config.extent_bytes)
        self.count = config.extents
        self.extent_bytes = config.extent_bytes
        self.nodes: tuple[int, ...] = ()  # of each extent; empty: all are alike
        self._threads = config.threads
        self.huge_page = huge_page
        self._by_number = {node.number: node for node in on}
        self.progress: Progress = _untold  # bytes done, bytes in all

    def inode(self, extent: int) -> int | None:
        """The file's inode number; None when there is no file."""
        try:
            return self.files.path(extent).stat().st_ino
        except FileNotFoundError:
            return None

    def missing(self, mark: str) -> str:
        """Why the files are not the ones that the header promises; "" when they are."""
        for extent in range(self.count):
            try:
                found = self.files.path(extent).stat()
            except FileNotFoundError:
                return f"extent {extent} is missing"
            if found.st_size != self.extent_bytes:
                return f"extent {extent} has {found.st_size} bytes"
        if not has_mark(self.files.directory, mark):
            return f"the extents in {self.files.directory} are another pool's"
        return ""

    def remove_all(self) -> None:
        """Give the memory back, except what an orphaned mover still maps."""
        remove_files(self.files.directory)

    def create_all(self, mark: str) -> None:
        """Make and populate every extent, several at a time, and mark them.

        PoolError when memory runs out; what was taken until then is given back.
        """
        try:
            self._in_parallel(self._make, range(self.count))
            (self.files.directory / f"{mark}.pool").touch(mode=0o600)
        except PoolError:
            self.remove_all()
            raise

    def create(self, extents: Iterable[int]) -> None:
        """Make extents of zeros, populated, in the place of what was there."""
        self._in_parallel(self._make, list(extents))

    def zero(self, extents: Iterable[int]) -> None:
        """Overwrite extents with zeros. May run beside everything else, in a thread."""
        for extent in extents:
            fd = os.open(self.files.path(extent), os.O_RDWR | os.O_NOFOLLOW)
            try:
                self._write_zeros(fd)
            finally:
                os.close(fd)

    def zero_all(self, extents: Iterable[int]) -> None:
        """Overwrite many extents with zeros, several at a time."""
        self._in_parallel(lambda extent: self.zero((extent,)), list(extents))

    def _make(self, extent: int) -> None:
        fd = self._new_file(self.files.path(extent))
        try:
            os.ftruncate(fd, self.extent_bytes)
            with mmap.mmap(fd, self.extent_bytes) as mapping:
                populate(mapping, 0, self.extent_bytes, calls.MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which kernels before 5.14 say to the advice
                where = "there are no more huge pages" if self.huge_page else "the file system or"
                where += "" if self.huge_page else " the machine is full"
                short = what_is_short(error, f"{where}; lower the pool's size")
                raise PoolError(
                    f"no memory for extent {extent} of {self.count} ({self.extent_bytes} bytes,"
                    f" {error.strerror}): {short}"
                ) from error
            self._write_zeros(fd)
        finally:
            os.close(fd)

    def _new_file(self, path: Path) -> int:
        path.unlink(missing_ok=True)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise PoolError(
                f"{path} can't be made ({error.strerror}): its file system takes no more files, and"
                f" the pool has {self.count} extents; allow it more (mount -o remount,nr_inodes=)"
                " or raise extent_bytes"
            ) from error

    def _write_zeros(self, fd: int) -> None:
        if self.huge_page:
            self._clear_mapped(fd)
            return
        offset = 0
        while offset < self.extent_bytes:
            piece = memoryview(_ZEROS)[: self.extent_bytes - offset]
            offset += os.pwrite(fd, piece, offset)

    def _clear_mapped(self, fd: int) -> None:
        """The pages are there, so no store into the mapping can fail."""
        with mmap.mmap(fd, self.extent_bytes) as mapping, calls.address_of(mapping) as address:
            calls.write_zeros(address, self.extent_bytes)

    def _in_parallel(self, work: Callable[[int], None], extents: Sequence[int]) -> None:
        """Each extent's work in a thread of its node, all nodes at once."""
        total = len(extents) * self.extent_bytes
        done = 0
        with contextlib.ExitStack() as stack:
            pools: list[ThreadPoolExecutor] = []
            futures: list[Future[None]] = []
            for node, share in self._by_node(extents).items():
                pools.append(stack.enter_context(self._threads_of(node)))
                futures += [pools[-1].submit(work, extent) for extent in share]
            try:
                for future in as_completed(futures):
                    future.result()
                    done += self.extent_bytes
                    self.progress(done, total)
            except BaseException:
                for pool in pools:
                    pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _by_node(self, extents: Iterable[int]) -> dict[nodes.Node | None, list[int]]:
        """Extents by the node that they were dealt to; None: wherever the kernel likes."""
        shares: dict[nodes.Node | None, list[int]] = {}
        for extent in extents:
            node = self._by_number.get(self.nodes[extent]) if self.nodes else None
            shares.setdefault(node, []).append(extent)
        return shares

    def _threads_of(self, node: nodes.Node | None) -> ThreadPoolExecutor:
        prefix = "kvd-extents"
        if node is None:
            return ThreadPoolExecutor(self._threads, thread_name_prefix=prefix)
        each = -(-self._threads // len(self._by_number))
        return ThreadPoolExecutor(
            each, thread_name_prefix=prefix, initializer=nodes.bind_thread, initargs=(node,)
        )
