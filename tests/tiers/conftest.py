"""What Mooncake's library reads from the environment goes with the test that set it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_traces(own_environment: None) -> None:
    """Each test's."""
