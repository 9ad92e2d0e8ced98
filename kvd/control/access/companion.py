"""The companion socket: credentials, file descriptors, and the news of a death.

A Unix stream socket beside the gRPC one. Messages are those of companion.proto, each behind a
little-endian uint32 length. The end of a connection, or of the process as its pidfd tells,
ends the peer: its session, its rank.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import itertools
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from google.protobuf.message import DecodeError

from kvd.control import errors
from kvd.control.access import descriptors
from kvd.control.access.closing import Closer, close_all
from kvd.control.access.peers import (
    Peer,
    Peers,
    Role,
    credentials_of,
    has_ended,
    shares_of_memories,
    user_of,
)
from kvd.control.access.unread import UnreadDescriptors
from kvd.core.errors import InvalidArgument, KvdError, LimitExceeded
from kvd.core.shares import Bound, Shares
from kvd.runtime.turns import EndsInTurn
from kvd_proto.limits import MAX_COMPANION_BYTES
from kvd_proto.v1 import companion_pb2 as pb

log = logging.getLogger(__name__)

MAX_ENGINE_CONNECTIONS = 256  # of schedulers and workers
MAX_ENGINE_CONNECTIONS_OF_A_USER = 128
MAX_TOOL_CONNECTIONS = 128  # so that engines never keep operators out
MAX_TOOL_CONNECTIONS_OF_A_USER = 64
TOOL_CONNECTIONS_FOR_OPERATORS = 32
MAX_STRANGERS = 256  # that have not said hello
MAX_STRANGERS_OF_A_USER = 128
STRANGERS_FOR_OPERATORS = 64
MAX_PENDING_FDS = 4  # received but not named by a message yet
MAX_UNSENT_MESSAGES = 64  # a client that doesn't read is dropped
MESSAGES_AT_ONCE = 16  # of a client that sent many together: half a millisecond
HELLO_SECONDS = 5.0
ACCEPT_PAUSE_SECONDS = 0.2  # where no connection can be taken, as without a descriptor for it
MAX_UNCLOSED = 32  # while descriptors are scarce: those who come next wait
PROGRAM_BYTES = 256
_LENGTH = struct.Struct("<I")
# All that Linux lets a message have (SCM_MAX_FD): what does not fit it closes at once, which may
# take long.
_FDS_PER_READ = 253

# Gives the read-only descriptor of a namespace's index page, or raises KvdError.
PageOf = Callable[[Peer, int], int]


class CompanionServer:
    """The companion socket's server: it keeps the peers."""

    def __init__(
        self,
        peers: Peers,
        page_of: PageOf,
        operates: Callable[[int], bool],
        ends: EndsInTurn,
    ) -> None:
        self.peers = peers
        self.page_of = page_of
        self.operates = operates
        self.ends = ends
        self.closer = Closer()
        self.unread = UnreadDescriptors(operates, self.closer.close)
        self.numbers = itertools.count()
        self.memories = shares_of_memories()
        self.strangers = Shares(
            Bound(
                "connections that have not said hello",
                MAX_STRANGERS,
                MAX_STRANGERS_OF_A_USER,
                STRANGERS_FOR_OPERATORS,
            )
        )
        engines = Shares(
            Bound(
                "companion connections of engines",
                MAX_ENGINE_CONNECTIONS,
                MAX_ENGINE_CONNECTIONS_OF_A_USER,
            )
        )
        tools = Shares(
            Bound(
                "companion connections of tools",
                MAX_TOOL_CONNECTIONS,
                MAX_TOOL_CONNECTIONS_OF_A_USER,
                TOOL_CONNECTIONS_FOR_OPERATORS,
            )
        )
        self.shares = {Role.SCHEDULER: engines, Role.WORKER: engines, Role.TOOL: tools}
        self._listener: socket.socket | None = None
        self._connections: set[CompanionConnection] = set()

    def listen(self, path: str, mode: int) -> None:
        """Bind and accept from now on, on the running loop."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
        old_mask = os.umask(0o777 & ~mode)
        try:
            listener.bind(path)
        finally:
            os.umask(old_mask)
        listener.listen(128)
        listener.setblocking(False)
        self._listener = listener
        self.closer.begin()
        self._take_connections()

    def _take_connections(self) -> None:
        if self._listener is not None:  # it may have been closed in a pause
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(16):  # leave the loop to others now and then
            # What is refused still holds its descriptor. Who refuses faster than it is closed takes
            # the last ones, which are kept from clients.
            if self.closer.unclosed >= MAX_UNCLOSED and descriptors.are_scarce():
                self._pause()
                return
            try:
                connected, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # out of descriptors: those who wait may come later
                log.warning("can't accept a companion connection: %s", error)
                self._pause()
                return
            connected.setblocking(False)
            connection = CompanionConnection(self, connected, user_of(connected))
            try:
                if descriptors.are_scarce():
                    raise LimitExceeded("the daemon is short of file descriptors")
                connection.take_share(self.strangers)
            except LimitExceeded as error:
                connection.refuse(error.reason, str(error))
                connection.close()
                continue
            self._connections.add(connection)
            connection.start()

    def _pause(self) -> None:
        """Those who wait may come later; the loop would call again at once."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(ACCEPT_PAUSE_SECONDS, self._take_connections)

    def dropped(self, connection: CompanionConnection) -> None:
        self._connections.discard(connection)

    def close(self) -> None:
        """Stop listening and end every peer."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            # Not here either: connections that were not taken yet may hold descriptors.
            self.closer.close(None, (self._listener.detach(),))
            self._listener = None
        self.peers.note_stop()
        for connection in list(self._connections):
            connection.close()
        self.unread.end()
        self.closer.end()


class CompanionConnection:
    """One connection: bytes in, messages handled one by one, messages and descriptors out."""

    def __init__(self, server: CompanionServer, connected: socket.socket, user: int) -> None:
        self._server = server
        self._number = next(server.numbers)
        self._user = user
        self._whose = {"user": user}  # of lines in the log
        self._share: Shares | None = None
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._peer: Peer | None = None
        self._received = bytearray()
        self._fds: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._hello_timer: asyncio.TimerHandle | None = None
        self._ending = False  # its client is gone
        self._closed = False

    def start(self) -> None:
        """Read from now on; without a hello the connection is closed after HELLO_SECONDS."""
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._hello_timer = self._loop.call_later(HELLO_SECONDS, self.close)

    def take_share(self, shares: Shares) -> None:
        """Count as one of these from now on, and no more as one of others; or LimitExceeded."""
        shares.take(self._user, operates=self._server.operates(self._user))
        self._give_share_back()
        self._share = shares

    def _give_share_back(self) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.give_back(self._user)

    # -- in ---------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            received, ancillary, flags, _ = self._socket.recvmsg(
                MAX_COMPANION_BYTES + _LENGTH.size,
                socket.CMSG_SPACE(_FDS_PER_READ * array.array("i").itemsize),
                socket.MSG_CMSG_CLOEXEC,
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._end_in_turn()
            return
        self._keep_fds(ancillary)
        if not received:
            self._end_in_turn()
            return
        if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_PENDING_FDS:
            self._refuse_and_close("more descriptors than messages that name them")
            return
        self._received += received
        self._handle_received(1)

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)

    def _handle_received(self, most: int) -> None:
        """Handle some of the messages that are there; the others soon, and reading waits for them.

        A client sends one and waits for its answer. Who sends thousands at once waits for himself.
        """
        for _ in range(most):
            message = self._next_message()
            if message is None:
                return
            self._handle(message)
        if len(self._received) > _LENGTH.size and not self._closed:
            self._loop.remove_reader(self._socket.fileno())
            self._server.ends.put(self._user, self._go_on)

    def _go_on(self) -> None:
        if not (self._closed or self._ending):
            self._loop.add_reader(self._socket.fileno(), self._readable)
            self._handle_received(MESSAGES_AT_ONCE)

    def _next_message(self) -> bytes | None:
        """None: it has not come whole, or can't come any more."""
        if self._closed or len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if not 0 < length <= MAX_COMPANION_BYTES:
            self._refuse_and_close(f"a message of {length} bytes, not 1..{MAX_COMPANION_BYTES}")
            return None
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return message

    def _handle(self, message: bytes) -> None:
        try:
            request = pb.CompanionRequest.FromString(message)
        except DecodeError:
            self._refuse_and_close("the bytes are no CompanionRequest")
            return
        try:
            self._answer(request)
        except KvdError as error:
            self.refuse(error.reason, str(error))
            if self._peer is None:
                self.close()
        except OSError as error:  # the kernel has no memory to watch its process
            log.warning("can't serve a companion connection: %s", error, extra=self._whose)
            self.refuse(LimitExceeded.reason, f"the daemon is short of resources: {error.strerror}")
            self.close()

    def _answer(self, request: pb.CompanionRequest) -> None:
        kind = request.WhichOneof("kind")
        if (self._peer is None) != (kind == "hello"):
            raise InvalidArgument("the first message, and only the first, is hello", "hello")
        if kind == "hello":
            self._hello(request.hello)
            return
        assert self._peer is not None
        if kind == "offer_memory":
            self._offer_memory(self._peer, request.offer_memory)
        elif kind == "get_page":
            self._send_page(self._peer, request.get_page.namespace_id)
        else:
            raise InvalidArgument("the request is empty or of an unknown kind", "kind")

    def _hello(self, hello: pb.Hello) -> None:
        try:
            role = Role(hello.role)
        except ValueError:
            raise InvalidArgument(f"role {hello.role} is not known", "role") from None
        self.take_share(self._server.shares[role])
        program = hello.program.encode()[:PROGRAM_BYTES].decode(errors="replace")
        credentials = credentials_of(self._socket)
        close = partial(self._server.closer.close, self._user)
        operates, memories = self._server.operates(self._user), self._server.memories
        self._peer = Peer(credentials, role, program, self.send, close, operates, memories)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if credentials.pidfd is not None:
            self._loop.add_reader(credentials.pidfd, self._process_ended)
        self._server.peers.add(self._peer)
        log.log(
            _level_for(role),
            "peer %s pid=%d uid=%d %r",
            role.name,
            self._peer.pid,
            self._peer.uid,
            program,
            extra=self._whose,
        )
        self.send(pb.CompanionResponse(welcome=pb.Welcome(token=self._peer.token)), ())

    def _offer_memory(self, peer: Peer, offer: pb.OfferMemory) -> None:
        if not self._fds:
            raise InvalidArgument("offer_memory came without its descriptor", "memory_token")
        peer.offer(offer.memory_token, self._fds.popleft(), offer.device_memory)
        self.send(pb.CompanionResponse(memory_accepted=pb.MemoryAccepted()), ())

    def _send_page(self, peer: Peer, namespace: int) -> None:
        fd = self._server.page_of(peer, namespace)
        descriptors.require_room("namespace_id")  # a copy waits until the client reads
        self.send(pb.CompanionResponse(page=pb.PageGranted()), (fd,))

    # -- out --------------------------------------------------------------------------------

    def send(self, response: pb.CompanionResponse, fds: Sequence[int]) -> None:
        """Send one message; the descriptors are duplicated while they wait.

        LimitExceeded, and nothing was sent, where they can't be, or where too many were not read.
        """
        if self._closed or self._ending:
            return
        if len(self._unsent) >= MAX_UNSENT_MESSAGES:
            log.warning(
                "dropping a companion connection of uid %d that reads nothing",
                self._user,
                extra=self._whose,
            )
            self.close()
            return
        content = response.SerializeToString()
        message = memoryview(_LENGTH.pack(len(content)) + content)
        self._unsent.append((message, self._take(fds)))
        if len(self._unsent) == 1:
            self._writable()

    def _writable(self) -> None:
        while self._unsent:
            message, fds = self._unsent[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._socket.sendmsg([message], rights)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._socket.fileno(), self._writable)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # others of the daemon's user took it all
                    log.warning("can't send descriptors: %s", error, extra=self._whose)
                self.close()
                return
            self._let_go(fds)
            self._unsent[0] = (message[sent:], [])
            if sent == len(message):
                self._unsent.popleft()
        self._loop.remove_writer(self._socket.fileno())

    def _take(self, fds: Sequence[int]) -> list[int]:
        """Copies of those that will be sent, which count as unread from now on."""
        copies = _copies_of(fds)
        try:
            if fds:
                self._server.unread.take(self._number, self._user, self._socket, len(fds))
        except LimitExceeded:
            close_all(copies)
            raise
        return copies

    def _let_go(self, copies: list[int]) -> None:
        """They were sent, or never will be."""
        close_all(copies)
        if copies:
            self._server.unread.left(self._number, len(copies))

    def refuse(self, reason: str, message: str) -> None:
        """Answer with an error."""
        error = pb.CompanionError(reason=reason, message=message)
        self.send(pb.CompanionResponse(error=error), ())

    def _refuse_and_close(self, message: str) -> None:
        self.refuse(errors.MALFORMED_MESSAGE, message)
        self.close()

    # -- end --------------------------------------------------------------------------------

    def _process_ended(self) -> None:
        # A child that inherited the connection may hold it open; the process is gone all the same.
        self._end_in_turn()

    def _end_in_turn(self) -> None:
        """Its client is gone: nothing comes any more, and its peer ends soon.

        Who opened nothing makes room at once: else who comes and goes would be one too many.
        """
        if self._ending or self._closed:
            return
        if self._peer is None or self._peer.ends_at_once:
            self.close()
            return
        self._ending = True
        self._stop_looking()
        self._server.ends.put(self._user, self.close)

    def _stop_looking(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        if self._peer is not None and self._peer.credentials.pidfd is not None:
            self._loop.remove_reader(self._peer.credentials.pidfd)

    def close(self) -> None:
        """End the connection and its peer. Once."""
        if self._closed:
            return
        self._closed = True
        self._give_share_back()
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self._stop_looking()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # its client hears so at once
        # In its socket descriptors may lie that were not read.
        self._server.closer.close(self._user, (self._socket.detach(), *self._fds))
        for _message, fds in self._unsent:
            self._let_go(fds)
        self._server.dropped(self)
        peer, self._peer = self._peer, None  # which knows how to send by this connection
        if peer is not None:
            pidfd = peer.credentials.pidfd
            how = "closed its connection"
            if pidfd is not None and has_ended(pidfd):
                how = "ended"
            log.log(
                _level_for(peer.role),
                "peer %s pid=%d %s",
                peer.role.name,
                peer.pid,
                how,
                extra=self._whose,
            )
            peer.end()


def _level_for(role: Role) -> int:
    """Who looks at the status, perhaps every few seconds, is no news."""
    return logging.DEBUG if role is Role.TOOL else logging.INFO


def _copies_of(fds: Sequence[int]) -> list[int]:
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))  # noqa: PERF401 - what was had is closed if one fails
    except OSError as error:
        for copy in copies:
            os.close(copy)
        raise LimitExceeded(
            f"no descriptor to answer with ({error.strerror}): end some clients, or raise the"
            " daemon's limit (LimitNOFILE)"
        ) from error
    return copies
