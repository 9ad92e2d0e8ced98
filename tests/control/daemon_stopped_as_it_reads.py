"""`kvd serve` that is told to stop when it has read the first blocks of its pool."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from kvd.pool.recovery import Recovery


def _stopping(recovery: Recovery) -> Iterator[Any]:
    for event in _events(recovery):
        yield event
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _events = Recovery.events
    Recovery.events = _stopping  # type: ignore[method-assign,assignment]

    from kvd.__main__ import main

    sys.exit(main())
