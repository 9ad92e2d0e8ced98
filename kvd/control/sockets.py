"""The daemon's socket files: made by one daemon at a time, removed by none but the one that did.

A path says nothing about who listens there. Two daemons that start at once would each find nobody
and then take the other's files away, and one that ends late those of its successor: that one
would go on, in good health, where nobody can reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvd.config.values import gid_of
from kvd.linux.proc import CAP_CHOWN, own_capabilities

log = logging.getLogger(__name__)

ALONE_SECONDS = 2.0  # a daemon needs milliseconds
_AGAIN_SECONDS = 0.02
_LOST_LOOK_SECONDS = 2.0


class SocketTaken(Exception):
    """Another daemon answers on the socket."""


def refuse_taken(socket_file: Path, companion: Path) -> None:
    """Raise SocketTaken where anybody living has the socket; a file left behind is nobody's.

    OSError, with the setting to change, where this user may not even ask.
    """
    # Both: the one may be another daemon's companion socket, by a slip in --socket.
    if _is_answered(companion) or _is_answered(socket_file):
        raise SocketTaken(
            f"another daemon answers on {socket_file}; stop it or choose another --socket"
        )


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except (TimeoutError, BlockingIOError):
            pass  # it lives, and has no time to answer
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:  # one of datagrams, say: another program's
                return True
            raise OSError(
                f"uid {os.geteuid()} can't reach {path} ({error.strerror}): give it and its"
                " directory to the daemon's user (an earlier daemon of another user may have left"
                " it), or choose another --socket"
            ) from error
    return True


@contextlib.asynccontextmanager
async def alone_in(directory: Path) -> AsyncIterator[None]:
    """No other daemon looks for sockets, makes or removes them in the directory meanwhile.

    Whoever may read the directory could keep us out: after ALONE_SECONDS it is done all the same.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + ALONE_SECONDS
        while not _locked(fd):
            if time.monotonic() > until:
                log.warning("somebody keeps %s locked: another kvd may start there", directory)
                break
            await asyncio.sleep(_AGAIN_SECONDS)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class SocketFile:
    """A socket's file as it was made; another one of its name is somebody else's."""

    path: Path
    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """The file that is there now."""
        found = path.lstat()
        return cls(path, found.st_dev, found.st_ino)

    def is_there(self) -> bool:
        """Whether its path still leads to it."""
        try:
            return SocketFile.of(self.path) == self
        except OSError:
            return False

    def remove(self) -> None:
        """Take it away if it still is this one."""
        if self.is_there():
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()


async def tell_when_lost(lost: Callable[[], Path | None]) -> None:
    """Say in the log when a socket's file is not ours any more, and when it is back. Never ends.

    What is connected goes on meanwhile, so nothing else would tell that nobody new can come.
    """
    told = None
    while await asyncio.sleep(_LOST_LOOK_SECONDS, result=True):
        now = lost()
        if now is not None and now != told:
            log.error("somebody removed %s: no engine can connect any more; restart kvd", now)
        if now is None and told is not None:
            log.warning("%s is back: engines can connect again", told)
        told = now


def require_bindable(socket_file: Path) -> None:
    """OSError, with the setting to change, where a socket can't be put there, or would take
    something else away.
    """
    directory = socket_file.parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise OSError(
            f"the socket's directory {directory} can't be written to by uid {os.geteuid()}: give it"
            " to the daemon's user (under systemd: RuntimeDirectory= or ReadWritePaths= of its"
            " unit), or choose another --socket"
        )
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(socket_file.lstat().st_mode):
            raise OSError(
                f"{socket_file} is there and is no socket: remove it, or choose another --socket"
            )


def require_group(name: str) -> None:
    """OSError, with the fix, where this user may not give the socket files to the group."""
    if not name or own_capabilities() & CAP_CHOWN:
        return
    if gid_of(name) not in {os.getegid(), *os.getgroups()}:
        raise OSError(
            f"uid {os.geteuid()} is not in socket_group {name!r}, and can't give it the sockets:"
            f" put the daemon's user into it (usermod -aG {name} USER), or choose another"
            " --socket-group"
        )


def missing_directories(directory: Path) -> list[Path]:
    """The directory and those above it, as far as they are not there."""
    return [each for each in (directory, *directory.parents) if not each.exists()]


def let_group_enter(made: list[Path], group: str) -> None:
    """Directories that were made for a socket are the group's, which may enter them. OSError."""
    for directory in made:
        os.chown(directory, -1, gid_of(group))
        directory.chmod(0o750)  # whatever the umask took away


def warn_where_closed(socket_file: Path, group: str) -> None:
    """Say where a directory that was there keeps the group out that may open the socket."""
    if not group:
        return
    found = socket_file.parent.stat()
    enters = stat.S_IXGRP if found.st_gid == gid_of(group) else stat.S_IXOTH
    if not found.st_mode & enters:
        log.warning(
            "%s keeps users of socket_group %s out (it is gid %d's, mode %04o), who may open the"
            " socket in it: chgrp %s %s, and chmod 0750",
            socket_file.parent,
            group,
            found.st_gid,
            stat.S_IMODE(found.st_mode),
            group,
            socket_file.parent,
        )


def unused_name(path: Path) -> Path:
    """A name beside the path for a socket that is renamed to it, no longer than the companion's.

    GRPC removes the file of the name that it bound, whoever's it is by then.
    """
    return path.with_name(f"{path.name}.{os.urandom(4).hex()}")
