"""The pool's files are removed while the daemon runs: it ends, and no byte goes to another pool."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.scene import MakeScene, Scene
from tests.waiting import wait_until

MIB = 1 << 20


def remove_all(pool: Path) -> None:
    shutil.rmtree(pool)


def remove_inside(pool: Path) -> None:
    for path in pool.iterdir():
        if path.is_file():
            path.unlink()


def remove_extents(pool: Path) -> None:
    shutil.rmtree(pool / "extents")


@pytest.mark.parametrize("name", ["checksums.table", "generations.table", "registry.jsonl"])
def test_a_daemon_that_lost_one_table_ends(own_scene: MakeScene, name: str) -> None:
    scene = own_scene(payload_checksums="on")
    (scene.daemon.pool / name).unlink()
    wait_until(lambda: scene.daemon.has_ended, "the daemon's end")
    assert f"{name} was removed while the daemon ran" in scene.daemon.log.read_text()


@pytest.mark.parametrize("name", ["slots.table", "registry.jsonl"])
def test_a_daemon_whose_table_was_cut_short_says_so_before_it_reads_beyond_its_end(
    own_scene: MakeScene, name: str
) -> None:
    scene = own_scene()
    scene.engine("one")  # the registry has a line
    path = scene.daemon.pool / name
    os.truncate(path, path.stat().st_size - 1)
    wait_until(lambda: scene.daemon.has_ended, "the daemon's end")
    assert f"{name} was cut short while the daemon ran" in scene.daemon.log.read_text()


@pytest.mark.parametrize("remove", [remove_all, remove_inside, remove_extents])
def test_a_daemon_whose_pool_was_removed_ends_and_its_successor_serves(
    own_scene: MakeScene, remove: Callable[[Path], None]
) -> None:
    scene = own_scene()
    engine = scene.engine("one")
    assert engine.store("before", 40) == 40
    remove(scene.daemon.pool)
    wait_until(lambda: scene.daemon.has_ended, "the daemon's end")
    log = scene.daemon.log.read_text()
    assert "was removed while the daemon ran" in log
    assert "Traceback" not in log
    assert engine.load("before", 40) == 0, "it is computed"
    scene.forget_caller()
    scene.daemon.start()
    engine.wait_usable(after=1)
    assert engine.store("after", 40) == 40
    assert engine.load("after", 40) == 40


def test_movers_of_a_removed_pool_touch_no_extent_of_the_next_one(own_scene: MakeScene) -> None:
    scene = own_scene()
    engine = scene.engine("one", num_blocks=1024)
    assert engine.store("before", 40) == 40
    scene.daemon.freeze()  # it can't notice
    remove_all(scene.daemon.pool)
    next_one = Scene()
    next_one.daemon.pool, next_one.daemon.pool_bytes = scene.daemon.pool, 32 * MIB
    try:
        next_one.daemon.start()
        scene.daemon.thaw()
        engine.ask("store", prefix="after", count=900, first_block=56, wait=False)
        wait_until(lambda: scene.daemon.has_ended, "the first daemon's end")
        extents = sorted((scene.daemon.pool / "extents").glob("*.kv"))
        assert len(extents) == 32
        assert [path.name for path in extents if any(path.read_bytes())] == []
    finally:
        next_one.close()
