"""A real daemon for the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.engine.daemon import Daemon

POOL_BYTES = 64 << 20
EXTENT_BYTES = 2 << 20


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """`kvd serve` on a socket and a pool of its own."""
    with Daemon(POOL_BYTES, EXTENT_BYTES) as running:
        yield running
