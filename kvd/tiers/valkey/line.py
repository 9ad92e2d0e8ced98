"""A connection to one Valkey server: commands out of memory, values into memory.

Values go between the socket and the memory that is lent, and nowhere else: a client library's own
buffers and threads cost as much processor time as the network. Nothing of that memory is held on
to when a call has returned or raised.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Any

from kvd.tiers.store import TierError, TierReason

Command = Sequence[Any]  # words: text, bytes, memory, or a tuple of memory, end to end
Room = Sequence[memoryview]  # for one value, end to end
Answer = Any  # bytes, a number, None, a list of them, or a ServerRefusal
# Of all answers of one run for which no memory was given:
MAX_TOLD_BYTES = 16 << 20  # of their values together
MAX_TOLD_VALUES = 1 << 20  # of their lists together
MAX_TOLD_DEPTH = 8  # of lists in lists
_BUFFER_BYTES = 4096  # for short answers; what else comes with them is copied once
_GATHERED = 128  # pieces in one call to the system
_SHORT_BYTES = 4096  # of a word that is copied behind others
_TIMEVAL = struct.Struct("ll")
# Once it is closed, as by the death of its process, nothing more goes out: the system would send it
# for minutes, and what was cleared meanwhile would be there again.
_SEND_NO_MORE = struct.pack("ii", 1, 0)


class ServerRefusal(TierError):
    """What a server answers instead of a value; `code` is its first word."""

    def __init__(self, said: str) -> None:
        self.code = said.partition(" ")[0]
        super().__init__(said, _REASONS.get(self.code, TierReason.REFUSED))


_REASONS = {
    "OOM": TierReason.NO_SPACE,
    "CLUSTERDOWN": TierReason.UNREACHABLE,
    "MASTERDOWN": TierReason.UNREACHABLE,
}


class Line:
    """One thread's connection. OSError ends it: what was sent by then may still happen.

    `peer`: the address that the host's name meant when it was made.
    """

    def __init__(
        self, host: str, port: int, seconds: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self._socket = _connected(host, port, seconds, tls)
        self.peer = str(self._socket.getpeername())
        self._is_plain = tls is None
        self._seconds = 0.0  # that the system waits
        self._until = 0.0
        self._buffer = bytearray(_BUFFER_BYTES)
        self._room = memoryview(self._buffer)
        self._at = self._end = 0  # what has come and was not looked at
        self._values_left = self._bytes_left = 0  # that answers of this run may still have
        self._refused = ""  # what the server refused last

    def run(
        self, commands: Sequence[Command], seconds: float, into: Sequence[Room] = ()
    ) -> list[Answer]:
        """Commands in their order, and what the server says to each; a ServerRefusal is an answer.

        `into`: memory for the value of each; the answer is then how long it is, -1 where that is
        more than its memory has, which has its beginning. OSError: the answers did not come,
        TimeoutError: in time.
        """
        self._until = time.monotonic() + seconds
        self._be_patient_for(seconds)
        self._require_nothing_unasked()
        try:
            self._send(_framed(commands))
            self._values_left, self._bytes_left = MAX_TOLD_VALUES, MAX_TOLD_BYTES
            rooms: Sequence[Room | None] = into or [None] * len(commands)
            answers = [self._answer(room) for room in rooms]
        except (BlockingIOError, TimeoutError):
            raise TimeoutError(f"no answer within {seconds:.3g} s") from None
        except ssl.SSLEOFError:
            raise _closed() from None
        self._require_nothing_unasked()
        return answers

    def last_word(self) -> str:
        """What the server refused before it ended the connection; nothing where it said nothing."""
        with contextlib.suppress(OSError):
            self._answer(None)
        return self._refused

    def say_no_more(self) -> None:
        """What was sent may happen yet; `has_ended` says when it has, or never will."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._is_plain = True  # what comes is not looked at

    def has_ended(self, seconds: float) -> bool:
        """Whether the server has ended the connection by then, as it does after all was read."""
        self._until = time.monotonic() + max(seconds, 1e-4)
        self._be_patient_for(max(seconds, 1e-4))
        try:
            while True:
                self._receive(self._room, whole=False)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()

    def _be_patient_for(self, seconds: float) -> None:
        if seconds == self._seconds:
            return
        self._seconds = seconds
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.settimeout(seconds)
            return
        # The system waits, not the interpreter: one call to it less, and whole values in one.
        whole = int(seconds)
        limit = _TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _require_time(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if left < self._seconds / 2:
            self._be_patient_for(left)

    # -- out ----------------------------------------------------------------------------------

    def _send(self, pieces: list[bytes | memoryview]) -> None:
        if not self._is_plain:
            for piece in pieces:
                self._require_time()
                self._socket.sendall(piece)
            return
        at = 0
        while at < len(pieces):
            self._require_time()
            sent = self._socket.sendmsg(pieces[at : at + _GATHERED])
            while at < len(pieces) and sent >= len(pieces[at]):
                sent -= len(pieces[at])
                at += 1
            if sent:
                pieces[at] = memoryview(pieces[at])[sent:]

    # -- in -----------------------------------------------------------------------------------

    def _receive(self, into: memoryview, *, whole: bool) -> int:
        """Fill some of it, all of it where that needs no further call; how much, never 0."""
        self._require_time()
        count = self._socket.recv_into(into, 0, socket.MSG_WAITALL if whole else 0)
        if not count:
            raise _closed()
        return count

    def _answer(self, into: Room | None, depth: int = 0) -> Answer:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if into is not None:
            if kind == b"$":
                number = _number(line)
                return None if number < 0 else self._value(number, into)
            if kind != b"-":  # a number would pass for a length
                raise _no_valkey(line)
        if depth and kind in b"+-:":  # a value, too: each may be as long as the buffer
            self._bytes_left -= len(rest)
            if self._bytes_left < 0:
                raise _no_valkey(line)
        if kind == b"+":
            return rest
        if kind == b"-":
            self._refused = rest[:300].decode(errors="replace")
            return ServerRefusal(self._refused)
        number = _number(line)
        if kind == b":":
            return number
        if kind == b"$":
            return None if number < 0 else self._value(number, into)
        if kind != b"*" or number > self._values_left or depth == MAX_TOLD_DEPTH:
            raise _no_valkey(line)
        if number < 0:
            return None
        self._values_left -= number
        return [self._answer(None, depth + 1) for _ in range(number)]

    def _value(self, length: int, into: Room | None) -> bytes | int:
        """One that is too long for its memory is -1, one that is too long for any is empty."""
        said: bytes | int = length
        left = length
        if into is None and length <= self._bytes_left:
            self._bytes_left -= length
            value = bytearray(length)
            self._fill(memoryview(value))
            said, left = bytes(value), 0
        elif into is None:
            said = b""
        else:
            for view in into:
                self._fill(view[:left])
                left = max(0, left - view.nbytes)
            said = -1 if left else length
        if left:
            self._skip(left)
        if self._line():
            raise _no_valkey(b"a value that is longer than it says")
        return said

    def _require_nothing_unasked(self) -> None:
        """ConnectionError where more has come than was asked for: which answer is whose, none can
        tell from then on, and the answers to one question would be taken for another's."""
        if self._at != self._end or self._has_come():
            raise ConnectionError("the server sends more answers than it was asked for")

    def _has_come(self) -> bool:
        """Whether there is something to be read; where the server has ended it, who asks hears."""
        if not isinstance(self._socket, ssl.SSLSocket):
            with contextlib.suppress(BlockingIOError):
                return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            return False
        self._socket.settimeout(0)
        try:
            return bool(self._socket.recv(1))  # taken: the line is left then
        except ssl.SSLWantReadError:  # nothing, or what TLS says for itself
            return False
        finally:
            self._socket.settimeout(self._seconds)

    def _skip(self, length: int) -> None:
        room = memoryview(bytearray(min(length, 1 << 20)))
        for begin in range(0, length, len(room)):
            self._fill(room[: min(len(room), length - begin)])

    def _fill(self, into: memoryview) -> None:
        have = min(len(into), self._end - self._at)
        into[:have] = self._room[self._at : self._at + have]
        self._at += have
        while have < len(into):
            have += self._receive(into[have:], whole=self._is_plain)

    def _line(self) -> bytes:
        """The next line of an answer, without its end."""
        while True:
            end = self._buffer.find(b"\r\n", self._at, self._end)
            if end >= 0:
                line = bytes(self._room[self._at : end])
                self._at = end + 2
                return line
            left = self._end - self._at
            if left == _BUFFER_BYTES:
                raise _no_valkey(bytes(self._room[:40]))
            self._buffer[:left] = self._buffer[self._at : self._end]
            self._at, self._end = 0, left
            self._end += self._receive(self._room[left:], whole=False)


def _connected(host: str, port: int, seconds: float, tls: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection((host, port), seconds)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _SEND_NO_MORE)
        if tls is not None:
            return tls.wrap_socket(plain, server_hostname=host)
        plain.setblocking(True)
    except BaseException:
        plain.close()
        raise
    return plain


def _number(line: bytes) -> int:
    """What stands behind a line's first letter."""
    try:
        return int(line[1:])
    except ValueError:
        raise _no_valkey(line) from None


def _framed(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """As they go over the wire; what is long stays where it is."""
    pieces: list[bytes | memoryview] = []
    short: list[bytes] = []
    for command in commands:
        short.append(b"*%d\r\n" % len(command))
        for word in command:
            if isinstance(word, tuple):
                short.append(b"$%d\r\n" % sum([view.nbytes for view in word]))
                pieces += [b"".join(short), *word]
                short = [b"\r\n"]
                continue
            plain = word.encode() if isinstance(word, str) else word
            if len(plain) <= _SHORT_BYTES:
                short.append(b"$%d\r\n%s\r\n" % (len(plain), plain))
            else:
                short.append(b"$%d\r\n" % len(plain))
                pieces += [b"".join(short), memoryview(plain)]
                short = [b"\r\n"]
    pieces.append(b"".join(short))
    return pieces


def _closed() -> ConnectionResetError:
    return ConnectionResetError("the server has closed the connection")


def _no_valkey(said: bytes) -> ConnectionError:
    return ConnectionError(f"what came is no answer of a Valkey server: {said[:40]!r}")
