"""A daemon for the tests of a module, and an engine for each test; modules may have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.control.daemon_rig import RawEngine, RunningDaemon, daemon


@pytest.fixture(scope="module")
def running() -> Iterator[RunningDaemon]:
    with daemon() as started:
        yield started


@pytest.fixture
def engine(running: RunningDaemon) -> Iterator[RawEngine]:
    made = RawEngine(running.socket)
    yield made
    made.close()
