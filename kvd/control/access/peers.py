"""Who stands behind a call: peers that said hello on the companion socket."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import fcntl
import os
import secrets
import select
import socket
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvd.control.access import descriptors
from kvd.control.access.closing import close_all
from kvd.core.errors import (
    Draining,
    InvalidArgument,
    LimitExceeded,
    PermissionDenied,
    Unauthenticated,
)
from kvd.core.shares import Shares
from kvd.linux.calls import (
    SO_PEERPIDFD,
    anonymous_name_of,
    is_sealed_against_writes,
    lies_in_memory,
    type_of,
)
from kvd_proto.v1 import companion_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
TOKEN_KEY = "kvd-token"  # noqa: S105 - the name of the entry, no secret
ON_BEHALF_OF_KEY = "kvd-on-behalf-of"  # whom a gateway calls for; a claim, for the log alone
MAX_NAME_CHARACTERS = 256  # of it
MAX_MEMORIES = 256
MAX_MEMORIES_IN_ALL = 65536  # or half of what the daemon may have open
_IDS = struct.Struct("iII")
# Anonymous inodes that no driver makes, by name.
_KERNELS_OWN = frozenset(
    {"eventfd", "eventpoll", "fanotify", "inotify", "io_uring", "perf_event", "pidfd", "signalfd"}
    | {"timerfd", "userfaultfd"}
)
MAX_REGISTRATIONS = 4096  # of one connection, one after the other


class Role(enum.Enum):
    """What a companion connection is for."""

    SCHEDULER = pb.PEER_ROLE_SCHEDULER
    WORKER = pb.PEER_ROLE_WORKER
    TOOL = pb.PEER_ROLE_TOOL


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the kernel says of the process at the other end."""

    uid: int
    gid: int
    pid: int  # 0 where its PID namespace can't be seen from here
    pidfd: int | None


def credentials_of(connection: socket.socket) -> Credentials:
    """Ask the kernel; the pidfd, where there is one, belongs to the caller."""
    pid, uid, gid = _ids_of(connection)
    try:
        pidfd: int | None = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        # Only a kernel before 6.5 is asked by number: what later ones before 6.16 refuse is a peer
        # that has ended, whose number may be another's by now.
        pidfd = _pidfd_of(pid) if error.errno == errno.ENOPROTOOPT else None
    if pidfd is not None:
        os.set_inheritable(pidfd, False)
    return Credentials(uid, gid, pid, pidfd)


