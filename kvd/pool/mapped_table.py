"""A file of records of one size, mapped whole: what the pool's tables have in common."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvd.core.keys import U64
from kvd.linux.calls import MADV_POPULATE_READ
from kvd.pool.config import PoolError
from kvd.pool.extents import populate
from kvd.pool.reserve import have_all
from kvd_proto.tags import mix_in_place

_STEP = np.array(0x9E3779B97F4A7C15, dtype=np.uint64)


def checksums(seed: np.uint64, columns: Sequence[U64]) -> U64:
    """One for each row of these columns. The seed tells what is summed up, and how."""
    sums = np.full(len(columns[0]), seed, dtype=np.uint64)
    spare = np.empty_like(sums)
    for column in columns:
        sums += _STEP
        sums ^= column
        mix_in_place(sums, spare)
    return sums


class MappedTable:
    """`_words`: the records, as [record, word]. A new file is zeros, whose memory is had."""

    def __init__(self, path: Path, records: int, record_bytes: int) -> None:
        self._record_bytes = record_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            have_all(self._fd, records * record_bytes, path)
            self._map = mmap.mmap(self._fd, records * record_bytes)
        except BaseException:
            os.close(self._fd)
            raise
        words: U64 = np.frombuffer(self._map, dtype=np.uint64)
        self._words = words.reshape(records, record_bytes // words.itemsize)

    def close(self) -> None:
        """Unmap it. Nobody else may hold a view of the words."""
        del self._words
        self._map.close()
        os.close(self._fd)

    def _prepare(self, first: int, records: int, whose: str) -> None:
        """Make sure of the memory for some records; PoolError, saying whose, where there is none.

        It was had at the start, and a file system may all the same have taken it back.
        """
        size = self._record_bytes
        try:
            os.posix_fallocate(self._fd, first * size, records * size)
        except OSError as error:
            raise PoolError(
                f"no memory for {whose} ({error.strerror}): the file"
                " system of the pool is full; enlarge it or keep others' files out of it"
            ) from error

    def _prefetch(self, first: int, records: int) -> None:
        """Map some records at once, where the kernel can, before all are read."""
        size = self._record_bytes
        with contextlib.suppress(OSError):
            populate(self._map, first * size, records * size, MADV_POPULATE_READ)
