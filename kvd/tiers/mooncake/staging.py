"""A call's own memory that the network knows: records of blocks, and small blocks whole.

Mooncake moves each stretch of memory by itself, which costs as much as some ten to fifty KiB. So a
small block is copied beside its record, and goes or comes in one stretch. What came there is
proved there, and only then copied to where it shall be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from kvd.tiers.mooncake.moves import MooncakeMove
from kvd.tiers.sealing import prove_all, sound_records_of, wipe
from kvd.tiers.store import TierBlock

# Summed up while it is still in the processor's cache, after it was copied or before.
CACHED_BYTES = 1 << 20
_BYTE = np.dtype(np.uint8)


class NetworkMemory:
    """Used by one call at a time."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self._memory = memory
        self._bytes = np.frombuffer(memory, dtype=_BYTE)
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
            for move in some:
                if move.is_staged:
                    self._lay(move)
            records = sound_records_of([self._lying(move) for move in some])
            for move, record in zip(some, records, strict=True):
                if record is None:
                    damaged.append(move)
                else:
                    self._memory[move.at : move.at + move.record_bytes] = record
        return damaged

    def deliver(self, moves: Sequence[MooncakeMove]) -> list[MooncakeMove]:
        """Put what came where it shall be, if it proves whole. Those that don't are given back,
        and nothing of them is left in their parts."""
        wrong: list[MooncakeMove] = []
        for some in _a_few(moves):
            proven = prove_all(
                [self.record(move) for move in some], [self._lying(move) for move in some]
            )
            for move, is_proven in zip(some, proven, strict=True):
                if is_proven and move.is_staged:
                    self._take(move)
                elif not is_proven:
                    wrong.append(move)
                    if not move.is_staged:
                        wipe(move.block)
        return wrong

    def _lying(self, move: MooncakeMove) -> TierBlock:
        """The block, with its bytes where they lie on their way."""
        if not move.is_staged:
            return move.block
        ends = list(itertools.accumulate(move.sizes, initial=move.at + move.record_bytes))
        parts = tuple([self._memory[at:to] for at, to in itertools.pairwise(ends)])
        return TierBlock(move.block.key, parts, move.block.sums)

    def _lay(self, move: MooncakeMove) -> None:
        at = move.at + move.record_bytes
        for part, size in zip(move.block.parts, move.sizes, strict=True):
            self._bytes[at : at + size] = _plain(part)
            at += size

    def _take(self, move: MooncakeMove) -> None:
        at = move.at + move.record_bytes
        for part, size in zip(move.block.parts, move.sizes, strict=True):
            _plain(part)[:] = self._bytes[at : at + size]
            at += size


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
