"""What the rank side moves, byte for byte: every byte of the KV that no load named stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from tests.daemon_process import DaemonProcess
from tests.vllm.conftest import StartRig
from tests.vllm.rank_rig import LAYER_BYTES, NUM_BLOCKS, RankRig, cache_config

MakeRig = Callable[..., RankRig]


@pytest.fixture
def make_rig(kvd: DaemonProcess, start_rig: StartRig) -> MakeRig:
    """Ranks of an engine of its own; all that a test makes share what they store."""
    return partial(start_rig, kvd)


def check_loaded(
    rig: RankRig, name: str, blocks: list[int], contents: list[list[torch.Tensor]], group: int = 0
) -> None:
    """Load into these blocks; they hold the contents then, by rank, and nothing else changed."""
    expected = []
    for rank, of_rank in zip(rig.ranks, contents, strict=True):
        before = rank.memory.clone()
        for block, content in zip(blocks, of_rank, strict=True):
            rank.put(group, block, content)
        expected.append(rank.memory.clone())
        rank.memory.copy_(before)
    job = rig.load(name, blocks, group)
    assert rig.was_done(job) == [True] * rig.world_size
    for rank, wanted in zip(rig.ranks, expected, strict=True):
        assert torch.equal(rank.memory, wanted), "a byte is wrong"
    assert [names[-1] for names in rig.received] == [name] * rig.world_size
    assert not any(rig.failed)


def contents_of(rig: RankRig, blocks: list[int], group: int = 0) -> list[list[torch.Tensor]]:
    return [[rank.block(group, block) for block in blocks] for rank in rig.ranks]


def test_what_was_stored_comes_back_in_other_blocks_and_nothing_else_changes(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    blocks = [3, 4, 9, NUM_BLOCKS - 1]
    contents = contents_of(rig, blocks)
    assert rig.was_done(rig.store("plain", blocks)) == [True]
    check_loaded(rig, "plain", [20, 11, 12, 0], contents)


def test_groups_that_overlay_each_other_keep_their_own_blocks(make_rig: MakeRig) -> None:
    rig = make_rig(caches=cache_config(groups=2))
    first, second = contents_of(rig, [1, 2]), contents_of(rig, [5, 6], group=1)
    rig.store("full", [1, 2])
    rig.store("sliding", [5, 6], group=1)
    check_loaded(rig, "full", [7, 8], first)
    check_loaded(rig, "sliding", [9, 10], second, group=1)


def test_a_kvd_block_may_be_several_of_vllms(make_rig: MakeRig) -> None:
    rig = make_rig(blocks_per_chunk=2)
    blocks = [1, 2, 8, 5]
    contents = contents_of(rig, blocks)
    rig.store("wide", blocks)
    check_loaded(rig, "wide", [30, 31, 10, 20], contents)


def test_each_rank_of_two_gets_its_own_bytes_back(make_rig: MakeRig) -> None:
    rig = make_rig(world_size=2)
    contents = contents_of(rig, [4, 5])
    assert not torch.equal(contents[0][0], contents[1][0])
    rig.store("two ranks", [4, 5])
    check_loaded(rig, "two ranks", [14, 15], contents)


def test_pipeline_stages_may_hold_different_amounts(make_rig: MakeRig) -> None:
    rig = make_rig(world_size=2, stages=[cache_config(layers=3), cache_config(layers=2)])
    sizes = [shake.shard_bytes for shake in rig.handshakes]
    assert sizes == [(3 * LAYER_BYTES,), (2 * LAYER_BYTES,)]
    contents = contents_of(rig, [4, 5])
    rig.store("two stages", [4, 5])
    check_loaded(rig, "two stages", [14, 15], contents)


def test_a_pipeline_stage_may_have_no_layer_of_a_group(make_rig: MakeRig) -> None:
    both = cache_config(groups=2)
    first = cache_config(groups=1)
    first.kv_cache_groups.append(KVCacheGroupSpec([], both.kv_cache_groups[1].kv_cache_spec))
    rig = make_rig(world_size=2, caches=both, stages=[first, both])
    assert [shake.shard_bytes[1] > LAYER_BYTES for shake in rig.handshakes] == [False, True]
    full, sliding = contents_of(rig, [1, 2]), contents_of(rig, [5, 6], group=1)
    rig.store("in both", [1, 2])
    assert rig.was_done(rig.store("in one", [5, 6], group=1)) == [True, True]
    check_loaded(rig, "in both", [7, 8], full)
    check_loaded(rig, "in one", [9, NUM_BLOCKS - 1], sliding, group=1)


def test_a_replicated_layout_is_stored_once_and_loaded_by_every_rank(make_rig: MakeRig) -> None:
    rig = make_rig(world_size=2, replicated=True)
    contents = contents_of(rig, [4, 5])
    assert [shake.shard for shake in rig.handshakes] == [0, 0]
    job = rig.store("replicated", [4, 5])
    assert rig.was_done(job) == [True, True]
    check_loaded(rig, "replicated", [14, 15], [contents[0], contents[0]])


def test_an_engine_loads_what_another_one_stored(make_rig: MakeRig) -> None:
    writer, reader = make_rig(), make_rig()
    contents = contents_of(writer, [1, 2, 3])
    writer.store("shared", [1, 2, 3])
    check_loaded(reader, "shared", [21, 22, 23], contents)


def test_flushed_stores_are_copied_before_their_blocks_may_be_overwritten(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    contents = contents_of(rig, [6, 7])
    earlier, now = rig.draft("flushed", [6]), rig.draft("flushed at once", [7])
    rig.send(stores=[earlier])
    rig.run(rig.metadata(stores=[earlier]))
    rig.send(stores=[now])
    step = rig.metadata(stores=[now], flush=[earlier.job_id, now.job_id])
    (rank,) = rig.ranks
    rank.worker.handle_preemptions(step)
    rank.memory.zero_()
    rank.worker.start_kv_transfers(step)
    rank.worker.prepare_store_kv(step)
    rig.run_until_ended(earlier, now)
    assert rig.was_done(earlier) == rig.was_done(now) == [True]
    check_loaded(rig, "flushed", [1], [[contents[0][0]]])
    check_loaded(rig, "flushed at once", [2], [[contents[0][1]]])


def test_stores_of_a_step_that_vllm_did_not_finalize_are_flushed_too(make_rig: MakeRig) -> None:
    rig = make_rig()
    (rank,) = rig.ranks
    contents = contents_of(rig, [6])
    job = rig.draft("not finalized", [6])
    rig.send(stores=[job])
    step = rig.metadata(stores=[job])
    rank.worker.handle_preemptions(step)
    rank.worker.start_kv_transfers(step)
    rig.collect()
    rank.worker.handle_preemptions(rig.metadata(flush=[job.job_id]))
    rank.memory.zero_()
    rig.run_until_ended(job)
    assert rig.was_done(job) == [True]
    check_loaded(rig, "not finalized", [1], contents)


def test_a_flushed_load_has_ended_before_its_blocks_may_be_overwritten(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.store("reset", list(range(16)))
    job = rig.draft("reset", list(range(16, 32)))
    rig.send(loads=[job])
    rig.run(rig.metadata(loads=[job]))
    (rank,) = rig.ranks
    rank.worker.handle_preemptions(rig.metadata(flush=[job.job_id]))
    rank.memory.zero_()
    rig.run_until_ended(job)
    assert not rank.memory.any(), "the load wrote after its flush"


def test_after_sleep_the_kv_is_served_again_and_no_copy_touched_it_meanwhile(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    (rank,) = rig.ranks
    contents = contents_of(rig, [2, 3])
    rig.store("sleeper", [2, 3])
    job = rig.draft("sleeper", [12, 13])
    rig.send(loads=[job])
    rank.worker.handle_preemptions(rig.metadata(loads=[job]))
    rank.worker.unregister_kv_caches()
    rank.worker.unregister_kv_caches()
    rank.memory.zero_()
    late = rig.draft("sleeper", [14, 15])
    rig.run(rig.metadata(loads=[late]))
    assert not rank.memory.any()
    assert rig.failed == [["sleeper"]]
    rank.worker.restore_kv_caches()
    rank.worker.restore_kv_caches()
    assert rank.worker.get_handshake_metadata().registered
    rig.load_when_back("sleeper", [22, 23])
    assert torch.equal(rank.block(0, 22), contents[0][0])
    assert torch.equal(rank.block(0, 23), contents[0][1])


def test_kv_that_was_allocated_anew_is_served_where_it_lies_now(make_rig: MakeRig) -> None:
    rig = make_rig()
    (rank,) = rig.ranks
    content = rank.block(0, 2)
    rig.store("moved", [2])
    before = rank.memory.clone()
    old = rank.memory
    rank.allocate()
    assert rank.memory.data_ptr() != old.data_ptr()
    rig.load_when_back("moved", [9])
    assert torch.equal(rank.block(0, 9), content)
    assert torch.equal(old, before), "a copy went to where the KV was"
