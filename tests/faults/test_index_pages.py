"""Index pages take the memory that their blocks want, and engines that do nothing see all of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.faults.scene import MakeScene, Scene, links, target
from tests.waiting import wait_until

PROMPTS = [f"prompt {number}" for number in range(60)]
BLOCKS = 256  # of a prompt
BYTES_A_BLOCK = 64
EMPTY_BYTES = 8192


def page_bytes(scene: Scene) -> int:
    """Memory behind the daemon's index pages, each of which it holds by two descriptors."""
    pages = [Path(link).stat() for link in links(scene.daemon.pid) if "kvd-page" in target(link)]
    return sum({stat.st_ino: stat.st_blocks * 512 for stat in pages}.values())


def fits(scene: Scene, most: int) -> bool:
    return page_bytes(scene) <= most


def test_page_grows_and_shrinks_with_the_blocks_and_an_idle_engine_misses_nothing(
    own_scene: MakeScene,
) -> None:
    """It was made for all that the pool could hold; tags anywhere in it kept it all in memory."""
    scene = own_scene(pool_bytes=64 << 20, extent_bytes=4 << 20)
    idle = scene.engine("idle")
    assert page_bytes(scene) == EMPTY_BYTES
    busy = scene.engine("busy")
    for number, prompt in enumerate(PROMPTS, 1):
        assert busy.store(prompt, BLOCKS) == BLOCKS
        if number in (1, 4, 16, 60):
            most = BYTES_A_BLOCK * number * BLOCKS + EMPTY_BYTES
            wait_until(partial(fits, scene, most), "the page's size")
            assert [idle.hits(each, BLOCKS) for each in PROMPTS[:number]] == [
                (BLOCKS, BLOCKS)
            ] * number
    assert page_bytes(scene) >= 16 * BLOCKS * len(PROMPTS)
    assert idle.load(PROMPTS[0], BLOCKS) == BLOCKS
    scene.clear()
    wait_until(lambda: page_bytes(scene) == EMPTY_BYTES, "the memory to be given back")
    assert idle.hits(PROMPTS[0], BLOCKS) == (0, 0)
    assert busy.store("after", BLOCKS) == BLOCKS
    assert idle.hits("after", BLOCKS) == (BLOCKS, BLOCKS)


def test_page_of_a_warm_daemon_has_all_that_was_stored_before(own_scene: MakeScene) -> None:
    scene = own_scene(pool_bytes=32 << 20, extent_bytes=4 << 20)
    engine = scene.engine("one")
    for prompt in PROMPTS[:24]:
        assert engine.store(prompt, BLOCKS) == BLOCKS
    scene.kill_daemon()
    scene.daemon.start()
    engine.wait_usable(1)
    assert [engine.hits(each, BLOCKS) for each in PROMPTS[:24]] == [(BLOCKS, BLOCKS)] * 24
    assert page_bytes(scene) <= BYTES_A_BLOCK * 24 * BLOCKS + EMPTY_BYTES
