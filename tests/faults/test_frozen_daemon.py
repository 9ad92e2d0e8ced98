"""Control stopped for longer than its deadlines: what ended meanwhile has ended, the rest ends."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.faults.probe import Probe
from tests.faults.scene import Scene, freeze, thaw
from tests.waiting import wait_until

DEADLINE_SECONDS = 2.0  # for either half of a job: more than a busy machine takes to freeze all
FROZEN_SECONDS = 4.0
STORES = 4
BLOCKS = 16
BLOCK_BYTES = 4096
FLAGS = {"submit-deadline-seconds": DEADLINE_SECONDS, "copy-deadline-seconds": DEADLINE_SECONDS}


@pytest.fixture
def engine(scene: Scene) -> Probe:
    made = scene.engine("one")
    assert made.store("old", BLOCKS) == BLOCKS
    return made


def begin_stores(engine: Probe) -> None:
    """The movers have their orders; the workers say ready in a moment."""
    for number in range(STORES):
        first = number * BLOCKS
        engine.ask(
            "store",
            prefix=f"p{number}",
            count=BLOCKS,
            first_block=first,
            hold=True,
            wait=False,
        )


def test_stores_that_movers_finished_meanwhile_are_all_found(scene: Scene, engine: Probe) -> None:
    movers = scene.movers_of(engine)
    begin_stores(engine)
    wait_until(lambda: scene.status().pool.slots_reserved == STORES * BLOCKS, "the orders")
    scene.daemon.freeze()
    engine.ask("ready")
    for number in range(STORES):
        copied = partial(scene.copied_blocks, f"p{number}", BLOCKS, BLOCK_BYTES)
        wait_until(lambda: copied() == BLOCKS, "the copies")  # noqa: B023 - waited for at once
    time.sleep(FROZEN_SECONDS)
    scene.daemon.thaw()
    said = engine.ask("pump")
    assert said["idle"]
    assert said["refusals"] == {}
    found = [engine.hits(f"p{number}", BLOCKS) for number in range(STORES)]
    assert found == [(BLOCKS, BLOCKS)] * STORES
    assert scene.movers_of(engine) == movers


def test_load_that_its_mover_finished_meanwhile_is_done(scene: Scene, engine: Probe) -> None:
    movers = scene.movers_of(engine)
    assert engine.ask("match", request="r", prefix="old", count=BLOCKS)["found"] == BLOCKS
    engine.ask("start_load", request="r", found=BLOCKS, first_block=100, hold=True)
    wait_until(lambda: scene.session_of(engine).jobs_in_flight == 1, "the order")
    scene.daemon.freeze()
    engine.ask("ready")
    loaded = {"prefix": "old", "count": BLOCKS, "first_block": 100}
    wait_until(lambda: engine.ask("check", **loaded)["wrong"] == [], "the copy")
    time.sleep(FROZEN_SECONDS)
    scene.daemon.thaw()
    said = engine.ask("pump")
    assert (said["idle"], said["finished"], said["failed"]) == (True, ["r"], [])
    assert engine.ask("check", **loaded)["wrong"] == []
    assert scene.movers_of(engine) == movers


def test_jobs_that_an_engine_sent_meanwhile_end_too(scene: Scene, engine: Probe) -> None:
    scene.daemon.freeze()
    begin_stores(engine)
    engine.ask("ready")
    engine.ask("pump_for", seconds=FROZEN_SECONDS)
    scene.daemon.thaw()
    assert engine.ask("pump")["idle"]
    wait_until(lambda: scene.busy_slots() == 0, "the slots")
    assert engine.load("old", BLOCKS) == BLOCKS


def test_engine_that_died_meanwhile_leaves_nothing(scene: Scene, engine: Probe) -> None:
    begin_stores(engine)
    wait_until(lambda: scene.status().pool.slots_reserved == STORES * BLOCKS, "the orders")
    scene.daemon.freeze()
    engine.ask("ready")
    engine.kill()
    time.sleep(FROZEN_SECONDS)
    scene.daemon.thaw()
    wait_until(lambda: not scene.status().sessions and not scene.daemon.movers(), "its end")
    wait_until(lambda: scene.busy_slots() == 0, "the slots")


def test_jobs_end_whoever_wakes_first_where_everybody_slept(scene: Scene, engine: Probe) -> None:
    [mover] = scene.movers_of(engine)
    pids = {"daemon": scene.daemon.pid, "mover": mover, "engine": engine.pid}
    for first in pids:
        begin_stores(engine)
        for pid in pids.values():
            freeze(pid)
        time.sleep(FROZEN_SECONDS)
        for name in sorted(pids, key=lambda name: name != first):
            thaw(pids[name])
        engine.ask("ready")
        assert engine.ask("pump")["idle"]
        wait_until(lambda: scene.busy_slots() == 0, "the slots")
        assert scene.movers_of(engine) == [mover]
