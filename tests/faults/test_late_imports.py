"""A daemon that serves imports nothing more: others would wait for it, or a copy would."""

from __future__ import annotations

from pathlib import Path

from tests.faults.conftest import Patched
from tests.faults.scene import MIB, MakeScene
from tests.faults.test_tiers import wait_for_tier, wait_found_below

# Each import from when there is a file of this name.
NOTED = """
import os, pathlib, sys
here = pathlib.Path(__file__).parent
def note(event, arguments):
    if event == "import" and os.path.exists(here / "serving"):
        with open(here / "imports", "a") as imports:
            imports.write(f"{os.getpid()} {arguments[0]}\\n")
sys.addaudithook(note)
"""


def test_daemon_and_mover_import_nothing_once_they_serve(
    own_scene: MakeScene, patched: Patched, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    tiers = tmp_path / "kvd.toml"
    tiers.write_text(
        '[[tiers]]\nname = "disk"\nkind = "disk"\nwrite = "through"\n[tiers.options]\n'
        f'directories = ["{tmp_path}/disk"]\ndirectory_bytes = "64MiB"\n'
    )
    scene = own_scene(pool_bytes=4 * MIB, starts=False, config=tiers)
    scene.daemon.environment = patched(NOTED)
    scene.daemon.start()
    one, two = scene.engines("one", "two")
    wait_for_tier(scene)
    movers = [*scene.movers_of(one), *scene.movers_of(two)]
    serving = [scene.daemon.pid, *movers, *scene.daemon.tiers()]
    assert len(serving) == 4
    (tmp_path / "serving").touch()
    wait_found_below(one, two, "first")
    assert one.load("never stored", 50) == 0
    scene.status()
    scene.clear()
    assert scene.engine("three").store("a", 8) == 8, "its mover imports: that is seen"
    noted = [line.split() for line in (tmp_path / "imports").read_text().splitlines()]
    assert {int(pid) for pid, _ in noted} - set(serving), "nothing was noted"
    assert [(pid, name) for pid, name in noted if int(pid) in serving] == []
