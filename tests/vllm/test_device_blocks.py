"""Which blocks lazy mode takes from vLLM's own block pool, and what a replay takes it for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.request import RequestStatus

from kvd.cli.replay.device import DeviceMemory
from kvd_client.integrations.vllm.scheduling.lazy import BlocksOnDevice, LeavingJob, check_lazy
from kvd_client.integrations.vllm.scheduling.requests import track
from kvd_client.integrations.vllm.scheduling.scheduler import KvdConnectorScheduler
from kvd_client.integrations.vllm.spec import KvdOffloadingSpec
from tests.vllm.configurations import BLOCK_TOKENS, configure
from tests.vllm.scheduler_stand import write_model
from tests.vllm.test_one_group import ScriptedRequest

TOKENS = 16


class Pool:
    """vLLM's block pool, and requests of whole blocks that run one after the other."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks + 1, enable_caching=True, hash_block_size=TOKENS)

    def begin(self, prompt: Sequence[int]) -> list[Any]:
        """Its blocks: those found, and new ones, named as vLLM names them when it schedules."""
        found = []
        for block in prompt:
            there = self.pool.get_cached_block(name(block), [0])
            if there is None:
                break
            found += there
        self.pool.touch(found)
        request: Any = SimpleNamespace(block_hashes=[name(block) for block in prompt])
        new = self.pool.get_new_blocks(len(prompt) - len(found))
        blocks: list[Any] = [*found, *new]
        self.pool.cache_full_blocks(request, blocks, len(found), len(prompt), TOKENS, 0)
        return blocks

    def end(self, blocks: Sequence[Any]) -> None:
        self.pool.free_blocks(reversed(blocks))

    def run(self, prompt: Sequence[int], device: BlocksOnDevice | None = None) -> list[Any]:
        blocks = self.begin(prompt)
        if device is not None:
            device.note([b.block_id for b in blocks], [key(block) for block in prompt])
            device.gave([b.block_id for b in blocks])
        self.end(blocks)
        return blocks

    def held(self) -> set[int]:
        """What the free blocks are named."""
        names = (block.block_hash for block in self.pool.blocks if block.block_hash is not None)
        return {int.from_bytes(each[:8], "big") for each in names}


def name(block: int) -> Any:
    return block.to_bytes(8, "big") * 4


def key(block: int) -> OffloadKey:
    return OffloadKey(make_block_hash_with_group_id(name(block), 0))


def near(device: BlocksOnDevice) -> list[int]:
    """What came near, the first to leave first; it is dealt with."""
    found = device.near()
    device.deal_with(found)
    return [int.from_bytes(each[:8], "big") for _, each in found]


def bound(pool: Pool, depth: int) -> BlocksOnDevice:
    device = BlocksOnDevice(depth)
    device.bind(pool.pool)
    return device


paths = st.lists(
    st.lists(st.integers(1, 12), min_size=1, max_size=8, unique=True), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=60)
@given(paths, st.integers(8, 14))
def test_a_replays_device_holds_what_vllms_pool_holds(
    prompts: list[list[int]], blocks: int
) -> None:
    pool, model = Pool(blocks), DeviceMemory(blocks)
    for prompt in prompts:
        before = pool.held()
        left = model.begin(prompt)
        model.end()
        pool.run(prompt)
        assert {b for b in range(1, 13) if model.leading([b])} == pool.held()
        assert before - pool.held() <= set(left)


def test_only_what_stands_near_the_front_is_near_its_end_the_tail_first() -> None:
    pool = Pool(8)
    device = bound(pool, depth=3)
    pool.run([1, 2, 3], device)
    assert near(device) == []  # five free blocks that hold nothing stand before them
    pool.run([4, 5, 6, 7], device)
    assert near(device) == [3, 2]
    assert near(device) == []
    pool.run([8], device)
    assert near(device) == [1]  # the free places before it are given away; 3, 2 were named


def test_a_block_that_was_used_again_and_is_near_once_more_is_named_again() -> None:
    pool = Pool(4)
    device = bound(pool, depth=2)
    pool.run([1, 2], device)
    pool.run([3, 4], device)
    assert near(device) == [2, 1]
    pool.run([1, 2], device)
    assert near(device) == [4, 3]
    pool.run([3, 4], device)
    assert near(device) == [2, 1]


