"""One owner of a pool: a lock, and the end of the last owner's movers.

A mover that outlives its daemon may still write into extents. The next owner kills it before
it looks at the slot table. A pid alone names nobody (pids are reused), so each mover is recorded
with the start time that /proc gives, and only that very process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvd.linux.own_directory import CLOSED, CLOSED_FIX, NotTrustedError, Wanted, require_own
from kvd.linux.proc import locker_of, mapped_inodes, start_time_of
from kvd.pool import sealed_json
from kvd.pool.config import CHECKSUM_TABLE, PoolConfig, PoolError
from kvd.pool.extents import Extents, first_stranger, is_marked, remove_files

MOST_MOVERS = 512  # noted at a time: more than the fleet has, and those that outlived their daemon
_LINE_BYTES = 128
_OWNER_BYTES = 32  # of the lock file: a pid
_PLACE_BYTES = 160  # behind it: where the pool's files lie
FILES = (
    "lock",
    "pool.header",
    "slots.table",
    "rows.table",
    CHECKSUM_TABLE,
    "generations.table",
    "registry.jsonl",
    "movers",
    "reserve",
)
_BLANK = b"\n"
# There is none of this pid, or a thread of another process has it as its number: which of them a
# kernel says then differs.
_NO_PROCESS = (errno.ESRCH, errno.ENOENT, errno.EINVAL)
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class MoverRecord(NamedTuple):
    """A mover's process, told apart from any later one with its pid."""

    pid: int
    start_time: int  # clock ticks since boot: field 22 of /proc/<pid>/stat


@dataclass(frozen=True, slots=True)
class Orphan:
    """A mover of an earlier owner that can't be ended, and what it keeps from this one."""

    pid: int
    state: str  # as /proc has it: D waits in the kernel
    extents: int  # that it maps, of this pool or of one that was here before
    slots: int  # free ones, in rows that it may still write to
    slot_bytes: int


def own_places(config: PoolConfig) -> None:
    """Have the pool's directories to ourselves; PoolError where that can't be."""
    require_apart(config)
    _own(Wanted("pool_directory", config.directory))
    if config.extents_directory is not None:
        _own(Wanted("extents_directory", config.extents_directory))
        require_writable(config.extents_directory)
    require_files(config)


def _own(wanted: Wanted) -> None:
    try:
        require_own(wanted)
    except NotTrustedError as error:
        raise PoolError(str(error)) from error
    except OSError as error:
        fix = "name a directory that the daemon's user may write to"
        if error.errno == errno.EROFS:
            fix = CLOSED_FIX
        raise PoolError(
            f"{wanted.setting} {wanted.path} can't be used: {error.strerror}; {fix}"
        ) from error


def require_writable(extents_directory: Path) -> None:
    """PoolError where this user may make no files there."""
    if not os.access(extents_directory, os.W_OK | os.X_OK):
        raise PoolError(f"extents_directory {extents_directory} can't be written to: {CLOSED_FIX}")


def require_apart(config: PoolConfig) -> None:
    """PoolError where a directory is another pool's, or in one: whose daemon is away would lose its
    extents to this pool, and this pool its files to whoever removes that one.
    """
    own = Path(os.path.realpath(config.directory))  # Path.resolve raises at a loop of links
    extents = Path(os.path.realpath(config.extents_place))
    of_extents = "extents_directory" if config.extents_directory is not None else "pool_directory"
    for setting, place in (("pool_directory", own), (of_extents, extents)):
        for above in (place, *place.parents):
            if above != own and _has_own_file(above, "pool.header"):
                raise _anothers(f"{setting} {place} is in the directory of another pool, {above}")
    if not _has_own_file(own, "lock") and is_marked(own):
        raise _anothers(f"pool_directory {own} has the extents of another pool")


def _anothers(what: str) -> PoolError:
    return PoolError(
        f"{what}: name one that is not, or remove that pool's files where nobody needs them"
    )


