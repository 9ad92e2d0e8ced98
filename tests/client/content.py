"""What is in every block: a function of its key and rank, so that anybody can check any byte."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

HASH_BYTES = 32
TOKENS = 16

Words = npt.NDArray[np.uint64]

_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def block_hashes(prefix: str, count: int) -> list[bytes]:
    """The chained hashes of a prompt's first `count` blocks."""
    hashes: list[bytes] = []
    parent = prefix.encode()
    for _ in range(count):
        parent = hashlib.sha256(parent).digest()
        hashes.append(parent)
    return hashes


def block_words(key: bytes, rank: int, block_bytes: int) -> Words:
    """One block's bytes on one rank, as 64-bit words: no two places of any two blocks agree."""
    seed = np.uint64(int.from_bytes(key[:8], "little") ^ (rank << 56))
    return np.arange(1, block_bytes // 8 + 1, dtype=np.uint64) * _STRIDE + seed


def last_word(key: bytes, rank: int, block_bytes: int) -> int:
    """The word that a copy writes last."""
    return int(block_words(key, rank, block_bytes)[-1])
