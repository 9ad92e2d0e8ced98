"""Several pools: SGLang's hit policies, against its own file backend, and pages of every pool."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MLABufferInfo, MLASplitBuffers
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvd_client.batches import BlockBatches
from kvd_client.integrations.sglang.backend import KvdHiCache
from kvd_client.integrations.sglang.hits import PoolHits, fold
from kvd_client.integrations.sglang.pools import HostPool
from tests.daemon_process import DaemonProcess
from tests.sglang.conftest import MakeBackend
from tests.sglang.rig import (
    HURRIED,
    PAGE_TOKENS,
    PATIENCE_S,
    extra_config,
    host_pool,
    mha_device_pool,
    mla_device_pool,
    state_pool,
    storage_config,
)

PAGES = 12
KEYS = [f"{number:064x}" for number in range(PAGES)]


def tables(states: Any) -> list[torch.Tensor]:
    return [states.temporal_buffer, *states.conv_buffer, *states.slot_state_buffers]


def windows(count: int) -> PoolTransfer:
    return PoolTransfer(
        name=PoolName.MAMBA, keys=KEYS[:count], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


def test_states_and_pages_are_restored_together(
    make_backend: MakeBackend,
) -> None:
    kv, states = host_pool(mha_device_pool()), state_pool()
    backend = make_backend({PoolName.KV: kv, PoolName.MAMBA: states})
    indices = kv.alloc(PAGES * PAGE_TOKENS)
    kv.kv_buffer.uniform_()
    assert backend.batch_set_v1(KEYS, indices) == [True] * PAGES
    for table in tables(states):
        table.uniform_()
    kept = [table[[2, 5]].clone() for table in tables(states)]
    assert len(kept) == 4
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
    assert all(map(torch.equal, [table[[20, 11]] for table in tables(states)], kept))
    assert backend.batch_get_v2([windows(2)]) == {PoolName.MAMBA: [False, False]}  # no indices


def test_states_are_each_ranks_own_where_mla_pages_are_shared(
    make_backend: MakeBackend,
) -> None:
    pools = [
        {PoolName.KV: host_pool(mla_device_pool()), PoolName.MAMBA: state_pool()} for _ in range(2)
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


def test_both_namespaces_of_an_engine_with_a_name_are_used(
    kvd: DaemonProcess, make_backend: MakeBackend
) -> None:
    """Two sessions of one name would end each other."""
    kv, states = host_pool(mla_device_pool()), state_pool()
    named = extra_config(kvd.socket, engine_name="engine")
    backend = make_backend(
        {PoolName.KV: kv, PoolName.MAMBA: states}, is_mla_model=True, extra_config=named
    )
    keys = [each[::-1] for each in KEYS]
    pages = PoolTransfer(name=PoolName.KV, keys=keys, host_indices=kv.alloc(PAGES * PAGE_TOKENS))
    state = PoolTransfer(name=PoolName.MAMBA, keys=keys[:1], host_indices=torch.tensor([1]))
    stored = {PoolName.KV: [True] * PAGES, PoolName.MAMBA: [True]}
    assert backend.batch_set_v2([pages, state]) == stored
    names = [batches._connection._identity.engine_id for batches in backend._opened]
    assert len(set(names)) == 2


def test_without_a_daemon_one_namespace_is_waited_for_not_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = extra_config(str(tmp_path / "kvd.sock"), register_wait_s=0.01)
    backend = KvdHiCache(storage_config(extra, is_mla_model=True))
    try:
        backend.register_mem_pool_host(host_pool(mla_device_pool()))
        backend.register_mem_host_pool_v2(state_pool(), PoolName.MAMBA)
        backend.on_host_pools_registered()
        assert len(backend._opened) == 2
        assert len([line for line in caplog.messages if "not usable yet" in line]) == 1
    finally:
        backend.close()


def test_a_drafters_heads_are_each_ranks_own_beside_mla(
    make_backend: MakeBackend,
) -> None:
    pools = [
        {PoolName.KV: host_pool(mla_device_pool()), PoolName.DRAFT: host_pool(mha_device_pool())}
        for _ in range(2)
    ]
    first, second = (
        make_backend(each, is_mla_model=True, tp_rank=rank, tp_size=2)
        for rank, each in enumerate(pools)
    )
    indices = pools[0][PoolName.KV].alloc(PAGES * PAGE_TOKENS)
    kept = pools[0][PoolName.DRAFT].kv_buffer.uniform_().clone()
    both = [
        PoolTransfer(name=name, keys=KEYS, host_indices=indices)
        for name in (PoolName.KV, PoolName.DRAFT)
    ]
    done = dict.fromkeys((PoolName.KV, PoolName.DRAFT), [True] * PAGES)
    assert first.batch_set_v2(both) == done
    drafts = PoolTransfer(name=PoolName.DRAFT, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert first.batch_exists_v2(KEYS, [drafts]).kv_hit_pages == PAGES
    assert second.batch_exists(KEYS) == PAGES
    assert second.batch_exists_v2(KEYS, [drafts]).kv_hit_pages == 0
    pools[0][PoolName.DRAFT].kv_buffer.zero_()
    assert first.batch_get_v2(both) == done
    rows = slice(0, PAGES * PAGE_TOKENS)
    assert torch.equal(pools[0][PoolName.DRAFT].kv_buffer[:, rows], kept[:, rows])


def test_groups_of_blocks_are_found_by_keys_of_their_own(
    make_backend: MakeBackend,
) -> None:
    groups = host_pool(mha_device_pool(layers=1))
    pools = {PoolName.KV: host_pool(mha_device_pool()), PoolName.DEEPSEEK_V4_C4: groups}
    backend = make_backend(pools)
    own = [f"{1000 + number:064x}" for number in range(6)]
    assert backend.batch_set_v1(KEYS, torch.arange(PAGES * PAGE_TOKENS)) == [True] * PAGES
    stored = PoolTransfer(
        name=PoolName.DEEPSEEK_V4_C4, keys=own[:5], host_indices=torch.arange(5 * PAGE_TOKENS)
    )
    assert backend.batch_set_v2([stored]) == {PoolName.DEEPSEEK_V4_C4: [True] * 5}
    asked = PoolTransfer(
        name=PoolName.DEEPSEEK_V4_C4,
        keys=own,
        hit_policy=PoolHitPolicy.BLOCK_GROUPS,
        block_pages=4,
        group_pages=2,
    )
    found = backend.batch_exists_v2(KEYS, [asked])
    assert found.extra_pool_hit_pages[PoolName.DEEPSEEK_V4_C4] == 2 * 4  # of the last, a half
    assert found.restorable_prefix_pages[-1] == PAGES


def test_where_the_anchor_only_gives_indices_away_the_other_pools_have_the_word(
    make_backend: MakeBackend,
) -> None:
    """As of DeepSeek V4: its anchor has no bytes to keep, and misses nothing."""
    other = host_pool(mha_device_pool(layers=1))
    anchor = LogicalHostPool(size=PAGES * PAGE_TOKENS, page_size=PAGE_TOKENS)
    backend = make_backend({PoolName.KV: anchor, PoolName.DEEPSEEK_V4_C4: other})
    keys = [f"{2000 + number:064x}" for number in range(PAGES)]
    indices = torch.arange(PAGES * PAGE_TOKENS)
    stored = PoolTransfer(
        name=PoolName.DEEPSEEK_V4_C4, keys=keys[:5], host_indices=indices[: 5 * PAGE_TOKENS]
    )
    assert backend.batch_set_v2([stored]) == {PoolName.DEEPSEEK_V4_C4: [True] * 5}
    assert backend.batch_set_v1(keys, indices) == [True] * PAGES
    assert backend.batch_exists(keys) == PAGES
    asked = PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, hit_policy=PoolHitPolicy.ALL_PAGES)
    found = backend.batch_exists_v2(keys, [asked])
    assert found.kv_hit_pages == 5
    assert found.extra_pool_hit_pages[PoolName.DEEPSEEK_V4_C4] == 5
    both = [PoolTransfer(name=PoolName.KV, keys=keys, host_indices=indices), stored]
    assert [*backend.batch_get_v2(both).values()] == [[True] * PAGES, [True] * 5]
    unknown = PoolTransfer(name=PoolName.MAMBA, keys=keys[:1], host_indices=torch.tensor([1]))
    assert backend.batch_set_v2([unknown]) == {PoolName.MAMBA: [False]}
    window = PoolTransfer(
        name=PoolName.DEEPSEEK_V4_C4, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES
    )
    assert (
        backend.batch_exists_v2(
            [each[::-1] for each in keys[:3]] + keys[3:5], [window]
        ).kv_hit_pages
        == 5
    )
    backend.close()
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, indices) == [False] * PAGES


def split_pool() -> Any:
    """MLA in the layout of Ascend's devices: latents, positions and an index, each a file."""
    buffers = MLASplitBuffers(
        k=None, v=None, index_k=torch.zeros(2, 1), index_scales=torch.zeros(2, 1),
        index_layer_indices=(0, 1), k_width=24, v_width=8, index_width=16,
    )  # fmt: skip
    info = MLABufferInfo(
        buffers=buffers, data_ptrs=None, layer_indices=(0, 1, 2), device_layer_num=3,
        page_size=PAGE_TOKENS, kv_lora_rank=24, qk_rope_head_dim=8, kv_cache_dim=32,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        info, 1.0, 0, PAGE_TOKENS, "page_first_kv_split", target_layer_num=3,
        device_capacity_tokens=512, start_layer=0, end_layer=3, pin_memory=False,
        allocator_type="shm",
    )  # fmt: skip


