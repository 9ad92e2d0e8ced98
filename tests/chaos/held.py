"""What a daemon and all around it hold at rest: it must not grow from turn to turn."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests import leaks
from tests.faults.scene import Scene, links, target

SETTLED_SECONDS = 5.0
SPARE_DESCRIPTORS = 12  # connections that are made anew, and such
SPARE_MIB = 64
SPARE_FILES = 8
ANONYMOUS = "RssAnon:"


@dataclass(frozen=True, slots=True)
class Held:
    """At one moment."""

    processes: int
    daemon_descriptors: int
    mover_descriptors: int  # of the mover that has most, but for the extents'
    tier_descriptors: int
    daemon_mib: float  # anonymous memory
    files: int  # of the pool's directory, and of shared memory

    def beyond(self, first: Held, processes: int) -> list[str]:
        """What is more than it was at first, or than there should be."""
        wrong = []
        if self.processes != processes:
            wrong.append(f"{self.processes} processes in the place of {processes}")
        wrong += [
            f"{name}: {getattr(self, name)} after {getattr(first, name)}"
            for name in ("daemon_descriptors", "mover_descriptors", "tier_descriptors")
            if getattr(self, name) > getattr(first, name) + SPARE_DESCRIPTORS
        ]
        if self.daemon_mib > first.daemon_mib + SPARE_MIB:
            wrong.append(f"{self.daemon_mib:.0f} MiB after {first.daemon_mib:.0f}")
        if self.files > first.files + SPARE_FILES:
            wrong.append(f"{self.files} files after {first.files}")
        return wrong


def look(scene: Scene) -> Held:
    """What is held now."""
    bury_orphans(scene)
    daemon = scene.daemon
    movers, tiers = daemon.movers(), daemon.tiers()
    return Held(
        len(leaks.child_processes()),
        len(links(daemon.pid)),
        max(map(descriptors, movers), default=0),
        max(map(descriptors, tiers), default=0),
        anonymous_mib(daemon.pid),
        sum(len(files) for _, _, files in os.walk(daemon.pool)) + len(leaks.shared_files()),
    )


def descriptors(pid: int) -> int:
    """Those of extents come with the rows that are granted."""
    return sum(not target(link).endswith(".kv") for link in links(pid))


def bury_orphans(scene: Scene) -> None:
    """What a killed daemon leaves becomes a child of this process; what it started itself, others
    wait for."""
    ours = {scene.daemon.pid, *(probe.pid for probe in scene.probes)}
    for title in leaks.child_processes():
        pid = int(title.split()[0])
        if title.endswith("zombie") and pid not in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def settled(scene: Scene, first: Held | None, processes: int) -> tuple[Held, list[str]]:
    """What is held, and what of it is too much for so long that it stays."""
    deadline = time.monotonic() + SETTLED_SECONDS
    while True:
        held = look(scene)
        wrong = held.beyond(first or held, processes)
        if not wrong or time.monotonic() > deadline:
            return held, wrong
        time.sleep(0.1)


def who_is_there(scene: Scene) -> str:
    """For the report: every process, and the daemon's descriptors by kind."""
    kinds = Counter(target(link).split(":")[0] for link in links(scene.daemon.pid))
    return f"{sorted(leaks.child_processes())}, {kinds.most_common(12)}"


def anonymous_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(ANONYMOUS):
            return int(line.split()[1]) / 1024
    return 0.0


def waited_seconds(pid: int) -> float:
    """How long the process, its first thread, has waited for a processor: that is no hang."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # it has ended, or the kernel doesn't say
        return 0.0