def _pidfd_of(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


def user_of(connection: socket.socket) -> int:
    """The user at the other end, as the kernel says."""
    return _ids_of(connection)[1]


def _ids_of(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _IDS.size)
    pid, uid, gid = _IDS.unpack(raw)
    return pid, uid, gid


def _number_of(pidfd: int) -> int:
    """The process behind it, by a number that no other has until the next boot.

    0 before Linux 6.9, where all pidfds have the inode of whatever has none of its own.
    """
    try:
        other = os.eventfd(0)
    except OSError:
        return 0
    try:
        nobodys, found = os.fstat(other), os.fstat(pidfd)
    finally:
        os.close(other)
    return 0 if found.st_dev == nobodys.st_dev else found.st_ino


def has_ended(pidfd: int) -> bool:
    """True when the process behind the pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


@dataclass(frozen=True, slots=True)
class Memory:
    """A shared-memory file, or an export of device memory, that a peer offered.

    The descriptor is ours. Of device memory only an importer can say the size: 0 here.
    """

    fd: int
    bytes: int
    is_device: bool = False


def shares_of_memories() -> Shares:
    """Descriptors of memories that users' clients may have the daemon hold."""
    name = "memories offered, each a file descriptor of the daemon"
    return descriptors.shared_by_users(name, MAX_MEMORIES_IN_ALL, "memory_token")


def accept_memory(fd: int) -> Memory:
    """Check an offered descriptor; InvalidArgument unless it is writable shared memory.

    Only tmpfs and hugetlbfs are taken: a mover that maps a file of a slow or remote file
    system could hang where no signal reaches it. So no other file system is asked anything.
    """
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise InvalidArgument("the offered descriptor is not open for reading and writing")
    if not lies_in_memory(fd):
        raise InvalidArgument("the offered file is not in shared memory (tmpfs or hugetlbfs)")
    if is_sealed_against_writes(fd):
        raise InvalidArgument(
            "the offered memory is sealed against writes (F_SEAL_WRITE, F_SEAL_FUTURE_WRITE or"
            " F_SEAL_EXEC), and loads write there: offer it without that seal"
        )
    size = os.fstat(fd).st_size
    if size == 0:
        raise InvalidArgument("the offered file is empty")
    return Memory(fd, size)


def accept_device_memory(fd: int) -> Memory:
    """Check an offered export of device memory; InvalidArgument where it can't be one.

    Control only holds it and hands it to a mover, whose driver says whether it knows it. Drivers
    export by a character device or an anonymous inode; neither blocks whoever closes it, nor does
    a file in shared memory. Sockets, pipes, terminals and files elsewhere are refused: to hold or
    to close one may tie up others, or hang. So are the kernel's own anonymous inodes, by name.
    """
    name = anonymous_name_of(fd)
    if name in _KERNELS_OWN:
        raise InvalidArgument(
            f"the offered descriptor is of kind {name}, and so no export of device memory"
            " (cuMemExportToShareableHandle, as a POSIX file descriptor)",
            "device_memory",
        )
    kind = type_of(fd)
    a_device = kind == stat.S_IFCHR and not os.isatty(fd)
    if not (a_device or kind == 0 or lies_in_memory(fd)):
        raise InvalidArgument(
            "the offered descriptor is no export of device memory"
            " (cuMemExportToShareableHandle, as a POSIX file descriptor)",
            "device_memory",
        )
    return Memory(fd, 0, is_device=True)


Send = Callable[[pb.CompanionResponse, Sequence[int]], None]
Close = Callable[[Sequence[int]], None]


@dataclass(slots=True, eq=False)
class Peer:
    """The client behind one companion connection. Lives until its process ends or closes it."""

    credentials: Credentials
    role: Role
    program: str
    send: Send  # one message with its descriptors, which stay the caller's
    close: Close = close_all  # descriptors that it gave; takes them, and may close them later
    operates: bool = False  # whether its user was an operator when it came
    shares: Shares = field(default_factory=shares_of_memories)  # of all peers together
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    memories: dict[int, Memory] = field(default_factory=dict)
    registrations: set[int] = field(default_factory=set)  # every one it ever had
    ended: bool = False
    daemon_stops: bool = False  # which is why it ends
    _pidfd_open: bool = True
    _on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def uid(self) -> int:
        return self.credentials.uid

    @property
    def pid(self) -> int:
        return self.credentials.pid

    @property
    def process_number(self) -> int:
        """Tells processes apart where the pid is 0, too; 0 where the kernel can't."""
        pidfd = self.credentials.pidfd
        return _number_of(pidfd) if pidfd is not None and self._pidfd_open else 0

    @property
    def alive(self) -> bool:
        """False once the connection is closed or the kernel says that the process ended."""
        pidfd = self.credentials.pidfd
        return not self.ended and not (pidfd is not None and has_ended(pidfd))

    def watch_process(self) -> int | None:
        """A pidfd of the caller's own; None where the process can't be watched (any more)."""
        pidfd = self.credentials.pidfd
        if pidfd is None or not self._pidfd_open or descriptors.are_scarce():
            return None
        try:
            return os.dup(pidfd)
        except OSError:
            return None

    def on_end(self, then: Callable[[], None]) -> None:
        """Call `then` once when the peer ends; at once if it has."""
        if self.ended:
            then()
        else:
            self._on_end.append(then)

    @property
    def ends_at_once(self) -> bool:
        """Whether nobody waits for its end but who keeps the list of peers."""
        return len(self._on_end) <= 1 and not self.memories

    def forget(self, then: Callable[[], None]) -> None:
        """Take back what `on_end` noted, if it still stands."""
        if then in self._on_end:
            self._on_end.remove(then)

    def require_registration(self) -> None:
        """LimitExceeded where the connection has registered as often as it may."""
        if len(self.registrations) >= MAX_REGISTRATIONS:
            raise LimitExceeded(
                f"{MAX_REGISTRATIONS} registrations on one companion connection; open another",
                "registration_id",
            )

    def offer(self, number: int, fd: int, is_device: bool = False) -> None:
        """Keep an offered memory under the client's number; owns the descriptor either way."""
        try:
            if len(self.memories) >= MAX_MEMORIES and number not in self.memories:
                raise LimitExceeded(
                    f"more than {MAX_MEMORIES} memories offered on one companion connection; open"
                    " another",
                    "memory_token",
                )
            descriptors.require_room("memory_token")
            memory = accept_device_memory(fd) if is_device else accept_memory(fd)
            if number not in self.memories:
                self.shares.take(self.uid, operates=self.operates)
        except BaseException:
            self.close((fd,))
            raise
        if (old := self.memories.pop(number, None)) is not None:
            self.close((old.fd,))
        self.memories[number] = memory

    def take_device_memories(self) -> list[int]:
        """The exports that were offered, for the caller to close.

        As long as one is open, its memory is not free.
        """
        exports = [n for n, memory in self.memories.items() if memory.is_device]
        return [self._take_back(number) for number in exports]

    def _take_back(self, number: int) -> int:
        self.shares.give_back(self.uid)
        return self.memories.pop(number).fd

    def end(self) -> None:
        """The peer is gone: tell whoever asked, give its descriptors back. Once."""
        if self.ended:
            return
        self.ended = True
        callbacks, self._on_end = self._on_end, []
        for then in callbacks:
            then()
        self.close([self._take_back(number) for number in list(self.memories)])
        if self.credentials.pidfd is not None:
            os.close(self.credentials.pidfd)
            self._pidfd_open = False


def no_peer() -> Unauthenticated:
    """The error of a caller who is not known."""
    return Unauthenticated(
        f"the metadata entry {TOKEN_KEY} names no live companion connection; say hello on the"
        " companion socket first",
        TOKEN_KEY,
    )


@contextlib.contextmanager
def ends_with(peer: Peer) -> Iterator[None]:
    """Within the block, for a stream: it is left with `no_peer` once the peer is gone.

    With Draining where the daemon ends it: its client is in order, and may come back.

    A call may outlive its caller's companion connection. Cancelled, it would get no status and
    never end, and hold what gRPC has for it.
    """
    streaming = asyncio.current_task()
    assert streaming is not None, "a call runs in a task"
    has_gone = False

    def gone() -> None:
        nonlocal has_gone
        has_gone = True
        streaming.cancel()

    try:
        peer.on_end(gone)
        yield
    except asyncio.CancelledError:
        if not has_gone or streaming.uncancel():  # gRPC gives the call up, too
            raise
        stops = Draining("the daemon is stopping")
        raise (stops if peer.daemon_stops else no_peer()) from None
    finally:
        peer.forget(gone)


def on_behalf_of(context: Context) -> str | None:
    """Whom the caller says it calls for; None where it says nothing."""
    for entry in context.invocation_metadata() or ():
        if entry[0] == ON_BEHALF_OF_KEY and isinstance(entry[1], str):
            return entry[1][:MAX_NAME_CHARACTERS]
    return None


class Peers:
    """The clients that have said hello, by token."""

    def __init__(self) -> None:
        self._by_token: dict[str, Peer] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def add(self, peer: Peer) -> None:
        self._by_token[peer.token] = peer
        peer.on_end(lambda: self._forget(peer))

    def _forget(self, peer: Peer) -> None:
        self._by_token.pop(peer.token, None)

    def note_stop(self) -> None:
        """All that end from now on do so because the daemon stops."""
        for peer in self._by_token.values():
            peer.daemon_stops = True

    def user_behind(self, context: Context) -> int | None:
        """The caller's user; None for a caller who has not said hello."""
        peer = self._find(context)
        return None if peer is None else peer.uid

    def _find(self, context: Context) -> Peer | None:
        token = ""
        for entry in context.invocation_metadata() or ():
            if entry[0] == TOKEN_KEY and isinstance(entry[1], str):
                token = entry[1]
        return self._by_token.get(token)

    def behind(self, context: Context, *roles: Role) -> Peer:
        """The caller, if its token is that of a live peer in one of these roles (any if none)."""
        peer = self._find(context)
        if peer is None:
            raise no_peer()
        if roles and peer.role not in roles:
            wanted = " or ".join(role.name for role in roles)
            raise PermissionDenied(f"a {peer.role.name} called what only a {wanted} may", "role")
        return peer
