"""Every parser refuses nonsense in its own words; a long run is `make fuzz MINUTES=`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvd.cli.replay.trace import TraceError, read_trace
from kvd.core.keys import KeyBatch
from tests.contract import pool_orders as orders
from tests.fuzz import pool_files, targets
from tests.fuzz.targets import TARGETS, Target, mutated

INPUTS = 1000
FILES = 40  # of a whole pool, which is slow


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_valid_bytes_and_mutations_of_them_are_read_or_refused(target: Target) -> None:
    target(TARGETS[target])
    dice = random.Random(7)
    for _ in range(FILES if target is pool_files.pool_files else INPUTS):
        target(mutated(TARGETS[target], dice))


@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b"[" * 100_000, b'{"kind": "new"}'])
def test_a_sealed_line_of_another_make_is_no_record_of_ours(body: bytes) -> None:
    targets.registry(body)
    targets.header(body)


def test_a_line_of_a_trace_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(TraceError, match="not JSON"):
        read_trace(path)


def test_files_of_a_pool_are_warm_before_they_are_changed(shared_directory: Path) -> None:
    pool_files.lay_out(shared_directory)
    for name in pool_files.SEALED:
        pool_files.seal(shared_directory / "pool" / name)
    with orders.opened(pool_files.config(shared_directory)) as pool:
        assert pool.cold_reason == ""
        rows = orders.rows_of(list(pool.recovered()))
        assert pool.dropped_records == 0
    assert sum(len(orders.blocks_of(row)) for row in rows.values()) == 40


def test_no_keys_are_no_bytes() -> None:
    assert KeyBatch.from_bytes(b"", 32).to_bytes() == b""
