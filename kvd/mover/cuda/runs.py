"""The copies that move a part's blocks between slots and a GPU's memory, as arrays.

Engine blocks are scattered and their fragments many, so everything here is numpy arrays with a
row per copy, never a loop per block. A row is a strided copy: evenly spaced stretches on both
sides. Blocks whose engine ids and slots are adjacent share rows, a row whose stretches touch on
both sides becomes one stretch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64
from kvd.mover.layout import WORD, GroupMap, LocatedPart
from kvd.mover.ranges import I64, FoldedFragment, fold, spans_of

Number = TypeVar("Number", np.int64, np.uint64)

_KNOWN_SHAPES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Strided copies, one per row, in bytes: `height` stretches of `width`, whose addresses
    step by the pitches. Six uint64 arrays [n]; where the height is 1 both pitches are the width.
    """

    host: U64
    device: U64
    host_pitch: U64
    device_pitch: U64
    width: U64
    height: U64

    def __len__(self) -> int:
        return len(self.width)

    @property
    def nbytes(self) -> int:
        """Bytes that they copy."""
        return int((self.width * self.height).sum())

    def expand(self) -> tuple[U64, U64, U64]:
        """Host addresses, device addresses and bytes: a row per stretch, in order.

        Stretches of two rows stay two, even where they touch: they may lie in two extents whose
        mappings happen to touch, and no copy may run across two registrations of host memory.
        """
        index, nth = _parts(self.height)
        host = self.host[index] + nth * self.host_pitch[index]
        device = self.device[index] + nth * self.device_pitch[index]
        return host, device, self.width[index]

    def pieces(self, most_bytes: int) -> Iterator[Runs]:
        """The same copies in order, cut so that each piece has at most that many bytes.

        Runs are cut between stretches, and a stretch only where it alone is too large, at a
        multiple of a word.
        """
        assert most_bytes >= WORD
        most = most_bytes - most_bytes % WORD
        runs = _with_bytes(_with_width(self, most), most)
        ends = np.cumsum(runs.width * runs.height)
        start, done = 0, 0
        while start < len(runs):
            end = int(np.searchsorted(ends, np.uint64(done + most), side="right"))
            yield runs[start:end]
            start, done = end, int(ends[end - 1])

    def __getitem__(self, rows: slice | I64 | npt.NDArray[np.bool_]) -> Runs:
        return Runs(
            self.host[rows],
            self.device[rows],
            self.host_pitch[rows],
            self.device_pitch[rows],
            self.width[rows],
            self.height[rows],
        )


def runs_of(
    part: LocatedPart,
    group: GroupMap,
    host_base: Callable[[int], int],
    region_base: Sequence[int],
) -> Runs:
    """The few runs that copy the part's blocks; null ones are left out.

    host_base: an extent's number to the address of its mapping. region_base: device address of
    each region's first byte.
    """
    # By hand, timeit, one core of a small machine: 16384 scattered blocks of 64 fragments each,
    # a million runs, take 20 ms, and 64 such blocks 0.1 ms.
    spans = spans_of(part, group)
    real = spans.firsts >= 0
    firsts, counts, extents, offsets = (column[real] for column in spans)
    hosts = _host_bases(extents, host_base) + offsets
    shape = _shape_of(group)
    bases = np.array(region_base, dtype=np.uint64).view(np.int64)
    enough = counts[:, None] >= shape.together.least_blocks
    runs = _spread(shape.together, bases, (firsts, hosts, counts), enough)
    if not len(shape.alone.width) or enough.all():
        return runs
    # Spans that are too short for some rows are taken block by block there.
    index, nth = _parts(counts)
    firsts = firsts[index] + nth
    hosts = hosts[index] + nth * group.engine_block_bytes
    few = counts[index, None] < shape.alone.least_blocks
    return _joined(runs, _spread(shape.alone, bases, (firsts, hosts, np.ones_like(nth)), few))


