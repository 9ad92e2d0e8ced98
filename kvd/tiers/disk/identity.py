"""Which disk a block belongs to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.core.keys import U64
from kvd_proto.tags import mix


def home_of(digests: U64, seeds: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which of some disks each block belongs to, by their seeds.

    Rendezvous hashing (Thaler and Ravishankar, 1998): another disk in the list takes its share of
    the blocks from all, and no block moves between the others.
    """
    if len(seeds) == 1:
        return np.zeros(len(digests), dtype=np.int64)
    weights = np.stack([mix(digests[:, 1] ^ np.uint64(seed)) for seed in seeds])
    return np.asarray(weights.argmax(axis=0), dtype=np.int64)
