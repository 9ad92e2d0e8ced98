"""A Valkey server for a test; and what Mooncake reads from the environment goes with its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.valkey_rig import ValkeyServer


@pytest.fixture(autouse=True)
def _without_traces(own_environment: None) -> None:
    """Each test's."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path / "server", in_cluster=False)
    server.wait()
    yield server
    server.kill()
