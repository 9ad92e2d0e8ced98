"""Whether the pool keeps checksums of its blocks' bytes, where nobody said so (`auto`).

The pool that is there decides first: one with checksums goes on with them, whatever they cost
now. Any other gets them where whoever made the configuration would have them and where they have
room. No start fails for them, and none forgets a block that was stored without.
"""

from __future__ import annotations

from dataclasses import replace

from kvd.pool import capacity_check
from kvd.pool.config import CHECKSUM_TABLE, PoolConfig, PoolError
from kvd.pool.header import standing_extent_bytes

POOL_HAS_THEM = "the pool that is there has them"
NO_ROOM = "there is no room for their table"


def with_checksums_settled(config: PoolConfig) -> PoolConfig:
    """The configuration with what holds for this pool, and why.

    The directory must have been found to be the daemon's own, and the extents' size settled.
    """
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
