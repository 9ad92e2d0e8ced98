"""A real daemon for the engine's tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import IO

import pytest

from examples.engine import daemon as engines_daemon
from examples.engine import process
from examples.engine.daemon import Daemon
from examples.engine.lifetime import STARTER
from tests import forked
from tests.engine.forked_engine import start_engine

POOL_BYTES = 64 << 20
EXTENT_BYTES = 2 << 20


@pytest.fixture(autouse=True)
def _starts_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Daemons, engines and ranks have their imports done; test_demo starts one of each without."""
    monkeypatch.setattr(process, "start_process", start_engine)
    starts = SimpleNamespace(**vars(subprocess) | {"Popen": start_daemon})
    monkeypatch.setattr(engines_daemon, "subprocess", starts)


def start_daemon(
    command: list[str], *, env: dict[str, str], stdout: IO[bytes], stderr: IO[bytes], **_: object
) -> forked.ForkedProcess | subprocess.Popen[bytes]:
    """For `subprocess.Popen`: it ends with what forked it, which ends with these tests."""
    words = command[command.index("kvd") + 1 :]
    environment = {name: value for name, value in env.items() if name != STARTER}
    return forked.start(
        words, output=stdout, errors=stderr, environment=environment, own_session=True
    )


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """`kvd serve` on a socket and a pool of its own."""
    with Daemon(POOL_BYTES, EXTENT_BYTES) as running:
        yield running
