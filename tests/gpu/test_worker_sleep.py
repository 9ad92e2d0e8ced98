"""An engine's worker takes its GPU memory back while copies run, and gives it again."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from kvd_client import EngineIdentity, ScheduledRequest
from tests.client.content import TOKENS
from tests.daemon_process import DaemonProcess, is_alive
from tests.gpu.driver import Driver
from tests.gpu.rank_engine import (
    CANARY,
    COUNT,
    FRAGMENT_BYTES,
    GAP_BYTES,
    GROUPS,
    LAYERS,
    GpuEngine,
    as_tensors,
    check_gaps,
    layers_in_one_allocation,
)
from tests.gpu.rank_process import RankProcess
from tests.waiting import wait_until

SLOW_BYTES_PER_SECOND = 64 << 10  # seconds for COUNT blocks


# -- taking it back -------------------------------------------------------------------------------


def slow_down(driver: Driver) -> None:
    """Copies that begin from now on are under way when the test goes on; on a GPU perhaps."""
    if driver.is_fake:
        driver.inject("bandwidth", bytes_per_second=SLOW_BYTES_PER_SECOND)


def speed_up(driver: Driver) -> None:
    if driver.is_fake:
        driver.inject("bandwidth", bytes_per_second=0)


def copies(driver: Driver) -> int:
    """What the fake counted that was queued so far; the tests' own copies are synchronous."""
    if not driver.is_fake:
        return 0
    counters = driver.counters()
    return sum(counters[name] for name in ("copies_async", "copies_2d", "batches"))


def free_all(process: RankProcess, layers: Sequence[int], driver: Driver) -> None:
    """As sleep mode does; the fake counts it where a mover had it open still."""
    process.free(layers[0] - GAP_BYTES)
    if driver.is_fake:
        assert driver.counters()["violations"] == 0


def test_unregistering_while_a_store_copies_ends_it_before_the_memory_is_freed(
    daemon: DaemonProcess,
    engine: GpuEngine,
    process: RankProcess,
    layers: list[int],
    driver: Driver,
) -> None:
    slow_down(driver)
    copied = copies(driver)
    engine.prefill("asleep", "asleep", COUNT)
    if driver.is_fake:
        wait_until(lambda: copies(driver) > copied, "the store's copies")
    [mover] = daemon.movers()
    assert process.unregister()
    assert mover not in daemon.movers()
    free_all(process, layers, driver)
    speed_up(driver)
    wait_until(lambda: not engine.step()[0].stores and not pending(engine), "the jobs' ends")
    assert len(engine.stored) in ((0,) if driver.is_fake else (0, COUNT))


def pending(engine: GpuEngine) -> bool:
    return engine.scheduler.has_pending_work()


def test_unregistering_while_a_load_copies_leaves_no_write_for_later(
    daemon: DaemonProcess,
    engine: GpuEngine,
    process: RankProcess,
    layers: list[int],
    driver: Driver,
) -> None:
    engine.store("a", "woken", COUNT)
    slow_down(driver)
    copied = copies(driver)
    engine.begin_load("woken")
    if driver.is_fake:
        wait_until(lambda: copies(driver) > copied, "the load's copies")
    assert process.unregister()
    assert daemon.movers() == []
    for layer in layers:
        process.write(layer, CANARY * COUNT * FRAGMENT_BYTES)
    speed_up(driver)
    wait_until(lambda: not engine.step()[0].loads and not pending(engine), "the jobs' ends")
    for layer in layers:
        assert process.read(layer, COUNT * FRAGMENT_BYTES) == CANARY * COUNT * FRAGMENT_BYTES
    if driver.is_fake:
        assert driver.counters()["violations"] == 0


def test_unregistering_while_the_mover_starts_waits_for_its_end(
    daemon: DaemonProcess, process: RankProcess, layers: list[int], driver: Driver
) -> None:
    process.make(daemon.socket, EngineIdentity("hasty", bytes(16)), 0, 1)
    assert process.register(as_tensors(layers), GROUPS) is None
    wait_until(lambda: bool(daemon.movers()), "a mover")
    assert process.unregister()
    assert daemon.movers() == []
    free_all(process, layers, driver)
    process.close_worker()


def test_unregistering_from_a_daemon_that_hangs_says_so_unless_the_mover_is_dead(
    daemon: DaemonProcess, process: RankProcess, layers: list[int], driver: Driver
) -> None:
    process.make(daemon.socket, EngineIdentity("hung", bytes(16)), 0, 1)
    assert process.register(as_tensors(layers), GROUPS) is None
    wait_until(lambda: bool(daemon.movers()), "a mover")
    [mover] = daemon.movers()
    daemon.freeze()
    assert not (process.unregister(1.0) and is_alive(mover))
    daemon.thaw()
    assert process.unregister()
    assert not is_alive(mover)
    free_all(process, layers, driver)
    process.close_worker()


def test_after_sleep_other_memory_is_registered_and_the_blocks_come_back(
    engine: GpuEngine, process: RankProcess, layers: list[int], driver: Driver
) -> None:
    engine.store("a", "before sleep", COUNT)
    assert process.unregister()
    free_all(process, layers, driver)
    layers[:] = layers_in_one_allocation(process)
    assert process.register(as_tensors(layers), GROUPS) is None
    wait_until(lambda: engine.step() is not None and usable(engine), "the session")
    assert engine.load("b", "before sleep", COUNT) == COUNT
    check_gaps(process, layers)


def usable(engine: GpuEngine) -> bool:
    return engine.connection.session is not None


def test_after_its_mover_was_killed_the_rank_registers_again_by_the_same_handle(
    daemon: DaemonProcess, engine: GpuEngine, process: RankProcess
) -> None:
    engine.store("a", "survives", COUNT)
    [handle] = process.exported()
    [mover] = daemon.movers()
    os.kill(mover, signal.SIGKILL)
    wait_until(lambda: daemon.movers() not in ([], [mover]), "another mover")
    assert process.wait_registered()
    wait_until(lambda: engine.step() is not None and usable(engine), "the session")
    assert process.exported() == [handle]
    assert engine.load("b", "survives", COUNT) == COUNT


# -- the engine's compute -------------------------------------------------------------------------


def test_a_store_holds_what_was_still_being_computed_when_its_step_ended(
    engine: GpuEngine, process: RankProcess, layers: list[int], driver: Driver
) -> None:
    hashes = engine.arrive("late", "late", 4)
    engine.scheduler.update_state_after_alloc("late", [[0, 1, 2, 3]], 0)
    slow_down(driver)
    before_it = layers[0] + 100 * FRAGMENT_BYTES  # other blocks, long enough for a hasty store
    process.compute_later(before_it, CANARY * 100 * FRAGMENT_BYTES)
    blocks = [engine.words(engine.ranks[0], content) for content in engine.contents(hashes)]
    for layer, address in enumerate(layers):
        parts = [block.reshape(LAYERS, -1)[layer].tobytes() for block in blocks]
        process.compute_later(address, b"".join(parts))
    engine.step(ScheduledRequest("late", [[0, 1, 2, 3]], 4 * TOKENS))
    engine.scheduler.request_finished("late", [[0, 1, 2, 3]])
    engine.step_until_idle()
    speed_up(driver)
    assert engine.load("again", "late", 4) == 4