def test_a_near_block_that_was_not_stored_is_named_again_once_the_queue_has_moved() -> None:
    pool = Pool(64)
    device = bound(pool, depth=16)
    for first in range(1, 65, 8):
        pool.run(range(first, first + 8), device)
    found = device.near()
    device.deal_with(found)
    refused = dict(found[-4:])
    device.not_stored(list(dict(found)), refused.values())
    assert device.near() == []  # or an engine that only stores would never rest
    for block in range(101, 106):
        pool.run([block], device)
    assert set(refused.items()) < set(device.near())


def test_a_block_that_is_named_and_was_never_computed_is_not_stored() -> None:
    """VLLM names it when it schedules; its request was preempted before it ran."""
    pool = Pool(2)
    device = bound(pool, depth=2)
    pool.end(pool.begin([1, 2]))
    assert pool.held() == {1, 2}
    assert near(device) == []


def test_a_block_that_another_request_wrote_over_is_not_stored_under_its_old_name() -> None:
    """It has that name again, and the request that it is named for never ran."""
    pool = Pool(3)
    device = bound(pool, depth=3)
    first = [block.block_id for block in pool.run([1, 2, 3], device)]
    nameless = pool.pool.get_new_blocks(3)  # of what a request generated, which is not stored
    device.gave([block.block_id for block in nameless])
    pool.end(nameless[::-1])
    again = pool.begin([1, 2, 3])
    assert sorted(first) == sorted(block.block_id for block in again)
    pool.end(again)
    assert pool.held() == {1, 2, 3}
    assert near(device) == []


def test_a_block_that_another_request_found_is_stored_when_it_leaves() -> None:
    pool = Pool(3)
    device = bound(pool, depth=3)
    pool.run([1, 2, 3], device)
    blocks = pool.begin([1, 2, 3])
    device.gave([block.block_id for block in blocks])
    pool.end(blocks)
    assert near(device) == [3, 2, 1]


def test_a_block_that_another_request_has_by_now_is_not_stored() -> None:
    pool = Pool(2)
    device = bound(pool, depth=2)
    pool.run([1, 2], device)
    pool.end(pool.begin([8, 9]))  # in their places, and not computed
    assert near(device) == []


def test_the_queue_is_looked_at_again_once_a_quarter_of_the_depth_was_given_away() -> None:
    pool = Pool(64)
    device = bound(pool, depth=16)
    for first in range(1, 65, 8):
        pool.run(range(first, first + 8), device)
    assert len(near(device)) == 16
    for block in range(101, 105):
        pool.run([block], device)
        assert device.near() == []
    pool.run([105], device)
    assert len(near(device)) == 5


def test_where_the_queue_is_short_what_is_freed_is_near_at_once() -> None:
    pool = Pool(8)
    device = bound(pool, depth=8)
    blocks = pool.begin([1, 2])
    device.note([block.block_id for block in blocks], [key(1), key(2)])
    assert near(device) == []
    pool.end(blocks)
    assert near(device) == [2, 1]
    assert device.near() == []


def test_a_block_in_use_is_not_near_its_end() -> None:
    pool = Pool(3)
    device = bound(pool, depth=3)
    pool.run([1, 2, 3], device)
    blocks = pool.begin([1, 2])
    assert near(device) == [3]
    pool.end(blocks)
    assert near(device) == [2, 1]


def test_what_found_no_room_is_named_again_and_after_a_reset_nothing_is() -> None:
    pool = Pool(2)
    device = bound(pool, depth=2)
    pool.run([1, 2], device)
    assert len(device.near()) == len(device.near()) == 2
    device.clear()
    assert device.near() == []


class LazyScheduler:
    """The connector's scheduler side in lazy mode, without a daemon, over a pool."""

    def __init__(self, model: Path, pool: Pool) -> None:
        lazy = {"store_mode": "lazy"}
        made = configure(Path(write_model(model)), lazy, skip_tokenizer_init=True)
        self.made = KvdConnectorScheduler(KvdOffloadingSpec(made.offloading), made.vllm, made.cache)
        self.made.bind_gpu_block_pool(pool.pool)
        assert self.made._device is not None
        self.device = self.made._device

    def step(self, began: dict[str, list[int]], scheduled: dict[str, int], *ended: str) -> Any:
        """A step that gives these engine blocks to requests that begin, and computes so many blocks
        of each; what it orders."""
        new = [SimpleNamespace(req_id=each, block_ids=(row,)) for each, row in began.items()]
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={
                each: blocks * BLOCK_TOKENS for each, blocks in scheduled.items()
            },
            finished_req_ids=set(ended),
            preempted_req_ids=set(),
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )
        return OffloadingConnectorScheduler.build_connector_meta(self.made, output)

    def begin(self, request_id: str, prompt: Sequence[int]) -> ScriptedRequest:
        request = ScriptedRequest(request_id, len(prompt))
        request.block_hashes[:] = [name(block) for block in prompt]
        self.made.on_new_request(request)
        return request


