"""A benchmark that is told to end takes along what it has started."""

from __future__ import annotations

import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def end_in_order() -> None:
    """From now on these signals unwind what is open, as Ctrl-C does. On the main thread.

    By itself a signal ends this process alone: daemons, servers and busy processes, in groups and
    sessions of their own, would go on without it.
    """
    for number in SIGNALS:
        signal.signal(number, _leave)


def _leave(number: int, _frame: FrameType | None) -> None:
    for each in SIGNALS:  # once: a second one must not stop the unwinding half-way
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
