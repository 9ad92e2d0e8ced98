"""How tests wait for what they need: for as long as a busy machine takes."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 25.0  # less than what the daemon gives a job: nothing comes by that alone
LOOK_SECONDS = 0.01


def wait_until(
    true: Callable[[], bool], what: str = "a condition", seconds: float = PATIENCE_SECONDS
) -> None:
    """Look again and again; an assertion that names `what` where it does not become true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(LOOK_SECONDS)
