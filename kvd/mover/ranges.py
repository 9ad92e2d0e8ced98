"""Turns fragments and block lists into few, large copies.

Fragments of one block that follow each other at even steps fold into one strided view, blocks
whose engine ids and slots are both adjacent merge into one range: a copy is then one numpy
assignment, whatever its shape, with the interpreter's lock released.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart
from kvd_proto.layout import NULL_ENGINE_BLOCK

# A copy can't be interrupted within a range: at 10 GB/s this is less than a millisecond.
MAX_RANGE_BYTES = 8 << 20
_MAX_FOLDS = 2

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FoldedFragment:
    """Fragments folded together: `counts` repetitions of `bytes`, outermost first, that lie
    `steps` bytes apart in the region and close together in a slot, `at` bytes from where the
    engine block begins there."""

    region: int
    base: int
    stride: int  # from one engine block to the next
    bytes: int
    at: int
    counts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


class Range(NamedTuple):
    """`blocks` engine blocks, from engine id `first` on (None: null), that lie one after the
    other in the extent from `offset` on."""

    first: int | None
    blocks: int
    extent: int
    offset: int


def fold(fragments: Sequence[FragmentSpec]) -> tuple[FoldedFragment, ...]:
    """The fewest pieces that this looks for: adjacent fragments joined, then even steps."""
    pieces: list[FoldedFragment] = []
    at = 0
    for fragment in fragments:
        last = pieces[-1] if pieces else None
        if (
            last is not None
            and (last.region, last.stride) == (fragment.region, fragment.stride)
            and last.base + last.bytes == fragment.base
        ):
            pieces[-1] = replace(last, bytes=last.bytes + fragment.bytes)
        else:
            pieces.append(
                FoldedFragment(fragment.region, fragment.base, fragment.stride, fragment.bytes, at)
            )
        at += fragment.bytes
    for _ in range(_MAX_FOLDS):
        pieces = _fold_once(pieces)
    return tuple(pieces)


def _fold_once(pieces: list[FoldedFragment]) -> list[FoldedFragment]:
    folded: list[FoldedFragment] = []
    start = 0
    while start < len(pieces):
        head = pieces[start]
        end = start + 1
        step = pieces[end].base - head.base if end < len(pieces) else 0
        while (
            end < len(pieces)
            and step > 0
            and pieces[end].base - pieces[end - 1].base == step
            and _same_shape(head, pieces[end])
        ):
            end += 1
        count = end - start
        if count > 1:
            head = replace(head, counts=(count, *head.counts), steps=(step, *head.steps))
        folded.append(head)
        start = end
    return folded


def _same_shape(one: FoldedFragment, other: FoldedFragment) -> bool:
    return replace(one, base=0, at=0) == replace(other, base=0, at=0)


class Spans(NamedTuple):
    """Ranges as arrays, one row per range, of any size. A null range has first < 0."""

    firsts: I64
    counts: I64
    extents: I64
    offsets: I64


def spans_of(part: LocatedPart, group: GroupMap) -> Spans:
    """The part's blocks in order, all neighbours merged."""
    block_bytes = group.engine_block_bytes
    per_slot = group.blocks_per_block
    engine = part.engine_blocks.astype(np.int64).ravel()
    extents = part.extents.astype(np.int64).repeat(per_slot)
    offsets = part.offsets.astype(np.int64).repeat(per_slot)
    offsets += np.tile(np.arange(per_slot) * block_bytes, len(part.extents))
    null = engine == NULL_ENGINE_BLOCK
    engine[null] = -1
    joined = (extents[1:] == extents[:-1]) & (offsets[1:] == offsets[:-1] + block_bytes)
    joined &= (null[1:] & null[:-1]) | (~null[1:] & ~null[:-1] & (np.diff(engine) == 1))
    starts = np.concatenate((np.arange(min(1, len(engine))), np.flatnonzero(~joined) + 1))
    counts = np.diff(starts, append=len(engine))
    return Spans(engine[starts], counts, extents[starts], offsets[starts])


def ranges_of(part: LocatedPart, group: GroupMap) -> Iterator[Range]:
    """The part's blocks in order, neighbours merged up to MAX_RANGE_BYTES."""
    block_bytes = group.engine_block_bytes
    most = max(1, MAX_RANGE_BYTES // block_bytes)
    rows = zip(*(column.tolist() for column in spans_of(part, group)), strict=True)
    for first, count, extent, offset in rows:
        for done in range(0, count, most):
            blocks = min(most, count - done)
            known = None if first < 0 else first + done
            yield Range(known, blocks, extent, offset + done * block_bytes)
