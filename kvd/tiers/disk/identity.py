"""What a block is known by, and what proves its bytes.

A *digest* of 128 bits stands for the whole key in memory and in the index. A *seal* of 64 bits
is taken of the whole key, the parts' lengths and every part's checksum: a row that names another
block's bytes, or bytes that were written over or torn, has a seal that does not fit. So neither
the slab nor the index is ever believed, and nothing has to reach the disk in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from kvd.core.keys import U64
from kvd.mover.checksums import checksums
from kvd.tiers.store import TierBlock, TierKey
from kvd_proto.tags import mix

_SEAL_BYTES = 8
_DIGEST_BYTES = 16
_WORD = np.dtype("<u8")


def digests_of(keys: Sequence[TierKey]) -> U64:
    """The digest of each key, shape [n, 2]."""
    blake2b, size = hashlib.blake2b, _DIGEST_BYTES
    # A scope has one length, so that no two keys come to the same bytes.
    joined = b"".join([blake2b(k.scope + k.block, digest_size=size).digest() for k in keys])
    return np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2)


def lengths_of(block: TierBlock) -> bytes:
    """The lengths of a block's parts, eight bytes each."""
    return b"".join([part.nbytes.to_bytes(8, "little") for part in block.parts])


def seal_of(block: TierBlock, lengths: bytes) -> int:
    """Reads every byte of the block, with the interpreter's lock released."""
    taken = hashlib.blake2b(block.key.scope, digest_size=_SEAL_BYTES)
    taken.update(len(block.key.block).to_bytes(8, "little") + block.key.block + lengths)
    for part in block.parts:
        words = np.frombuffer(part, dtype=_WORD).reshape(1, -1)
        taken.update(checksums(words).tobytes())
    return int.from_bytes(taken.digest(), "little")


def home_of(digests: U64, seeds: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which of some disks each block belongs to, by their seeds.

    Rendezvous hashing (Thaler and Ravishankar, 1998): another disk in the list takes its share of
    the blocks from all, and no block moves between the others.
    """
    if len(seeds) == 1:
        return np.zeros(len(digests), dtype=np.int64)
    weights = np.stack([mix(digests[:, 1] ^ np.uint64(seed)) for seed in seeds])
    return np.asarray(weights.argmax(axis=0), dtype=np.int64)