def null_ranges(part: LocatedPart, group: GroupMap) -> list[tuple[int, int, int]]:
    """Extent, offset and bytes of what null engine blocks leave in the slots: what a store
    must fill with zeros. Neighbours are merged."""
    spans = spans_of(part, group)
    null = spans.firsts < 0
    sizes = spans.counts[null] * group.engine_block_bytes
    columns = (spans.extents[null], spans.offsets[null], sizes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# -- what a group's runs look like, whatever the blocks -------------------------------------


class _Rows(NamedTuple):
    """Rows that a span gives; int64 arrays [rows], bytes. `device` is relative to the region
    and engine block 0, `host` to the engine block's place in the slot."""

    region: I64
    device: I64
    host: I64
    stride: I64  # from one engine block to the next
    width: I64
    device_pitch: I64
    host_pitch: I64
    height: I64  # times the blocks that the row is for
    least_blocks: I64


ROW_FIELDS = _Rows._fields


class _Shape(NamedTuple):
    """together: rows that serve a whole span of at least `least_blocks`, stepping from block to
    block. alone: rows within one engine block, for spans of fewer: there these are fewer."""

    together: _Rows
    alone: _Rows
    tables: tuple[I64, I64]  # the same two, a row of the table for each; see ROW_FIELDS


_Row = tuple[int, ...]  # one of _Rows
_shapes: dict[int, tuple[GroupMap, _Shape]] = {}


def _shape_of(group: GroupMap) -> _Shape:
    """Found by identity: to hash thousands of fragments would cost more than a short copy. The
    group is kept, so that its identity can't become another's."""
    known = _shapes.get(id(group))
    if known is not None:
        return known[1]
    if len(_shapes) >= _KNOWN_SHAPES:
        _shapes.clear()
    block_bytes = group.engine_block_bytes
    together: list[_Row] = []
    alone: list[_Row] = []
    for piece in fold(group.fragments):
        if _goes_on(piece, block_bytes):
            together += _rows_within(piece, least_blocks=1)
        else:
            together += _rows_across(piece, block_bytes)
            alone += _rows_within(piece, least_blocks=max(piece.counts, default=1))
    tables = (_table(together), _table(alone))
    shape = _Shape(_columns(tables[0]), _columns(tables[1]), tables)
    _shapes[id(group)] = (group, shape)
    return shape


def tables_of(group: GroupMap) -> tuple[I64, I64]:
    """The rows of the group's runs, int64 arrays [n, 9], see ROW_FIELDS: those that serve a whole
    span, and those for spans that are too short for some of these."""
    return _shape_of(group).tables


def _goes_on(piece: FoldedFragment, block_bytes: int) -> bool:
    """Whether the piece's steps go on evenly from one block to the next, on both sides."""
    if not piece.counts:
        return False
    count, step = piece.counts[0], piece.steps[0]
    return (
        count == max(piece.counts)
        and piece.stride == count * step
        and block_bytes == piece.bytes * math.prod(piece.counts)
    )


def _rows_across(piece: FoldedFragment, block_bytes: int) -> list[_Row]:
    """A row per repetition, that steps from block to block."""
    least = max(piece.counts, default=1)
    steps = (piece.stride, piece.bytes, piece.stride, block_bytes, 1, least)
    return [
        (piece.region, piece.base + device, piece.at + host, *steps)
        for device, host in _places(piece, range(len(piece.counts)))
    ]


def _rows_within(piece: FoldedFragment, least_blocks: int) -> list[_Row]:
    """Rows along the piece's most frequent step; none where it has no steps."""
    if not piece.counts:
        return []
    along = piece.counts.index(max(piece.counts))
    others = [dim for dim in range(len(piece.counts)) if dim != along]
    pitches = (piece.steps[along], _host_step(piece, along))
    steps = (piece.stride, piece.bytes, *pitches, piece.counts[along], least_blocks)
    return [
        (piece.region, piece.base + device, piece.at + host, *steps)
        for device, host in _places(piece, others)
    ]


def _places(piece: FoldedFragment, dims: Iterable[int]) -> list[tuple[int, int]]:
    """Where the repetitions along these dimensions begin: bytes in the region, in the slot."""
    places = [(0, 0)]
    for dim in dims:
        device_step, host_step = piece.steps[dim], _host_step(piece, dim)
        places = [
            (device + nth * device_step, host + nth * host_step)
            for device, host in places
            for nth in range(piece.counts[dim])
        ]
    return places


def _host_step(piece: FoldedFragment, dim: int) -> int:
    """In a slot the repetitions lie close together."""
    return piece.bytes * math.prod(piece.counts[dim + 1 :])


def _table(rows: list[_Row]) -> I64:
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(ROW_FIELDS))


