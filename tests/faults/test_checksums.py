"""Bytes of the pool flipped behind the daemon's back: found at the load, never served."""

from __future__ import annotations

import shutil
from urllib.request import urlopen

import numpy as np
import pytest

from kvd import native
from kvd.cli.status import as_text
from tests.client.content import block_hashes, last_word
from tests.faults.probe import Probe
from tests.faults.scene import MakeScene, Scene
from tests.ports import free_port
from tests.waiting import wait_until

BLOCK_BYTES = 4096
COUNT = 40


@pytest.fixture
def checked(own_scene: MakeScene) -> Scene:
    return own_scene(payload_checksums="true", http_port=free_port())


def damage(scene: Scene, prefix: str, *numbers: int, rank: int = 0) -> None:
    """Flip a bit in the middle of these blocks, wherever in the pool's files they lie."""
    keys = block_hashes(prefix, COUNT)
    wanted = {last_word(keys[number], rank, BLOCK_BYTES) for number in numbers}
    found = 0
    for path in (scene.daemon.pool / "extents").glob("*.kv"):
        words = np.memmap(path, dtype=np.uint64, mode="r+")
        blocks = words.reshape(-1, BLOCK_BYTES // 8)
        for row in np.flatnonzero(np.isin(blocks[:, -1], list(wanted))):
            blocks[row, BLOCK_BYTES // 16] ^= np.uint64(1 << 17)
            found += 1
    assert found == len(numbers), "the blocks are not in the pool"


def metric(scene: Scene, name: str) -> float:
    with urlopen(f"http://127.0.0.1:{scene.daemon.flags['http-port']}/metrics") as page:
        lines = page.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def settle(probe: Probe, prefix: str) -> None:
    """Compute and store what of the prompt is not there any more; then all of it is served.

    On a slow machine a lookup may be given up and the engine computes: it is asked again.
    """

    def is_served() -> bool:
        probe.store(prefix, COUNT)
        return probe.load(prefix, COUNT) == COUNT

    wait_until(is_served, "the prompt", 40)


def find_out(probe: Probe, prefix: str, left: int) -> None:
    """Load until the damage is found: no byte of it comes, and `left` blocks are there."""

    def is_found() -> bool:
        answer = probe.ask("load", prefix=prefix, count=COUNT)
        assert (answer["loaded"], answer["wrong"]) in ((0, []), (left, []))
        return probe.hits(prefix, COUNT) == (left, left)

    wait_until(is_found, "the damage", 40)


def test_flipped_bit_fails_the_load_and_removes_the_block(checked: Scene) -> None:
    one, two = checked.engines("one", "two")
    assert one.store("prompt", COUNT) == COUNT
    damage(checked, "prompt", 7, 20)
    find_out(two, "prompt", 7)
    assert metric(checked, "kvd_checksum_failures_total") == 2
    assert "failed their checksums" in checked.daemon.log.read_text()
    for probe in (one, two):  # what is before the first damaged block is served as before
        assert probe.hits("prompt", COUNT) == (7, 7)
        assert probe.load("prompt", COUNT) == 7
    settle(one, "prompt")
    assert two.load("prompt", COUNT) == COUNT
    pool = checked.status().pool
    assert (pool.slots_reserved, pool.slots_quarantined) == (0, 0)


def test_bit_that_was_flipped_while_the_daemon_was_down_is_found_at_the_load(
    checked: Scene,
) -> None:
    engine = checked.engine("one")
    assert engine.store("a", COUNT) == COUNT
    assert engine.store("b", COUNT) == COUNT
    checked.kill_daemon()
    damage(checked, "a", 0)
    checked.daemon.start()
    engine.wait_usable()
    assert checked.status().recovered_blocks == 2 * COUNT
    assert engine.load("b", COUNT) == COUNT
    find_out(engine, "a", 0)
    settle(engine, "a")
    checked.kill_daemon()
    checked.daemon.start()
    engine.wait_usable()
    assert checked.status().recovered_blocks == 2 * COUNT
    assert engine.load("a", COUNT) == COUNT


def test_damage_in_one_ranks_shard_fails_the_load_on_both(checked: Scene) -> None:
    engine = checked.engine("two ranks", world_size=2)
    assert engine.store("prompt", COUNT) == COUNT
    assert engine.load("prompt", COUNT) == COUNT
    damage(checked, "prompt", 3, rank=1)
    find_out(engine, "prompt", 3)
    settle(engine, "prompt")


def test_checksums_may_come_and_go_and_only_what_was_summed_up_is_served_with_them(
    own_scene: MakeScene,
) -> None:
    scene = own_scene(payload_checksums="false")
    engine = scene.engine("one")
    assert engine.store("without", COUNT) == COUNT

    def restart(checksums: str) -> None:
        scene.end_daemon()
        scene.daemon.flags["payload-checksums"] = checksums
        scene.daemon.start()
        engine.wait_usable()

    restart("true")
    assert "40 blocks were left out" in scene.daemon.log.read_text()
    assert engine.hits("without", COUNT) == (0, 0)
    assert engine.store("with", COUNT) == COUNT
    restart("false")
    assert engine.load("with", COUNT) == COUNT
    restart("true")
    assert engine.load("with", COUNT) == COUNT


def test_without_checksums_nobody_notices(own_scene: MakeScene) -> None:
    """What the setting is for: the same bit, and the wrong bytes go to the engine."""
    scene = own_scene(payload_checksums="off")
    engine = scene.engine("one")
    assert engine.store("prompt", COUNT) == COUNT
    damage(scene, "prompt", 7)
    assert engine.ask("load", prefix="prompt", count=COUNT)["wrong"] == [7]


def test_upgrade_from_a_pool_without_checksums_loses_no_block_and_compares_what_comes(
    own_scene: MakeScene,
) -> None:
    """By default, and back again; each daemon is killed."""
    if native.library() is None:
        pytest.skip(f"off by default: {native.why_not()}")
    scene = own_scene(payload_checksums="off")
    engine = scene.engine("one")

    def restart(checksums: str, *, copies: str = "auto") -> None:
        scene.kill_daemon()
        scene.daemon.flags["payload-checksums"] = checksums
        scene.daemon.environment["KVD_NATIVE"] = copies
        scene.daemon.start()
        engine.wait_usable()

    assert engine.store("old", COUNT) == COUNT
    restart("auto")
    pool = scene.status().pool
    assert (pool.checksums, pool.checksums_reason) == (True, "")
    assert "40 blocks were stored without checksums" in scene.daemon.log.read_text()
    assert engine.load("old", COUNT) == COUNT
    assert engine.store("new", COUNT) == COUNT
    restart("auto", copies="off")  # numpy compares what the library summed up
    assert scene.status().pool.checksums_reason == "the pool that is there has them"
    assert engine.load("new", COUNT) == COUNT
    assert engine.load("old", COUNT) == COUNT
    assert engine.store("by numpy", COUNT) == COUNT
    restart("off")  # as an earlier kvd does without the setting
    assert engine.store("later", COUNT) == COUNT
    restart("auto")
    assert scene.status().recovered_blocks == 4 * COUNT
    for prefix in ("old", "new", "by numpy", "later"):
        assert engine.load(prefix, COUNT) == COUNT
    damage(scene, "by numpy", 9)
    find_out(engine, "by numpy", 9)


@pytest.mark.parametrize(("copies", "word"), [("auto", "on"), ("off", "off")])
def test_by_default_a_new_pool_has_checksums_where_the_library_is(
    own_scene: MakeScene, copies: str, word: str
) -> None:
    if copies == "auto" and native.library() is None:
        pytest.skip(f"no native library: {native.why_not()}")
    scene = own_scene(http_port=free_port())
    scene.end_daemon()
    shutil.rmtree(scene.daemon.pool)
    scene.daemon.pool.mkdir()
    scene.daemon.environment["KVD_NATIVE"] = copies
    scene.daemon.start()
    pool = scene.status().pool
    assert pool.checksums is (word == "on")
    assert pool.checksums_reason == (
        "" if word == "on" else "no native library sums up what it copies: KVD_NATIVE is off"
    )
    assert metric(scene, "kvd_pool_checksums") == (word == "on")
    said = f"checksums of the blocks' bytes: {word}"
    assert said in scene.daemon.log.read_text()
    assert any(line.startswith(said) for line in as_text(scene.status()))
