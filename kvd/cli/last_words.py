"""What a service says that can't begin: in its log where a program reads that, else plainly."""

from __future__ import annotations

import logging
import sys

from kvd.cli.exits import Failure
from kvd.observability import logs

log = logging.getLogger(__name__)


def end(message: str, exit_code: int, log_format: str) -> int:
    """The exit code, once the log has the message. Failure: people alone would read it there."""
    if log_format == "text" and not logs.goes_to_journal(sys.stderr):
        raise Failure(message, exit_code)
    logs.start("info", log_format)
    log.critical("%s", message)
    return exit_code
