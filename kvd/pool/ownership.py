"""One owner of a pool: a lock, and the end of the last owner's movers.

A mover that outlives its daemon may still write into extents. The next owner kills it before
it looks at the slot table. A pid alone names nobody (pids are reused), so each mover is recorded
with the start time that /proc gives, and only that very process is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvd.pool import lines
from kvd.pool.config import PoolError
from kvd.pool.extents import Extents


class MoverRecord(NamedTuple):
    """A process, told from any later one with its pid."""

    pid: int
    start_time: int  # clock ticks since boot: field 22 of /proc/<pid>/stat


def start_time_of(pid: int) -> int | None:
    """Start time of a process as /proc gives it; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything, so count from its end.
    return int(stat.rpartition(")")[2].split()[19])


class PoolLock:
    """The flock that makes this process the pool's owner, held until `release`."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise PoolError(
                f"{path.parent} is owned by another kvd (pid {owner or 'unknown'}): stop it, or"
                " give this one a directory of its own"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


class DirectoryLock:
    """The flock on a directory of extents, wherever it lies, held until `release`.

    On the directory itself: it may be on a file system whose files can't be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise PoolError(
                f"extents_directory {directory} is in use by another kvd: stop it, or give this"
                " one a directory of its own"
            ) from None

    def release(self) -> None:
        os.close(self._fd)


class MoverList:
    """The file `movers`: who may be writing into the extents."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._movers: dict[int, int] = {}

    def read_last_owner(self) -> list[MoverRecord]:
        """What the last owner left; damaged lines can't be acted on and are skipped."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        records = [lines.unseal(line) for line in content.splitlines()]
        return [MoverRecord(r["pid"], r["start_time"]) for r in records if r is not None]

    def replace(self, movers: Iterable[MoverRecord]) -> None:
        """Forget all others."""
        self._movers = dict(movers)
        self._write()

    def add(self, mover: MoverRecord) -> None:
        self._movers[mover.pid] = mover.start_time
        self._write()

    def remove(self, pid: int) -> None:
        self._movers.pop(pid, None)
        self._write()

    def _write(self) -> None:
        sealed = (lines.seal({"pid": p, "start_time": s}) for p, s in self._movers.items())
        lines.replace_file(self._path, b"".join(sealed))


def end_movers(movers: Iterable[MoverRecord], deadline_s: float) -> list[MoverRecord]:
    """Kill these processes and wait for their end; returns those still alive at the deadline.

    Never signals a process whose start time differs from the recorded one.
    """
    end = time.monotonic() + deadline_s
    with contextlib.ExitStack() as stack:
        waiting: dict[int, MoverRecord] = {}
        for mover in movers:
            try:
                pidfd = os.pidfd_open(mover.pid)
            except ProcessLookupError:
                continue
            stack.callback(os.close, pidfd)
            # Asked after the open: if it matches, the descriptor names that process or a dead one.
            if start_time_of(mover.pid) != mover.start_time:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            waiting[pidfd] = mover
        poll = select.poll()
        for pidfd in waiting:
            poll.register(pidfd, select.POLLIN)
        while waiting:
            left_ms = max(0, int((end - time.monotonic()) * 1000))
            ended = poll.poll(left_ms)
            for pidfd, _ in ended:
                poll.unregister(pidfd)
                del waiting[pidfd]
            if not ended and left_ms == 0:
                break
        return list(waiting.values())


def extents_mapped_by(pid: int, extents: Extents) -> frozenset[int]:
    """Extents that a process maps now; all of them where the kernel doesn't say.

    By inode, since a path may read differently in the other process's mount namespace.
    """
    try:
        text = Path(f"/proc/{pid}/maps").read_text()
    except ProcessLookupError:
        return frozenset()
    except OSError:
        return frozenset(range(extents.count))
    inodes = {int(line.split(maxsplit=5)[4]) for line in text.splitlines()}
    return frozenset(e for e in range(extents.count) if extents.inode(e) in inodes)
