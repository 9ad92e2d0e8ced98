"""Real daemons for a module's tests, each over a pool of its own on shared memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests import leaks
from tests.daemon_process import DaemonProcess

ROOT = Path(__file__).resolve().parents[1]
# Tests of engines run in the engine's environment, the daemon in its own.
DAEMON_PYTHON = os.environ.get("KVD_DAEMON_PYTHON", str(ROOT / ".venv" / "bin" / "python"))

Daemon = TypeVar("Daemon", bound=DaemonProcess)


@contextmanager
def daemons(
    kind: Callable[[Path, Path], Daemon], make_directory: Callable[[str], Path]
) -> Iterator[Callable[[], Daemon]]:
    """Gives what makes daemons, not yet started; all end, and their pools go, with the context."""
    made: list[Daemon] = []
    pools: list[Path] = []

    def make() -> Daemon:
        name = f"kvd-test-{os.getpid()}-"
        pools.append(Path(tempfile.mkdtemp(prefix=name, dir=leaks.SHARED_MEMORY)))
        made.append(kind(make_directory("kvd"), pools[-1]))
        made[-1].python = DAEMON_PYTHON
        return made[-1]

    try:
        yield make
    finally:
        for daemon in made:
            daemon.end()
        for pool in pools:
            shutil.rmtree(pool)
