"""The connector's ranks over device memory, by real movers: the driver is the tests' own.

It enforces what a CUDA driver's documentation promises. No vLLM engine and no GPU takes part.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.gpu.device_memory import DeviceMemory
from tests.gpu.driver import Driver, started
from tests.vllm import rank_rig
from tests.vllm.gpu_rank import DeviceWorker, GpuRank
from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.rank_rig import LAYER_BYTES, RankRig, cache_config

LATE_US = 200_000


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """The fake one, in this process and in what it starts."""
    with started() as made, made.in_environment():
        yield made


@pytest.fixture(scope="module")
def device(driver: Driver) -> Iterator[DeviceMemory]:
    made = DeviceMemory()
    yield made
    made.close()


@pytest.fixture(scope="module")
def gpu_daemon(driver: Driver, make_daemon: Callable[[], NodeDaemon]) -> NodeDaemon:
    made = make_daemon()
    made.environment = driver.environment()
    made.start()
    return made


@pytest.fixture
def stream(device: DeviceMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.c_void_p]:
    """What torch would say this thread launches on."""
    made = ctypes.c_void_p()
    device.call("cuStreamCreate", ctypes.byref(made), 1)
    current = SimpleNamespace(cuda_stream=made.value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    yield made
    device.call("cuStreamSynchronize", made)
    device.call("cuStreamDestroy_v2", made)


@pytest.fixture
def make_rig(
    gpu_daemon: NodeDaemon,
    driver: Driver,
    device: DeviceMemory,
    stream: ctypes.c_void_p,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., RankRig]]:
    monkeypatch.setattr(rank_rig, "KvdConnectorWorker", DeviceWorker)
    monkeypatch.setattr(rank_rig, "Rank", GpuRank)
    monkeypatch.setattr(GpuRank, "device", device, raising=False)
    driver.reset()
    with rank_rig.rigs() as start:
        yield partial(start, gpu_daemon)
    assert driver.counters()["violations"] == 0
    driver.reset()


def only_rank(rig: RankRig) -> GpuRank:
    (rank,) = rig.ranks
    assert isinstance(rank, GpuRank)
    return rank


@contextmanager
def written_late(
    driver: Driver, rank: GpuRank, stream: ctypes.c_void_p, content: torch.Tensor
) -> Iterator[None]:
    """The engine's stream writes its memory late, while movers copy at once; it has at the end."""
    driver.inject("latency", microseconds=LATE_US)
    source = rank.launch(stream, content)
    time.sleep(LATE_US / 10e6)  # for the stream to begin its wait
    driver.inject("latency", microseconds=0)
    yield
    rank.device.call("cuStreamSynchronize", stream)
    rank.device.free(source)


def expect_loaded(rank: GpuRank, pairs: list[tuple[int, int]], group: int = 0) -> torch.Tensor:
    """What the memory is once each pair's first block was loaded into its second; `memory` is
    still as it was."""
    before = rank.fetch()
    contents = [rank.block(group, source) for source, _ in pairs]
    for (_, target), content in zip(pairs, contents, strict=True):
        rank.put(group, target, content)
    expected = rank.memory.clone()
    rank.memory.copy_(before)
    return expected