def test_pages_whose_parts_lie_in_files_of_their_own_come_back(
    make_backend: MakeBackend,
) -> None:
    pool = split_pool()
    parts = [pool.k_buffer, pool.v_buffer, pool.index_k_buffer, pool.index_k_scale_buffer]
    backend = make_backend({PoolName.KV: pool}, is_mla_model=True)
    for part in parts:
        part.uniform_()
    stored = pool.alloc(PAGES * PAGE_TOKENS)
    room = pool.alloc(PAGES * PAGE_TOKENS)
    pages, places = (each[::PAGE_TOKENS] // PAGE_TOKENS for each in (stored, room))
    assert not any(torch.equal(part[pages], part[places]) for part in parts)
    assert backend.batch_set_v1(KEYS, stored) == [True] * PAGES
    assert backend.batch_get_v1(KEYS, room) == [True] * PAGES
    assert all(torch.equal(part[pages], part[places]) for part in parts)


def test_engines_of_different_page_sizes_share_nothing(
    make_backend: MakeBackend,
) -> None:
    first, second = (
        make_backend({PoolName.KV: host_pool(mha_device_pool(), page_tokens=size)})
        for size in (PAGE_TOKENS, 2 * PAGE_TOKENS)
    )
    assert first.batch_set_v1(KEYS, torch.arange(PAGES * PAGE_TOKENS)) == [True] * PAGES
    assert (first.batch_exists(KEYS), second.batch_exists(KEYS)) == (PAGES, 0)
    twice = torch.arange(2 * PAGES * PAGE_TOKENS)
    assert second.batch_get_v1(KEYS, twice) == [False] * PAGES


def test_a_pool_that_came_later_is_served_too(make_backend: MakeBackend) -> None:
    backend = make_backend({PoolName.KV: host_pool(mha_device_pool())})
    states = state_pool()
    backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    assert backend._opened[-1].wait_usable(PATIENCE_S)
    state = PoolTransfer(name=PoolName.MAMBA, keys=[KEYS[0]], host_indices=torch.tensor([1]))
    done = backend.batch_set_v2([state])
    assert done == {PoolName.MAMBA: [True]}, backend._opened[-1].refusals


def test_a_drafters_pages_and_the_models_are_found_after_another_attach(
    make_backend: MakeBackend,
) -> None:
    """At a start SGLang registers a drafter's pools once the backend is attached, else with all."""
    keys = [f"{number:064x}" for number in range(100, 104)]
    indices = torch.arange(len(keys) * PAGE_TOKENS)
    model, draft = host_pool(mha_device_pool()), host_pool(mha_device_pool(layers=1))
    started = make_backend({PoolName.KV: model})
    started.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    assert started._opened[-1].wait_usable(PATIENCE_S)
    both = [
        PoolTransfer(name=name, keys=keys, host_indices=indices)
        for name in (PoolName.KV, PoolName.DRAFT)
    ]
    assert all(map(all, started.batch_set_v2(both).values()))
    started.close()
    attached = make_backend({PoolName.KV: model, PoolName.DRAFT: draft})
    found = attached.batch_exists_v2(keys, [PoolTransfer(name=PoolName.DRAFT)])
    assert found.extra_pool_hit_pages == {PoolName.KV: len(keys), PoolName.DRAFT: len(keys)}
    assert all(map(all, attached.batch_get_v2(both).values()))


def test_pools_outside_memory_files_are_refused_with_the_way_out(kvd: DaemonProcess) -> None:
    """The first one while SGLang can still undo the attach."""
    backend = KvdHiCache(storage_config(extra_config(kvd.socket)))
    outside = host_pool(mha_device_pool(), allocator="default")
    with pytest.raises(ValueError, match='"allocator": "shm"'):
        backend.register_mem_pool_host(outside)
    backend.register_mem_pool_host(host_pool(mha_device_pool()))
    backend.register_mem_host_pool_v2(outside, PoolName.DRAFT)
    with pytest.raises(ValueError, match='"allocator": "shm"'):
        backend.on_host_pools_registered()
    backend.close()


Pieces = Callable[[int, int], list[tuple[int, int]]]


def pool_of_pieces(pieces: Pieces) -> HostPool:
    """A pool that says of a page, by its number and address, where its pieces are."""
    pool = host_pool(mla_device_pool())
    own = pool.get_page_buffer_meta

    def told(indices: torch.Tensor) -> tuple[list[int], list[int]]:
        [address], _ = own(indices)
        found = pieces(int(indices[0]) // pool.page_size, address)
        return [each for each, _ in found], [size for _, size in found]

    pool.get_page_buffer_meta = told
    return HostPool("kv", pool)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        (lambda _, address: [(address, 12)], "multiples of 8"),
        (lambda _, address: [(address + 4, 8)], "multiples of 8"),
        (lambda page, address: [(address + 8 * page**2, 8)], "do not follow each other evenly"),
        (lambda _, address: [(address, 1 << 20)], "do not follow each other evenly"),
        (lambda _, address: [(address, 0)], "has no bytes"),
        (lambda _, address: [(address - 8, 8)], "not in shared memory files"),
        (lambda _, address: [(address + (1 << 40), 8)], "not in shared memory files"),
    ],
    ids=[
        "odd size",
        "odd place",
        "uneven",
        "over each other",
        "empty",
        "before its file",
        "behind its file",
    ],
)
def test_pages_that_can_not_be_copied_as_they_lie_are_refused(pieces: Pieces, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pool_of_pieces(pieces)


def test_the_last_piece_of_a_pool_may_end_with_its_file() -> None:
    half = host_pool(mla_device_pool()).get_page_buffer_meta(torch.arange(PAGE_TOKENS))[1][0] // 2
    made = pool_of_pieces(lambda _, address: [(address, half), (address + half, half)])
    assert [each.bytes for each in made.extents] == [half, half]


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
        own, longest = fold(
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
        if own:  # else SGLang asks no further
            told = expected.extra_pool_hit_pages
            assert longest == {str(each.name): told.get(each.name, 0) for each in transfers}


def test_groups_of_blocks_have_a_word_of_their_own() -> None:
    flags = np.array([True, True, True, True, False, True])
    groups = PoolHits(name="c4", policy="block_groups", flags=flags, block_pages=8, group_pages=2)
    assert fold(3, [groups]) == ([1, 2, 3], {"c4": 16})
    unsaid = PoolHits(name="c4", policy="block_groups", flags=flags)
    assert fold(3, [unsaid]) == ([1, 2, 3], {"c4": 0})


def test_a_window_of_no_pages_is_the_last_page() -> None:
    flags = np.array([False, True, False])
    window = PoolHits(name="swa", policy="trailing_pages", flags=flags, trailing=0)
    assert fold(3, [window]) == ([2], {"swa": 2})


@pytest.mark.parametrize("is_get", [True, False], ids=["get", "set"])
def test_a_hung_daemon_costs_one_deadline_not_one_for_each_namespace(
    make_daemon: Callable[[], DaemonProcess], is_get: bool
) -> None:
    """MLA's pages and states are two."""
    daemon = make_daemon()
    daemon.start()
    kv, states = host_pool(mla_device_pool()), state_pool()
    extra = extra_config(daemon.socket, **HURRIED)
    backend = KvdHiCache(storage_config(extra, is_mla_model=True))
    try:
        backend.register_mem_pool_host(kv)
        backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
        backend.on_host_pools_registered()
        for batches in backend._opened:
            assert batches.wait_usable(PATIENCE_S), batches.problem
            batches._connection._silence_s = 600.0  # so that no stall of the machine's ends it
        pages = PoolTransfer(
            name=PoolName.KV, keys=KEYS, host_indices=kv.alloc(PAGES * PAGE_TOKENS)
        )
        state = PoolTransfer(name=PoolName.MAMBA, keys=KEYS[:1], host_indices=torch.tensor([1]))
        moved = {PoolName.KV: [True] * PAGES, PoolName.MAMBA: [True]}
        assert backend.batch_set_v2([pages, state]) == moved
        daemon.freeze()
        awaited: list[BlockBatches] = []
        for batches in backend._opened:
            note_waits(batches, awaited)
        move = backend.batch_get_v2 if is_get else backend.batch_set_v2
        state.keys = pages.keys = KEYS if is_get else [each[::-1] for each in KEYS]
        state.keys = state.keys[:1]
        assert move([pages, state]) == {PoolName.KV: [False] * PAGES, PoolName.MAMBA: [False]}
        assert len(awaited) == 1
    finally:
        daemon.thaw()
        backend.close()


def test_a_transfer_of_no_pages_moves_none_and_is_no_error(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend = make_backend(
        {PoolName.KV: host_pool(mha_device_pool()), PoolName.MAMBA: state_pool()}
    )
    nothing = PoolTransfer(name=PoolName.MAMBA, keys=None, host_indices=None)
    assert backend.batch_set_v2([nothing]) == {PoolName.MAMBA: []}
    assert backend.batch_get_v2([nothing]) == {PoolName.MAMBA: []}
    assert not [line for line in caplog.messages if "are no pages of it" in line]


def test_who_cuts_pages_for_several_parallel_sizes_is_told_that_they_serve_one(
    make_backend: MakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    for number, is_cut in enumerate((False, True)):
        make_backend({PoolName.KV: host_pool(mha_device_pool())}, should_split_heads=is_cut)
        assert caplog.text.count("tp_lcm_size") == number


def note_waits(batches: BlockBatches, awaited: list[BlockBatches]) -> None:
    """From here on, whoever waits for jobs is noted."""
    wait = batches._see_ends

    def wait_and_note(*given: Any, **named: Any) -> list[bool]:
        awaited.append(batches)
        return wait(*given, **named)

    batches._see_ends = wait_and_note  # type: ignore[method-assign]
