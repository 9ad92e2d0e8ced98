"""The command line."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from kvd.cli.interrupts import ends_at_once
from kvd.linux import signals, standard_streams

if sys.argv[1:2] == ["serve"]:
    signals.hold()  # until the daemon takes them, or `main` has ended

with ends_at_once():
    import click

    from kvd.cli.commands import CLI
    from kvd.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, Failure, NobodyReads, is_of_output

# Who reads them may have enough at any line.
_LISTS = (["events"], ["explain"], ["namespaces"], ["quota"], ["status"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    standard_streams.fill()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have letters that it can't show
        sys.stdout.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with signals.held() if words[:1] == ["serve"] else contextlib.nullcontext():
            ended = CLI.main(args=words, prog_name="kvd", standalone_mode=False)
    except click.ClickException as error:
        with contextlib.suppress(OSError):  # its code is still told
            error.show()
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except NobodyReads:
        _write_no_more()
        return 0 if words[:1] in _LISTS else EXIT_FAILED
    except OSError as error:
        if not is_of_output(error):
            raise
        _write_no_more()
        with contextlib.suppress(OSError):
            Failure(f"the output can't be written: {error.strerror}").show()
        return EXIT_FAILED
    return ended if isinstance(ended, int) else 0


def _write_no_more() -> None:
    """What is still to be written is lost, too."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
