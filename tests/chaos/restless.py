"""A daemon that has other settings in each of its lives, and dies at steps of a commit."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

from kvd.pool.config import CHECKSUM_TABLE
from tests.chaos.failing_daemon import MANNERS, STEPS, TABLES, VARIABLE
from tests.chaos.held import waited_seconds
from tests.daemon_process import DaemonProcess

MOST_WRITES = 40  # to a table, before it dies; some lives have fewer
MOST_CALLS = 6
OPTIONS: dict[str, tuple[object, ...]] = {
    "policy": ("lru", "arc", "s3fifo", "turns"),
    "prefault-threads": (1, 2, 4),
    "lease-ttl-ms": (200, 2000, 5000),
    "lease-share": (0.05, 0.25, 0.9),
    "log-level": ("debug", "info", "warning"),
    "private-grace-seconds": (0.0, 60.0),
    "store-threshold": (1, 1, 1, 2),
}


class RestlessDaemon(DaemonProcess):
    """Draws its settings at each start; `arm` has its next life end at a step."""

    def __init__(self, directory: Path, pool: Path, dice: random.Random) -> None:
        super().__init__(directory, pool)
        self.module = "tests.chaos.failing_daemon"
        self._dice = dice
        # With "on", blocks that were stored while they were off are left out at a start.
        self.checksums: tuple[str, ...] = dice.choice([("on", "auto"), ("off", "auto")])
        self.options = OPTIONS
        self.done: Counter[str] = Counter()
        self.slowest_start = 0.0
        self.said_at_slowest: list[str] = []
        self._armed = ""

    def arm(self) -> None:
        """Its next life ends at a step."""
        step = self._dice.choice([*TABLES[:1] * 4, *STEPS])
        most = MOST_WRITES if step == TABLES[0] else MOST_CALLS
        count = int(most ** self._dice.random())
        self._armed = f"{step}:{count}:{self._dice.choice(MANNERS)}"
        self.environment[VARIABLE] = self._armed

    def disarm(self) -> None:
        self.environment.pop(VARIABLE, None)
        self._armed = ""

    @property
    def is_armed(self) -> bool:
        """Whether this life, or the next, ends at a step."""
        return bool(self._armed)

    def start(self) -> None:
        """As ever. One that dies at a step of its start is started again."""
        options = self.options | {"payload-checksums": self._checksums()}
        self.flags |= {name: self._dice.choice(those) for name, those in options.items()}
        began = time.monotonic()
        try:
            super().start()
        except AssertionError as error:
            if not self.has_died_at_a_step():
                error.add_note(self._where_it_stands())
                raise
            began = time.monotonic()
            super().start()
        seconds = time.monotonic() - began - waited_seconds(self.pid)
        if seconds > self.slowest_start:
            self.slowest_start = seconds
            lines = self.log.read_text(errors="replace").splitlines()
            self.said_at_slowest = [line for line in lines if "cygrpc" not in line][-12:]

    def _checksums(self) -> tuple[str, ...]:
        """What it may say of them at this start.

        A pool that began with them goes on with them where it may choose. One that was lost, and
        then chose none on a full file system, may choose on: there is no room to insist on them.
        """
        if "policy" not in self.flags:
            return self.checksums[:1]
        if "on" in self.checksums and not (self.pool / CHECKSUM_TABLE).exists():
            return ("auto",)
        return self.checksums

    def _where_it_stands(self) -> str:
        """Every thread of a daemon that hangs."""
        if self._process is None or self._process.poll() is not None:
            return "it has ended"
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        waits = [
            f"{task.name} {(task / 'wchan').read_text()} {(task / 'stat').read_text()[:60]}"
            for task in Path(f"/proc/{self.pid}/task").iterdir()
        ]
        log = self.log.read_text(errors="replace")
        return f"armed {self._armed!r}, flags {self.flags}, {waits}\n{log[-6000:]}"

    def has_died_at_a_step(self) -> bool:
        """True once for each such death, which is counted; the next life has nothing of it."""
        process = self._process
        if not self._armed or process is None or process.poll() != -signal.SIGKILL:
            return False
        step, _, manner = self._armed.split(":")
        self.done[f"died {manner} {step}"] += 1
        self.disarm()
        return True
