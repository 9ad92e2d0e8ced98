"""What a pool gets where nobody said so: the size of its extents, and checksums (`auto`).

The pool that is there decides first: one with checksums goes on with them, whatever they cost
now. Any other gets them where whoever made the configuration would have them and where they have
room. No start fails for them, and none forgets a block that was stored without.
"""

from __future__ import annotations

from dataclasses import replace

from kvd.pool import capacity_check
from kvd.pool.checksum_table import ChecksumTable
from kvd.pool.config import CHECKSUM_TABLE, PoolConfig, PoolError
from kvd.pool.header import standing_extent_bytes

POOL_HAS_THEM = "the pool that is there has them"
NO_ROOM = "there is no room for their table"


def settled(config: PoolConfig) -> PoolConfig:
    """The configuration with what holds for this pool, and why.

    The directory must have been found to be the daemon's own.
    """
    return _with_checksums_settled(_with_extents_sized(config))


def open_checksums(config: PoolConfig) -> ChecksumTable | None:
    """The table of a pool that keeps checksums. None for others, and where its room was taken.

    Whoever fills the file system may do so after the choice, or before: room that a pool holds
    already counts for the whole of it. PoolError where there is none, and they were asked for.
    """
    if not config.payload_checksums:
        return None
    path = config.directory / CHECKSUM_TABLE
    stood = path.exists()
    try:
        return ChecksumTable(config, path)
    except (PoolError, OSError):
        if not stood:  # the next start would take it for one with checksums
            path.unlink(missing_ok=True)
        if not config.checksums_chosen:
            raise
        return None


def _with_extents_sized(config: PoolConfig) -> PoolConfig:
    """With the extents' size of the pool that is there, or else with one that its files can have.

    Only where nobody set one.
    """
    if not config.extent_bytes_chosen:
        return config
    page = capacity_check.huge_page(config)
    standing = standing_extent_bytes(config)
    if standing and not (page and standing % page):
        return replace(config, extent_bytes=standing)
    return replace(config, extent_bytes=max(config.extent_bytes, page))


def _with_checksums_settled(config: PoolConfig) -> PoolConfig:
    if not config.checksums_chosen:
        return config
    wanted = replace(config, payload_checksums=True)
    if (config.directory / CHECKSUM_TABLE).is_file() and standing_extent_bytes(config):
        return replace(wanted, checksums_reason=POOL_HAS_THEM)
    if not config.payload_checksums:
        return config
    try:
        capacity_check.require_space(wanted, capacity_check.measure(wanted))
    except PoolError:
        return replace(config, payload_checksums=False, checksums_reason=NO_ROOM)
    return wanted
