"""Where a memory limit is hit, the kernel ends a mover and not the daemon of everybody."""

from __future__ import annotations

from pathlib import Path

from tests.faults.scene import Scene

MOST = 1000  # that Linux knows: it ends such a process before any other


def preference(pid: int) -> int:
    """By how many thousandths of the memory Linux counts this process as larger."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_a_mover_is_ended_before_control(scene: Scene) -> None:
    """In a control group of 320 MiB, too, where control has 75 and a new mover hardly any."""
    scene.engines("one", "two")
    least = min(preference(scene.daemon.pid) + 240, MOST)
    movers = scene.daemon.movers()
    assert len(movers) == 2
    assert all(preference(mover) >= least for mover in movers)
