"""What a process of control's says in the daemon's log."""

from __future__ import annotations

import itertools
import os
import sys

MAX_COMPLAINTS = 100
_complaints = itertools.count()
_title = "mover"


def introduce(title: str) -> None:
    """Say from now on who complains."""
    global _title
    _title = title


def log_limited(message: str) -> None:
    """Say it in the daemon's log, which a hostile worker must not be able to fill."""
    if next(_complaints) < MAX_COMPLAINTS:
        print(f"kvd {_title} {os.getpid()}: {message}", file=sys.stderr, flush=True)  # noqa: T201
