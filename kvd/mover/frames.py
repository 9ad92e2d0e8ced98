"""What control and one mover say to each other, as bodies of frames."""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from kvd.core.events import JobKind, TransferOutcome
from kvd.core.keys import U64, JobId, MoverId, RowId, TransferId
from kvd.mover.layout import (
    CudaRegion,
    FragmentSpec,
    GpuConfig,
    GroupMap,
    LocatedPart,
    MoverConfig,
    Region,
)
from kvd.processes import framing
from kvd.processes.framing import BadFrame
from kvd.processes.mappings import ExtentFiles


class FrameKind(enum.IntEnum):
    """The kinds of frames. Down: control to mover. Up: mover to control."""

    CONFIGURE = 1
    MAP_ROW = 2
    UNMAP_ROW = 3
    TRANSFER = 4
    REVOKE = 5
    READY = 6
    STOP = 7
    HELLO = 32
    REFUSED = 33
    FINISHED = 34
    ROW_UNMAPPED = 35
    ROW_WARM = 36
    FACTS = 37


def _none() -> U64:
    return np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A mover's word that a transfer has ended, or never will start.

    checksums: of a store's slots, in the order of its parts, where they are wanted; else empty.
    damaged: numbers, in that order, of a load's slots that did not hold what was stored.
    """

    transfer: TransferId
    outcome: TransferOutcome
    bytes_copied: int = 0
    duration_ns: int = 0
    checksums: U64 = field(default_factory=_none)
    damaged: U64 = field(default_factory=_none)


NOT_STARTED = "not started"  # nothing is wrong with the registration


@dataclass(frozen=True, slots=True)
class Refusal:
    """A mover's word why it can't serve this registration."""

    error: str  # name of a class of kvd.core.errors, or NOT_STARTED
    message: str
    field: str
    reason: str = ""  # the class's own, or one of kvd.mover.registration_errors


@dataclass(frozen=True, slots=True, eq=False)
class TransferOrder:
    """One rank's copy of a piece: of one job, or of several stores."""

    transfer: TransferId
    jobs: tuple[JobId, ...]
    kind: JobKind
    parts: tuple[LocatedPart, ...]


_ROW = struct.Struct("<QQ")
_TRANSFER = struct.Struct("<QIII4x")  # ..., kind, how many jobs, how many parts
_PART = struct.Struct("<IIII")  # group, blocks, engine blocks per block, 1 with checksums
_FINISHED = struct.Struct("<QIIQQQ")  # ..., how many checksums, ..., how many damaged
_OUTCOMES = tuple(TransferOutcome)


# -- bodies -----------------------------------------------------------------------------------


def pack_config(config: MoverConfig, ring_fd: int, board_fd: int, event_fd: int) -> bytes:
    """The whole configuration. Fragments may be thousands: only their numbers are said."""
    fields = asdict(replace(config, groups=()))
    fields["groups"] = [
        {
            "num_blocks": group.num_blocks,
            "blocks_per_block": group.blocks_per_block,
            "part_bytes": group.part_bytes,
            "fragments": [
                number for f in group.fragments for number in (f.region, f.base, f.stride, f.bytes)
            ],
        }
        for group in config.groups
    ]
    fields["extents"]["directory"] = str(config.extents.directory)
    fields["channel"] = (ring_fd, board_fd, event_fd)
    return json.dumps(fields, default=bytes.hex).encode()


def unpack_config(body: bytes) -> tuple[MoverConfig, tuple[int, int, int]]:
    fields: dict[str, Any] = json.loads(body.rstrip(b"\0"))
    groups = tuple(
        GroupMap(
            group["num_blocks"],
            group["blocks_per_block"],
            group["part_bytes"],
            tuple(starmap(FragmentSpec, zip(*[iter(group["fragments"])] * 4, strict=True))),
        )
        for group in fields["groups"]
    )
    ring_fd, board_fd, event_fd = fields["channel"]
    place = fields["extents"]
    config = MoverConfig(
        MoverId(fields["mover"]),
        _regions(fields),
        groups,
        ExtentFiles(Path(place["directory"]), place["inode"], place["extent_bytes"]),
        fields["checksums"],
        None if fields["gpu"] is None else GpuConfig(**fields["gpu"]),
    )
    return config, (ring_fd, board_fd, event_fd)