def _has_own_file(directory: Path, name: str) -> bool:
    """False of one that another user made: in a directory like /dev/shm anyone may."""
    try:
        found = (directory / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def require_files(config: PoolConfig) -> None:
    """PoolError where a directory, say, has the name of one of the pool's files."""
    for name in FILES:
        for path in (config.directory / name, config.directory / f"{name}.new"):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISREG(path.lstat().st_mode):
                    raise _no_plain_file(path, "pool_directory")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(config.extents_place.lstat().st_mode):
            raise PoolError(
                f"{config.extents_place} is no directory, and the pool's extents are in one of that"
                " name: remove it, or name another extents_directory"
            )
    if stranger := first_stranger(config.extents_place):
        raise _no_plain_file(stranger, "extents_directory")


def _no_plain_file(path: Path, setting: str) -> PoolError:
    return PoolError(
        f"{path} is no plain file, and the pool has one of that name: remove it, or name another"
        f" {setting}"
    )


def own_pool(path: Path) -> int:
    """The descriptor of the lock file that makes this process the pool's owner, until it is closed.

    PoolError where another process is.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno not in CLOSED:
            raise
        raise PoolError(
            f"pool_directory {path.parent} can't be written to ({error.strerror}): {CLOSED_FIX}"
        ) from error
    try:
        if not _locked(fd):
            owner = os.pread(fd, _OWNER_BYTES, 0).decode(errors="replace").strip()
            raise PoolError(
                f"{path.parent} is owned by another kvd (pid {owner or 'unknown'}): stop it, or"
                " give this one a directory of its own"
            )
        # Over what is there: a page that is let go on a full file system is not had again.
        os.pwrite(fd, f"{os.getpid()}\n".ljust(_OWNER_BYTES).encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def note_place(lock: int, config: PoolConfig) -> None:
    """Say in the lock file which files the pool is, for `why_elsewhere` at the next start.

    They are told by their numbers: names are the same where a copy was put in their place.
    """
    line = sealed_json.seal({"files": _numbers(lock, config)}, _PLACE_BYTES)
    if os.pread(lock, len(line), _OWNER_BYTES) != line:
        os.pwrite(lock, line, _OWNER_BYTES)


def why_elsewhere(lock: int, config: PoolConfig, extents_directory: str) -> str:
    """Why what lies here may be no pool, whose header names that directory of extents; "" where
    the files are the last owner's own, whatever their directories are called now.

    Tables and bytes that were copied one after the other, while a daemon changed them, don't
    belong together.
    """
    noted = _noted(lock)
    if noted == _numbers(lock, config):
        return ""
    now = str(config.extents_place)
    if extents_directory != now:
        return (
            f"the pool was made with extents_directory = {extents_directory}, configured is {now}"
        )
    if noted is None:
        return ""
    return "its files are a copy, whose tables and bytes may be of different times"


def why_not_here(config: PoolConfig, extents_directory: str) -> str:
    """The same before the lock is had."""
    if not config.extents_place.is_dir():
        return "the extents are missing"
    lock = config.directory / "lock"
    fd = os.open(lock if lock.exists() else os.devnull, _READ)  # none says as much as an empty one
    try:
        return why_elsewhere(fd, config, extents_directory)
    finally:
        os.close(fd)


def is_copied_here(lock: int, config: PoolConfig) -> bool:
    """Whether the tables are a copy: where they came from the pool itself may lie yet, and be
    started again. False where nobody knows.
    """
    noted = _noted(lock)
    return noted is not None and noted[:2] != _numbers(lock, config)[:2]


def _noted(lock: int) -> list[str] | None:
    """What `note_place` wrote; None where it says nothing, as of earlier releases."""
    said = sealed_json.unseal(os.pread(lock, _PLACE_BYTES, _OWNER_BYTES)) or {}
    found = said.get("files")
    return found if isinstance(found, list) else None


def _numbers(lock: int, config: PoolConfig) -> list[str]:
    found = (os.fstat(lock), config.directory.stat(), config.extents_place.stat())
    return [f"{each.st_dev}:{each.st_ino}" for each in found]


def refuse_owned(config: PoolConfig) -> None:
    """PoolError where a living daemon has this pool, or its extents. Takes no lock itself."""
    for place, locked in (
        (f"pool_directory {config.directory}", config.directory / "lock"),
        (f"extents_directory {config.extents_place}", config.extents_place),
    ):
        with contextlib.suppress(OSError):  # it is not there, or not ours to look at
            owner = locker_of(locked)
            if owner is not None:
                raise PoolError(
                    f"{place} is owned by another kvd (pid {owner}): stop it, or give this one a"
                    " directory of its own"
                )


def own_directory(directory: Path) -> int:
    """The same for a directory of extents, wherever it is.

    By the directory itself: it may be on a file system whose files can't be written to.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not _locked(fd):
        os.close(fd)
        raise PoolError(
            f"extents_directory {directory} is in use by another kvd: stop it, or give this"
            " one a directory of its own"
        )
    return fd


def remove_left(directory: Path) -> None:
    """Give back the extents of a pool that was here, unless a daemon uses their directory.

    As it does where this pool is a copy: its header says where the other one's lie.
    """
    try:
        fd = own_directory(directory)
    except (PoolError, FileNotFoundError, NotADirectoryError):
        return
    try:
        remove_files(directory)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    """Whether the flock of it is ours; False: somebody else's."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


class MoverList:
    """The file `movers`: who may be writing into the extents.

    Its lines all have one length and are there from `replace` on, so that `add` and `remove`
    need neither room in the file system nor a descriptor: whatever is short, a mover that
    started is known to the next owner, and one that ended takes nothing along.

    A line says in which directory it was written: in a copy of a pool's files stand the movers of
    another daemon, which may live and serve.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        found = path.parent.stat()
        self._place = f"{found.st_dev}:{found.st_ino}"
        self._fd = -1
        self._lines: dict[int, int] = {}  # by pid

    def read_last_owner(self) -> list[MoverRecord]:
        """What the last owner left; damaged lines can't be acted on and are skipped."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        lines = [self._mover_of(sealed_json.unseal(line)) for line in content.splitlines()]
        return [mover for mover in lines if mover is not None][:MOST_MOVERS]

    def replace(self, movers: Iterable[MoverRecord]) -> None:
        """Forget all others, and take the room for as many as there may be."""
        kept = list(movers)
        assert len(kept) <= MOST_MOVERS, "more movers were read than a list holds"
        places = self._places(kept)
        if places is None:
            sealed = [self._line(mover) for mover in kept]
            content = b"".join(sealed).ljust(MOST_MOVERS * _LINE_BYTES, _BLANK)
            sealed_json.replace_file(self._path, content)
            places = {mover.pid: line for line, mover in enumerate(kept)}
        self.close()
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._lines = places
        for line in set(range(MOST_MOVERS)) - set(places.values()):
            os.pwrite(self._fd, _BLANK * _LINE_BYTES, line * _LINE_BYTES)

    def _places(self, kept: list[MoverRecord]) -> dict[int, int] | None:
        """In which lines of the file these stand, so that it can stay: a new one takes room."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        if len(content) != MOST_MOVERS * _LINE_BYTES:
            return None
        starts = range(0, len(content), _LINE_BYTES)
        found = {content[start : start + _LINE_BYTES]: start // _LINE_BYTES for start in starts}
        places = {mover.pid: found.get(self._line(mover), -1) for mover in kept}
        return None if -1 in places.values() else places

    def add(self, mover: MoverRecord) -> None:
        """OSError where as many are noted as the list holds."""
        taken = set(self._lines.values())
        line = self._lines.get(mover.pid)
        if line is None:
            line = next((n for n in range(MOST_MOVERS) if n not in taken), None)
        if line is None:
            raise OSError(errno.ENOSPC, f"{MOST_MOVERS} movers are noted", str(self._path))
        os.pwrite(self._fd, self._line(mover), line * _LINE_BYTES)
        self._lines[mover.pid] = line

    def remove(self, pid: int) -> None:
        """Nothing happens where no such mover is noted."""
        line = self._lines.pop(pid, None)
        if line is not None:
            os.pwrite(self._fd, _BLANK * _LINE_BYTES, line * _LINE_BYTES)

    def close(self) -> None:
        """Let go of the file, which stays for the next owner."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _mover_of(self, record: Mapping[str, Any] | None) -> MoverRecord | None:
        """None where it names no process, as a line of another file doesn't, or none of ours."""
        read = (record or {}).get
        pid, start_time = read("pid"), read("start_time")
        if type(pid) is not int or type(start_time) is not int or not 0 < pid < 1 << 31:
            return None
        if read("place", self._place) != self._place:  # earlier releases don't say
            return None
        return MoverRecord(pid, start_time)

    def _line(self, mover: MoverRecord) -> bytes:
        said = {"pid": mover.pid, "start_time": mover.start_time, "place": self._place}
        line = sealed_json.seal(said, _LINE_BYTES)
        assert len(line) == _LINE_BYTES, f"{mover} doesn't fit in a line"
        return line


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
            except OSError as error:
                if error.errno not in _NO_PROCESS:
                    raise
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
        inodes = mapped_inodes(pid)
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()
    except OSError:
        return frozenset(range(extents.count))
    return frozenset(e for e in range(extents.count) if extents.inode(e) in inodes)