def _columns(table: I64) -> _Rows:
    return _Rows(*np.ascontiguousarray(table.T))


# -- arrays ---------------------------------------------------------------------------------


def _spread(
    rows: _Rows, bases: I64, spans: tuple[I64, I64, I64], used: npt.NDArray[np.bool_]
) -> Runs:
    """Each of the rows for each of the spans (first engine block, host address, blocks per
    row), where `used` [spans, rows] says so; all of a span's rows follow each other."""
    firsts, hosts, blocks = (column[:, None] for column in spans)
    stretches = rows.height * blocks
    flat = (rows.device_pitch == rows.width) & (rows.host_pitch == rows.width)
    width = np.where(flat, rows.width * stretches, rows.width)
    height = np.where(flat, 1, stretches)
    single = height == 1
    columns = (
        hosts + rows.host,
        bases[rows.region] + rows.device + firsts * rows.stride,
        np.where(single, width, rows.host_pitch),
        np.where(single, width, rows.device_pitch),
        width,
        height,
    )
    if used.all():
        return Runs(*(column.view(np.uint64).ravel() for column in columns))
    return Runs(*(column.view(np.uint64)[used] for column in columns))


def _with_width(runs: Runs, most: int) -> Runs:
    """No stretch wider than that: what is wider becomes a run per part."""
    if not len(runs) or int(runs.width.max()) <= most:
        return runs
    one = np.uint64(1)
    index, nth = _parts(np.where(runs.width > most, runs.height, one))
    host = runs.host[index] + nth * runs.host_pitch[index]
    device = runs.device[index] + nth * runs.device_pitch[index]
    row, part = _parts((runs.width[index] + np.uint64(most - 1)) // np.uint64(most))
    whole, at = runs[index[row]], part * np.uint64(most)
    width = np.minimum(whole.width - at, np.uint64(most))
    cut = whole.width > most
    return Runs(
        host[row] + at,
        device[row] + at,
        np.where(cut, width, whole.host_pitch),
        np.where(cut, width, whole.device_pitch),
        width,
        np.where(cut, one, whole.height),
    )


def _with_bytes(runs: Runs, most: int) -> Runs:
    """No run of more bytes than that, where no stretch is: taller ones are cut."""
    most_rows = np.uint64(most) // runs.width
    if (runs.height <= most_rows).all():
        return runs
    index, nth = _parts((runs.height + most_rows - np.uint64(1)) // most_rows)
    whole, most_rows = runs[index], most_rows[index]
    first = nth * most_rows
    height = np.minimum(whole.height - first, most_rows)
    single = height == 1
    return Runs(
        whole.host + first * whole.host_pitch,
        whole.device + first * whole.device_pitch,
        np.where(single, whole.width, whole.host_pitch),
        np.where(single, whole.width, whole.device_pitch),
        whole.width,
        height,
    )


def _joined(one: Runs, other: Runs) -> Runs:
    return Runs(
        np.concatenate((one.host, other.host)),
        np.concatenate((one.device, other.device)),
        np.concatenate((one.host_pitch, other.host_pitch)),
        np.concatenate((one.device_pitch, other.device_pitch)),
        np.concatenate((one.width, other.width)),
        np.concatenate((one.height, other.height)),
    )


def _parts(counts: npt.NDArray[Number]) -> tuple[I64, npt.NDArray[Number]]:
    """For rows that fall into so many parts each: the row of every part, and the how-manieth
    of that row it is."""
    index = np.repeat(np.arange(len(counts)), counts.astype(np.int64))
    before = np.cumsum(counts) - counts
    return index, np.arange(len(index), dtype=counts.dtype) - before[index]


def _host_bases(extents: I64, host_base: Callable[[int], int]) -> I64:
    known, index = np.unique(extents, return_inverse=True)
    return np.array([host_base(int(extent)) for extent in known], dtype=np.int64)[index]
