"""Workers, movers and daemons that hang: deadlines free what they hold, engines go on."""

from __future__ import annotations

import time

import pytest

from tests.daemon_process import is_alive
from tests.faults.probe import Probe
from tests.faults.scene import Scene, freeze, thaw
from tests.waiting import wait_until

BLOCK = 64 << 10
COUNT = 384
SUBMIT_SECONDS = 2.0  # more than a busy machine takes to show what was reserved
COPY_SECONDS = 6.0  # and to have a copy begin half-way, and end
TICKS = 10.0  # the daemon looks four times a second, a starved one later; all below its own 30 s
FLAGS = {"submit-deadline-seconds": SUBMIT_SECONDS, "copy-deadline-seconds": COPY_SECONDS}


@pytest.fixture
def engine(scene: Scene) -> Probe:
    made = scene.engine("one", block_bytes=BLOCK, num_blocks=400)
    assert made.store("old", 8) == 8
    return made


@pytest.fixture
def hasty(scene: Scene) -> Probe:
    """One that ends the mover of a load, sooner than the daemon would."""
    made = scene.engine("hasty", block_bytes=BLOCK, num_blocks=400, load_deadline_s=3.0)
    assert made.store("old", 8) == 8
    return made


def test_worker_that_never_says_ready_loses_the_job_and_nobody_is_killed(
    scene: Scene, engine: Probe
) -> None:
    movers = scene.movers_of(engine)
    engine.ask("store", prefix="a", count=16, hold=True, wait=False)
    wait_until(lambda: scene.busy_slots() == 16, "the reservation")
    wait_until(lambda: scene.busy_slots() == 0, "the revocation", SUBMIT_SECONDS + TICKS)
    assert scene.movers_of(engine) == movers
    engine.ask("ready")
    assert engine.ask("pump")["idle"]
    # The word comes on the board; the stream, which has the reason, is quiet for a moment.
    wait_until(lambda: engine.ask("status")["refusals"] == {"EXPIRED": 1}, "its reason")
    assert engine.hits("a", 16) == (0, 0)
    assert engine.store("a", 16) == 16
    assert engine.load("a", 16) == 16


def test_frozen_engine_loses_the_job_and_finds_its_cache_when_it_wakes(
    scene: Scene, engine: Probe
) -> None:
    engine.ask("store", prefix="a", count=16, hold=True, wait=False)
    wait_until(lambda: scene.busy_slots() == 16, "the reservation")
    freeze(engine.pid)
    wait_until(lambda: scene.busy_slots() == 0, "the revocation", SUBMIT_SECONDS + TICKS)
    thaw(engine.pid)
    engine.ask("ready")
    assert engine.ask("pump")["idle"]
    assert engine.load("old", 8) == 8


def test_frozen_mover_is_killed_at_the_copys_deadline_and_its_slots_come_back(
    scene: Scene, engine: Probe
) -> None:
    [mover] = scene.movers_of(engine)
    freeze(mover)
    engine.ask("store", prefix="a", count=16, wait=False)
    wait_until(lambda: scene.busy_slots() == 16, "the reservation")
    within = SUBMIT_SECONDS + COPY_SECONDS + TICKS
    wait_until(lambda: mover not in scene.daemon.movers(), "its end", within)
    wait_until(lambda: scene.busy_slots() == 0, "the slots")
    assert engine.ask("pump")["idle"]
    scene.wait_replaced(engine, mover)
    assert engine.hits("a", 16) == (0, 0)
    assert engine.store("a", 16) == 16
    assert (engine.load("a", 16), engine.load("old", 8)) == (16, 8)


def test_load_of_a_frozen_mover_fails_only_once_the_mover_is_dead(
    scene: Scene, engine: Probe
) -> None:
    [mover] = scene.movers_of(engine)
    assert engine.ask("match", request="r", prefix="old", count=8)["found"] == 8
    freeze(mover)
    engine.ask("start_load", request="r", found=8, first_block=100)
    while True:
        has_failed = "r" in engine.ask("pump_for", seconds=0.05)["failed"]
        if mover not in scene.daemon.movers():
            break
        assert not has_failed
    assert "r" in engine.ask("pump")["failed"]
    scene.wait_replaced(engine, mover)
    assert engine.load("old", 8) == 8


def test_load_that_a_frozen_daemon_never_orders_ends_with_its_mover(
    scene: Scene, hasty: Probe
) -> None:
    engine = hasty
    [mover] = scene.movers_of(engine)
    assert engine.ask("match", request="r", prefix="old", count=8)["found"] == 8
    scene.daemon.freeze()
    try:
        engine.ask("start_load", request="r", found=8, first_block=100)
        waited = engine.ask("wait_for_end", request="r")
        assert waited["failed"]
        assert not is_alive(mover), "before that it might still have written"
        assert waited["steps"] < 200 * (1 + waited["seconds"]), "it spun"
    finally:
        scene.daemon.thaw()
    scene.wait_replaced(engine, mover)
    assert engine.load("old", 8) == 8


def test_mover_that_its_rank_asks_to_leave_ends_though_the_daemon_is_frozen(
    scene: Scene, engine: Probe
) -> None:
    [mover] = scene.movers_of(engine)
    scene.daemon.freeze()
    try:
        engine.ask("ask_movers_to_leave")
        wait_until(lambda: not is_alive(mover), "its end")
    finally:
        scene.daemon.thaw()
    scene.wait_replaced(engine, mover)
    assert engine.load("old", 8) == 8


def test_copy_that_is_slow_but_ends_before_its_deadline_counts(scene: Scene, engine: Probe) -> None:
    [mover] = scene.movers_of(engine)
    prefix = scene.pin_mid_store(engine, mover, COUNT, BLOCK)
    time.sleep(SUBMIT_SECONDS + 0.3)  # revoked meanwhile, but it has begun
    thaw(mover)
    assert engine.ask("pump")["idle"]
    assert scene.movers_of(engine) == [mover]
    page, call = engine.hits(prefix, COUNT)
    assert page == call == engine.load(prefix, COUNT) > 0


def test_blocks_that_a_stuck_store_reads_are_used_again_and_no_byte_is_wrong(scene: Scene) -> None:
    """The store ends before they are overwritten, or is given up: it takes nothing of after."""
    engine, other = scene.engines("one", "two", block_bytes=BLOCK, num_blocks=400)
    assert engine.store("old", 8) == 8
    [mover] = scene.movers_of(engine)
    stuck = scene.pin_mid_store(engine, mover, COUNT, BLOCK)
    engine.order("store", prefix="after", count=COUNT)
    assert not engine.has_answered(0.3), "nothing is stuck"
    thaw(mover)
    engine.answer()
    for prefix in (stuck, "after", "old"):
        answer = other.ask("load", prefix=prefix, count=COUNT)
        wrong = len(answer["wrong"])
        assert not wrong, f"{wrong} wrong blocks of {prefix}"
    assert other.load("old", 8) == 8
    assert other.load(stuck, COUNT) == COUNT
