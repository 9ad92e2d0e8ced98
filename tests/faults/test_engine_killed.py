"""kill -9 of an engine in each phase: nothing of it is left, no torn block, no lost one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.faults.probe import Probe
from tests.faults.scene import (
    RELEASE_SECONDS,
    Clean,
    Scene,
    freeze,
)
from tests.waiting import wait_until

BLOCK = 64 << 10  # large enough for a copy to be caught in the middle
COUNT = 384


@pytest.fixture(scope="module")
def bystander(shared_scene: Scene) -> Probe:
    """An engine that lives through it all; what it stored must stay."""
    engine = shared_scene.engine("bystander", block_bytes=BLOCK, num_blocks=400)
    assert engine.store("its own", 8) == 8
    return engine


@pytest.fixture
def scene(shared_scene: Scene, bystander: Probe) -> Iterator[Scene]:
    """The module's daemon with the bystander alone."""
    yield shared_scene
    shared_scene.end_engines(bystander)


@pytest.fixture
def before(scene: Scene, bystander: Probe) -> Clean:
    """What the daemon holds for the bystander alone."""
    return scene.lasting_figures()


@pytest.fixture
def victim(scene: Scene, before: Clean) -> Probe:
    return scene.engine("victim", block_bytes=BLOCK, num_blocks=400)


def kill_and_look(scene: Scene, victim: Probe, before: Clean, bystander: Probe) -> None:
    """Nothing of the victim is left in time, and its neighbour has lost nothing."""
    spent = scene.wait_released(victim, victim.kill(), before)
    assert spent < RELEASE_SECONDS
    assert bystander.load("its own", 8) == 8
    assert bystander.store(f"goes on after {victim.pid}", 4) == 4


def whole_blocks(engine: Probe, prefix: str) -> int:
    """How many blocks of a prompt are found; page and call agree and every byte is right."""
    page, call = engine.hits(prefix, COUNT)
    assert page == call == engine.load(prefix, COUNT)
    return call


def test_engine_killed_before_it_says_ready_leaves_no_block(
    scene: Scene, bystander: Probe, before: Clean, victim: Probe
) -> None:
    victim.ask("store", prefix="unsaid", count=16, hold=True, wait=False)
    wait_until(lambda: scene.status().pool.slots_reserved == 16, "the reservation")
    kill_and_look(scene, victim, before, bystander)
    assert bystander.hits("unsaid", 16) == (0, 0)


def test_engine_killed_with_a_copy_ready_but_not_started_leaves_no_block(
    scene: Scene, bystander: Probe, before: Clean, victim: Probe
) -> None:
    freeze(*scene.movers_of(victim))
    victim.ask("store", prefix="unstarted", count=16, wait=False)
    wait_until(lambda: scene.status().pool.slots_reserved == 16, "the reservation")
    kill_and_look(scene, victim, before, bystander)
    assert bystander.hits("unstarted", 16) == (0, 0)


def test_engine_killed_in_the_middle_of_a_copy_leaves_no_half_written_block(
    scene: Scene, bystander: Probe, before: Clean, victim: Probe
) -> None:
    [mover] = scene.movers_of(victim)
    prefix = scene.pin_mid_store(victim, mover, COUNT, BLOCK)
    kill_and_look(scene, victim, before, bystander)
    assert whole_blocks(bystander, prefix) < COUNT


def test_engine_killed_after_its_copies_are_done_leaves_whole_blocks(
    scene: Scene, bystander: Probe, before: Clean, victim: Probe
) -> None:
    ready = scene.status().pool.slots_ready
    victim.ask("store", prefix="done", count=16, wait=False)
    wait_until(lambda: scene.status().pool.slots_ready == ready + 16, "the copies' end")
    kill_and_look(scene, victim, before, bystander)
    assert bystander.load("done", 16) == 16


def test_engine_killed_while_it_stores_leaves_whole_blocks_or_none(
    scene: Scene, bystander: Probe, before: Clean, victim: Probe
) -> None:
    victim.ask("store", prefix="storing", count=COUNT, wait=False)
    kill_and_look(scene, victim, before, bystander)
    assert whole_blocks(bystander, "storing") <= COUNT


def test_engine_killed_while_it_loads_frees_what_was_pinned(
    scene: Scene, bystander: Probe, before: Clean, victim: Probe
) -> None:
    found = victim.ask("match", request="r", prefix="its own", count=8)["found"]
    assert found == 8
    freeze(*scene.movers_of(victim))
    victim.ask("start_load", request="r", found=8, first_block=0)
    wait_until(lambda: scene.session_of(victim).jobs_in_flight == 1, "the load")
    kill_and_look(scene, victim, before, bystander)


def test_engine_killed_while_it_holds_leases_gives_them_back(
    scene: Scene, bystander: Probe, before: Clean, victim: Probe
) -> None:
    assert victim.ask("match", request="r", prefix="its own", count=8)["found"] == 8
    assert scene.session_of(victim).leases == 1
    kill_and_look(scene, victim, before, bystander)


def test_engine_killed_before_all_its_ranks_have_come_leaves_nothing(
    scene: Scene, bystander: Probe, before: Clean
) -> None:
    early = scene.start_engine("early", world_size=2, ranks=[0])
    wait_until(lambda: len(scene.daemon.movers()) == 2, "its only rank")
    assert not early.ask("status")["usable"]
    kill_and_look(scene, early, before, bystander)


def test_engine_killed_while_its_mover_starts_leaves_nothing(
    scene: Scene, bystander: Probe, before: Clean
) -> None:
    for delay in (0.0, 0.05, 0.15):
        early = scene.start_engine("early", block_bytes=BLOCK)
        wait_until(lambda: len(scene.daemon.movers()) == 2, "its mover's first sign of life")
        time.sleep(delay)
        kill_and_look(scene, early, before, bystander)
