"""An engine of two ranks, one of which fails."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.probe import Probe
from tests.faults.scene import Scene, freeze, thaw, wait_until

COUNT = 32


@pytest.fixture
def engine(scene: Scene) -> Probe:
    """Two ranks, each with its own shard of every block."""
    made = scene.engine("pair", world_size=2)
    assert made.store("old", 8) == 8
    return made


@pytest.mark.parametrize("failing", [0, 1])
def test_store_of_which_one_rank_dies_is_never_a_hit(
    scene: Scene, engine: Probe, failing: int
) -> None:
    movers = scene.movers_of(engine)
    freeze(movers[failing])
    engine.ask("store", prefix="half", count=COUNT, wait=False)
    wait_until(
        lambda: scene.copied_blocks("half", COUNT, 4096, 1 - failing) == COUNT, "the other rank"
    )
    assert engine.hits("half", COUNT) == (0, 0)
    os.kill(movers[failing], signal.SIGKILL)
    assert engine.ask("pump")["idle"]
    scene.wait_replaced(engine, movers[failing])
    assert engine.hits("half", COUNT) == (0, 0)
    wait_until(lambda: scene.status().pool.slots_quarantined == 0, "the slots")
    assert scene.movers_of(engine)[1 - failing] == movers[1 - failing]
    assert engine.store("half", COUNT) == COUNT
    assert engine.load("half", COUNT) == COUNT


@pytest.mark.parametrize("failing", [0, 1])
def test_load_of_which_one_rank_dies_fails_for_the_whole_request(
    scene: Scene, engine: Probe, failing: int
) -> None:
    movers = scene.movers_of(engine)
    assert engine.ask("match", request="r", prefix="old", count=8)["found"] == 8
    freeze(movers[failing])
    engine.ask("start_load", request="r", found=8, first_block=100)
    engine.ask("pump", seconds=0.2)
    status = engine.ask("status")
    assert "r" not in status["finished"] + status["failed"]  # the other rank has its bytes
    os.kill(movers[failing], signal.SIGKILL)
    status = engine.ask("pump")
    assert "r" in status["failed"]
    assert "r" not in status["finished"]
    scene.wait_replaced(engine, movers[failing])
    assert engine.load("old", 8) == 8


def test_store_is_a_hit_only_once_both_ranks_have_written(scene: Scene, engine: Probe) -> None:
    movers = scene.movers_of(engine)
    freeze(movers[1])
    engine.ask("store", prefix="slow", count=COUNT, wait=False)
    wait_until(lambda: scene.copied_blocks("slow", COUNT, 4096, 0) == COUNT, "rank 0")
    assert engine.hits("slow", COUNT) == (0, 0)
    thaw(movers[1])
    assert engine.ask("pump")["idle"]
    assert engine.load("slow", COUNT) == COUNT
