"""Bytes flipped in host memory, with checksums of payloads and a tier below: never served."""

from __future__ import annotations

import re
import time
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest

from tests.client.content import block_hashes, last_word
from tests.faults.probe import Probe
from tests.faults.scene import Scene
from tests.faults.test_tiers import TIER, evict, tiered, wait_for_tier, wait_found_below
from tests.ports import free_port
from tests.waiting import wait_until

BLOCK_BYTES = 4096
COUNT = 200
DISK = """
[[tiers]]
name = "disk"
kind = "disk"
options = {{directories = "{place}", directory_bytes = "64MiB", region_bytes = "1MiB"}}
"""


def flip(scene: Scene, prompt: str, *numbers: int) -> int:
    """Flip a bit in the middle of these blocks, where they lie in host memory; how many do."""
    keys = block_hashes(prompt, COUNT)
    wanted = {last_word(keys[number], 0, BLOCK_BYTES) for number in numbers}
    found = 0
    for path in (scene.daemon.pool / "extents").glob("*.kv"):
        words = np.memmap(path, dtype=np.uint64, mode="r+")
        blocks = words.reshape(-1, BLOCK_BYTES // 8)
        for row in np.flatnonzero(np.isin(blocks[:, -1], list(wanted))):
            blocks[row, BLOCK_BYTES // 16] ^= np.uint64(1 << 17)
            found += 1
    return found


def metric(scene: Scene, name: str) -> float:
    page = urlopen(f"http://127.0.0.1:{scene.daemon.flags['http-port']}/metrics", timeout=10)
    found = re.search(rf"^{name} ([0-9.e+]+)$", page.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def load(engine: Probe, prompt: str) -> int:
    """Blocks that were loaded; none of them may be wrong."""
    answer = engine.ask("load", prefix=prompt, count=COUNT)
    assert answer["wrong"] == []
    return int(answer["loaded"])


def checked() -> dict[str, object]:
    return {"payload-checksums": "true", "http-port": free_port()}


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_block_damaged_before_it_is_written_down_is_in_no_tier(tmp_path: Path, kind: str) -> None:
    tier = TIER if kind == "memory" else DISK.format(place=tmp_path / "disk")
    with tiered(tmp_path, tier + 'write = "demotion"\n', checked()) as scene:
        wait_for_tier(scene)
        one, two = scene.engines("one", "two")
        assert one.store("first", COUNT) == COUNT
        assert flip(scene, "first", 60, 150) == 2
        for number in range(4):
            one.store(f"before {number}", 180)
        stored = iter(range(1000))

        def is_found() -> bool:
            """Written down at a tick, before their slots are needed if these are few in between."""
            time.sleep(0.25)
            one.store(f"other {next(stored)}", 20)
            return metric(scene, "kvd_checksum_failures_total") == 2

        wait_until(is_found, "the damage, on its way down")
        assert "failed their checksums" in scene.daemon.log.read_text()
        evict(one)
        assert load(two, "first") in range(61), "what is sound, and was written in time"
        one.store("first", COUNT)
        wait_until(lambda: load(two, "first") == COUNT, "what was computed again", 40)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_block_damaged_after_its_promotion_fails_its_load_and_comes_from_the_tier_again(
    tmp_path: Path, kind: str
) -> None:
    tier = TIER if kind == "memory" else DISK.format(place=tmp_path / "disk")
    with tiered(tmp_path, tier, checked()) as scene:
        wait_for_tier(scene)
        one, two = scene.engines("one", "two")
        wait_found_below(one, two, "first")
        evict(one)
        assert load(two, "first") == COUNT, "promoted"
        assert flip(scene, "first", 11) == 1
        before = metric(scene, "kvd_checksum_failures_total")

        def is_found() -> bool:
            load(two, "first")
            return metric(scene, "kvd_checksum_failures_total") == before + 1

        wait_until(is_found, "the damage", 40)
        wait_until(lambda: load(two, "first") == COUNT, "the tier's own copy", 40)
        assert metric(scene, "kvd_checksum_failures_total") == before + 1


def test_what_was_promoted_is_compared_after_a_restart_too(tmp_path: Path) -> None:
    with tiered(tmp_path, TIER, checked()) as scene:
        wait_for_tier(scene)
        one, two = scene.engines("one", "two")
        wait_found_below(one, two, "first")
        evict(one)
        assert load(two, "first") == COUNT
        scene.kill_daemon()
        assert flip(scene, "first", 3) == 1
        scene.daemon.start()
        two.wait_usable(1)
        assert "left out: they have no checksums" not in scene.daemon.log.read_text()
        assert load(two, "first") in (0, 3)
        wait_until(lambda: metric(scene, "kvd_checksum_failures_total") == 1, "the damage")
