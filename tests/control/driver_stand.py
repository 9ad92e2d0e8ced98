"""A driver with a new pool of four extents, and sessions that nobody listens to."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from kvd.core import actions as act
from kvd.core.machine import Machine, MachineConfig
from kvd.mover.process import MoverProcess
from kvd.observability.metrics import Metrics
from kvd.pool.config import PoolConfig
from kvd.pool.pool import Pool
from kvd.runtime.driver import Driver
from kvd.runtime.fleet import MoverLauncher

EXTENT_BYTES = 65536


class NoNews:
    """A session's listener that takes no notice."""

    def job_ended(self, order: act.EndJob) -> None:
        pass

    def rank_lost(self, rank: int, reason: str) -> None:
        pass


def config_of(directory: Path, extent_bytes: int = EXTENT_BYTES) -> PoolConfig:
    return PoolConfig(directory, 4 * extent_bytes, extent_bytes=extent_bytes)


@contextlib.asynccontextmanager
async def opened_driver(
    config: PoolConfig, launch: MoverLauncher = MoverProcess.start
) -> AsyncIterator[Driver]:
    """It has taken up its pool, and is closed at the end."""
    pool = Pool.open(config, lambda _done, _all: None)
    machine = Machine(MachineConfig(pool.extents, config.extent_bytes, spare_bytes=0))
    driver = Driver(machine, pool, Metrics("test"), launch=launch)
    for event in pool.recovered():
        driver.call(event)
    yield driver
    await driver.close()
