"""Exit codes of every command, and the errors that lead to them. docs/commands.md lists them."""

from __future__ import annotations

import errno
from typing import IO, Any

import click

from kvd.observability.printable import printable_lines

# Of what is written, never of a call to a daemon.
_OF_FILES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

EXIT_FAILED = 1  # nobody answers, it can't start, or the asked said no
EXIT_MISUSED = 2  # flags, variables or the configuration file
EXIT_FOUND = 3  # it did what was asked, and what it found is bad
EXIT_REFUSED = 4  # the daemon answered, and refused
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells have it


def is_of_output(error: OSError) -> bool:
    """Whether a command's own writing failed: `kvd events | head`, a full disk."""
    return isinstance(error, BrokenPipeError) or error.errno in _OF_FILES


class NobodyReads(Exception):
    """Whoever read the output has ended: `kvd events | head`."""


class Failure(click.ClickException):
    """Ends a command with one line and an exit code."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc] # which click means to be set so

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it as every error of kvd is printed."""
        click.echo(f"kvd: {printable_lines(self.format_message())}", file=file, err=file is None)
