"""The companion socket, client's side: credentials, file descriptors, news of the daemon's death.

Plain blocking calls with a timeout; each raises OSError (a timeout is one) when the daemon is
absent, hung or gone, and CompanionRefused when it said no.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvd_proto.limits import MAX_COMPANION_BYTES
from kvd_proto.v1 import companion_pb2

MAX_DESCRIPTORS = 8  # received and not taken yet; a message has four at most
_LENGTH = struct.Struct("<I")
_AGAIN_S = 0.01  # between tries while the daemon's queue of connections is full
# What an engine's operator has most likely forgotten, for the line in its log.
_FIXES: dict[type[OSError], str] = {
    PermissionError: (
        "this user must be in the group that owns the socket (usermod -aG, --group-add,"
        " supplementalGroups)"
    ),
    FileNotFoundError: "no daemon runs there, or its directory is not mounted here",
    ConnectionRefusedError: "the daemon that made it is gone",
}

_NO_SOCKET = "it is there and is no socket: name the daemon's (socket_path, KVD_SOCKET)"
_ALONE = (
    "the socket is there, and its .companion is not beside it: mount the directory of both, or"
    " restart the daemon where somebody removed it"
)
_CROWDED = "the daemon is stopped, hangs, or has too many callers"


def is_something_else(path: str) -> bool:
    """Whether what lies at a socket's path is no socket, but a file or folder, say."""
    try:
        return not stat.S_ISSOCK(Path(path).stat().st_mode)
    except (OSError, ValueError):  # not there, or not for this user to see: connecting says which
        return False


def _misnamed(path: str, error: OSError) -> str | None:
    """What is wrong with the name itself, or beside it, where the companion socket is not there."""
    if not isinstance(error, FileNotFoundError):
        return None
    if path.startswith("unix:"):
        return "name the socket by its path alone, without unix:"
    if path.endswith(".companion"):
        return "name the socket without .companion"
    return _ALONE if os.path.lexists(path) else None


class CompanionRefused(Exception):
    """The daemon answered with a reason instead of what was asked for."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class CompanionSocket:
    """A client's connection to the companion socket.

    One connection to `<socket>.companion`. Its end of file is the daemon's death.
    """

    def __init__(self, socket_path: str, timeout_s: float) -> None:
        self._descriptors: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(timeout_s)
        try:
            self._connect(f"{socket_path}.companion", timeout_s)
        except OSError as error:
            self._socket.close()
            if is_something_else(socket_path):
                raise OSError(errno.ENOTSOCK, _NO_SOCKET) from error
            fix = _misnamed(socket_path, error) or _FIXES.get(type(error))
            if fix is None:
                raise
            raise type(error)(error.errno, f"{error.strerror}; {fix}") from error

    def _connect(self, path: str, timeout_s: float) -> None:
        """Linux waits for no room in a full queue of connections, whatever the timeout: we do."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                self._socket.connect(path)
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    raise TimeoutError(f"timed out: {_CROWDED}") from error
            else:
                return
            time.sleep(_AGAIN_S)

    def fileno(self) -> int:
        return self._socket.fileno()

    def hello(self, role: companion_pb2.PeerRole, program: str) -> companion_pb2.Welcome:
        """Introduce this process; the answer's token goes into the gRPC metadata."""
        hello = companion_pb2.Hello(role=role, program=program[:256])
        return self._ask(companion_pb2.CompanionRequest(hello=hello), "welcome").welcome

    def offer_memory(self, memory_token: int, fd: int, device_memory: bool = False) -> None:
        """Hand a shared-memory file, or an export of device memory, to the daemon."""
        offer = companion_pb2.OfferMemory(memory_token=memory_token, device_memory=device_memory)
        request = companion_pb2.CompanionRequest(offer_memory=offer)
        self._ask(request, "memory_accepted", [fd])

    def get_page(self, namespace_id: int) -> int:
        """Descriptor of a namespace's index page; the caller closes it."""
        get_page = companion_pb2.GetPage(namespace_id=namespace_id)
        self._ask(companion_pb2.CompanionRequest(get_page=get_page), "page")
        return self._take_descriptors(1)[0]

    def rank_channel(self, registration_id: int) -> tuple[int, int, int, int]:
        """Descriptors of ring, board, eventfd and mover's pidfd; the caller closes them."""
        answer = self._receive("rank_channel")
        if answer.rank_channel.registration_id != registration_id:
            raise CompanionRefused("PROTOCOL", "the channel belongs to another registration")
        ring, board, event, pidfd = self._take_descriptors(4)
        return ring, board, event, pidfd

    def close(self) -> None:
        self._socket.close()
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(
        self, request: companion_pb2.CompanionRequest, kind: str, fds: Sequence[int] = ()
    ) -> companion_pb2.CompanionResponse:
        body = request.SerializeToString()
        framed = _LENGTH.pack(len(body)) + body
        sent = socket.send_fds(self._socket, [framed], list(fds)) if fds else 0
        self._socket.sendall(framed[sent:])
        return self._receive(kind)

    def _receive(self, kind: str) -> companion_pb2.CompanionResponse:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_COMPANION_BYTES:
            raise CompanionRefused("PROTOCOL", f"a message of {length} bytes")
        answer = companion_pb2.CompanionResponse.FromString(self._read(length))
        got = answer.WhichOneof("kind")
        if got == "error":
            raise CompanionRefused(answer.error.reason, answer.error.message)
        if got != kind:
            raise CompanionRefused("PROTOCOL", f"{got} came where {kind} was due")
        return answer

    def _read(self, length: int) -> bytes:
        parts = bytearray()
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
        while len(parts) < length:
            piece, ancillary, flags, _ = self._socket.recvmsg(
                length - len(parts), room, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._descriptors.extend(fds)
            if flags & socket.MSG_CTRUNC or len(self._descriptors) > MAX_DESCRIPTORS:
                raise CompanionRefused(
                    "PROTOCOL",
                    f"more than {MAX_DESCRIPTORS} descriptors came, or this process may have no"
                    " more (ulimit -n)",
                )
            if not piece:
                raise ConnectionResetError("the daemon closed the companion socket")
            parts += piece
        return bytes(parts)

    def _take_descriptors(self, count: int) -> list[int]:
        if len(self._descriptors) < count:
            raise CompanionRefused("PROTOCOL", f"{count} descriptors were due")
        taken, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return taken
