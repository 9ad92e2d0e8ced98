"""Small engines at a real daemon; what a test starts ends with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.client.small_engine import SmallEngine
from tests.client.worker_bench import MoverStandIn
from tests.daemon_process import DaemonProcess

StartEngine = Callable[..., SmallEngine]


@pytest.fixture
def start_engine(daemon: DaemonProcess) -> Iterator[StartEngine]:
    """Starts engines at the test's daemon; each can be used when it is here."""
    engines: list[SmallEngine] = []

    def start(engine_id: str = "e0", **settings: Any) -> SmallEngine:
        engine = SmallEngine(daemon.socket, engine_id, **settings)
        engines.append(engine)
        engine.wait_usable()
        return engine

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(start_engine: StartEngine) -> SmallEngine:
    """One engine."""
    return start_engine()


@pytest.fixture
def mover() -> Iterator[MoverStandIn]:
    """The far end of a worker's ring and board."""
    running = MoverStandIn()
    yield running
    running.end()
    if not running.registration.is_closed:
        running.registration.close()
