"""What control and a tier's process say to each other, as bodies of frames.

Orders go down, each with a number of its own and a deadline; each is answered once. What there
may be thousands of is arrays.
"""

from __future__ import annotations

import enum
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NewType

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U32, U64, KeyBatch, RowId, TierId
from kvd.processes import framing
from kvd.processes.framing import BadFrame, clean_text
from kvd.processes.mappings import ExtentFiles
from kvd.tiers.store import (
    MAX_BLOCKS_PER_CALL,
    MAX_SCOPES_PER_CALL,
    PART_UNIT,
    SCOPE_BYTES,
    Outcome,
    TierOptions,
    TierReason,
    TierUsage,
)
from kvd_proto.limits import MAX_HASH_BYTES, MAX_RANKS

U8 = npt.NDArray[np.uint8]
OrderId = NewType("OrderId", int)  # chosen by who orders; never twice with one process

MAX_REASON_BYTES = 64
MAX_NOTES = 16  # of a store
MAX_MOUNTS_CHARS = 1 << 20  # of all points that a store lies below, as its next process is told
_MOST = 1 << 63  # that a store may count
MAX_PARTS_PER_ORDER = 1 << 19  # of all its blocks: a frame has room for them
# Of blocks that have left a store, in one frame: an event of the core's for each scope.
MAX_LEFT_KEYS = 1024
MAX_LEFT_SCOPES = 32


class TierFrame(enum.IntEnum):
    """The kinds of frames. Down: control to the tier's process. Up: the other way.

    Both are of one release (`kvd/processes/release.py`): another may have other numbers.
    """

    CONFIGURE = 1
    EXISTS = 2
    READ = 3
    WRITE = 4
    DELETE_SCOPES = 5
    CALL_OFF = 6
    ASK_USAGE = 7
    UNMAP_ROW = 8
    STOP = 9
    TELL_LEFT = 10
    HELLO = 32
    REFUSED = 33
    ANSWER = 34
    USAGE = 35
    ROW_UNMAPPED = 36
    LEAVING = 37
    LEFT = 38


ORDERS = frozenset(
    {
        TierFrame.EXISTS,
        TierFrame.READ,
        TierFrame.WRITE,
        TierFrame.DELETE_SCOPES,
    }
)
COPIES = frozenset({TierFrame.READ, TierFrame.WRITE})
# What may become of a block of a copy.
OUTCOMES = {
    TierFrame.READ: (Outcome.DONE, Outcome.MISSING, Outcome.FAILED),
    TierFrame.WRITE: (Outcome.DONE, Outcome.FULL, Outcome.FAILED, Outcome.DAMAGED),
}


class OrderEnd(enum.IntEnum):
    """How an order ended."""

    ANSWERED = 1  # the store answered
    FAILED = 2  # the store was asked, and nothing can be said of it; what a read fills is undefined
    NEVER_STARTED = 3  # the store was never asked: what it would have filled is untouched


class ProcessReason(enum.StrEnum):
    """Why an order was not answered, beside what a store says. Stable: labels of a metric."""

    LATE = "LATE"  # its deadline passed
    CALLED_OFF = "CALLED_OFF"  # the process is to stop
    NOT_MAPPED = "NOT_MAPPED"  # an extent that can't be mapped, or is being unmapped
    STORE_RAISED = "STORE_RAISED"  # the store broke its promise: only TierError may come out
    STORE_LIED = "STORE_LIED"  # so many answers as were not asked for, or impossible ones
    TIER_GONE = "TIER_GONE"  # the process ended


@dataclass(frozen=True, slots=True)
class TierConfig:
    """All that a tier's process must know at its start.

    store: "package.module:name" of an OpenStore, imported by the process alone. checksums: reads
    are answered with the sums of what was read.
    """

    tier: TierId
    store: str
    options: TierOptions
    extents: ExtentFiles
    checksums: bool = False
    name: str = ""  # the operator's for it
    mounts: tuple[str, ...] = ()  # points that the last process's store lay below

    @property
    def title(self) -> str:
        """What logs call it."""
        return f"tier {self.name or self.tier}"


@dataclass(frozen=True, slots=True)
class TierHello:
    """A tier's word that it serves: whether its store names what leaves it, and where it lies."""

    names_left: bool
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TierRefusal:
    """A tier's word why it can't serve: `field` of its table in the configuration is to change."""

    reason: str
    field: str
    message: str


