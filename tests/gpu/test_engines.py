"""Engines whose KV lies on a GPU: what they store comes back, byte by byte, also to others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.driver import Driver
from tests.gpu.gpu_scene import NUM_BLOCKS, GpuScene, gpu_scene

COUNT = 48


@pytest.fixture(scope="module")
def shared(driver: Driver) -> Iterator[GpuScene]:
    with gpu_scene(driver) as scene:
        yield scene


@pytest.fixture
def scene(shared: GpuScene) -> Iterator[GpuScene]:
    """The module's daemon without engines and blocks."""
    shared.clear()
    yield shared
    shared.end_engines()


def test_what_a_gpu_engine_stores_another_on_the_same_gpu_loads(
    scene: GpuScene, driver: Driver
) -> None:
    one, two = scene.engines("one", "two")
    assert one.store("a prompt", COUNT) == COUNT
    assert two.load("a prompt", COUNT, first_block=7) == COUNT
    assert one.load("a prompt", COUNT, first_block=NUM_BLOCKS - COUNT) == COUNT
    if driver.is_fake:
        assert driver.counters()["pageable_copies"] == 0


@pytest.mark.parametrize("kind", ["malloc", "vmm_exportable"])
def test_gpu_engine_and_host_engine_load_what_the_other_stored(scene: GpuScene, kind: str) -> None:
    on_gpu, on_host = scene.engines("gpu", memory=kind) + scene.engines("host", memory="host")
    assert on_gpu.store("computed on the GPU", COUNT) == COUNT
    assert on_host.load("computed on the GPU", COUNT) == COUNT
    assert on_host.store("computed on the host", COUNT) == COUNT
    assert on_gpu.load("computed on the host", COUNT) == COUNT


def test_two_ranks_on_one_gpu_each_get_their_own_shard_back(scene: GpuScene) -> None:
    pair = scene.engine("pair", world_size=2)
    assert pair.store("sharded", COUNT) == COUNT
    assert pair.load("sharded", COUNT, first_block=3) == COUNT
    ranks = scene.ranks_of(pair)
    assert len({rank.mover_pid for rank in ranks}) == 2
    assert len({rank.gpu.uuid for rank in ranks}) == 1


def test_restarted_gpu_engine_finds_what_it_stored_before(scene: GpuScene) -> None:
    first = scene.engine("engine")
    assert first.store("kept", COUNT) == COUNT
    first.kill()
    again = scene.engine("engine")
    assert again.load("kept", COUNT) == COUNT


def test_restarted_daemon_gives_a_gpu_engine_its_blocks_back(scene: GpuScene) -> None:
    engine = scene.engine("engine")
    assert engine.store("kept", COUNT) == COUNT
    generation = engine.wait_usable()
    scene.kill_daemon()
    scene.daemon.start()
    engine.wait_usable(after=generation)
    assert engine.load("kept", COUNT) == COUNT


def test_stores_and_loads_at_random_never_mix_up_a_byte(scene: GpuScene) -> None:
    engines = scene.engines("one", "two")
    for engine in engines:
        engine.order("churn", prefixes=["a", "b", "c"], rounds=8, most=COUNT)
    for engine in engines:
        assert engine.answer()["wrong"] == []


def test_status_says_how_a_gpu_rank_is_reached(scene: GpuScene, driver: Driver) -> None:
    ipc, vmm = scene.engines("ipc") + scene.engines("vmm", memory="vmm_exportable")
    [by_handle], [by_descriptor] = scene.ranks_of(ipc), scene.ranks_of(vmm)
    assert (by_handle.transport, by_descriptor.transport) == ("cuda-ipc", "cuda-vmm")
    assert by_handle.gpu.uuid == by_descriptor.gpu.uuid == driver.uuids[0]
    assert by_handle.copier == "batch"
    assert by_handle.gpu.context_bytes > 0
    assert by_handle.gpu.unregistered_extents == 0


def test_control_never_has_cuda_and_movers_of_gpu_ranks_do(scene: GpuScene) -> None:
    on_gpu, on_host = scene.engines("gpu") + scene.engines("host", memory="host")
    assert on_gpu.store("x", 4) == 4
    assert on_host.load("x", 4) == 4
    assert scene.processes_with_cuda() == set(scene.movers_of(on_gpu))
