"""A start takes up the blocks of its pool, piece by piece."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvd.core.machine import Machine, MachineConfig
from kvd.observability.metrics import Metrics
from kvd.pool.config import PoolError
from kvd.pool.pool import Pool
from kvd.runtime.driver import Driver
from tests.contract import pool_orders as orders
from tests.control.daemon_rig import RawEngine, block, daemon, identity
from tests.daemon_process import START_SECONDS


@asynccontextmanager
async def starting(directory: Path) -> AsyncIterator[Driver]:
    """The driver of a daemon whose pool holds a block, which it has not taken up."""
    config = orders.config(directory)
    with orders.opened(config) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready([0], orders.keys(1)))
    machine = Machine(MachineConfig(orders.EXTENTS, orders.EXTENT_BYTES))
    driver = Driver(machine, Pool.open(config, lambda _done, _all: None), Metrics("test"))
    yield driver
    await driver.close()


async def test_recovery_without_memory_for_an_index_page_says_so(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    broken: list[Exception] = []
    async with starting(shared_directory) as driver:
        driver.on_broken_invariant = lambda _event, error, _story: broken.append(error)
        with monkeypatch.context() as patched:
            patched.setattr(os, "memfd_create", refuse)
            with pytest.raises(PoolError, match="Cannot allocate memory"):
                list(driver.recover())
        assert not broken


async def test_long_work_begins_once_all_of_the_pool_is_taken_up(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[bool] = []

    async def work() -> None:
        began.append(True)

    monkeypatch.setattr(Machine, "has_work", lambda _: True)
    async with starting(shared_directory) as driver:
        monkeypatch.setattr(driver, "_work", work)
        pieces = 0
        for _ in driver.recover():
            await asyncio.sleep(0)
            assert not began
            pieces += 1
        await asyncio.sleep(0)
        assert began
        assert pieces > 2
        assert driver.machine.statistics().counters.recovered == 1


def test_a_daemon_that_is_told_to_stop_while_it_reads_its_pool_does_so_and_loses_nothing() -> None:
    with daemon() as running:
        engine = RawEngine(running.socket, identity=identity("first"))
        engine.store({1: block(1)})
        engine.close()
        running.stop()
        running.module = "tests.control.daemon_stopped_as_it_reads"
        running.launch()
        assert running.process.wait(START_SECONDS) == 0
        assert "told to stop while the pool was made or read" in running.log.read_text()
        running.module = "kvd"
        running.start()
        again = RawEngine(running.socket, identity=identity("again"))
        assert again.load([1]) == [block(1)]
        again.close()