@pytest.mark.parametrize("kind", ["malloc", "vmm_exportable"])
def test_blocks_come_back_from_device_memory_and_nothing_else_changes(
    make_rig: Callable[..., RankRig], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(GpuRank, "kind", kind)
    rig = make_rig()
    rank = only_rank(rig)
    assert rig.handshakes[0].shard_bytes == (3 * LAYER_BYTES,)
    expected = expect_loaded(rank, [(3, 20), (4, 11), (9, 12)])
    rig.store(kind, [3, 4, 9])
    job = rig.load(kind, [20, 11, 12])
    assert rig.was_done(job) == [True]
    assert torch.equal(rank.fetch(), expected), "a byte is wrong"


def test_groups_that_overlay_each_other_keep_their_own_blocks(
    make_rig: Callable[..., RankRig],
) -> None:
    rig = make_rig(caches=cache_config(groups=2), blocks_per_chunk=2)
    rank = only_rank(rig)
    rig.store("full", [1, 2])
    expected = expect_loaded(rank, [(1, 8), (2, 7)])
    assert rig.was_done(rig.load("full", [8, 7])) == [True]
    assert torch.equal(rank.fetch(), expected)
    rig.store("sliding", [5, 6], group=1)
    expected = expect_loaded(rank, [(5, 9), (6, 10)], group=1)
    assert rig.was_done(rig.load("sliding", [9, 10], group=1)) == [True]
    assert torch.equal(rank.fetch(), expected)


def test_a_replicated_layout_is_stored_once_and_loaded_by_every_rank(
    make_rig: Callable[..., RankRig],
) -> None:
    rig = make_rig(world_size=2, replicated=True)
    first, second = rig.ranks
    assert isinstance(first, GpuRank)
    assert isinstance(second, GpuRank)
    content = first.block(0, 4)
    rig.store("replicated", [4])
    assert rig.was_done(rig.load("replicated", [14])) == [True, True]
    for rank in (first, second):
        rank.fetch()
        assert torch.equal(rank.block(0, 14), content)


def test_a_store_reads_what_its_step_still_computes(
    make_rig: Callable[..., RankRig], driver: Driver, stream: ctypes.c_void_p
) -> None:
    rig = make_rig()
    rank = only_rank(rig)
    content = torch.full_like(rank.memory, 5)
    job = rig.draft("computing", [3])
    rig.send(stores=[job])
    with written_late(driver, rank, stream, content):
        rig.run(rig.metadata(stores=[job]))
        rig.run_until_ended(job)
    assert rig.was_done(rig.load("computing", [10])) == [True]
    assert torch.equal(rank.fetch(), content)


def test_a_load_comes_after_all_that_was_launched_before_its_step(
    make_rig: Callable[..., RankRig], driver: Driver, stream: ctypes.c_void_p
) -> None:
    rig = make_rig()
    rank = only_rank(rig)
    content = rank.block(0, 5)
    rig.store("stale", [5])
    job = rig.draft("stale", [12])
    rig.send(loads=[job])
    overwritten = torch.full_like(rank.memory, 1)
    with written_late(driver, rank, stream, overwritten):
        step = rig.metadata(loads=[job])
        rank.worker.handle_preemptions(step)
        rank.worker.note_launched(step)
        rank.worker.start_kv_transfers(step)
        rank.worker.prepare_store_kv(step)
        rig.run_until_ended(job)
    assert rig.was_done(job) == [True]
    rank.fetch()
    assert torch.equal(rank.block(0, 12), content)
    assert torch.equal(rank.block(0, 13), overwritten[:1].expand(rank.block(0, 13).shape))


def test_asleep_the_memory_is_the_engines_alone_and_awake_it_is_served_again(
    make_rig: Callable[..., RankRig], driver: Driver, device: DeviceMemory
) -> None:
    rig = make_rig()
    rank = only_rank(rig)
    worker = rank.worker
    assert isinstance(worker, DeviceWorker)
    content = rank.block(0, 2)
    rig.store("sleeper", [2])
    worker.unregister_kv_caches()
    before = driver.free_bytes()
    device.free(worker.address)
    assert driver.free_bytes() > before, "somebody still has the memory open"
    worker.address = device.allocate(len(rank.memory))
    rank.push()
    worker.register_kv_caches(rank.kv)
    assert worker.get_handshake_metadata().registered
    rig.load_when_back("sleeper", [9])
    rank.fetch()
    assert torch.equal(rank.block(0, 9), content)


@pytest.mark.parametrize(
    ("kind", "named"),
    [("vmm", "--enable-sleep-mode"), ("pool", "cudaMallocAsync"), ("managed", "cudaMallocManaged")],
)
def test_memory_that_cannot_be_shared_ends_the_rank_with_vllms_flag(
    make_rig: Callable[..., RankRig], monkeypatch: pytest.MonkeyPatch, kind: str, named: str
) -> None:
    monkeypatch.setattr(GpuRank, "kind", kind)
    with pytest.raises(RuntimeError, match=rf"can't share this engine's KV cache.*{named}"):
        make_rig()
