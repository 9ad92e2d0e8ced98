"""gRPC calls whose messages stop half-way: HTTP/2 by hand, as no gRPC client would send it."""

from __future__ import annotations

import select
import socket
import struct
import time

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_CANCEL = 8  # an error's number
_INITIAL_WINDOW = 4  # the setting's number
_FRAME_BYTES = 16384
_DEFAULT_WINDOW = 65535


def message(content: bytes, length: int | None = None) -> bytes:
    """A gRPC message; with a `length` of more than it has, one that stops half-way."""
    return struct.pack(">BI", 0, len(content) if length is None else length) + content


class RawHttp2:
    """One connection to a Unix socket. Reads nothing but what flow control needs."""

    def __init__(self, path: str, *, says_hello: bool = True, takes_data: bool = True) -> None:
        """One that takes no data leaves no room for any answer, and never will."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)  # waits where the daemon's queue is full
        self._socket.settimeout(10.0)
        self._poll = select.poll()  # select() knows no more than 1,024 descriptors
        self._poll.register(self._socket, select.POLLIN)
        self._received = bytearray()
        self._initial = _DEFAULT_WINDOW
        self._windows = {0: _DEFAULT_WINDOW}
        self._next = 1
        self.is_over = False  # the other side closed it
        self.begun: set[int] = set()  # streams on which it answers
        self.reset: set[int] = set()  # streams that it ended
        if says_hello:
            settings = b"" if takes_data else struct.pack(">HI", _INITIAL_WINDOW, 0)
            self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, settings))

    def fileno(self) -> int:
        return self._socket.fileno()

    def begin(self, method: str, token: str) -> int:
        """Begin a call of `/Service/Method`; its stream's number."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            "kvd-token": token,
        }
        block = b"".join(_literal(name, value) for name, value in fields.items())
        self._socket.sendall(_frame(_HEADERS, 0x4, stream, block))
        return stream

    def send(self, stream: int, content: bytes, seconds: float = 10.0) -> int:
        """Send so much of these bytes as the other side takes in that time; how many."""
        until = time.monotonic() + seconds
        sent = 0
        while sent < len(content) and not self.is_over and stream not in self.reset:
            room = min(self._windows[0], self._windows[stream], _FRAME_BYTES, len(content) - sent)
            if room <= 0:
                if time.monotonic() > until:
                    break
                self.read(0.05)
                continue
            self._socket.sendall(_frame(_DATA, 0, stream, content[sent : sent + room]))
            self._windows[0] -= room
            self._windows[stream] -= room
            sent += room
            self.read(0.0)
        return sent

    def give_up(self, stream: int) -> None:
        """Cancel a call."""
        self._answer(_frame(_RESET, 0, stream, struct.pack(">I", _CANCEL)))

    def read(self, seconds: float) -> None:
        """Take in what has come, waiting so long for it, and answer what must be answered."""
        if self.is_over or not self._poll.poll(seconds * 1e3):
            return
        try:
            received = self._socket.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            self.is_over = True
            return
        self._received += received
        while len(self._received) >= 9:
            length = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + length:
                return
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9], "big") & 0x7FFFFFFF
            body = bytes(self._received[9 : 9 + length])
            del self._received[: 9 + length]
            self._take(kind, flags, stream, body)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _HEADERS:
            self.begun.add(stream)
        if kind == _WINDOW and stream in self._windows:
            self._windows[stream] += int.from_bytes(body, "big") & 0x7FFFFFFF
        elif kind == _SETTINGS and not flags & 1:
            for at in range(0, len(body), 6):
                number, value = struct.unpack_from(">HI", body, at)
                if number == _INITIAL_WINDOW:
                    for each in self._windows.keys() - {0}:
                        self._windows[each] += value - self._initial
                    self._initial = value
            self._answer(_frame(_SETTINGS, 1, 0, b""))
        elif kind == _PING and not flags & 1:
            self._answer(_frame(_PING, 1, 0, body))
        elif kind == _RESET or (kind == _HEADERS and flags & 1):
            self.reset.add(stream)

    def _answer(self, frame: bytes) -> None:
        try:
            self._socket.sendall(frame)
        except OSError:  # shut down after it had spoken
            self.is_over = True

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + body


def _literal(name: str, value: str) -> bytes:
    """One header field, neither indexed nor compressed."""
    return b"\0" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    raw = text.encode()
    assert len(raw) < 127, "a length of one byte"
    return bytes([len(raw)]) + raw
