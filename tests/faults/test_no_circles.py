"""What engines leave when they end goes at once: none of it waits for Python's collector."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.collecting_daemon import VARIABLE
from tests.faults.scene import MakeScene, Scene
from tests.waiting import wait_until


@pytest.fixture
def scene(own_scene: MakeScene, tmp_path: Path) -> Scene:
    made = own_scene(starts=False)
    made.daemon.module = "tests.faults.collecting_daemon"
    made.daemon.environment[VARIABLE] = str(tmp_path / "garbage")
    made.daemon.start()
    return made


def garbage(path: Path) -> dict[str, int]:
    """What only the collector frees, by type, since the last time."""
    path.unlink(missing_ok=True)
    path.with_suffix(".asked").touch()
    wait_until(path.exists, "what the daemon has for the collector")
    lines = (line.rsplit(maxsplit=1) for line in path.read_text().splitlines())
    return {kind: int(count) for kind, count in lines}


def of_engines(path: Path) -> dict[str, int]:
    """Objects of ours, and calls of theirs that gRPC still knows."""
    kinds = ("kvd", "grpc._cython.cygrpc.RPCState")
    return {kind: count for kind, count in garbage(path).items() if kind.startswith(kinds)}


def test_engines_that_were_killed_leave_nothing_in_circles(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "garbage"
    engine = scene.engine("stays", world_size=2)
    assert engine.store("a", 20) == 20
    garbage(path)  # whatever a start leaves
    for number in range(3):
        one = scene.engine(f"goes {number}", world_size=2)
        assert one.store(f"{number}", 20) == 20
        assert one.load("a", 20) == 20
        scene.end_engines(engine)
    (mover, _) = scene.movers_of(engine)
    os.kill(mover, signal.SIGKILL)
    scene.wait_replaced(engine, mover)
    assert engine.load("a", 20) == 20
    scene.forget_caller()
    assert of_engines(path) == {}
