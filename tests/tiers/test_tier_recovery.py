"""A tier's process that outlived its daemon: the pool's next owner ends it, or leaves alone what it
may still write to. It maps the extents of every row, where a mover maps those of one rank."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import pytest

from kvd.linux.proc import start_time_of
from kvd.pool import PoolConfig
from kvd.tiers.process import OrderId, PlacedBlocks, TierConfig, TierId, TierProcess
from kvd.tiers.store import Outcome
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import EXTENTS, opened
from tests.tiers.tier_rig import MEMORY, HeardByTierSink, hashes, on_loop, soon

ROWS = range(EXTENTS - 1)  # the last extent is nobody's


def filled(config: PoolConfig) -> None:
    """A block in each row."""
    with opened(config) as pool:
        orders.introduce(pool)
        for extent in ROWS:
            pool.grant_row(orders.row([extent]))
            pool.write_ready(
                orders.ready([extent * orders.SLOTS_PER_EXTENT], orders.keys(1, seed=extent))
            )


async def orphaned(config: PoolConfig, sink: HeardByTierSink) -> TierProcess:
    """A tier that has mapped every row, noted in a pool that nobody owns any more."""
    with opened(config) as pool:
        files = pool.extent_files
        started: list[tuple[int, int]] = []

        def noted(tier: TierId, pid: int, start_time: int) -> None:
            pool.record_mover(pid, start_time)
            started.append((pid, start_time))
            sink.living.add(pid)

        sink.process_started = noted  # type: ignore[method-assign]
        tier = await TierProcess.start(TierConfig(TierId(0), MEMORY, {}, files), sink)
        assert started == [(tier.pid, start_time_of(tier.pid))]
        extents = np.array([ROWS], dtype=np.uint32)
        offsets = np.zeros_like(extents, dtype=np.uint64)
        blocks = PlacedBlocks(bytes(32), hashes(ROWS), extents, offsets, (4096,))
        assert tier.write(OrderId(1), [blocks], soon())
        answer = await sink.answer(1)
        assert set(answer.values.tolist()) == {Outcome.DONE}
    return tier


@on_loop
async def test_a_tiers_process_that_outlived_its_daemon_is_ended(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    filled(config)
    sink = HeardByTierSink()
    await orphaned(config, sink)
    with opened(config) as pool:
        await sink.until(lambda: sink.gone)
        assert sink.gone == ["killed by SIGKILL, perhaps for want of memory"]
        rows = orders.rows_of(list(pool.recovered()))
        assert not any(row.quarantined for row in rows.values())
        assert not pool.orphans()


@on_loop
async def test_every_row_that_an_undead_tier_maps_is_quarantined_and_its_blocks_are_served(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = orders.config(shared_directory)
    impatient = PoolConfig(
        config.directory, config.pool_bytes, config.extent_bytes, mover_kill_deadline_s=0.05
    )
    filled(config)
    sink = HeardByTierSink()
    tier = await orphaned(config, sink)
    with monkeypatch.context() as patch:
        # As if it waited for a disk: the signal is sent and nothing comes of it.
        patch.setattr(signal, "pidfd_send_signal", lambda _fd, _signal: None)
        with opened(impatient) as pool:
            rows = orders.rows_of(list(pool.recovered()))
            [orphan] = pool.orphans()
    assert (orphan.pid, orphan.extents) == (tier.pid, len(ROWS))
    assert {row: event.quarantined for row, event in rows.items()} == dict.fromkeys(ROWS, True)
    assert all(event.ordinals.tolist() == [0] for event in rows.values())
    with opened(config) as pool:
        await asyncio.wait_for(sink.until(lambda: sink.gone), 5)
        rows = orders.rows_of(list(pool.recovered()))
        assert not any(row.quarantined for row in rows.values())
