"""Reading a large message in pieces: protobuf's own reader takes one in a single go.

An encoded message may be cut between any two of its fields, and the parts read one after the
other into the same message: protobuf says that this gives what the whole gives. So a message of
some MiB is read with other calls between, whatever it is made of; and of one that can't be read,
the number by which its sender knows it can be found all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from kvd.control.convert import check_struct
from kvd.core.errors import KvdError
from kvd.runtime.turns import Pace
from kvd_proto.v1 import engine_pb2

PIECE_BYTES = 16 * 1024  # read in one go: at worst half a millisecond
BYTES_A_UNIT = 256  # of a pace
FIELDS_A_UNIT = 16
MAX_DEPTH = 100  # as protobuf's own reader
# Beside each other in one message: more than the most ids in two lists, and 1,024 of each part.
MAX_FIELDS = 3 * 16_384
MAX_PACKED_BYTES = 256 * 1024  # of one field of numbers: three times what 16,384 job ids take

_STRUCT = "google.protobuf.Struct"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}


class Unreadable(Exception):
    """These bytes are no message of the wanted type."""


@dataclass(frozen=True, slots=True)
class _Field:
    number: int
    begin: int  # of its tag
    value: int  # of its value, behind tag and length
    end: int
    wire_type: int


async def read_in_pieces(message: Message, content: bytes, pace: Pace) -> None:
    """Merge the encoded content into the message; Unreadable where it is none.

    InvalidArgument for a part that is larger than the protocol allows.
    """
    if len(content) <= PIECE_BYTES:
        _merge(message, content)
        await pace.spend(len(content) // BYTES_A_UNIT)
    else:
        await _read(message, memoryview(content), pace, MAX_DEPTH)


async def _read(message: Message, content: memoryview, pace: Pace, depth: int) -> None:
    if not depth:
        raise Unreadable("its parts are nested too deeply")
    begin = 0  # of what is not merged yet
    for count, field in enumerate(_fields(content)):
        if count >= MAX_FIELDS:
            raise Unreadable(f"it has more than {MAX_FIELDS} fields beside each other")
        if count % FIELDS_A_UNIT == 0:
            await pace.spend(1)
        if field.end - begin <= PIECE_BYTES:
            continue
        if field.begin > begin:
            await _merge_piece(message, content[begin : field.begin], pace)
        begin = field.begin
        if field.end - begin > PIECE_BYTES:
            await _read_large(message, field, content, pace, depth)
            begin = field.end
    await _merge_piece(message, content[begin:], pace)


async def _read_large(
    message: Message, field: _Field, content: memoryview, pace: Pace, depth: int
) -> None:
    """Merge one field that is larger than a piece."""
    known: Any = message.DESCRIPTOR.fields_by_number.get(field.number)
    if known is None:  # a later protocol's: what it holds is passed over, not that it is there
        _, behind_tag = _varint(content, field.begin)
        nothing = bytes(_FIXED_SIZES.get(field.wire_type, 1))
        _merge(message, bytes(content[field.begin : behind_tag]) + nothing)
        return
    kind = known.message_type
    if kind is not None and kind.full_name == _STRUCT:
        # One that is far too long isn't read at all: many small values take long.
        check_struct(field.end - field.value, known.name)
    elif kind is not None and field.wire_type == _BYTES:
        held = getattr(message, known.name)
        part = held.add() if known.is_repeated else held
        part.SetInParent()
        await _read(part, content[field.value : field.end], pace, depth - 1)
        return
    is_text = known.type in (known.TYPE_BYTES, known.TYPE_STRING)
    if not is_text and field.end - field.begin > MAX_PACKED_BYTES:
        raise Unreadable(f"{known.name} takes more than {MAX_PACKED_BYTES} bytes")
    await _merge_piece(message, content[field.begin : field.end], pace)


async def _merge_piece(message: Message, content: memoryview, pace: Pace) -> None:
    _merge(message, content)
    await pace.spend(min(len(content), PIECE_BYTES) // BYTES_A_UNIT)


def _merge(message: Message, content: bytes | memoryview) -> None:
    try:
        message.MergeFromString(bytes(content))
    except Exception as error:  # noqa: BLE001 - protobuf raises more than DecodeError
        raise Unreadable(str(error)) from None


def _fields(content: memoryview) -> Iterator[_Field]:
    """The fields that lie directly in the message; Unreadable where there is none."""
    at, end = 0, len(content)
    while at < end:
        begin = at
        tag, at = _varint(content, at)
        wire_type = tag & 7
        value = at
        if wire_type == _BYTES:
            length, value = _varint(content, at)
            at = value + length
        elif wire_type == _VARINT:
            _, at = _varint(content, at)
        elif wire_type in _FIXED_SIZES:
            at += _FIXED_SIZES[wire_type]
        else:
            raise Unreadable(f"a field of wire type {wire_type}")
        if at > end or not tag >> 3:
            raise Unreadable("a field that does not fit in")
        yield _Field(tag >> 3, begin, value, at, wire_type)


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """A number and the place behind it."""
    number = shift = 0
    while True:
        if at >= len(content) or shift > 63:
            raise Unreadable("a number that does not end")
        byte = content[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


_ALL_BITS = (1 << 64) - 1
# The number by which the sender knows its message, by the field of SessionRequest.
_REQUEST = engine_pb2.SessionRequest.DESCRIPTOR.fields_by_name
_NUMBERED = {
    _REQUEST[kind].number: (kind, _REQUEST[kind].message_type.fields_by_name[number].number)
    for kind, number in (("step", "sequence"), ("lookup", "call_id"), ("reset_cache", "sequence"))
}


@dataclass(frozen=True, slots=True)
class UnreadableRequest:
    """Stands for a message of a session's stream that could not be read.

    `kind` is empty and `number` 0 where not even they can be found.
    """

    error: KvdError
    kind: str = ""
    number: int = 0


def unreadable_request(content: bytes, error: KvdError) -> UnreadableRequest:
    """What can be told of such a message: its kind and number stand at its beginning."""
    whole = memoryview(content)
    try:
        outer = next(_fields(whole))
        kind, wanted = _NUMBERED.get(outer.number, ("", 0))
        if kind and outer.wire_type == _BYTES:
            inside = whole[outer.value : outer.end]
            first = next(_fields(inside))
            if (first.number, first.wire_type) == (wanted, _VARINT):
                number, _ = _varint(inside, first.value)
                return UnreadableRequest(error, kind, number & _ALL_BITS)  # as protobuf reads it
    except (Unreadable, StopIteration):
        pass
    return UnreadableRequest(error)
