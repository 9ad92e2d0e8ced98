"""A real daemon for tests: started, stopped in order, killed, frozen, started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests import forked
from tests.forked import ForkedProcess

START_SECONDS = 90.0
STOP_SECONDS = 60.0
logs: set[Path] = set()  # of all that was started


class DaemonProcess:
    """`python -m kvd serve` (or another `module`) over one pool directory, which outlives it."""

    def __init__(self, directory: Path, pool: Path) -> None:
        self.socket = str(directory / "kvd.sock")
        self.log = directory / "kvd.log"
        self.pool = pool / "pool"
        self.pool.mkdir()
        self.pool_bytes = 32 << 20
        self.extent_bytes = 1 << 20
        self.flags: dict[str, object] = {}
        self.more_flags: tuple[str, ...] = ()
        self.environment: dict[str, str] = {}
        self.python = sys.executable
        self.module = "kvd"
        self.behind: tuple[str, ...] = ()  # a command that runs it, as on another host
        self.own_session = False  # as a service has one: Linux may share processors out by it
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the daemon does not run"
        return self._process.pid

    def start(self) -> None:
        """Start over the pool as it is; returns once the socket takes connections."""
        self.launch()
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process is not None
            assert self._process.poll() is None, self._story("ended at its start")
            assert time.monotonic() < deadline, self._story(f"no answer in {START_SECONDS} s")
            time.sleep(0.02)

    def launch(self) -> None:
        """Begin to start."""
        settings = {
            "socket": self.socket,
            "pool-directory": self.pool,
            "pool-bytes": self.pool_bytes,
            "extent-bytes": self.extent_bytes,
            "http-port": 0,
            **self.flags,
        }
        logs.add(self.log)
        flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        words, environment = ["serve", *flags, *self.more_flags], os.environ | self.environment
        with self.log.open("ab") as log:
            if self.module == "kvd" and not self.behind:
                self._process = forked.start(
                    words,
                    output=log,
                    errors=log,
                    environment=environment,
                    python=self.python,
                    own_session=self.own_session,
                )
                return
            self._process = subprocess.Popen(
                [*self.behind, self.python, "-m", self.module, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=self.own_session,
            )

    def _story(self, what: str) -> str:
        """What a test that fails here should know: whether it hangs, starves or has ended."""
        assert self._process is not None
        times = Path(f"/proc/{self._process.pid}/stat")
        spent = times.read_text().rpartition(")")[2].split()[11:13] if times.exists() else []
        said = f"{what}; status {self._process.returncode}, ticks of processor time {spent}"
        return f"{said}\n{self.log.read_text()}"

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self.socket)
            except OSError:
                return False
        return True

    @property
    def is_started(self) -> bool:
        """Whether there is a process; it may not serve yet, or have ended."""
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """Kill -9."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """SIGSTOP: there, but hung."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Stop in order; by force when that takes too long."""
        if self._process is None:
            return
        self.thaw()
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._process = None

    def movers(self) -> list[int]:
        """Pids of the daemon's living mover processes: not of those that it has yet to bury."""
        return self._children("kvd.mover")

    def tiers(self) -> list[int]:
        """Likewise of its tiers' processes."""
        return self._children("kvd.tiers")

    def _children(self, room: str) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in children if is_alive(int(pid)) and runs(int(pid), room)]

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # a process that has ended needs none


def is_alive(pid: int) -> bool:
    """False for a process that is gone, and for one that only waits for its parent to take note."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it ended meanwhile
        return False
    return state not in "ZX"


def runs(pid: int, module: str) -> bool:
    """Whether it was started as this Python module."""
    try:
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile
        return False