@dataclass(frozen=True, slots=True, eq=False)
class ScopedKeys:
    """Keys of blocks of one scope."""

    scope: bytes
    keys: KeyBatch


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBlocks:
    """Blocks of one scope, and where their slots' parts are.

    extents: extent number of each part, shape [shards, n]. offsets: bytes in the extent, likewise.
    part_bytes: of every part of a shard. sums: what the parts' checksums must be as they are
    written, shaped like extents; None, or NO_SUM, where nothing is compared.
    """

    scope: bytes
    keys: KeyBatch
    extents: U32
    offsets: U64
    part_bytes: tuple[int, ...]
    sums: U64 | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """What the process is to ask its store. `content`: scopes where whole scopes are to go.

    deadline: seconds of time.monotonic(), which all processes of the machine share. again: a
    write's blocks are likely there. tenant: whose it is; "" where it is nobody's.
    """

    order: OrderId
    kind: TierFrame
    deadline: float
    content: tuple[ScopedKeys, ...] | tuple[PlacedBlocks, ...] | tuple[bytes, ...]
    again: bool = False
    tenant: str = ""

    @property
    def count(self) -> int:
        """Its keys, blocks or scopes."""
        return sum(1 if isinstance(part, bytes) else len(part.keys) for part in self.content)


def _none() -> U8:
    return np.empty(0, dtype=np.uint8)


def no_sums() -> U64:
    """Where there are none."""
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class TierAnswer:
    """How an order ended.

    values: a Found for each key that was asked about; an Outcome for each block of a copy. Empty
    unless it was ANSWERED, and for deletes. duration_ns: of the store's call. reason: of a
    TierReason or ProcessReason, where it was not ANSWERED. sums: of a read that was, where they
    are wanted, the checksum of each part, block after block; of those that are DONE they count.
    """

    order: OrderId
    end: OrderEnd
    values: U8 = field(default_factory=_none)
    bytes_copied: int = 0
    duration_ns: int = 0
    reason: str = ""
    sums: U64 = field(default_factory=no_sums)


@dataclass(frozen=True, slots=True, eq=False)
class TierLeft:
    """Blocks that have left a store by themselves.

    in_doubt: others have, too, and nobody knows which. more: there are more to be told of.
    """

    parts: tuple[ScopedKeys, ...]
    in_doubt: bool = False
    more: bool = False


# ..., how many parts, 1 where they are likely there, bytes of the tenant
_ORDER = struct.Struct("<QdIII4x")
_KEYS = struct.Struct("<II")  # keys, bytes of each hash
_BLOCKS = struct.Struct("<IIII")  # blocks, bytes of each hash, shards, 1 with sums
_ANSWER = struct.Struct("<QQQIIII")  # ..., end, how many values and sums, bytes of the reason
_LEFT = struct.Struct("<III4x")  # parts, 1 in doubt, 1 where there are more
_WORD = struct.Struct("<Q")


# -- down -------------------------------------------------------------------------------------


def pack_config(config: TierConfig) -> bytes:
    fields = asdict(config)
    fields["extents"]["directory"] = str(config.extents.directory)
    return json.dumps(fields).encode()


def unpack_config(body: bytes) -> TierConfig:
    fields: dict[str, Any] = json.loads(body.rstrip(b"\0"))
    place = fields["extents"]
    extents = ExtentFiles(Path(place["directory"]), place["inode"], place["extent_bytes"])
    checksums = bool(fields["checksums"])
    return TierConfig(
        TierId(fields["tier"]),
        fields["store"],
        fields["options"],
        extents,
        checksums,
        str(fields["name"]),
        tuple(fields["mounts"]),
    )


def pack_order(order: Order) -> bytes:
    """The body of a frame of the order's kind."""
    tenant = order.tenant.encode()
    head = order.order, order.deadline, len(order.content), order.again, len(tenant)
    pieces = [_ORDER.pack(*head), _padded(tenant)]
    for part in order.content:
        if isinstance(part, bytes):
            pieces += [_WORD.pack(len(part)), part.ljust(SCOPE_BYTES, b"\0")]
            continue
        count, hash_bytes = len(part.keys), part.keys.hash_bytes
        if isinstance(part, ScopedKeys):
            pieces += _packed_keys(part)
            continue
        pieces += [
            part.scope,
            _BLOCKS.pack(count, hash_bytes, len(part.part_bytes), part.sums is not None),
            _packed(np.array(part.part_bytes), "<u8"),
            _packed(part.keys.words, "<u8"),
            _packed(part.offsets, "<u8"),
            _packed(part.extents, "<u4"),
        ]
        if part.sums is not None:
            pieces.append(_packed(part.sums, "<u8"))
    return b"".join(pieces)