def _regions(fields: dict[str, Any]) -> tuple[Region, ...] | tuple[CudaRegion, ...]:
    if fields["gpu"] is None:
        return tuple(Region(**region) for region in fields["regions"])
    return tuple(
        CudaRegion(**(region | {"handle": bytes.fromhex(region["handle"])}))
        for region in fields["regions"]
    )


def pack_transfer(order: TransferOrder) -> bytes:
    head = _TRANSFER.pack(order.transfer, order.kind, len(order.jobs), len(order.parts))
    blocks = [head, pack_jobs(order.jobs)]
    for part in order.parts:
        count, per_block = part.engine_blocks.shape
        blocks.append(_PART.pack(part.group, count, per_block, part.checksums is not None))
        # 64-bit arrays first, so that every array is aligned where it is read.
        blocks.append(np.ascontiguousarray(part.offsets, dtype="<u8").tobytes())
        if part.checksums is not None:
            blocks.append(np.ascontiguousarray(part.checksums, dtype="<u8").tobytes())
        blocks.append(np.ascontiguousarray(part.extents, dtype="<u4").tobytes())
        blocks.append(np.ascontiguousarray(part.engine_blocks, dtype="<u4").tobytes())
        blocks.append(b"\0" * (-(4 * count * (1 + per_block)) % 8))
    return b"".join(blocks)


def unpack_transfer(body: bytes) -> TransferOrder:
    transfer, kind, job_count, count = _TRANSFER.unpack_from(body)
    at = _TRANSFER.size
    jobs = struct.unpack_from(f"<{job_count}Q", body, at)
    at += 8 * job_count
    parts = []
    for _ in range(count):
        group, blocks, per_block, checked = _PART.unpack_from(body, at)
        at += _PART.size
        offsets = np.frombuffer(body, dtype="<u8", count=blocks, offset=at)
        at += offsets.nbytes
        checksums = np.frombuffer(body, dtype="<u8", count=blocks, offset=at) if checked else None
        at += blocks * 8 if checked else 0
        extents = np.frombuffer(body, dtype="<u4", count=blocks, offset=at)
        at += extents.nbytes
        engine = np.frombuffer(body, dtype="<u4", count=blocks * per_block, offset=at)
        at += engine.nbytes
        at += -at % 8
        engine_blocks = engine.reshape(blocks, per_block)
        parts.append(LocatedPart(group, extents, offsets, engine_blocks, checksums))
    return TransferOrder(TransferId(transfer), tuple(map(JobId, jobs)), JobKind(kind), tuple(parts))


def pack_row(row: int, extent: int) -> bytes:
    return _ROW.pack(row, extent)


def unpack_row(body: bytes) -> tuple[RowId, int]:
    row, extent = _ROW.unpack_from(body)
    return RowId(row), extent


def pack_jobs(jobs: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(jobs)}Q", *jobs)


def unpack_jobs(body: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(body) // 8}Q", body))


def pack_finished(finished: Finished) -> bytes:
    head = _FINISHED.pack(
        finished.transfer,
        _OUTCOMES.index(finished.outcome),
        len(finished.checksums),
        finished.bytes_copied,
        finished.duration_ns,
        len(finished.damaged),
    )
    arrays = (finished.checksums, finished.damaged)
    return head + b"".join(array.astype("<u8").tobytes() for array in arrays)


def unpack_finished(body: bytes) -> Finished:
    transfer, outcome, sums, bytes_copied, duration_ns, damaged = _FINISHED.unpack_from(body)
    if outcome >= len(_OUTCOMES) or len(body) != _FINISHED.size + 8 * (sums + damaged):
        raise BadFrame(f"a transfer's end with outcome {outcome} in {len(body)} bytes")
    words = np.frombuffer(body, dtype="<u8")[_FINISHED.size // 8 :]
    return Finished(
        TransferId(transfer),
        _OUTCOMES[outcome],
        bytes_copied,
        duration_ns,
        words[:sums],
        words[sums:],
    )


def pack_refusal(refusal: Refusal) -> bytes:
    return json.dumps(asdict(refusal)).encode()


def unpack_refusal(body: bytes) -> Refusal:
    """BadFrame for nonsense."""
    return framing.unpack_refusal(Refusal, body)
