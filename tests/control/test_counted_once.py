"""A lookup for which a tier is asked, and asked again when it has answered, counts once."""

from __future__ import annotations

import urllib.request
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from kvd_proto.v1 import common_pb2, engine_pb2
from tests.control.daemon_rig import RawEngine, block, context, daemon, disk_config, hashes
from tests.ports import free_port
from tests.waiting import wait_until

STORED, NOWHERE = [1, 2, 3, 4], [11, 12, 13, 14, 15, 16]
MISS, HIT, PENDING = 0, 1, 2
PATIENCE_S = 30.0
LOOKUPS = 20


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return disk_config(tmp_path)


def statuses(engine: RawEngine, request: str, keys: list[int]) -> list[int]:
    run = common_pb2.KeyRun(hashes=hashes(*keys))
    query = engine_pb2.Query(context=context(request), run=run, lease=engine_pb2.LEASE_MODE_PREFIX)
    asked = engine_pb2.LookupRequest(session_id=engine.scheduler.id, queries=[query])
    (answer,) = engine.scheduler.call(engine.scheduler.engine.Lookup, asked).answers
    return [status & 3 for status in answer.statuses]


def counted(port: int) -> dict[str, int]:
    """Blocks of lookups, by the metric's name."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    lines = [line.split() for line in page.splitlines() if line.startswith("kvd_lookup_")]
    return {name: int(float(count)) for name, count in lines if name.endswith("_total")}


def test_each_block_of_a_lookup_counts_once_and_as_it_was_answered(config: Path) -> None:
    port = free_port()
    with daemon("--config", str(config), "--http-port", str(port)) as running:
        engine = RawEngine(running.socket)
        status = engine.scheduler.status
        wait_until(lambda: status().tiers[0].serving, "the tier's process", PATIENCE_S)
        assert engine.store({key: block(key) for key in STORED}).status == 1
        answers: Counter[int] = Counter()
        requests = count()

        def asked_enough() -> bool:
            number = next(requests)
            answers.update(statuses(engine, f"r{number}", [*NOWHERE, *STORED]))
            return number >= LOOKUPS and answers[MISS] > 0

        wait_until(asked_enough, "the tier to answer at once now and then", PATIENCE_S)
        told = counted(port)
        engine.close()
    assert told == {
        "kvd_lookup_hits_total": answers[HIT],
        "kvd_lookup_misses_total": answers[MISS],
        "kvd_lookup_pending_total": answers[PENDING],
        "kvd_lookup_retries_total": 0,
    }