@pytest.fixture
def three() -> Pool:
    return Pool(3)


@pytest.fixture
def lazy(tmp_path: Path, three: Pool) -> LazyScheduler:
    return LazyScheduler(tmp_path, three)


@pytest.mark.parametrize("generates", [False, True])
def test_what_a_request_generates_over_others_blocks_is_not_stored_under_their_names(
    lazy: LazyScheduler, three: Pool, *, generates: bool
) -> None:
    first = lazy.begin("first", [1, 2, 3])
    blocks = three.begin([1, 2, 3])
    lazy.step({"first": [block.block_id for block in blocks]}, {"first": 3})
    first.status = RequestStatus.FINISHED_STOPPED
    three.end(blocks)
    if generates:  # what is not stored; it takes all places
        lazy.begin("second", [])
        nameless = three.pool.get_new_blocks(3)
        lazy.step({"second": [block.block_id for block in nameless]}, {"second": 3}, "first")
        three.end(nameless[::-1])
        three.end(three.begin([1, 2, 3]))  # of one that was preempted before it ran
    assert near(lazy.device) == ([] if generates else [3, 2, 1])


@pytest.mark.parametrize(
    ("happens", "stored"),
    [
        (lambda _made, _context: None, [3, 2, 1]),
        (lambda made, _context: made.reset_cache(), []),
        (lambda made, context: made.manager.end_stores(context), [1]),
    ],
    ids=["nothing", "a reset", "a load in doubt"],
)
def test_of_whom_nothing_more_is_to_be_stored_nothing_is_when_it_leaves(
    lazy: LazyScheduler, three: Pool, happens: Callable[[Any, Any], None], stored: list[int]
) -> None:
    request = lazy.begin("r", [1, 2, 3])
    blocks = three.begin([1, 2, 3])
    lazy.step({"r": [block.block_id for block in blocks]}, {"r": 1})
    request.num_computed_tokens = BLOCK_TOKENS
    happens(lazy.made, lazy.made._req_status["r"].req_context)
    lazy.step({}, {"r": 2})
    three.end(blocks)
    assert near(lazy.device) == stored


def test_a_reset_flushes_what_leaves_the_device(lazy: LazyScheduler) -> None:
    tracked: Any = None
    lazy.device.jobs[7] = LeavingJob(tracked, [key(1)], [1], [], cut=set())
    lazy.made.reset_cache()
    assert lazy.step({}, {}).jobs_to_flush == {7}


def test_of_a_failed_store_of_what_leaves_no_fence_stays_and_no_block_counts_as_dealt_with(
    lazy: LazyScheduler,
) -> None:
    tracked = track(ReqContext("leaving"), 1, "")
    lazy.device.jobs[7] = LeavingJob(tracked, [key(1)], [1], [], cut=set())
    lazy.device.deal_with([(1, key(1))])
    lazy.made._block_id_to_pending_jobs[1] = {7}
    lazy.made._end_leaving(7, failed=True, left=False)
    assert not lazy.device.jobs
    assert not lazy.device._dealt_with
    assert not lazy.made._block_id_to_pending_jobs


def check(**changes: Any) -> None:
    group = SimpleNamespace(requires_cow_source=changes.get("recurrent", False))
    vllm_config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=changes.get("caching", True)),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=changes.get("extra", {})),
    )
    config: Any = SimpleNamespace(
        blocks_per_chunk=changes.get("width", 1),
        supports_partial_tail=False,
        kv_group_configs=[group],
    )
    check_lazy(vllm_config, config)


def test_lazy_is_refused_by_name_where_it_cannot_be() -> None:
    check()
    for changes, reason in (
        ({"caching": False}, "prefix caching"),
        ({"width": 2}, "join 2 of them"),
        ({"recurrent": True}, "recurrent states"),
        ({"extra": {"self_describing_kv_events": True}}, "self_describing_kv_events"),
    ):
        with pytest.raises(ValueError, match=rf"store_mode.*{reason}.*Fix: "):
            check(**changes)
