"""A daemon that is told to stop while it makes its pool does so, and leaves nothing half made."""

from __future__ import annotations

import time

from tests.daemon_process import START_SECONDS
from tests.faults.conftest import Patched
from tests.faults.scene import MIB, MakeScene, Scene

EXTENTS = 240  # two minutes' worth
SLOW = """
import sys
if "serve" in sys.orig_argv:
    import time
    from kvd.pool import extents
    make = extents.Extents._make
    extents.Extents._make = lambda files, *args: (time.sleep(0.5), make(files, *args))
"""


def made(scene: Scene) -> int:
    return len(list((scene.daemon.pool / "extents").glob("*")))


def test_daemon_that_makes_its_pool_stops_when_told(own_scene: MakeScene, patched: Patched) -> None:
    scene = own_scene(EXTENTS * MIB, starts=False)
    daemon = scene.daemon
    daemon.extent_bytes = MIB
    daemon.flags["prefault-threads"] = 1
    daemon.environment = patched(SLOW)
    daemon.launch()
    deadline = time.monotonic() + START_SECONDS
    while made(scene) < 2:
        assert time.monotonic() < deadline, daemon.log.read_text()
        time.sleep(0.02)
    daemon.end()
    assert made(scene) < EXTENTS, "it went on until the pool was there"
    assert "told to stop while the pool was made" in daemon.log.read_text()
    daemon.environment = {}
    daemon.start()
    assert scene.engine("one").store("a", 4) == 4
