"""`kvd replay --device-blocks`: the engine's own memory before the pool, and what is stored."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cli.replay import command as replay
from kvd.cli.replay.device import EAGER, LAZY, SECOND, STORES, DeviceMemory, StoreRule
from kvd.cli.replay.trace import TraceRequest
from tests.core.test_replay import command, conversations, request, write_trace

REQUESTS = conversations(seed=4, count=150)
LONGEST = max(r.blocks.size for r in REQUESTS)


class PlainDevice:
    """The same device as one list of what its free places hold, next to leave first.

    Of a block that lies there twice the one computed first is found, as in vLLM.
    """

    def __init__(self, places: int) -> None:
        self.free: list[tuple[int, int]] = [(0, -1)] * places  # when computed, block
        self.now = 0

    def serve(self, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """Blocks found, and those that left."""
        used: list[tuple[int, int]] = []
        for block in blocks:
            there = [held for held in self.free if held[1] == block]
            if not there:
                break
            used.append(min(there))
            self.free.remove(min(there))
        found = len(used)
        left, self.free = self.free[: len(blocks) - found], self.free[len(blocks) - found :]
        for block in blocks[found:]:
            self.now += 1
            used.append((self.now, block))
        self.free += reversed(used)
        return found, [block for _, block in left if block >= 0]


def plain_lazy(requests: Sequence[TraceRequest], device: int, host: int) -> tuple[int, int, int]:
    """Found on the device, found in the pool, and stored, by an ordered dictionary."""
    memory, pool = PlainDevice(device), OrderedDict[int, None]()
    on_device = in_pool = stored = 0
    for blocks in (r.blocks.tolist() for r in requests):
        had, left = memory.serve(blocks)
        found = list(itertools.takewhile(pool.__contains__, blocks[had:]))
        for block in (*reversed(found), *(b for b in left if b in pool)):
            pool.move_to_end(block)
        missing = [b for b in reversed(left) if b not in pool][: host - len(found)]
        for victim in [b for b in pool if b not in found][
            : max(0, len(missing) + len(pool) - host)
        ]:
            del pool[victim]
        pool.update(dict.fromkeys(reversed(missing)))
        for block in reversed(found):
            pool.move_to_end(block)
        on_device, in_pool = on_device + had, in_pool + len(found)
        stored += len(missing)
    return on_device, in_pool, stored


paths = st.lists(
    st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True), min_size=1, max_size=40
)


@given(paths, st.integers(8, 14))
def test_device_gives_its_places_away_as_a_plain_queue_does(
    prompts: list[list[int]], places: int
) -> None:
    """Any numbers: a block may come back under another prefix, or lie in two places."""
    device, plain = DeviceMemory(places), PlainDevice(places)
    for blocks in prompts:
        found = device.leading(blocks)
        left = device.begin(blocks)
        device.end()
        assert (found, left) == plain.serve(blocks)


def test_tail_of_a_prompt_leaves_before_its_head() -> None:
    device = DeviceMemory(6)
    for blocks in ([1, 2, 3], [1, 9]):
        device.begin(blocks)
        device.end()
    assert device.begin([20, 21, 22, 23]) == [3, 2]
    device.end()
    assert device.leading([1, 9]) == 2
    assert device.begin([30, 31, 32, 33, 34, 35]) == [9, 1, 23, 22, 21, 20]


@pytest.mark.parametrize("host", [1, 7, 40, 1000])
@pytest.mark.parametrize("device", [LONGEST, 2 * LONGEST])
def test_lazy_finds_and_stores_exactly_what_plain_queues_do(device: int, host: int) -> None:
    result = replay.replay(REQUESTS, "lru", host, StoreRule.of(device, LAZY))
    on_device, in_pool, stored = plain_lazy(REQUESTS, device, host)
    assert result.device_ratio == on_device / result.blocks_offered
    assert result.host_ratio == in_pool / result.blocks_offered
    assert result.blocks_stored == stored
    assert result.blocks_found == on_device + in_pool


@pytest.mark.parametrize("store", STORES)
def test_levels_add_up(store: str) -> None:
    result = replay.replay(REQUESTS, "lru", 30, StoreRule.of(LONGEST, store))
    assert result.hit_ratio == pytest.approx(result.device_ratio + result.host_ratio)
    asked = result.blocks_offered * (1 - result.device_ratio)
    assert result.external_ratio == pytest.approx(result.host_ratio * result.blocks_offered / asked)
    assert result.bytes_stored == result.blocks_stored * result.block_bytes
    assert result.hit_ratio <= result.reachable_ratio <= result.infinite_ratio


def test_eager_repeats_the_device_where_both_are_of_one_size() -> None:
    """What eager storing wastes: the pool finds nothing; lazily both are as good as one."""
    both = 2 * LONGEST
    eager, lazy = (
        replay.replay(REQUESTS, "lru", both, StoreRule.of(both, store)) for store in (EAGER, LAZY)
    )
    alone = replay.replay(REQUESTS, "lru", both)
    assert eager.host_ratio == 0
    assert eager.hit_ratio == alone.hit_ratio < lazy.hit_ratio
    assert lazy.blocks_stored < eager.blocks_stored


def test_lazy_stores_nothing_while_the_device_has_room() -> None:
    rule = StoreRule.of(replay.distinct_blocks(REQUESTS), LAZY)
    result = replay.replay(REQUESTS, "lru", 10, rule)
    assert result.blocks_stored == 0
    assert result.hit_ratio == result.device_ratio == result.infinite_ratio


def test_second_stores_what_came_twice_only() -> None:
    requests = [request(1, 2, 3), request(4, 5), request(1, 2), request(4, 6), request(1, 2, 3)]
    second = replay.replay(requests, "lru", 10, StoreRule.of(3, SECOND))
    assert second.store_threshold == 2
    assert second.blocks_stored == 4  # 1, 2, 4, and 3 at last
    assert second.blocks_found == 4  # 1, 4 and 1 on the device, and then 2 in the pool
    assert second.host_ratio == 1 / 12
    assert replay.replay(requests, "lru", 10, StoreRule.of(3, EAGER)).blocks_stored == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store", "lazy"], "--store lazy needs --device-blocks"),
        (["--device-blocks", "3"], "a request has 4 blocks"),
        (["--device-blocks", "9", "--policy", "belady"], "belady is a bound for one cache"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_trace(tmp_path / "trace.jsonl", [request(1, 2, 3, 4)]))
    assert command("--trace", path, "--capacity-blocks", "5", *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_device_takes_no_memory_for_places_that_nobody_used() -> None:
    device = DeviceMemory(1 << 50)
    for _ in range(2):
        assert device.begin([1, 2, 3]) == []
        device.end()
    assert device.leading([1, 2, 3, 4]) == 3


def test_command_tells_device_and_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_trace(tmp_path / "trace.jsonl", REQUESTS))
    size = ["--capacity-blocks", "20", "--device-blocks", str(LONGEST), "--store", "lazy"]
    assert command("--trace", path, *size, "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["device_blocks"], fields["store"]) == (LONGEST, "lazy")
    assert 0 < fields["external_ratio"] < 1
