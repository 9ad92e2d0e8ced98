"""Several pools: SGLang's hit policies, against its own file backend, and a Mamba pool's pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.common import ShmHostTensorAllocator

from kvd_client.integrations.sglang.backend import KvdHiCache
from kvd_client.integrations.sglang.hits import PoolHits, fold
from tests.daemon_process import DaemonProcess
from tests.sglang.rig import (
    PAGE_TOKENS,
    PATIENCE_S,
    extra_config,
    host_pool,
    mha_device_pool,
    mla_device_pool,
    storage_config,
)

PAGES = 12
KEYS = [f"{number:064x}" for number in range(PAGES)]


class StatePool:
    """A pool of one state a page in two memory files, as MambaPoolHost lays them out."""

    page_size = 1
    layout = "page_first"
    dtype = torch.float32
    size = 24
    size_per_token = 4 * (3 * 40 + 3 * 6)

    def __init__(self) -> None:
        self.allocator = ShmHostTensorAllocator()
        self.temporal = self.allocator.allocate((self.size, 3, 1, 40), torch.float32, "cpu")
        self.conv = self.allocator.allocate((self.size, 3, 1, 6), torch.float32, "cpu")
        self.kv_buffer = [self.temporal, self.conv]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pieces = [part[int(index)] for index in indices for part in (self.temporal, self.conv)]
        return [p.data_ptr() for p in pieces], [p.numel() * p.element_size() for p in pieces]


@pytest.fixture
def make_backend(kvd: DaemonProcess) -> Iterator[Callable[..., KvdHiCache]]:
    made: list[KvdHiCache] = []

    def make(pools: dict[PoolName, Any], **changes: Any) -> KvdHiCache:
        backend = KvdHiCache(storage_config(extra_config(kvd.socket), **changes))
        made.append(backend)
        anchor, *others = pools.items()
        backend.register_mem_pool_host(anchor[1])
        for name, pool in pools.items():
            backend.register_mem_host_pool_v2(pool, name)
        backend.on_host_pools_registered()
        assert others or len(pools) == 1
        for batches in backend._opened:
            assert batches.wait_usable(PATIENCE_S), batches.problem
        return backend

    yield make
    while made:
        made.pop().close()


def windows(count: int) -> PoolTransfer:
    return PoolTransfer(
        name=PoolName.MAMBA, keys=KEYS[:count], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


def test_states_and_pages_are_restored_together(
    make_backend: Callable[..., KvdHiCache],
) -> None:
    kv, states = host_pool(mha_device_pool()), StatePool()
    backend = make_backend({PoolName.KV: kv, PoolName.MAMBA: states})
    indices = kv.alloc(PAGES * PAGE_TOKENS)
    kv.kv_buffer.uniform_()
    assert backend.batch_set_v1(KEYS, indices) == [True] * PAGES
    states.temporal.uniform_()
    states.conv.uniform_()
    kept = [states.temporal[[2, 5]].clone(), states.conv[[2, 5]].clone()]
    checkpoints = PoolTransfer(
        name=PoolName.MAMBA, keys=[KEYS[3], KEYS[7]], host_indices=torch.tensor([2, 5])
    )
    assert backend.batch_set_v2([checkpoints]) == {PoolName.MAMBA: [True, True]}
    found = backend.batch_exists_v2(KEYS, [windows(1)])
    assert found.restorable_prefix_pages == [4, 8]
    assert found.kv_hit_pages == 8
    assert found.extra_pool_hit_pages == {PoolName.KV: PAGES, PoolName.MAMBA: 8}
    into = PoolTransfer(
        name=PoolName.MAMBA, keys=[KEYS[3], KEYS[7]], host_indices=torch.tensor([20, 11])
    )
    assert backend.batch_get_v2([into]) == {PoolName.MAMBA: [True, True]}
    assert torch.equal(states.temporal[[20, 11]], kept[0])
    assert torch.equal(states.conv[[20, 11]], kept[1])
    assert backend.batch_get_v2([windows(2)]) == {PoolName.MAMBA: [False, False]}  # no indices


def test_states_are_each_ranks_own_where_mla_pages_are_shared(
    make_backend: Callable[..., KvdHiCache],
) -> None:
    pools = [
        {PoolName.KV: host_pool(mla_device_pool()), PoolName.MAMBA: StatePool()} for _ in range(2)
    ]
    first, second = (
        make_backend(each, is_mla_model=True, tp_rank=rank, tp_size=2)
        for rank, each in enumerate(pools)
    )
    indices = pools[0][PoolName.KV].alloc(PAGES * PAGE_TOKENS)
    assert first.batch_set_v1(KEYS, indices) == [True] * PAGES
    state = PoolTransfer(name=PoolName.MAMBA, keys=[KEYS[4]], host_indices=torch.tensor([1]))
    assert first.batch_set_v2([state]) == {PoolName.MAMBA: [True]}
    assert first.batch_exists_v2(KEYS, [windows(1)]).kv_hit_pages == 5
    assert second.batch_exists(KEYS) == PAGES
    assert second.batch_exists_v2(KEYS, [windows(1)]).kv_hit_pages == 0


def test_a_pool_that_came_later_is_served_too(make_backend: Callable[..., KvdHiCache]) -> None:
    backend = make_backend({PoolName.KV: host_pool(mha_device_pool())})
    states = StatePool()
    backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    assert backend._opened[-1].wait_usable(PATIENCE_S)
    state = PoolTransfer(name=PoolName.MAMBA, keys=[KEYS[0]], host_indices=torch.tensor([1]))
    done = backend.batch_set_v2([state])
    assert done == {PoolName.MAMBA: [True]}, backend._opened[-1].refusals


def test_pools_outside_memory_files_are_refused_with_the_way_out(kvd: DaemonProcess) -> None:
    backend = KvdHiCache(storage_config(extra_config(kvd.socket)))
    backend.register_mem_pool_host(host_pool(mha_device_pool(), allocator="default"))
    with pytest.raises(ValueError, match='"allocator": "shm"'):
        backend.on_host_pools_registered()
    backend.close()


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_are_those_of_sglangs_file_backend(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    extra = {"file_storage_path": str(tmp_path)}
    oracle = HiCacheFile(storage_config(extra), str(tmp_path))
    pages = 9
    keys = [f"k{number}" for number in range(pages)]
    for _ in range(25):
        there = {
            name: [draw.random() < 0.75 for _ in keys]
            for name in (PoolName.KV, PoolName.INDEXER, PoolName.MAMBA, PoolName.SWA)
        }
        oracle.clear()
        for name, flags in there.items():
            for key, flag in zip(keys, flags, strict=True):
                if flag:
                    oracle.set(oracle._log_key(name, key), torch.zeros(1))
        transfers = [
            PoolTransfer(name=PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES),
            PoolTransfer(
                name=PoolName.MAMBA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES
            ),
            PoolTransfer(name=PoolName.SWA, keys=keys[:3], hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ][: draw.randrange(4)]
        expected = oracle.batch_exists_v2(keys, transfers)
        kv_pages = next((i for i, flag in enumerate(there[PoolName.KV]) if not flag), pages)
        own, _ = fold(
            kv_pages,
            [
                PoolHits(
                    name=str(each.name),
                    policy=each.hit_policy.value,
                    flags=np.array(there[each.name]),
                    trailing=len(each.keys or ()),
                )
                for each in transfers
            ],
        )
        assert own == expected.restorable_prefix_pages
        assert (own[-1] if own else 0) == expected.kv_hit_pages


def test_groups_of_blocks_have_a_word_of_their_own() -> None:
    flags = np.array([True, True, True, True, False, True])
    groups = PoolHits(name="c4", policy="block_groups", flags=flags, block_pages=8, group_pages=2)
    assert fold(3, [groups]) == ([1, 2, 3], {"c4": 16})
