"""What a process of control's says in the daemon's log."""

from __future__ import annotations

import logging
import os
import resource
import sys
import time

from kvd.linux.standard_streams import goes_to_journal

# Why a process could not be started, and the fix.
NO_MORE_PROCESSES = (
    "there are as many processes and threads as there may be: raise TasksMax of the service, the"
    " container's or pod's limit of pids, or LimitNPROC"
)
_OF_STACKS = (
    (resource.RLIMIT_DATA, "data", "LimitDATA (ulimit -d)"),
    (resource.RLIMIT_AS, "addresses", "LimitAS (ulimit -v)"),
)
_NO_THREAD = "can't start new thread"  # Python's word
MAX_COMPLAINTS = 100
COMPLAINT_SECONDS = 60.0  # after that, one more in so long: such a process may run for months
WARNING = "<4>"  # in front of a line, as the journal takes priorities: sd-daemon(3)
_said = 0
_began = time.monotonic()
_title = "mover"


def why_no_thread() -> str:
    """Why a thread could not be started, and the fix: its stack needs memory, too."""
    for which, what, fix in _OF_STACKS:
        limit = resource.getrlimit(which)[0]
        if limit != resource.RLIM_INFINITY:
            return (
                f"this process may have {limit >> 20} MiB of {what}, and each thread takes some:"
                f" raise {fix}, or else {NO_MORE_PROCESSES}"
            )
    return NO_MORE_PROCESSES


def finds_no_thread(error: Exception) -> bool:
    """Whether it says that no thread could be started."""
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)


class ComplaintHandler(logging.Handler):
    """Says in the daemon's log what a library warns of, or a store of a site's own."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say it, and a traceback where there is one."""
        try:
            log_limited(self.format(record))
        except Exception:  # noqa: BLE001 - as logging's own do
            self.handleError(record)


def introduce(title: str) -> None:
    """Say from now on who complains; so do warnings by `logging`, where nobody else takes them."""
    global _title
    _title = title
    logging.lastResort = ComplaintHandler(logging.WARNING)


def log_limited(message: str) -> None:
    """Say it in the daemon's log, which a hostile worker must not be able to fill."""
    global _said
    if _said < MAX_COMPLAINTS + (time.monotonic() - _began) // COMPLAINT_SECONDS:
        _said += 1
        line = f"kvd {_title} {os.getpid()}: {message}"
        if goes_to_journal(sys.stderr):
            line = WARNING + line.replace("\n", f"\n{WARNING}")
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # noqa: T201 - whole, in one write
