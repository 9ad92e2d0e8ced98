"""Checksums of a block's parts in the pool, as the movers take them: what a tier's process adds.

A block that goes to a tier must have the bytes that were stored, or a tier would vouch for damaged
ones. A block that comes from a tier must have sums, so that its next load has something to compare.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64
from kvd.mover.checksums import checksums_of, copy_and_sum, differ, empty_sums_of
from kvd.native import Sums
from kvd.tiers.store import Outcome, TierBlock


def sums_of(parts: Sequence[memoryview]) -> U64:
    """The checksum of each part. Reads every byte, with the interpreter's lock released."""
    return checksums_of(parts)


def sums_of_each(blocks: Sequence[TierBlock]) -> list[U64]:
    """The same of the parts of each block; many small blocks at once cost less than one by one."""
    return _each(checksums_of([part for block in blocks for part in block.parts]), blocks)


def copied_sums_of_each(
    blocks: Sequence[TierBlock], places: Sequence[Sequence[memoryview]]
) -> list[U64]:
    """The same; each part is copied to its place besides."""
    sources = [part for block in blocks for part in block.parts]
    return _each(copy_and_sum(sources, [part for each in places for part in each]), blocks)


def _each(sums: U64, blocks: Sequence[TierBlock]) -> list[U64]:
    ends = itertools.accumulate(len(block.parts) for block in blocks)
    return [sums[end - len(block.parts) : end] for block, end in zip(blocks, ends, strict=True)]


def begun_sums(blocks: Iterable[TierBlock]) -> Sums:
    """Sums of every part of these blocks, before any byte is added to them."""
    return empty_sums_of([part.nbytes for block in blocks for part in block.parts])


def is_damaged(block: TierBlock) -> bool:
    """Whether the block's bytes are others than its sums say."""
    return block.sums is not None and contradict(block, sums_of(block.parts))


def contradict(block: TierBlock, found: U64) -> bool:
    """The same, where the checksums of the parts are known."""
    return block.sums is not None and bool(differ(found, block.sums).any())


def doubt(blocks: Sequence[TierBlock], outcomes: npt.NDArray[np.uint8]) -> None:
    """Believe that a block is damaged where it is: no store may cost host memory a good one."""
    for row in np.flatnonzero(outcomes == Outcome.DAMAGED).tolist():
        if not is_damaged(blocks[row]):
            outcomes[row] = Outcome.FAILED


def complete(blocks: Sequence[TierBlock], outcomes: Sequence[int]) -> None:
    """Sum up what was read, where the store has not."""
    for block, outcome in zip(blocks, outcomes, strict=True):
        if outcome == Outcome.DONE and block.sums is not None and not block.sums.all():
            block.sums[:] = sums_of(block.parts)
