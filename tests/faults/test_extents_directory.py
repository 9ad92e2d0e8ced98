"""A daemon whose extents lie elsewhere than its tables: stores, loads, restarts, warm and cold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scene import MakeScene, Scene
from tests.huge_pages import PAGE_BYTES, huge_pages

COUNT = 60
EXTENTS = 16


@pytest.fixture(params=["tmpfs", "hugetlbfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path, shared_directory: Path) -> Iterator[Path]:
    if request.param == "tmpfs":
        yield shared_directory / "extents"
        return
    with huge_pages(tmp_path / "huge", EXTENTS + 2) as mount:
        yield mount / "extents"


@pytest.fixture
def scene(place: Path, own_scene: MakeScene) -> Iterator[Scene]:
    made = own_scene(EXTENTS * PAGE_BYTES, PAGE_BYTES, extents_directory=place)
    yield made
    made.close()  # before huge pages are taken from under it


def test_blocks_are_stored_there_and_served_again_after_every_restart(
    scene: Scene, place: Path
) -> None:
    engine = scene.engine("one")
    assert engine.store("a", COUNT) == COUNT
    mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in scene.daemon.movers())
    assert str(place) in mapped
    assert not (scene.daemon.pool / "extents").exists()
    for stop in (scene.end_daemon, scene.kill_daemon):
        stop()
        scene.daemon.start()
        engine.wait_usable()
        assert scene.status().recovered_blocks == COUNT
        assert engine.load("a", COUNT) == COUNT


def test_a_daemon_that_is_told_another_place_starts_cold_and_says_so(
    scene: Scene, place: Path
) -> None:
    engine = scene.engine("one")
    assert engine.store("a", COUNT) == COUNT
    scene.end_daemon()
    del scene.daemon.flags["extents-directory"]
    scene.daemon.start()
    engine.wait_usable()
    assert f"extents_directory = {place}, configured is" in scene.daemon.log.read_text()
    assert scene.status().recovered_blocks == 0
    assert engine.store("a", COUNT) == COUNT
    assert engine.load("a", COUNT) == COUNT
    assert list(place.iterdir()) == []
