"""kill -9 around a GPU: device memory is back in time, no other rank notices, no byte is wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.faults.probe import Probe
from tests.faults.scene import RELEASE_SECONDS
from tests.gpu.driver import Driver
from tests.gpu.gpu_scene import BLOCK, GpuScene, gpu_scene
from tests.waiting import wait_until

COUNT = 64
# Slow enough that a copy of COUNT blocks is under way when the blow falls.
SLOW_BYTES_PER_SECOND = COUNT * BLOCK // 2


@pytest.fixture(scope="module")
def shared(driver: Driver) -> Iterator[GpuScene]:
    with gpu_scene(driver) as scene:
        yield scene


@pytest.fixture(scope="module")
def neighbour(shared: GpuScene) -> Probe:
    """An engine on the same GPU that lives through it all and must not notice."""
    engine = shared.engine("neighbour")
    assert engine.store("its own", 8) == 8
    return engine


@pytest.fixture
def scene(shared: GpuScene, neighbour: Probe) -> Iterator[GpuScene]:
    """The module's daemon with the neighbour alone."""
    yield shared
    shared.end_engines(neighbour)


@pytest.fixture
def free_before(scene: GpuScene, driver: Driver) -> int:
    """Free device memory while only the neighbour runs."""
    return driver.free_bytes() - driver.kept_bytes


@pytest.fixture
def victim(scene: GpuScene, free_before: int) -> Probe:
    return scene.engine("victim")


def goes_on(neighbour: Probe, generation: int) -> None:
    """The neighbour has the session that it had, its blocks, and stores more."""
    assert neighbour.wait_usable() == generation
    assert neighbour.load("its own", 8) == 8
    assert neighbour.store(f"more {time.monotonic()}", 4) == 4


def slow_down(driver: Driver) -> None:
    if driver.is_fake:
        driver.inject("bandwidth", bytes_per_second=SLOW_BYTES_PER_SECOND)


def speed_up(driver: Driver) -> None:
    if driver.is_fake:
        driver.inject("bandwidth", bytes_per_second=0)


def begin_store(scene: GpuScene, engine: Probe, prefix: str) -> None:
    """Have a store's copy under way; a real GPU may be through before that can be seen."""
    ready = scene.status().pool.slots_ready

    def has_begun() -> bool:
        pool = scene.status().pool
        is_through = not scene.driver.is_fake and pool.slots_ready >= ready + COUNT
        return is_through or pool.slots_reserved >= COUNT

    engine.ask("store", prefix=prefix, count=COUNT, wait=False)
    wait_until(has_begun, "the store")


def test_engine_killed_with_a_copy_queued_gives_its_device_memory_back(
    scene: GpuScene, driver: Driver, neighbour: Probe, free_before: int, victim: Probe
) -> None:
    generation = neighbour.wait_usable()
    slow_down(driver)
    begin_store(scene, victim, "queued")
    scene.wait_free(free_before, since=victim.kill())
    speed_up(driver)
    goes_on(neighbour, generation)
    found = neighbour.load("queued", COUNT)
    assert found == neighbour.hits("queued", COUNT)[1]
    assert found == 0 or not driver.is_fake, "the copy was not under way"
    wait_until(lambda: not scene.busy_slots(), "its slots")


def test_mover_killed_in_a_store_is_replaced_and_the_blocks_are_stored_anew(
    scene: GpuScene, driver: Driver, neighbour: Probe, victim: Probe
) -> None:
    generation = neighbour.wait_usable()
    [mover] = scene.movers_of(victim)
    slow_down(driver)
    begin_store(scene, victim, "cut off")
    os.kill(mover, signal.SIGKILL)
    speed_up(driver)
    victim.ask("pump")
    scene.wait_replaced(victim, mover)
    stored = neighbour.load("cut off", COUNT)
    assert stored == 0 or not driver.is_fake, "the copy was not under way"
    assert victim.store("cut off", COUNT) == COUNT - stored
    assert neighbour.load("cut off", COUNT) == COUNT
    goes_on(neighbour, generation)


