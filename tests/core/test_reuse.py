"""The estimate of what pools of other sizes would find, beside pools of those sizes."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.cli.replay import command as replay
from kvd.cli.replay.device import StoreRule
from kvd.cli.replay.engine import ReplayEngine
from kvd.core.model import reuse
from kvd.core.model.reuse import MAX_SAMPLED_BLOCKS, ReuseSample
from kvd.core.model.slots import SECONDS_A_STAMP, STAMP_SHIFT
from tests.core.test_replay import conversations

BLOCK = 4096
ODD = np.uint64(0xD6E8FEB86659FD93)


def tags(*numbers: int) -> np.ndarray:
    """Tags as the core has them: well mixed."""
    mixed = (np.array(numbers, np.uint64) + np.uint64(1)) * ODD
    for _ in range(2):
        mixed = (mixed ^ (mixed >> np.uint64(32))) * ODD
    return mixed


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is sampled: what is told is exact."""
    monkeypatch.setattr(reuse, "FIRST_SHARE", 1.0)


@pytest.mark.usefixtures("every")
def test_a_block_is_found_by_pools_that_hold_what_was_used_since() -> None:
    sample = ReuseSample(4 * BLOCK)
    for number in (0, 1, 2, 3, 4, 5):
        sample.use(tags(number), BLOCK)
    sample.use(tags(4), BLOCK)  # one other since: 2 blocks
    sample.use(tags(1), BLOCK)  # 5, 4, 3, 2 since: 5 blocks
    curve = sample.curve()
    assert curve is not None
    assert dict(curve.points) == {0.5: 1 / 8, 1.0: 1 / 8, 2.0: 2 / 8, 4.0: 2 / 8}
    assert (curve.uses, curve.share) == (8, 1.0)


@pytest.mark.usefixtures("every")
def test_of_a_prompt_that_is_too_long_the_head_is_kept() -> None:
    sample = ReuseSample(4 * BLOCK)
    for _ in range(2):
        sample.use(tags(*range(8)), BLOCK)
    curve = sample.curve()
    assert curve is not None
    assert [ratio for _, ratio in curve.points] == [2 / 16, 4 / 16, 8 / 16, 8 / 16]


@pytest.mark.usefixtures("every")
def test_larger_blocks_count_for_more() -> None:
    sample = ReuseSample(4 * BLOCK)
    sample.use(tags(0), BLOCK)
    sample.use(tags(1), 6 * BLOCK)
    sample.use(tags(0), BLOCK)
    curve = sample.curve()
    assert curve is not None
    assert dict(curve.points)[1.0] == 0
    assert dict(curve.points)[2.0] == 1 / 3


def test_nothing_is_said_of_nothing() -> None:
    assert ReuseSample(BLOCK).curve() is None


def test_it_holds_so_much_and_no_more() -> None:
    sample = ReuseSample(1 << 40)
    for first in range(0, 40 * MAX_SAMPLED_BLOCKS, 8192):
        sample.use(tags(*range(first, first + 8192)), BLOCK)
    assert sample.blocks <= MAX_SAMPLED_BLOCKS
    curve = sample.curve()
    assert curve is not None
    assert curve.share < 1 / 20
    assert all(ratio < 0.02 for _, ratio in curve.points)
    again = tags(*range(8192))
    for _ in range(60):
        sample.use(again, BLOCK)
    curve = sample.curve()
    assert curve is not None
    expected = 60 * 8192 / (40 * MAX_SAMPLED_BLOCKS + 60 * 8192)
    assert curve.points[1][1] == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_replay_at_those_sizes_finds_as_much(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "FIRST_SHARE", 1.0)
    requests = conversations(seed, 600)
    blocks = max(40, replay.distinct_blocks(requests) // 10)
    engine = ReplayEngine("lru", blocks, StoreRule())
    for each in requests:
        engine.serve(each)
    curve = engine.curve()
    assert curve is not None
    for scale in (0.5, 2.0):
        there = replay.replay(requests, "lru", round(blocks * scale)).hit_ratio
        assert dict(curve.points)[scale] == pytest.approx(there, abs=0.02)


def seconds(count: float) -> int:
    """As coarse times go."""
    return round(count / SECONDS_A_STAMP)


@pytest.mark.parametrize("told_late", [False, True], ids=["told before", "told after its use"])
@pytest.mark.parametrize(
    ("after_s", "regrets"),
    [(50, [1, 1, 1]), (70, [0, 1, 1]), (700, [0, 0, 1]), (4000, [0, 0, 0])],
)
@pytest.mark.usefixtures("every")
def test_an_evicted_block_that_is_used_again_so_soon_is_regretted(
    after_s: int, regrets: list[int], told_late: bool
) -> None:
    sample, begin = ReuseSample(4 * BLOCK), seconds(1000)
    sample.use(tags(1, 2), BLOCK, begin << STAMP_SHIFT)
    evicted = begin + seconds(5)
    again_ns = (evicted + seconds(after_s)) << STAMP_SHIFT
    if not told_late:
        sample.evicted(tags(1, 7), np.array([evicted, evicted]))
        assert sample.regrets == [0, 0, 0]
    sample.use(tags(1), BLOCK, again_ns)
    if told_late:
        sample.evicted(tags(1), np.array([evicted]))
    assert sample.regrets == regrets
    sample.use(tags(1), BLOCK, again_ns)
    assert sample.regrets == regrets, "once"


def test_a_sampled_regret_stands_for_as_many_as_were_not_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reuse, "FIRST_SHARE", 0.5)
    sample, blocks = ReuseSample(4 * BLOCK), tags(*range(1000))
    sample.use(blocks, BLOCK, 0)
    sample.evicted(blocks, np.full(1000, 1))
    sample.use(blocks, BLOCK, 2 << STAMP_SHIFT)
    assert sample.regrets[0] == 2 * sample.blocks
    assert 400 < sample.blocks < 600


def test_a_cold_engines_few_blocks_are_no_finds() -> None:
    for count in (1, 5, 40, 300, MAX_SAMPLED_BLOCKS):
        sample = ReuseSample(1 << 40)
        for first in range(0, count, 100):
            sample.use(tags(*range(first, min(count, first + 100))), BLOCK)
        curve = sample.curve()
        assert curve is not None
        assert [ratio for _, ratio in curve.points] == [0, 0, 0, 0]


def test_what_a_few_blocks_find_is_told_to_the_block() -> None:
    sample = ReuseSample(1 << 40)
    for _ in range(2):
        sample.use(tags(*range(10)), BLOCK)
    curve = sample.curve()
    assert curve is not None
    assert [ratio for _, ratio in curve.points] == [0.5] * 4
