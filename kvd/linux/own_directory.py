"""Directories that nobody but the daemon's user and root can change, or have made ready for it.

Who may write to a directory above decides what a path names; who made a directory may still have
it open, and have laid files, links or further names of files into it. So a path is walked from
the root by descriptors, each step looked at before the next, and what lies in the last directory
is looked at one by one. What was found so can't be changed by others from then on: paths below it
may be used like the descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_LINKS = 40  # followed in one path, as the kernel does
_ROOT = 0
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What a read may wait for without end, or never end of.
_WAITED_FOR = (stat.S_ISFIFO, stat.S_ISCHR, stat.S_ISBLK)
_WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# A directory that the daemon may not write to, and what to do.
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
CLOSED_FIX = (
    "mount its file system for writing, let kvd write there (under systemd: ReadWritePaths= of its"
    " unit), or name another directory"
)


class NotTrustedError(Exception):
    """Others can change, or may have made, what the daemon would rely on; names the fix."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A directory that is to be used. `setting` names it in what is said."""

    setting: str
    path: Path
    mode: int = 0o700  # that it is made with where there is none

    def refused(self, why: str) -> NotTrustedError:
        return NotTrustedError(f"{self.setting} {self.path} is not safe to use: {why}")


def require_place(wanted: Wanted) -> None:
    """Make the directory where there is none; others can't put another thing in its place.

    It may be root's or the daemon user's; with the sticky bit, like /tmp, everybody may write.
    OSError where it can't be made, NotTrustedError where somebody else could change it.
    """
    os.close(_walk(wanted, wanted.path.absolute()))


def require_own(wanted: Wanted) -> None:
    """`require_place`, and the directory and all in it are the daemon user's alone.

    A link at its end is refused, whoever made it; so is what lies in it and is a link, somebody
    else's, known by a further name, writable by others, or a pipe or device.
    """
    place = wanted.path.absolute()
    parent = _walk(wanted, place.parent)
    try:
        directory = _step(wanted, parent, place)
    finally:
        os.close(parent)
    try:
        found = os.fstat(directory)
        _require_mine(wanted, place, found)
        if found.st_mode & _WRITE_BY_OTHERS:
            raise wanted.refused(
                f"others may write to it (mode {_mode(found)}); make it the daemon's alone"
                f" (chmod 0700 {_quoted(place)}), once nothing of others is in it"
            )
        _require_own_entries(wanted, directory, place)
    finally:
        os.close(directory)


def _walk(wanted: Wanted, path: Path) -> int:
    """A descriptor of the directory, each one above it looked at; made where there is none."""
    here, at = os.open("/", _STEP), Path("/")
    try:
        _require_steady(wanted, at, os.fstat(here))
        names = deque(path.parts[1:])
        links = 0
        while names:
            name = names.popleft()
            target = _link_at(wanted, here, at / name)
            if target is not None:
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                names.extendleft(reversed(Path(target).parts))
                continue
            if name == "/":
                following, at = os.open("/", _STEP), Path("/")
            else:
                at = at / name if name != ".." else at.parent
                following = _step(wanted, here, at, name)
            os.close(here)
            here = following
            _require_steady(wanted, at, os.fstat(here))
    except BaseException:
        os.close(here)
        raise
    return here


def _link_at(wanted: Wanted, directory: int, path: Path) -> str | None:
    """Where a link leads that one of us made; None where there is none."""
    name = path.name
    if not name or name == "..":
        return None
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(found.st_mode):
        return None
    if found.st_uid not in (_ROOT, os.geteuid()):
        raise wanted.refused(
            f"{path} is a link that uid {found.st_uid} made; remove it, or name another directory"
        )
    return os.readlink(name, dir_fd=directory)


def _step(wanted: Wanted, parent: int, path: Path, name: str = "") -> int:
    """A descriptor of a directory in another, made where there is none."""
    name = name or path.name
    try:
        return os.open(name, _STEP, dir_fd=parent)
    except FileNotFoundError:
        os.mkdir(name, wanted.mode, dir_fd=parent)
        return os.open(name, _STEP, dir_fd=parent)
    except NotADirectoryError:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode):
            raise
        raise wanted.refused(
            f"{path} is a link; remove it, or name the directory that it should lead to"
        ) from None


def _require_steady(wanted: Wanted, path: Path, found: os.stat_result) -> None:
    """Nobody but root and the daemon's user can rename or remove what lies there."""
    if found.st_uid not in (_ROOT, os.geteuid()):
        raise wanted.refused(
            f"{path} belongs to uid {found.st_uid}, not to the daemon's user (uid"
            f" {os.geteuid()}) or root; remove it, give it to the daemon's user, or name another"
        )
    if found.st_mode & _WRITE_BY_OTHERS and not found.st_mode & stat.S_ISVTX:
        raise wanted.refused(
            f"others may write to {path} (mode {_mode(found)}) and so replace what is in it;"
            f" take that away (chmod go-w {_quoted(path)}), or set the sticky bit (chmod +t"
            f" {_quoted(path)})"
        )


def _require_mine(
    wanted: Wanted, path: Path, found: os.stat_result, otherwise: str = "remove it"
) -> None:
    if found.st_uid != os.geteuid():
        raise wanted.refused(
            f"{path} belongs to uid {found.st_uid}, not to the daemon's user (uid {os.geteuid()}):"
            f" whoever made it could read and forge KV; {otherwise}, or name another"
        )


def _require_own_entries(wanted: Wanted, directory: int, path: Path) -> None:
    """Everything in it, and in its directories, is the daemon user's alone."""
    given = (
        "if that was an earlier daemon, give all of its files to this one's user"
        f" (chown -R {os.geteuid()} {_quoted(wanted.path.absolute())}); else remove them"
    )
    for name, found in _entries(directory):
        entry = path / name
        if stat.S_ISLNK(found.st_mode):
            raise wanted.refused(f"{entry} is a link; remove it")
        _require_mine(wanted, entry, found, otherwise=given)
        if stat.S_ISDIR(found.st_mode):
            _require_own_subdirectory(wanted, directory, entry, found)
            continue
        if any(kind(found.st_mode) for kind in _WAITED_FOR):
            raise wanted.refused(f"{entry} is a pipe or a device; remove it")
        if stat.S_ISREG(found.st_mode) and found.st_nlink != 1:
            raise wanted.refused(
                f"{entry} has {found.st_nlink} names, so that others may reach it (hard links);"
                " remove it"
            )
        if not stat.S_ISSOCK(found.st_mode):  # of one it says who may connect
            _require_unwritable(wanted, entry, found)


def _require_own_subdirectory(
    wanted: Wanted, parent: int, path: Path, found: os.stat_result
) -> None:
    _require_unwritable(wanted, path, found)
    inner = os.open(path.name, _STEP, dir_fd=parent)
    try:
        _require_own_entries(wanted, inner, path)
    finally:
        os.close(inner)


def _require_unwritable(wanted: Wanted, path: Path, found: os.stat_result) -> None:
    if found.st_mode & _WRITE_BY_OTHERS:
        raise wanted.refused(f"others may write to {path} (mode {_mode(found)}); remove it")


def _entries(directory: int) -> Iterator[tuple[str, os.stat_result]]:
    """What lies in a directory, as it is and not where it leads."""
    readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        with os.scandir(readable) as found:
            names = sorted(entry.name for entry in found)
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # of a daemon that uses it now
                yield name, os.stat(name, dir_fd=directory, follow_symlinks=False)
    finally:
        os.close(readable)


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"


def _quoted(path: Path) -> str:
    """As a shell takes it for one word."""
    return shlex.quote(str(path))
