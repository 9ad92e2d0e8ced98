"""The probe of the other tests: what it can't know it doesn't call missing."""

from __future__ import annotations

import threading

from tests.faults.scene import MakeScene


def test_probe_without_a_session_says_so_and_then_waits_for_one(own_scene: MakeScene) -> None:
    scene = own_scene()
    engine = scene.engine("one")
    assert engine.store("a", 8) == 8
    scene.daemon.kill()
    engine.ask("pump_for", seconds=0.3)
    assert "no usable session" in engine.ask("probe", prefix="a", count=8)["unanswered"]
    back = threading.Timer(0.5, scene.daemon.start)
    back.start()
    try:
        assert engine.hits("a", 8) == (8, 8)
    finally:
        back.join()
