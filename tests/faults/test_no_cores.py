"""A process that holds other people's KV leaves no core with it, whoever the kernel gives cores."""

from __future__ import annotations

from pathlib import Path

from tests.faults.scene import Scene


def test_a_movers_core_would_have_no_memory(scene: Scene) -> None:
    (probe,) = scene.engines("one")
    assert probe.store("prompt", 4) == 4
    (mover,) = scene.daemon.movers()
    # The limit alone does not count where cores are handed to a program.
    assert int(Path(f"/proc/{mover}/coredump_filter").read_text(), 16) == 0
    limits = Path(f"/proc/{mover}/limits").read_text().splitlines()
    (core,) = [line.split() for line in limits if line.startswith("Max core file size")]
    assert core[4:6] == ["0", "0"]
