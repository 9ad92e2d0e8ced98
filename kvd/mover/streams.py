"""Copies between slots and engine memory by the native library: a few calls for many blocks.

The library goes through stretches of several places at once, and sums up what it copies in the
same pass where sums are wanted; see kvd/native/copies.c.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvd import native
from kvd.core.events import JobKind
from kvd.core.keys import U64
from kvd.mover.copy_engine import CopyStopped, KeepGoing, StillWanted
from kvd.mover.layout import GroupMap, LocatedPart
from kvd.processes.mappings import Mapping
from kvd_proto.layout import NULL_ENGINE_BLOCK

# A copy that only Python can stop can't be interrupted within a call: at 5 to 10 GB/s this is 0.2
# to 0.4 ms. Each further call costs some percent, and waits for the interpreter's lock. So what a
# `StillWanted` looks at is looked at by the library, and everything is one call.
MAX_CALL_BYTES = 2 << 20
_KINDS = {JobKind.LOAD: native.Kind.LOAD, JobKind.STORE: native.Kind.STORE}


@dataclass(frozen=True, slots=True)
class BlockStretch:
    """Bytes of every engine block that lie together on both sides.

    address: of engine block 0's; room: bytes that memory has from there on. at: in a slot, from
    where the engine block begins.
    """

    address: int
    room: int
    stride: int
    bytes: int
    at: int


class Streams:
    """One group's copies. The extents are those that are open now, by number."""

    def __init__(
        self,
        library: native.Library,
        group: GroupMap,
        stretches: Sequence[BlockStretch],
        extents: dict[int, Mapping],
    ) -> None:
        self._library, self._group, self._extents = library, group, extents
        self._rows = np.array(
            [_row(s) for whole in stretches for s in _cut(whole)], dtype=np.uint64
        )
        ends = np.cumsum(self._rows[:, 3])
        # Where a block is larger than a call may be, its rows are dealt out to several.
        calls = (ends - np.uint64(1)) // np.uint64(MAX_CALL_BYTES)
        bounds = np.flatnonzero(np.diff(calls)) + 1
        edges = [0, *bounds.tolist(), len(self._rows)]
        self._cuts = [slice(*edge) for edge in itertools.pairwise(edges)]
        self._at_once = max(1, MAX_CALL_BYTES // group.engine_block_bytes)

    def copy(
        self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing, sums: native.Sums | None
    ) -> int:
        """Copy the part's blocks that are not null, as `CopyEngine` says; their bytes.

        sums: of the part's slots; what is in the slots is added, null blocks' bytes too.
        """
        if not len(part.extents):
            return 0
        blocks = self._table(part)
        null = (part.engine_blocks == NULL_ENGINE_BLOCK).ravel()
        if null.any():
            skipped, blocks = blocks[null], blocks[~null]
            if kind is JobKind.STORE:
                self._zero(part, null, keep_going)  # and zeros add nothing to a sum
            elif sums is not None:
                self._run(native.Kind.SUM, skipped, keep_going, sums)
        self._run(_KINDS[kind], blocks, keep_going, sums)
        return len(blocks) * self._group.engine_block_bytes

    def _run(
        self, kind: native.Kind, blocks: U64, keep_going: KeepGoing, sums: native.Sums | None
    ) -> None:
        work = native.Stretches(self._library, kind, self._rows, blocks, sums)
        if isinstance(keep_going, StillWanted):
            work.watch(keep_going.watches)
            if not keep_going() or not work.run(0, len(blocks)):
                raise CopyStopped
            return
        for start in range(0, len(blocks), self._at_once):
            stop = min(len(blocks), start + self._at_once)
            for rows in self._cuts:
                if not keep_going():
                    raise CopyStopped
                work.run(start, stop, rows)

    def _zero(self, part: LocatedPart, null: npt.NDArray[np.bool_], keep_going: KeepGoing) -> None:
        """Zero the slots' bytes of null blocks."""
        size = self._group.engine_block_bytes
        slots, places = np.divmod(np.flatnonzero(null), part.engine_blocks.shape[1])
        starts = part.offsets[slots].astype(np.int64) + places * size
        for extent, start in zip(part.extents[slots].tolist(), starts.tolist(), strict=True):
            if not keep_going():
                raise CopyStopped
            self._extents[extent].view[start : start + size] = 0

    def _table(self, part: LocatedPart) -> U64:
        """A row for every engine block, as the library wants it."""
        slots, per_slot = part.engine_blocks.shape
        size = np.uint64(self._group.engine_block_bytes)
        table = np.empty((slots, per_slot, len(native.BLOCK_FIELDS)), dtype=np.uint64)
        numbers, where = np.unique(part.extents, return_inverse=True)
        extents = [self._extents[number] for number in numbers.tolist()]
        opened = np.array([(e.address, len(e.view)) for e in extents], dtype=np.uint64)
        places = np.arange(per_slot, dtype=np.uint64) * size
        table[:, :, :2] = opened[where.reshape(-1, 1)]
        table[:, :, 2] = part.offsets[:, None] + places
        table[:, :, 3] = part.engine_blocks
        table[:, :, 4] = places
        table[:, :, 5] = np.arange(slots, dtype=np.uint64)[:, None]
        return table.reshape(-1, len(native.BLOCK_FIELDS))


def _row(stretch: BlockStretch) -> tuple[int, ...]:
    return (stretch.address, stretch.room, stretch.stride, stretch.bytes, stretch.at)


def _cut(stretch: BlockStretch) -> list[BlockStretch]:
    """It in stretches of at most a call's bytes."""
    return [
        BlockStretch(
            stretch.address + at,
            stretch.room - at,
            stretch.stride,
            min(MAX_CALL_BYTES, stretch.bytes - at),
            stretch.at + at,
        )
        for at in range(0, stretch.bytes, MAX_CALL_BYTES)
    ]
