"""Made-up traffic for comparing policies: always the same, in order, and made of prefixes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.policies import Traffic, measure, measure_alone, rows_of, shown, worst
from benchmarks.workloads import WORKLOADS
from kvd.cli.replay.trace import MAX_BLOCKS


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_block_stands_for_all_before_it_and_time_never_falls(name: str) -> None:
    requests = WORKLOADS[name]()
    behind: dict[int, int] = {}
    for before, after in zip([None, *requests], requests, strict=False):
        assert before is None or before.timestamp_ms <= after.timestamp_ms
        blocks = after.blocks.tolist()
        assert 0 < len(blocks) == len(set(blocks)) <= MAX_BLOCKS
        for parent, block in zip([0, *blocks], blocks, strict=False):
            assert behind.setdefault(block, parent) == parent
    assert len(requests) >= 2000


def test_the_same_traffic_comes_at_every_call() -> None:
    one, other = WORKLOADS["retrieval"](), WORKLOADS["retrieval"]()
    assert [r.blocks.tolist() for r in one] == [r.blocks.tolist() for r in other]
    assert [r.timestamp_ms for r in one] == [r.timestamp_ms for r in other]


def test_a_trace_that_is_missing_is_named_and_the_others_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "small.jsonl"
    line = '{"timestamp": %d, "input_length": 900, "output_length": 1, "hash_ids": [1, %d]}\n'
    trace.write_text("".join(line % (at, 2 + at % 3) for at in range(8)))
    rows = rows_of([tmp_path / "gone.jsonl", trace], ["news"])
    assert [row.name for row in rows] == ["small", "small 1st half", "small 2nd half", "news"]
    assert "gone.jsonl is missing" in capsys.readouterr().err
    results = [measure(rows[2], 0.75, policy) for policy in ("lru", "arc")]
    assert results[0]["requests"] == 4
    assert "small 2nd half  75%   3" in shown(results, ("lru", "arc"), "hit_ratio")
    assert "1 of 1" in worst(results, ("lru", "arc"), "compute_ratio")


@pytest.mark.parametrize("policy", ["lru", "arc", "turns"])
def test_a_policy_without_the_core_finds_what_it_finds_within_it(policy: str) -> None:
    row = Traffic(None, "samples")
    alone, within = measure_alone(row, 0.01, policy), measure(row, 0.01, policy)
    assert alone["capacity_blocks"] == within["capacity_blocks"]
    assert alone["hit_ratio"] == pytest.approx(within["hit_ratio"], rel=0.01)
    assert 0.7 < alone["hit_ratio"] < 0.9