def _packed_keys(part: ScopedKeys) -> list[bytes]:
    count = _KEYS.pack(len(part.keys), part.keys.hash_bytes)
    return [part.scope, count, _packed(part.keys.words, "<u8")]


def _packed(array: npt.NDArray[Any], dtype: str) -> bytes:
    return _padded(np.ascontiguousarray(array, dtype=dtype).tobytes())


def _padded(raw: bytes) -> bytes:
    return raw + b"\0" * (-len(raw) % 8)


class _Body:
    """A frame's body, read from its beginning. BadFrame where it is shorter than it says."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack(self.raw(layout.size))

    def raw(self, size: int) -> bytes:
        found = self._body[self._at : self._at + size]
        if len(found) != size:
            raise BadFrame(f"{len(self._body)} bytes, of which {self._at + size} are wanted")
        self._at += size + -size % 8
        return found

    def array(self, dtype: str, *shape: int) -> npt.NDArray[Any]:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(self.raw(size), dtype=dtype).reshape(shape)


def unpack_order(kind: TierFrame, body: bytes) -> Order:
    """BadFrame for one that no store could be asked."""
    source = _Body(body)
    number, deadline, parts, again, tenant_bytes = source.fields(_ORDER)
    tenant = str(source.raw(tenant_bytes), "utf-8", "replace")
    if not 1 <= parts <= MAX_BLOCKS_PER_CALL:
        raise BadFrame(f"an order of {parts} parts")
    content: Any
    if kind is TierFrame.DELETE_SCOPES:
        content = tuple(_scope(source) for _ in range(parts))
    elif kind in COPIES:
        content = tuple(_blocks(source) for _ in range(parts))
    else:
        content = tuple(_keys(source) for _ in range(parts))
    order = Order(OrderId(number), kind, deadline, content, bool(again), tenant)
    require_order(order)
    return order


def _scope(source: _Body) -> bytes:
    size: int = source.fields(_WORD)[0]
    if size > SCOPE_BYTES:
        raise BadFrame(f"a scope of {size} bytes")
    return source.raw(SCOPE_BYTES)[:size]


def require_order(order: Order) -> None:
    """BadFrame for an order that breaks the rules of the seam or names what can't be."""
    most = MAX_SCOPES_PER_CALL if order.kind is TierFrame.DELETE_SCOPES else MAX_BLOCKS_PER_CALL
    if not 1 <= order.count <= most:
        raise BadFrame(f"an order of {order.count} keys, blocks or scopes; {most} are allowed")
    parts = count_parts(order)
    if parts > MAX_PARTS_PER_ORDER:
        raise BadFrame(f"an order of {parts} parts; {MAX_PARTS_PER_ORDER} are allowed")
    for part in order.content:
        if isinstance(part, bytes):
            continue
        if len(part.scope) != SCOPE_BYTES or not 1 <= part.keys.hash_bytes <= MAX_HASH_BYTES:
            raise BadFrame("a key of an impossible length")
        if isinstance(part, PlacedBlocks):
            if not 1 <= len(part.part_bytes) <= MAX_RANKS:
                raise BadFrame(f"a block of {len(part.part_bytes)} parts")
            if any(size <= 0 or size % PART_UNIT for size in part.part_bytes):
                raise BadFrame(f"parts of {part.part_bytes} bytes")


def count_parts(order: Order) -> int:
    """Of all blocks of a copy."""
    placed = [part for part in order.content if isinstance(part, PlacedBlocks)]
    return sum(len(part.keys) * len(part.part_bytes) for part in placed)


