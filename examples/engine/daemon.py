"""A kvd daemon as a child process, for the demo and the tests."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.engine.lifetime import child_environment, interrupts_held

START_SECONDS = 60.0
STOP_SECONDS = 30.0


class Daemon:
    """Runs `kvd serve` on a socket and a pool of its own; leaving the context removes both."""

    def __init__(self, pool_bytes: int, extent_bytes: int = 64 << 20) -> None:
        self._pool_bytes = pool_bytes
        self._extent_bytes = extent_bytes
        self._directory = Path(tempfile.mkdtemp(prefix="kvd-demo."))
        self._pool = Path(tempfile.mkdtemp(prefix="kvd-demo.", dir="/dev/shm"))
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = str(self._directory / "kvd.sock")
        self.log = self._directory / "kvd.log"
        self.start_s = 0.0
        try:
            self.start()
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the daemon does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it over the pool as it is; returns once it takes calls."""
        started = time.monotonic()
        # It must not outlive us, not even our own kill -9.
        bound = [sys.executable, "-m", "examples.engine.lifetime"]
        command = [*bound, "-m", "kvd", "serve", *self._flags()]
        with self.log.open("ab") as log, interrupts_held():
            # In a session of its own: Ctrl-C is for the demo, which then stops the daemon.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=child_environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"the daemon ended at its start:\n{self.log.read_text()}")
            if time.monotonic() - started > START_SECONDS:
                raise TimeoutError(f"the daemon took too long to start:\n{self.log.read_text()}")
            time.sleep(0.02)
        self.start_s = time.monotonic() - started

    def _flags(self) -> list[str]:
        settings = {
            "socket": self.socket,
            "pool-directory": self._pool,
            "pool-bytes": self._pool_bytes,
            "extent-bytes": self._extent_bytes,
            "http-port": 0,
        }
        return [part for name, value in settings.items() for part in (f"--{name}", str(value))]

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self.socket)
            except OSError:
                return False
        return True

    def kill(self) -> None:
        """Kill -9; the pool's files stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop in order, by SIGTERM; by force when that takes too long."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def remove(self) -> None:
        """Stop it and remove its socket, its log and its pool."""
        try:
            self.stop()
        finally:
            shutil.rmtree(self._pool, ignore_errors=True)
            shutil.rmtree(self._directory, ignore_errors=True)
