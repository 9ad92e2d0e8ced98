"""The hint `prefetch` to a real daemon with a disk: what was evicted is there before a lookup."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from kvd_proto.v1 import common_pb2, engine_pb2, operator_pb2
from tests.control.daemon_rig import (
    BLOCK_BYTES,
    RawEngine,
    block,
    context,
    daemon,
    disk_config,
    hashes,
)
from tests.ports import free_port
from tests.waiting import wait_until

KEYS = list(range(1, 21))
HIT = 1
PATIENCE_S = 30.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return disk_config(tmp_path, "deadline_seconds = 20.0\n")


def evict_all(engine: RawEngine) -> None:
    """By a quota of one block, that goes again."""
    call, set_quota = engine.scheduler.call, engine.scheduler.operator.SetQuota
    call(set_quota, operator_pb2.SetQuotaRequest(tenant="default", quota_bytes=BLOCK_BYTES))
    call(set_quota, operator_pb2.SetQuotaRequest(tenant="default"))


def touch(keys: list[int]) -> engine_pb2.Touch:
    """A coming prompt's blocks, with the hint."""
    hinted = context("to come")
    hinted.hints.update({"prefetch": True})
    return engine_pb2.Touch(context=hinted, runs=[common_pb2.KeyRun(hashes=hashes(*keys))])


def test_what_was_evicted_is_found_at_once_after_a_prefetch(config: Path) -> None:
    port = free_port()
    with daemon("--config", str(config), "--http-port", str(port)) as running:
        engine = RawEngine(running.socket)
        scheduler = engine.scheduler

        def tier() -> operator_pb2.TierStatus:
            return scheduler.status().tiers[0]

        wait_until(lambda: tier().serving, "the tier's process", PATIENCE_S)
        assert engine.store({key: block(key) for key in KEYS}).status == 1
        wait_until(lambda: tier().blocks_written == len(KEYS), "the disk's copies", PATIENCE_S)
        evict_all(engine)
        # No step ends: its engine may have nothing else to do.
        scheduler.step(touches=[touch(KEYS)])
        wait_until(lambda: tier().blocks_promoted >= len(KEYS) - 1, "the blocks", PATIENCE_S)
        assert scheduler.statuses(KEYS) == [HIT] * len(KEYS)
        assert engine.load(KEYS) == [block(key) for key in KEYS]
        scheduler.step(touches=[touch(KEYS)], end_step=True)
        assert len(KEYS) - 1 <= tier().blocks_promoted <= len(KEYS)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
        engine.close()
    counted = f'kvd_hinted_blocks_total{{hint="prefetch",outcome="followed"}} {2 * len(KEYS)}.0'
    assert counted in page.decode()
