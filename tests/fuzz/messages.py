"""Messages of the protocol drawn from its own descriptors: every field, and values at limits."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

DEPTH = 6
NUMBERS = (0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 255, 256, 257, 2**31 - 1, 2**31, 2**32 - 1)
LARGE = (2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 16 * 1024, 16 * 1024 + 1)
COUNTS = (0, 1, 1, 1, 2, 3, 63, 64, 65)
MANY = (1023, 1024, 1025, 8192, 8193)  # of small parts, now and then
WORDS = ("", "small", "default", "\x00", "é" * 128, "../..", "e0")
_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_SIGNED = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_SINT32)
_SMALL = (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32)
Known = Mapping[str, Sequence[Any]]  # what would do, by the field's name


def drawn(of: Descriptor, dice: random.Random, known: Known, depth: int = 0) -> Any:
    """One message. Most fields that name something name what is there."""
    message = GetMessageClass(of)()
    full = dice.random() < 0.6  # most fields, or few
    for field in of.fields:
        oneof = field.containing_oneof
        if oneof is not None and dice.random() < 1 - 1.5 / len(oneof.fields):
            continue
        if dice.random() > (0.9 if full else 0.3):
            continue
        _fill(message, field, dice, known, depth)
    return message


def _fill(
    message: Any, field: FieldDescriptor, dice: random.Random, known: Known, depth: int
) -> None:
    name = field.name
    if field.message_type is not None:
        if depth >= DEPTH:
            return
        if field.message_type.GetOptions().map_entry:
            _nest(message, dice)
        elif field.is_repeated:
            for _ in range(dice.choice(COUNTS if depth < 2 else COUNTS[:5])):
                getattr(message, name).append(drawn(field.message_type, dice, known, depth + 1))
        else:
            getattr(message, name).CopyFrom(drawn(field.message_type, dice, known, depth + 1))
        return
    if field.is_repeated:
        count = dice.choice(MANY if dice.random() < 0.02 else COUNTS)
        getattr(message, name).extend(_value(field, dice, known) for _ in range(count))
    else:
        setattr(message, name, _value(field, dice, known))


def _nest(message: Any, dice: random.Random) -> None:
    """Parameters of a request: JSON in a Struct, deep now and then."""
    value: Any = dice.choice(["x", 1.5, True, [1, 2], float("inf")])
    for _ in range(dice.choice([0, 1, 3, 20])):
        value = {dice.choice(WORDS): value}
    message.update({"do_remote_decode": True, "deep": value})


def _value(field: FieldDescriptor, dice: random.Random, known: Known) -> Any:
    if field.name in known and dice.random() < 0.75:
        return dice.choice(known[field.name])
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return dice.random() < 0.5
        case FieldDescriptor.TYPE_STRING:
            return dice.choice(WORDS) if dice.random() < 0.6 else "s" * dice.choice(LENGTHS)
        case FieldDescriptor.TYPE_BYTES:
            return dice.randbytes(dice.choice(LENGTHS))
        case FieldDescriptor.TYPE_ENUM:
            assert field.enum_type is not None
            return dice.choice([value.number for value in field.enum_type.values] + [99])
        case kind if kind in _FLOATS:
            return dice.choice([0.0, -1.0, 1e308, float("nan"), float("inf")])
        case kind if kind in _SIGNED:
            return dice.choice([0, 1, -1, 2**31 - 1, -(2**31)])
        case kind if kind in _SMALL:
            return dice.choice(NUMBERS)
    return dice.choice([*NUMBERS, *LARGE])
