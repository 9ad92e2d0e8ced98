"""Shares of gRPC connections: gRPC accepts them itself, and counts only all of them.

Before a call nobody but the kernel knows who is behind a connection, and gRPC doesn't ask. But
the descriptors are this process's: it looks through its own sockets, asks the kernel whose each is,
and shuts down the newest of who has more than his share. gRPC takes that for the client's end.

Connections that come in a burst are all accepted before gRPC serves anybody again, so few may
wait at once: who connects faster than they are accepted waits in `connect`, or is told to. While
somebody who has more than his share was shut out and connects again, very few may. Who closes his
connections and makes others without end is kept out by the gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvd.control.access import descriptors
from kvd.control.access.gate import Gate
from kvd.control.access.peers import user_of
from kvd.control.sockets import SocketFile
from kvd.core.shares import Bound
from kvd.linux.calls import SO_PASSRIGHTS
from kvd.linux.proc import count_own_descriptors, own_descriptors

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Who has as many engines and tools as a user may have companion connections has a gRPC connection
# for each of those, and some for those that begin anew.
MAX_CONNECTIONS_OF_A_USER = 224
# All clients of a node may connect at once: gRPC's client takes a full queue for a daemon that is
# away. gRPC's server asks for 4,096, and serves nobody while it accepts them.
MAX_UNACCEPTED = 128  # connections
MAX_UNACCEPTED_IN_A_FLOOD = 8  # each takes gRPC some 0.1 ms
FLOOD_SECONDS = 5.0  # after connections were shut down
LOOK_SECONDS = 0.25
HURRY_SECONDS = 0.02  # after a look, while somebody sends more calls than are taken up
TOGETHER = 4  # descriptors looked at, or connections shut down, between two pauses
PAUSE_SECONDS = 0.0002  # else the event loop would wait for the interpreter at each of its steps
LOG_SECONDS = 10.0  # who is shut out connects again at once


@dataclass(frozen=True, slots=True)
class GrpcConnection:
    """Of a client to the gRPC socket."""

    fd: int
    inode: int
    user: int


def bound_of_connections() -> Bound:
    """At most half of all for one user, and a sixteenth for operators."""
    most = descriptors.most_connections()
    each = min(MAX_CONNECTIONS_OF_A_USER, most // 2)
    return Bound("gRPC connections", most, each, most // 16)


def too_many(
    connections: list[GrpcConnection], bound: Bound, operates: Callable[[int], bool]
) -> list[GrpcConnection]:
    """Those that must go, where the list has the oldest first.

    Of who has more than his share the newest; then, so that the operators' reserve stays free, the
    newest of whoever has the most.
    """
    of: dict[int, list[GrpcConnection]] = defaultdict(list)
    for each in connections:
        of[each.user].append(each)
    gone = []
    for mine in of.values():
        while len(mine) > bound.each:
            gone.append(mine.pop())
    others = [mine for user, mine in of.items() if not operates(user)]
    while sum(map(len, others)) > bound.most - bound.reserved:
        gone.append(max(others, key=len).pop())
    return gone


class Door:
    """Bounds the connections to the gRPC socket: it looks now and then at who is connected.

    Lives on one event loop.
    """

    def __init__(
        self,
        path: str,
        operates: Callable[[int], bool],
        file: SocketFile | None = None,
        on_shut_out: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`path` is the socket's as the kernel knows it, `file` what leads there now."""
        self._path = path
        self._operates = operates
        self._on_shut_out = on_shut_out
        self.bound = bound_of_connections()
        self._gate = Gate(file, self.bound.each)
        self._shut_out: list[int] = []  # at the last look
        self._users: dict[int, int | None] = {}  # by inode; None: no such connection
        self._seen: dict[int, int] = {}  # inode -> when it was first seen; they may wrap
        self._looks = 0
        self._logged_s = -LOG_SECONDS
        self._held = 0  # descriptors at the last look
        self._flood_ends_s = time.monotonic()
        self._listener: tuple[int, int] | None = None  # gRPC's: descriptor, inode
        self._timer: asyncio.TimerHandle | None = None
        self._is_looking = False

    def begin(self) -> None:
        """Look from now on, until `close`."""
        self._shorten_queue()
        self._look_later()

    @property
    def _most_unaccepted(self) -> int:
        flooded = time.monotonic() < self._flood_ends_s
        return MAX_UNACCEPTED_IN_A_FLOOD if flooded else MAX_UNACCEPTED

    def _shorten_queue(self) -> None:
        """Let few connections wait. gRPC may listen only in a moment, with a queue of its own."""
        if self._listener is None:
            for fd, inode in _sockets():
                with contextlib.suppress(OSError), _socket(fd) as some:
                    if self._is_mine(some) and _listens(some):
                        self._listener = fd, inode
                        _refuse_descriptors(some)
        if self._listener is not None:
            fd, inode = self._listener
            with contextlib.suppress(OSError), _socket(fd) as listener:
                if os.fstat(listener.fileno()).st_ino == inode:
                    listener.listen(self._most_unaccepted)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._tick)

    def hurry(self) -> None:
        """Look sooner: somebody sends more calls than can be taken up."""
        if self._timer is None or self._is_looking:
            return
        loop = asyncio.get_running_loop()
        if self._timer.when() > loop.time() + HURRY_SECONDS:
            self._timer.cancel()
            self._timer = loop.call_later(HURRY_SECONDS, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._shorten_queue()
        held = count_own_descriptors()
        if held == self._held and not self._gate.wants_a_look:
            self._look_later()
            return
        # On a thread: some thousands of descriptors take some ten milliseconds.
        try:
            task = asyncio.get_running_loop().run_in_executor(None, self.look)
        except RuntimeError:  # there are as many threads as there may be, now
            self._look_later()
            return
        self._is_looking = True
        task.add_done_callback(self._looked)

    def _looked(self, task: asyncio.Future[int]) -> None:
        self._is_looking = False
        if not task.cancelled() and task.exception() is not None:
            log.error("can't look at who is connected", exc_info=task.exception())
        self._held = count_own_descriptors()
        shut_out, self._shut_out = self._shut_out, []
        for user in shut_out:
            self._on_shut_out(user)
        if self._timer is not None:
            self._look_later()

    def look(self) -> int:
        """Shut down what is too much; how many. On a thread: it pauses."""
        connections = self.connections()
        self._shut_out = self._gate.note(self._newcomers(connections))
        for user in self._shut_out:
            line = "uid %d connects again and again: it is kept out for a while"
            log.warning(line, user, extra={"user": user})
        gone = too_many(connections, self.bound, self._operates)
        if gone:  # they are back in a moment
            self._flood_ends_s = time.monotonic() + FLOOD_SECONDS
            self._shorten_queue()
        for each in with_pauses(gone):
            with contextlib.suppress(OSError), _socket(each.fd) as connected:
                # The number may be another's by now.
                if os.fstat(connected.fileno()).st_ino == each.inode:
                    connected.shutdown(socket.SHUT_RDWR)
        if gone and time.monotonic() > self._logged_s + LOG_SECONDS:
            self._logged_s = time.monotonic()
            users = ", ".join(map(str, sorted({each.user for each in gone})))
            log.warning(
                "closed %d gRPC connections of uid %s: one user may have %d, all but operators %d",
                len(gone),
                users,
                self.bound.each,
                self.bound.most - self.bound.reserved,
            )
        return len(gone)

    def connections(self) -> list[GrpcConnection]:
        """All of them, the oldest first."""
        self._looks += 1
        known, seen, found = self._users, self._seen, []
        users: dict[int, int | None] = {}
        for fd, inode in with_pauses(_sockets()):
            with contextlib.suppress(OSError):
                users[inode] = known[inode] if inode in known else self._user_behind(fd)
                if (user := users[inode]) is not None:
                    found.append(GrpcConnection(fd, inode, user))
        self._users = users
        self._seen = {each.inode: seen.get(each.inode, self._looks) for each in found}
        return sorted(found, key=lambda each: (self._seen[each.inode], each.inode))

    def _newcomers(self, connections: list[GrpcConnection]) -> Counter[int]:
        """How many of each user's were not there at the look before."""
        return Counter(e.user for e in connections if self._seen.get(e.inode) == self._looks)

    def _user_behind(self, fd: int) -> int | None:
        with _socket(fd) as connected:
            if not self._is_mine(connected) or _listens(connected):
                return None
            return user_of(connected)

    def _is_mine(self, some: socket.socket) -> bool:
        return some.family == socket.AF_UNIX and some.getsockname() == self._path


def with_pauses(all_of: Iterable[_T]) -> Iterator[_T]:
    """The same, for a thread of little haste: the event loop gets on between a few of them."""
    for number, each in enumerate(all_of, 1):
        yield each
        if number % TOGETHER == 0:
            time.sleep(PAUSE_SECONDS)


def _sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of this process's sockets; they may be others by the next moment."""
    for fd in own_descriptors():
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                yield fd, status.st_ino


def _refuse_descriptors(listener: socket.socket) -> None:
    """Have Linux refuse whoever sends descriptors by a connection, where it can (6.16).

    Nobody reads them there: Linux closes them on one of gRPC's threads, which waits for as long as
    who sent them likes.
    """
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def _listens(some: socket.socket) -> bool:
    return bool(some.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _socket(fd: int) -> socket.socket:
    """The socket behind a descriptor that stays somebody else's."""
    return socket.socket(fileno=os.dup(fd))
