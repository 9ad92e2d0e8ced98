"""SGLang's own controllers and pools on the CPU, and real daemons of the other environment."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import leaks
from tests.daemon_process import DaemonProcess
from tests.sglang import absent

ROOT = Path(__file__).resolve().parents[2]
DAEMON_PYTHON = os.environ.get("KVD_DAEMON_PYTHON", str(ROOT / ".venv" / "bin" / "python"))

absent.install()

if TYPE_CHECKING:
    from tests.sglang.rig import Rank

StartRank = Callable[..., "Rank"]


@pytest.fixture(scope="module")
def make_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], DaemonProcess]]:
    """Makes daemons, not yet started, each with a pool of its own on shared memory."""
    made: list[DaemonProcess] = []
    pools: list[Path] = []

    def make() -> DaemonProcess:
        pools.append(
            Path(tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir=leaks.SHARED_MEMORY))
        )
        made.append(DaemonProcess(tmp_path_factory.mktemp("kvd"), pools[-1]))
        made[-1].python = DAEMON_PYTHON
        made[-1].pool_bytes = 128 << 20
        return made[-1]

    yield make
    for daemon in made:
        daemon.end()
    for pool in pools:
        shutil.rmtree(pool)


@pytest.fixture(scope="module")
def kvd(make_daemon: Callable[[], DaemonProcess]) -> DaemonProcess:
    """A running daemon."""
    daemon = make_daemon()
    daemon.start()
    return daemon


@pytest.fixture
def start_rank(kvd: DaemonProcess) -> Iterator[StartRank]:
    """Starts ranks at the daemon, which are connected when they are here."""
    from tests.sglang.rig import Rank

    running: list[Rank] = []

    def start(*, wait: bool = True, **settings: Any) -> Rank:
        running.append(Rank(kvd.socket, **settings))
        if wait:
            running[-1].wait_usable()
        return running[-1]

    yield start
    while running:
        running.pop().close()
