"""Ctrl-C while modules are imported: the process ends at once, and no traceback is printed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_at_once() -> Iterator[None]:
    """SIGINT ends the process in here, as the kernel does it: shells see 130.

    Python would raise KeyboardInterrupt in the midst of an import, which prints where it was, and
    some modules make another error of it. What ignores SIGINT, or heeds it in its own way, is left
    alone.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