def _keys(source: _Body) -> ScopedKeys:
    scope = source.raw(SCOPE_BYTES)
    count, hash_bytes = source.fields(_KEYS)
    return ScopedKeys(scope, KeyBatch(source.array("<u8", count, -(-hash_bytes // 8)), hash_bytes))


def _blocks(source: _Body) -> PlacedBlocks:
    scope = source.raw(SCOPE_BYTES)
    count, hash_bytes, shards, summed = source.fields(_BLOCKS)
    part_bytes = source.array("<u8", shards)
    keys = KeyBatch(source.array("<u8", count, -(-hash_bytes // 8)), hash_bytes)
    offsets = source.array("<u8", shards, count)
    extents = source.array("<u4", shards, count)
    sums = source.array("<u8", shards, count) if summed else None
    return PlacedBlocks(scope, keys, extents, offsets, tuple(part_bytes.tolist()), sums)


def pack_row(row: RowId, extents: Sequence[int]) -> bytes:
    return _WORD.pack(row) + _WORD.pack(len(extents)) + _packed(np.array(extents), "<u8")


def unpack_row(body: bytes) -> tuple[RowId, tuple[int, ...]]:
    source = _Body(body)
    row, count = (source.fields(_WORD)[0] for _ in range(2))
    return RowId(row), tuple(source.array("<u8", count).tolist())


# -- up ---------------------------------------------------------------------------------------


def pack_answer(answer: TierAnswer) -> bytes:
    reason = answer.reason.encode()[:MAX_REASON_BYTES]
    head = _ANSWER.pack(
        answer.order,
        answer.bytes_copied,
        answer.duration_ns,
        answer.end,
        len(answer.values),
        len(answer.sums),
        len(reason),
    )
    return head + _packed(answer.values, "u1") + _packed(answer.sums, "<u8") + reason


def unpack_answer(body: bytes) -> TierAnswer:
    """ValueError or BadFrame for nonsense."""
    source = _Body(body)
    order, copied, duration_ns, end, count, summed, reason = source.fields(_ANSWER)
    if reason > MAX_REASON_BYTES:
        raise BadFrame(f"a reason of {reason} bytes")
    values = source.array("u1", count)
    sums = source.array("<u8", summed)
    said = source.raw(reason).decode("ascii")
    return TierAnswer(OrderId(order), OrderEnd(end), values, copied, duration_ns, said, sums)


def pack_left(left: TierLeft) -> bytes:
    pieces = [_LEFT.pack(len(left.parts), left.in_doubt, left.more)]
    for part in left.parts:
        pieces += _packed_keys(part)
    return b"".join(pieces)


def unpack_left(body: bytes) -> TierLeft:
    """BadFrame for nonsense."""
    source = _Body(body)
    count, in_doubt, more = source.fields(_LEFT)
    if count > MAX_LEFT_SCOPES:
        raise BadFrame(f"blocks of {count} scopes have left")
    parts: list[ScopedKeys] = []
    left = MAX_LEFT_KEYS
    for _ in range(count):
        parts.append(_keys(source))
        keys = parts[-1].keys
        left -= len(keys)
        if left < 0 or not 1 <= keys.hash_bytes <= MAX_HASH_BYTES:
            raise BadFrame(f"{len(keys)} keys of {keys.hash_bytes} bytes have left")
    return TierLeft(tuple(parts), bool(in_doubt), bool(more))


def pack_hello(hello: TierHello) -> bytes:
    return json.dumps(asdict(hello)).encode()


def unpack_hello(body: bytes) -> TierHello:
    """BadFrame for nonsense."""
    try:
        fields: dict[str, Any] = json.loads(body.rstrip(b"\0"))
        mounts = tuple(map(str, fields["mounts"]))
        if len(json.dumps(mounts)) > MAX_MOUNTS_CHARS or any("\0" in point for point in mounts):
            raise ValueError("it lies below what can't be")
        return TierHello(bool(fields["names_left"]), mounts)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadFrame(f"no hello: {error!r:.200}") from error


def pack_refusal(refusal: TierRefusal) -> bytes:
    return json.dumps(asdict(refusal)).encode()


def unpack_refusal(body: bytes) -> TierRefusal:
    """BadFrame for nonsense."""
    return framing.unpack_refusal(TierRefusal, body)


def pack_usage(usage: TierUsage) -> bytes:
    return json.dumps(asdict(usage)).encode()


def unpack_usage(body: bytes) -> TierUsage:
    """BadFrame for nonsense."""
    try:
        fields: dict[str, Any] = json.loads(body.rstrip(b"\0"))
        fields["errors"] = {TierReason(name): _count(n) for name, n in fields["errors"].items()}
        fields["notes"] = tuple([clean_text(note) for note in fields["notes"][:MAX_NOTES]])
        counted = ("blocks", "bytes", "capacity_bytes", "evicted_blocks")
        return TierUsage(**(fields | {name: _count(fields[name]) for name in counted}))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadFrame(f"no usage: {error!r:.200}") from error


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < _MOST:
        raise ValueError("it counts what can't be")
    return value


def pack_text(text: str) -> bytes:
    return text.encode()


def unpack_text(body: bytes) -> str:
    return clean_text(body.rstrip(b"\0").decode(errors="replace"))


def every_extent(parts: Iterable[PlacedBlocks]) -> frozenset[int]:
    """Extents in which the blocks lie."""
    return frozenset(extent for part in parts for extent in part.extents.ravel().tolist())
