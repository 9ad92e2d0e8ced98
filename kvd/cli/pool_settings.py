"""The pool that the settings ask for: what a start makes, and what its check looks for room for."""

from __future__ import annotations

from kvd.config.settings import Config
from kvd.mover.checksum_cost import why_checksums_cost
from kvd.pool.config import Checksums, PoolConfig


def pool_config(config: Config) -> PoolConfig:
    """What the pool is to be, before one that is there has its say. PoolError: it can't be."""
    checksums, costly = config.payload_checksums, ""
    if checksums is Checksums.AUTO:
        costly = why_checksums_cost()
    return PoolConfig(
        directory=config.pool_directory,
        pool_bytes=config.pool_bytes,
        extent_bytes=config.new_extent_bytes,
        extent_bytes_chosen=config.extent_bytes is None,
        threads=config.prefault_threads,
        any_filesystem=config.any_filesystem,
        payload_checksums=checksums is not Checksums.OFF and not costly,
        checksums_chosen=checksums is Checksums.AUTO,
        checksums_reason=costly,
        extents_directory=config.extents_directory,
    )
