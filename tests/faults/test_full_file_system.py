"""A neighbour fills the pool's file system: nothing ends, nothing is mixed up, and it heals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scene import MakeScene, Scene
from tests.small_tmpfs import fill, small_tmpfs
from tests.waiting import wait_until

MIB = 1 << 20
POOL_BYTES = 16 * MIB
TMPFS_BYTES = 24 * MIB


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "mount", TMPFS_BYTES) as mounted:
        yield mounted


@pytest.fixture
def unstarted(mount: Path, own_scene: MakeScene) -> Scene:
    made = own_scene(POOL_BYTES, starts=False)
    made.daemon.pool = mount / "pool"
    return made


@pytest.fixture
def scene(unstarted: Scene) -> Scene:
    unstarted.daemon.start()
    return unstarted


def test_engines_that_come_to_a_full_file_system_store_and_find(scene: Scene, mount: Path) -> None:
    fill(mount)
    engine = scene.engine("one")
    for prompt in ("a", "b", "c"):
        assert engine.store(prompt, 200) == 200
    other = scene.engine("two", model="another", block_bytes=8192)
    assert other.store("d", 100) == 100
    assert engine.load("a", 200) == 200
    assert other.load("d", 100) == 100


def test_a_daemon_started_anew_on_a_full_file_system_is_warm(scene: Scene, mount: Path) -> None:
    engine = scene.engine("one")
    assert engine.store("before", 200) == 200
    fill(mount)
    assert engine.store("after", 200) == 200
    for _ in range(3):
        scene.kill_daemon()
        scene.daemon.start()
    engine.wait_usable(after=1)
    assert engine.load("before", 200) == 200
    assert engine.load("after", 200) == 200


def test_a_daemon_that_has_no_room_for_checksums_warns_of_that(
    unstarted: Scene, mount: Path
) -> None:
    unstarted.daemon.flags["payload-checksums"] = "off"
    unstarted.daemon.start()
    fill(mount)
    unstarted.kill_daemon()
    unstarted.daemon.flags["payload-checksums"] = "auto"
    unstarted.daemon.start()
    said = "checksums of the blocks' bytes: off (there is no room for their table)"
    assert f"WARNING kvd.cli.serve: {said}" in unstarted.daemon.log.read_text()


def test_a_pool_without_a_table_of_clears_is_served_on_a_full_file_system_with_a_tier(
    scene: Scene, mount: Path, tmp_path: Path
) -> None:
    """As one that an earlier version left: room for the table comes of what starts may use."""
    engine = scene.engine("one")
    assert engine.store("before", 200) == 200
    scene.kill_daemon()
    table = scene.daemon.pool / "generations.table"
    table.unlink()
    fill(mount)
    config = tmp_path / "kvd.toml"
    config.write_text(
        '[[tiers]]\nname = "memory"\nstore = "tests.tiers.memory_store:MemoryStore"\n'
    )
    scene.daemon.flags["config"] = config
    scene.daemon.start()
    assert table.stat().st_blocks * 512 >= table.stat().st_size > 0
    engine.wait_usable(after=1)
    assert engine.load("before", 200) == 200
    wait_until(lambda: scene.status().tiers[0].serving, "the tier's process", 30.0)


def test_what_came_while_the_registry_was_full_outlives_the_daemon_once_there_is_room(
    scene: Scene, mount: Path
) -> None:
    scene.engine("first").store("first", 8)
    taken = fill(mount)
    # The reserve goes as well: the registry can't grow by a byte.
    (scene.daemon.pool / "reserve").write_bytes(b"")
    fill_again = fill(mount, "more")
    registry = scene.daemon.pool / "registry.jsonl"
    size = registry.stat().st_size
    engine = scene.engine("late", model="late", tenant="")
    for number in range(30):
        assert engine.store(f"{number}", 8) == 8
    many = [scene.engine(f"{number}", model=f"model {number}" * 20) for number in range(8)]
    assert [each.store("x", 8) for each in many] == [8] * len(many)
    assert "registry can't grow" in scene.daemon.log.read_text()
    taken.unlink()
    fill_again.unlink()
    log = scene.daemon.log
    wait_until(lambda: "registry is whole again" in log.read_text(), "the registry")
    assert registry.stat().st_size > size
    scene.kill_daemon()
    scene.daemon.start()
    for each in many:
        each.wait_usable(after=1)
        assert each.load("x", 8) == 8


def test_daemon_that_finds_not_a_byte_says_so_and_starts_once_there_are_some(
    unstarted: Scene, mount: Path
) -> None:
    daemon = unstarted.daemon
    daemon.pool.mkdir(mode=0o700)
    taken = fill(mount)
    with pytest.raises(AssertionError, match="ended at its start; status 1"):
        daemon.start()
    (said,) = daemon.log.read_text().splitlines()
    assert f"the file system of {daemon.pool} is full: enlarge it" in said
    taken.unlink()
    daemon.start()
