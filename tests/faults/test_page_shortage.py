"""Index pages that find no memory to grow: blocks are missed meanwhile, and found afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import Patched
from tests.faults.scene import MakeScene, Scene
from tests.small_tmpfs import fill, small_tmpfs
from tests.waiting import wait_until

PROMPTS = [f"prompt {number}" for number in range(24)]
BLOCKS = 256  # of a prompt
# The daemon's pages lie on a file system of the test's, which can be full; its files have no seals.
PAGES_ELSEWHERE = """
import fcntl, os, pathlib
make, control = os.memfd_create, fcntl.fcntl
mount = pathlib.Path(__file__).with_name("mount")
def memfd_create(name, *rest):
    if not name.startswith("kvd-page"):
        return make(name, *rest)
    path = mount / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    path.unlink()
    return fd
def without_seals(fd, command, *rest):
    return 0 if command == 1033 else control(fd, command, *rest)
os.memfd_create, fcntl.fcntl = memfd_create, without_seals
"""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "mount", 4 << 20) as mounted:
        yield mounted


@pytest.fixture
def scene(mount: Path, own_scene: MakeScene, patched: Patched) -> Scene:
    made = own_scene(64 << 20, 4 << 20, starts=False)
    made.daemon.environment = patched(PAGES_ELSEWHERE)
    made.daemon.start()
    return made


def test_blocks_that_a_full_file_system_kept_from_the_page_are_found_when_it_has_room(
    scene: Scene, mount: Path
) -> None:
    """They were misses for ever, and offered again and again only to be deduplicated."""
    engine, idle = scene.engines("busy", "idle")
    assert engine.store("before", BLOCKS) == BLOCKS
    neighbours = fill(mount)
    for prompt in PROMPTS:
        assert engine.store(prompt, BLOCKS) == BLOCKS
    found = [idle.hits(prompt, BLOCKS)[0] for prompt in PROMPTS]
    assert sum(found) < len(PROMPTS) * BLOCKS // 2, "the page was not full"
    assert "an index page stays as small as it is" in scene.daemon.log.read_text()
    assert idle.load("before", BLOCKS) == BLOCKS
    neighbours.unlink()
    wait_until(
        lambda: all(idle.hits(prompt, BLOCKS) == (BLOCKS, BLOCKS) for prompt in PROMPTS),
        "the blocks that were left out",
    )
    assert idle.load(PROMPTS[-1], BLOCKS) == BLOCKS
    scene.clear()
    assert [idle.hits(prompt, BLOCKS) for prompt in PROMPTS] == [(0, 0)] * len(PROMPTS)
