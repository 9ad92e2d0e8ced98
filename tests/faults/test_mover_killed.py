"""kill -9 of a mover in each phase: its jobs fail, its engine registers again, others go on."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.probe import Probe
from tests.faults.scene import Scene, pin_mid_load
from tests.waiting import wait_until

BLOCK = 64 << 10
COUNT = 384


@pytest.fixture
def engines(scene: Scene) -> tuple[Probe, Probe]:
    """One whose movers die, and a neighbour. Both have stored something."""
    victim, neighbour = scene.engines("victim", "neighbour", block_bytes=BLOCK, num_blocks=400)
    assert victim.store("old", 8) == 8
    assert neighbour.store("other", 8) == 8
    return victim, neighbour


def all_go_on(victim: Probe, neighbour: Probe) -> None:
    """Both engines store and load."""
    assert victim.load("old", 8) == 8
    assert victim.store("new", 8) == 8
    assert neighbour.load("new", 8) == 8
    assert neighbour.load("other", 8) == 8


def test_mover_killed_while_idle_is_replaced(scene: Scene, engines: tuple[Probe, Probe]) -> None:
    victim, neighbour = engines
    [mover] = scene.movers_of(victim)
    os.kill(mover, signal.SIGKILL)
    scene.wait_replaced(victim, mover)
    said = f"(pid {mover}) has ended: killed by SIGKILL"
    wait_until(lambda: said in scene.daemon.log.read_text(), "a word of why")
    all_go_on(victim, neighbour)


def test_mover_killed_half_way_through_a_store_fails_that_store_alone(
    scene: Scene, engines: tuple[Probe, Probe]
) -> None:
    victim, neighbour = engines
    [mover] = scene.movers_of(victim)
    prefix = scene.pin_mid_store(victim, mover, COUNT, BLOCK)
    os.kill(mover, signal.SIGKILL)
    status = victim.ask("pump")
    assert status["idle"]
    page, call = neighbour.hits(prefix, COUNT)
    assert page == call == neighbour.load(prefix, COUNT) < COUNT
    wait_until(lambda: scene.busy_slots() == 0, "the half-written slots")
    scene.wait_replaced(victim, mover)
    all_go_on(victim, neighbour)
    assert victim.store(prefix, COUNT) == COUNT - call
    assert neighbour.load(prefix, COUNT) == COUNT


def test_mover_killed_half_way_through_a_load_fails_that_request_alone(
    scene: Scene, engines: tuple[Probe, Probe]
) -> None:
    victim, neighbour = engines
    assert neighbour.store("long", COUNT) == COUNT
    [mover] = scene.movers_of(victim)
    request = pin_mid_load(victim, mover, "long", COUNT)
    assert request not in victim.ask("status")["failed"]
    os.kill(mover, signal.SIGKILL)
    status = victim.ask("pump")
    assert request in status["failed"]
    scene.wait_replaced(victim, mover)
    # The engine shall compute it, not ask for it again and again.
    assert victim.ask("match_again", request=request)["found"] == 0
    victim.ask("finish", request=request)
    all_go_on(victim, neighbour)
    assert victim.load("long", COUNT) == COUNT


def test_movers_killed_again_and_again_never_leave_a_wrong_byte(
    scene: Scene, engines: tuple[Probe, Probe]
) -> None:
    victim, neighbour = engines
    for _ in range(4):
        for engine in engines:
            engine.order("churn", prefixes=["a", "b", "c"], rounds=6, most=COUNT)
        [mover] = scene.movers_of(victim)
        os.kill(mover, signal.SIGKILL)
        for engine in engines:
            assert engine.answer()["wrong"] == []
        scene.wait_replaced(victim, mover)
    all_go_on(victim, neighbour)


def test_a_mover_that_nobody_needs_any_more_ends_without_a_warning(scene: Scene) -> None:
    engine = scene.engine("short")
    (mover,) = scene.movers_of(engine)
    scene.end_engines()
    assert f"(pid {mover}) has ended:" not in scene.daemon.log.read_text()
