"""What the operator says about the pool, and how a refusal is said."""

from __future__ import annotations

import enum
import errno
from dataclasses import dataclass
from pathlib import Path

from kvd.core.model.size_class import MIN_SLOT_BYTES

MIB = 1 << 20
RECORD_BYTES = 128
ROW_HEADER_BYTES = 64
CHECKSUM_BYTES = 8
CHECKSUM_TABLE = "checksums.table"
INDEX_BYTES = 64  # of an index page, the most for each readable block while no table changes
MAX_EXTENTS = 1 << 20
# A row is whole extents of one namespace: in few large ones much lies idle with who has them.
COMFORTABLE_EXTENTS = 32
LEAST_CHOSEN_BYTES = 4 * MIB  # smaller extents would be many files for little
MOST_CHOSEN_BYTES = 64 * MIB
MAX_SLOTS = (1 << 31) - 1  # eviction policies keep slot numbers in 31 bits
MAX_POOL_BYTES = MAX_SLOTS * MIN_SLOT_BYTES
MAX_THREADS = 64
# What the registry may grow by on a file system that others fill: this part of the pool.
RESERVE_SHARE = 256
MAX_RESERVE_BYTES = 128 << 20
START_BYTES = 256 << 10  # and what a start writes beside what is there


class PoolError(Exception):
    """The pool can't be opened, or its memory can't be had. The message names the fix."""


FULL = (errno.ENOSPC, errno.EDQUOT)  # what a file system without room says


def what_is_short(error: OSError, otherwise: str) -> str:
    """Why memory for a file can't be had, and the fix: `otherwise`, but for a limit of ours."""
    if error.errno != errno.EFBIG:
        return otherwise
    return "this process may have no file so large; raise LimitFSIZE= in the unit, or ulimit -f"


class Checksums(enum.StrEnum):
    """What the operator says of checksums of the blocks' bytes."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def chosen_extent_bytes(pool_bytes: int) -> int:
    """The extents' size where none is set: the greatest power of two that makes 32, in bounds."""
    share = max(1, pool_bytes // COMFORTABLE_EXTENTS)
    return min(max(1 << (share.bit_length() - 1), LEAST_CHOSEN_BYTES), MOST_CHOSEN_BYTES)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Where the pool is and how large it is; PoolError where a value is impossible.

    extent_bytes_chosen: nobody set extent_bytes, so a pool that is there may have another, and
    huge pages may ask for more.
    payload_checksums: whether there shall be checksums of the blocks' bytes. checksums_chosen:
    nobody said so, and the pool that is there, or room for them, may decide otherwise; blocks
    without are then kept. checksums_reason: why so, for people.
    """

    directory: Path
    pool_bytes: int
    extent_bytes: int = 64 * MIB
    threads: int = 2
    any_filesystem: bool = False
    mover_kill_deadline_s: float = 5.0
    payload_checksums: bool = False
    checksums_chosen: bool = False
    checksums_reason: str = ""
    extents_directory: Path | None = None  # None: `extents` in the directory
    extent_bytes_chosen: bool = False

    def __post_init__(self) -> None:
        if self.extent_bytes < MIN_SLOT_BYTES or self.extent_bytes % MIN_SLOT_BYTES:
            raise PoolError(
                f"extent_bytes is {self.extent_bytes}: it must be a positive multiple of"
                f" {MIN_SLOT_BYTES}"
            )
        if self.extents < 1:
            raise PoolError(
                f"pool_bytes is {self.pool_bytes}: less than one extent of {self.extent_bytes}"
                " bytes; raise pool_bytes or lower extent_bytes"
            )
        if self.extents > MAX_EXTENTS:
            raise PoolError(
                f"{self.pool_bytes} bytes in extents of {self.extent_bytes} make {self.extents}"
                f" extents, more than {MAX_EXTENTS}; raise extent_bytes"
            )
        if self.extents * self.slots_per_extent > MAX_SLOTS:
            raise PoolError(
                f"pool_bytes is {self.pool_bytes}: a pool has less than 8 TiB; lower pool_bytes to"
                f" at most {MAX_POOL_BYTES}, or run a second daemon with a pool of its own"
            )
        if not 1 <= self.threads <= MAX_THREADS:
            raise PoolError(f"threads is {self.threads}: it must lie in 1..{MAX_THREADS}")
        if self.mover_kill_deadline_s < 0:
            raise PoolError("mover_kill_deadline_s must not be negative")

    @property
    def extents_place(self) -> Path:
        """The directory of the extents' files, whoever named it."""
        return self.extents_directory or self.directory / "extents"

    @property
    def extents(self) -> int:
        """Whole extents that fit in pool_bytes."""
        return self.pool_bytes // self.extent_bytes

    @property
    def slots_per_extent(self) -> int:
        """Most slots that one extent can hold."""
        return self.extent_bytes // MIN_SLOT_BYTES

    @property
    def reserve_bytes(self) -> int:
        """Kept from the start for the registry, and for files that are written anew."""
        return min(self.pool_bytes // RESERVE_SHARE, MAX_RESERVE_BYTES) + START_BYTES

    @property
    def index_bytes(self) -> int:
        """Most that index pages take where all blocks are of the smallest size.

        They are memory of the daemon's, not of a directory's, and come with the blocks.
        """
        return self.extents * self.slots_per_extent * INDEX_BYTES

    @property
    def record_bytes(self) -> int:
        """The slot table alone."""
        return self.extents * self.slots_per_extent * RECORD_BYTES

    @property
    def table_bytes(self) -> int:
        """Slot table, row headers and checksums."""
        sum_bytes = CHECKSUM_BYTES * self.slots_per_extent if self.payload_checksums else 0
        return self.record_bytes + self.extents * (ROW_HEADER_BYTES + sum_bytes)
