"""A call's own memory that the network knows: records of blocks, and small blocks whole.

Mooncake moves each stretch of memory by itself, which costs as much as some ten to fifty KiB. So a
small block is copied beside its record, and goes or comes in one stretch. It is summed up while it
is copied; what came and proves wrong is wiped from where it should be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from kvd.core.keys import U64
from kvd.tiers.mooncake.moves import MooncakeMove
from kvd.tiers.sealing import prove_all, sound_records_of, wipe
from kvd.tiers.store import TierBlock
from kvd.tiers.sums import copied_sums_of_each, sums_of_each

# Summed up while it is still in the processor's cache, after it was copied or before.
CACHED_BYTES = 1 << 20
_BYTE = np.dtype(np.uint8)


class NetworkMemory:
    """Used by one call at a time."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self._memory = memory
        self.address = address

    def place(self, moves: Sequence[MooncakeMove]) -> None:
        """Give each its place, end to end. No record of an earlier block is left there."""
        at = 0
        memory = self._memory
        for move in moves:
            move.at = at
            memory[at : at + move.record_bytes] = bytes(move.record_bytes)
            at += move.laid_bytes

    def record(self, move: MooncakeMove) -> bytes:
        """What lies where the move's record belongs."""
        return bytes(self._memory[move.at : move.at + move.record_bytes])

    def stretches(self, move: MooncakeMove) -> tuple[list[int], list[int]]:
        """Addresses and sizes of what the value is made of, or goes to."""
        start = self.address + move.at
        if move.is_staged:
            return [start], [move.nbytes]
        return (
            [start, *(_plain(part).__array_interface__["data"][0] for part in move.block.parts)],
            [move.record_bytes, *move.sizes],
        )

    def seal(self, moves: Sequence[MooncakeMove]) -> list[MooncakeMove]:
        """Lay what these values are made of. Those whose bytes are not the block's `sums`, which
        are not to be written, are given back."""
        damaged: list[MooncakeMove] = []
        for some in _a_few(moves):
            blocks = [move.block for move in some]
            places = [self._lying(move) if move.is_staged else None for move in some]
            records = sound_records_of(blocks, _summed(blocks, places))
            for move, record in zip(some, records, strict=True):
                if record is None:
                    damaged.append(move)
                else:
                    self._memory[move.at : move.at + move.record_bytes] = record
        return damaged

    def deliver(self, moves: Sequence[MooncakeMove]) -> list[MooncakeMove]:
        """Put what came where it shall be. Those that don't prove whole are given back, and nothing
        of them is left in their parts."""
        wrong: list[MooncakeMove] = []
        for some in _a_few(moves):
            came = [
                TierBlock(move.block.key, self._lying(move)) if move.is_staged else move.block
                for move in some
            ]
            places = [move.block.parts if move.is_staged else None for move in some]
            records = [self.record(move) for move in some]
            found = _summed(came, places)
            proven = prove_all(records, [move.block for move in some], found)
            for move, is_proven in zip(some, proven, strict=True):
                if not is_proven:
                    wrong.append(move)
                    wipe(move.block)
        return wrong

    def _lying(self, move: MooncakeMove) -> tuple[memoryview, ...]:
        """Where a staged block's parts lie on their way."""
        ends = itertools.accumulate(move.sizes, initial=move.at + move.record_bytes)
        return tuple([self._memory[at:to] for at, to in itertools.pairwise(ends)])


def _summed(
    blocks: Sequence[TierBlock], places: Sequence[tuple[memoryview, ...] | None]
) -> list[U64]:
    """The checksums of each block's parts, which are copied where there is a place for them."""
    staged = [at for at, place in enumerate(places) if place is not None]
    others = [at for at, place in enumerate(places) if place is None]
    found: dict[int, U64] = {}
    if staged:
        where = [place for place in places if place is not None]
        found.update(
            zip(staged, copied_sums_of_each([blocks[at] for at in staged], where), strict=True)
        )
    if others:
        found.update(zip(others, sums_of_each([blocks[at] for at in others]), strict=True))
    return [found[at] for at in range(len(blocks))]


def _a_few(moves: Sequence[MooncakeMove]) -> Iterator[list[MooncakeMove]]:
    """As many as the processor's cache holds, or one."""
    some: list[MooncakeMove] = []
    size = 0
    for move in moves:
        if some and size + move.nbytes > CACHED_BYTES:
            yield some
            some, size = [], 0
        some.append(move)
        size += move.nbytes
    if some:
        yield some


def _plain(part: memoryview) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(part, dtype=_BYTE)