def test_mover_killed_in_a_load_fails_that_request_and_writes_nothing_afterwards(
    scene: GpuScene, driver: Driver, neighbour: Probe, victim: Probe
) -> None:
    generation = neighbour.wait_usable()
    assert victim.store("long", COUNT) == COUNT
    [mover] = scene.movers_of(victim)
    assert victim.ask("match", request="r", prefix="long", count=COUNT)["found"] == COUNT
    slow_down(driver)
    victim.ask("start_load", request="r", found=COUNT, first_block=0)
    os.kill(mover, signal.SIGKILL)
    speed_up(driver)
    assert "r" in victim.ask("pump")["failed"]
    before = victim.ask("check", prefix="long", count=COUNT, first_block=0)
    assert before["wrong"] or not driver.is_fake, "the copy was not under way"
    scene.wait_replaced(victim, mover)
    assert victim.ask("check", prefix="long", count=COUNT, first_block=0) == before
    victim.ask("finish", request="r")
    assert victim.load("long", COUNT) == COUNT
    goes_on(neighbour, generation)


def test_daemon_killed_leaves_no_device_memory_behind_and_comes_back_warm(
    scene: GpuScene, driver: Driver, neighbour: Probe
) -> None:
    held = driver.free_bytes()
    generation = neighbour.wait_usable()
    scene.kill_daemon()
    wait_until(lambda: driver.free_bytes() > held, "the mover's context")
    scene.daemon.start()
    generation = neighbour.wait_usable(after=generation)
    goes_on(neighbour, generation)


def test_cuda_error_costs_its_own_rank_one_mover_and_nobody_else_anything(
    scene: GpuScene, driver: Driver, neighbour: Probe, victim: Probe
) -> None:
    if not driver.is_fake:
        pytest.skip("errors can be injected into the fake driver only")
    generation = neighbour.wait_usable()
    [mover] = scene.movers_of(victim)
    driver.inject("copy_error", pid=mover, after=0, code=700)
    victim.ask("store", prefix="poisoned", count=COUNT, wait=False)
    wait_until(lambda: mover not in scene.daemon.movers(), "the mover's end")
    victim.ask("pump")
    scene.wait_replaced(victim, mover)
    assert neighbour.hits("poisoned", COUNT) == (0, 0)
    assert victim.store("poisoned", COUNT) == COUNT
    assert neighbour.load("poisoned", COUNT) == COUNT
    goes_on(neighbour, generation)


def test_engine_that_unregisters_frees_its_memory_for_good(
    scene: GpuScene, driver: Driver, neighbour: Probe, free_before: int, victim: Probe
) -> None:
    generation = neighbour.wait_usable()
    slow_down(driver)
    begin_store(scene, victim, "leaving")
    victim.close()
    assert driver.free_bytes() >= free_before
    speed_up(driver)
    goes_on(neighbour, generation)


def test_engine_killed_again_and_again_never_takes_device_memory_along(
    scene: GpuScene, driver: Driver, neighbour: Probe, free_before: int
) -> None:
    generation = neighbour.wait_usable()
    for number in range(3):
        victim = scene.engine("crashing")
        victim.ask("store", prefix=f"life {number}", count=COUNT, wait=False)
        scene.wait_free(free_before, since=victim.kill())
    goes_on(neighbour, generation)


def test_engine_killed_while_its_mover_starts_leaves_neither_behind(
    scene: GpuScene, neighbour: Probe, free_before: int
) -> None:
    generation = neighbour.wait_usable()
    before = set(scene.daemon.movers())
    victim = scene.start_engine("early")
    wait_until(lambda: bool(set(scene.daemon.movers()) - before), "a mover")
    [mover] = set(scene.daemon.movers()) - before
    os.kill(mover, signal.SIGSTOP)  # so that its start lasts
    killed_s = victim.kill()
    wait_until(lambda: set(scene.daemon.movers()) == before, "the mover's end")
    assert time.monotonic() - killed_s < RELEASE_SECONDS
    scene.wait_free(free_before, since=killed_s)
    goes_on(neighbour, generation)
