"""The private wire between control and a process of its own: frames over a socket pair.

A frame is a little-endian u32 of its whole length, a u32 of its kind, and a body padded to 8
bytes. Both ends run the same code of the same commit: there is no version and no negotiation.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

# Largest frame: one transfer of 8192 blocks with 64 engine blocks each is 2.1 MiB.
MAX_FRAME_BYTES = 16 << 20
MAX_TEXT_CHARS = 1000  # of what a process says in words; the rest is cut off

_HEADER = struct.Struct("<II")
_NUMBER = struct.Struct("<Q")

Kind = TypeVar("Kind", bound=enum.IntEnum)
Refused = TypeVar("Refused")


class BadFrame(Exception):
    """The other end wrote what no frame looks like."""


def frame(kind: enum.IntEnum, body: bytes = b"") -> bytes:
    """One frame, ready to be written."""
    padding = -len(body) % 8
    length = _HEADER.size + len(body) + padding
    if length > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {length} bytes; {MAX_FRAME_BYTES} are allowed")
    return _HEADER.pack(length, kind) + body + b"\0" * padding


def pack_number(number: int) -> bytes:
    """The body of a frame that says a number and nothing else."""
    return _NUMBER.pack(number)


def unpack_number(body: bytes) -> int:
    """The inverse. struct.error where the body is too short for one."""
    return int(_NUMBER.unpack_from(body)[0])


def clean_text(value: object) -> str:
    """What a process says in words: at most so long, and such that every message can carry it."""
    return str(value)[:MAX_TEXT_CHARS].encode(errors="replace").decode()


def unpack_refusal(make: Callable[..., Refused], body: bytes) -> Refused:
    """A process's word why it can't serve, of its fields in JSON. BadFrame for nonsense."""
    try:
        fields: dict[str, Any] = json.loads(body.rstrip(b"\0"))
        return make(**{name: clean_text(value) for name, value in fields.items()})
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise BadFrame(f"no refusal: {error!r:.200}") from error


class FrameReader(Generic[Kind]):
    """Cuts a byte stream into frames of the kinds that there are."""

    def __init__(self, kinds: type[Kind]) -> None:
        self._kinds = kinds
        self._pending = bytearray()

    def feed(self, received: bytes | memoryview) -> Iterator[tuple[Kind, bytes]]:
        """Frames that are complete now. Raises BadFrame; the reader is of no use after that."""
        self._pending += received
        start = 0
        while len(self._pending) - start >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._pending, start)
            if not _HEADER.size <= length <= MAX_FRAME_BYTES or length % 8:
                raise BadFrame(f"a frame of {length} bytes")
            if len(self._pending) - start < length:
                break
            try:
                known = self._kinds(kind)
            except ValueError:
                raise BadFrame(f"a frame of kind {kind}") from None
            yield known, bytes(self._pending[start + _HEADER.size : start + length])
            start += length
        del self._pending[:start]
