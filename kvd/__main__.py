"""The command line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import click

from kvd.cli.commands import CLI
from kvd.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        ended = CLI.main(args=words, prog_name="kvd", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `kvd status | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return ended if isinstance(ended, int) else 0


if __name__ == "__main__":
    sys.exit(main())
