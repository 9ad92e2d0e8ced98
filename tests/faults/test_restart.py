"""Restarts: warm after an orderly stop and after a crash, cold where that can't be."""

from __future__ import annotations

import pytest

from kvd.pool import lines
from tests.faults.conftest import MakeScene
from tests.faults.probe import Probe
from tests.faults.scene import Scene


@pytest.fixture
def stocked(own_scene: MakeScene) -> tuple[Scene, Probe]:
    """A daemon of its own, and an engine that has stored 100 blocks."""
    scene = own_scene()
    engine = scene.engine("one")
    assert engine.store("a", 60) == 60
    assert engine.store("b", 40) == 40
    return scene, engine


def test_pool_is_warm_after_an_orderly_stop_and_after_a_crash(
    stocked: tuple[Scene, Probe],
) -> None:
    scene, engine = stocked
    for stop in (scene.daemon.end, scene.daemon.kill):
        scene.forget_caller()
        stop()
        scene.daemon.start()
        engine.wait_usable()
        assert scene.status().recovered_blocks == 100
        assert (engine.load("a", 60), engine.load("b", 40)) == (60, 40)


def test_pool_that_can_not_be_used_starts_cold_and_says_why(stocked: tuple[Scene, Probe]) -> None:
    scene, engine = stocked
    header = scene.daemon.pool / "pool.header"
    stop(scene)
    written = lines.unseal(header.read_bytes())
    assert written is not None
    header.write_bytes(lines.seal({**written, "layout_version": 99}))
    starts_cold(scene, engine, "layout version 99")
    stop(scene)
    header.write_bytes(header.read_bytes()[:-9] + b"nonsense\n")
    starts_cold(scene, engine, "header is damaged")
    stop(scene)
    scene.daemon.pool_bytes *= 2
    starts_cold(scene, engine, "extents = 32, configured is 64")


def stop(scene: Scene) -> None:
    scene.forget_caller()
    scene.daemon.end()


def starts_cold(scene: Scene, engine: Probe, because: str) -> None:
    """Nothing of the old pool is served; the log says why; it works from then on."""
    scene.daemon.log.write_text("")
    scene.daemon.start()
    engine.wait_usable()
    assert because in scene.daemon.log.read_text()
    assert scene.status().recovered_blocks == 0
    assert engine.hits("a", 60) == (0, 0)
    assert engine.store("a", 60) == 60
    assert engine.load("a", 60) == 60
