"""A daemon process on a socket and a pool of its own, removed with all it left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.daemon_process import DaemonProcess
from tests.forked import ForkedProcess

DEADLINE_S = 15.0


class RunningDaemon(DaemonProcess):
    """`kvd serve` with more flags and variables of a test's choice."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvd-test."))
        self._shared = Path(tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir="/dev/shm"))
        super().__init__(self.directory, self._shared)
        self.log = self.directory / "log"
        self.extent_bytes = 4 << 20
        self.more_flags = flags
        self.environment = environment or {}

    @property
    def process(self) -> subprocess.Popen[bytes] | ForkedProcess:
        assert self._process is not None, "the daemon was never started"
        return self._process

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)

    def remove(self) -> None:
        if not self.ended:
            self.stop()
        if os.environ.get("KVD_TEST_SHOW_LOGS"):
            sys.stderr.write(self.log.read_text())
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self._shared, ignore_errors=True)


@contextlib.contextmanager
def daemon(*flags: str, environment: dict[str, str] | None = None) -> Iterator[RunningDaemon]:
    running = RunningDaemon(*flags, environment=environment)
    try:
        running.start()
        yield running
    finally:
        running.remove()
