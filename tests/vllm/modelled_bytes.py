"""What a model that computes nothing leaves in its KV: numbers that stand for all tokens so far.

The number of a position is made of all tokens up to it, so whoever reads it can tell whether it
is that prompt's. Each cache group has numbers of its own. The next token follows from the number
of the last one: the same prompt goes on in the same way, whoever computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from tests.vllm.scheduler_stand import VOCABULARY

WORDS = 256  # of a block, in each group
WORD_BITS = 64
Words = npt.NDArray[np.uint64]


class GroupShape(NamedTuple):
    """A cache group: tokens of an engine block, and its window or state."""

    tokens: int
    window: int = 0  # 0: all tokens are attended to
    recurrent: bool = False

    @property
    def spec(self) -> KVCacheSpec:
        """As vLLM has it; a block of every group has the same size."""
        floats = WORDS * 2
        if self.recurrent:
            return MambaSpec(
                block_size=self.tokens,
                shapes=((floats,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
            )
        figures = {
            "block_size": self.tokens,
            "num_kv_heads": 1,
            "head_size": floats // 2 // self.tokens,
            "dtype": torch.float32,
        }
        if self.window:
            return SlidingWindowSpec(**figures, sliding_window=self.window)
        return FullAttentionSpec(**figures)

    def attended(self, computed: int) -> range:
        """Positions that the next token reads, of so many computed ones."""
        first = max(0, computed - self.window + 1) if self.window else 0
        return range(first, computed)


def mixed(number: int, token: int) -> int:
    number = (number * 6364136223846793005 + token * 1442695040888963407 + 1013904223) % 2**64
    return number ^ number >> 29


def run_on(tokens: Sequence[int], length: int, weights: int) -> tuple[list[int], Words]:
    """So many tokens, those not given being sampled, and the number of each position.

    Other `weights` make other numbers of the same tokens.
    """
    known = list(tokens[:length])
    numbers = np.zeros(length, dtype=np.uint64)
    number = 1 + weights
    for position in range(length):
        if position >= len(known):
            known.append(1 + (number >> 33) % (VOCABULARY - 1))
        number = mixed(number, known[position])
        numbers[position] = number
    return known, numbers


class GroupMemory:
    """One group's view of the engine's memory: engine blocks of words."""

    def __init__(self, blocks: Words, group: int, shape: GroupShape) -> None:
        self.blocks, self.shape = blocks, shape
        self._own = np.uint64(mixed(7, group + 1))
        self._slots = blocks.reshape(len(blocks), shape.tokens, WORDS // shape.tokens)

    def are_right(self, table: Sequence[int], numbers: Words, positions: range) -> bool:
        """Whether these positions hold the numbers; no null block does."""
        places = np.arange(positions.start, positions.stop)
        rows = np.array(table, dtype=np.int64)[places // self.shape.tokens]
        wanted = numbers[positions.start : positions.stop] ^ self._own
        held = self._slots[rows, places % self.shape.tokens]
        return bool(rows.all() and (held == wanted[:, None]).all())

    def write(self, table: Sequence[int], numbers: Words, positions: range) -> None:
        places = np.arange(positions.start, positions.stop)
        rows = np.array(table, dtype=np.int64)[places // self.shape.tokens]
        assert rows.all(), "a null block is written"
        wanted = numbers[positions.start : positions.stop] ^ self._own
        self._slots[rows, places % self.shape.tokens] = wanted[:, None]

    def is_state(self, block: int, number: np.uint64) -> bool:
        return bool(block and (self.blocks[block] == number ^ self._own).all())

    def write_state(self, block: int, number: np.uint64) -> None:
        assert block, "a null block is written"
        self.blocks[block] = number ^ self._own

    def is_whole(self, blocks: Sequence[int], numbers: Words) -> bool:
        """Whether engine blocks hold the end of a prompt with these numbers, as it is stored."""
        if self.shape.recurrent:
            return self.is_state(blocks[-1], numbers[-1])
        size = self.shape.tokens
        first = (len(numbers) - 1) // size * size - (len(blocks) - 1) * size
        table = [0] * (first // size) + list(blocks)
        return self.are_right(table, numbers, range(first, len(numbers)))
