"""checksums.table: the checksum of each slot's bytes in each shard, where they are asked for.

One word for each ordinal of each extent; word i of extent e is e * slots_per_extent + i. The
words of a slot are written before its record says READY, and the record has their digest: they
are as much a part of it as if they lay in it, and a digest of 0 says that the slot has none. A
pool without the file, or with words of another daemon's making, is therefore not misread. Slots
without a digest that are served all the same (`checksums_chosen`) have NO_SUM in the table.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64
from kvd.pool.config import CHECKSUM_BYTES, PoolConfig
from kvd.pool.mapped_table import MappedTable, checksums

NO_DIGEST = np.uint64(0)
# Names the way in which movers sum up bytes: another way is another seed, and so no digest fits.
_DIGEST_SEED = np.uint64(int.from_bytes(b"kvd-sum1", "little"))


class ChecksumTable(MappedTable):
    """The file with the checksums of all parts, mapped.

    Places run along: extent and ordinal of each part.
    """

    def __init__(self, config: PoolConfig, path: Path) -> None:
        """Open or make the table."""
        self._per_extent = config.slots_per_extent
        super().__init__(path, config.extents * self._per_extent, CHECKSUM_BYTES)

    def prepare(self, extents: tuple[int, ...], slots: int) -> None:
        """Make sure of the memory for these extents' first words; PoolError where there is none."""
        for extent in extents:
            self._prepare(extent * self._per_extent, slots, f"the checksums of extent {extent}")

    def write(
        self,
        extents: npt.NDArray[np.int64],
        ordinals: npt.NDArray[np.int64],
        sums: U64 | np.uint64,
    ) -> None:
        self._words[extents * self._per_extent + ordinals, 0] = sums

    def read(self, extents: npt.NDArray[np.int64], ordinals: npt.NDArray[np.int64]) -> U64:
        sums: U64 = self._words[extents * self._per_extent + ordinals, 0]
        return sums

    def digests(self, extents: npt.NDArray[np.int64], ordinals: npt.NDArray[np.int64]) -> U64:
        """What the record of each slot must have. `extents`: [shards, n]. Never NO_DIGEST."""
        digests = checksums(_DIGEST_SEED, [self.read(shard, ordinals) for shard in extents])
        return np.maximum(digests, np.uint64(1))
