"""What a service says that can't begin: in its log where a program reads that, else plainly."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping
from typing import Any

import click

from kvd.cli.exits import EXIT_MISUSED, Failure
from kvd.linux.standard_streams import goes_to_journal
from kvd.observability import logs

log = logging.getLogger(__name__)


def end(message: str, exit_code: int, log_format: str) -> int:
    """The exit code, once the log has the message. Failure: people alone would read it there."""
    if log_format == "text" and not goes_to_journal(sys.stderr):
        raise Failure(message, exit_code)
    logs.start("info", log_format)
    log.critical("%s", message)
    return exit_code


class Service(click.Command):
    """A command that logs: its usage errors are in the log, too, where a program reads that."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does; a usage error for people alone is click's own."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            with contextlib.suppress(Failure):
                said = f"{error.format_message().rstrip('.')}: see kvd {self.name} --help"
                ctx.exit(end(said, EXIT_MISUSED, self.log_format(self._flags(ctx, words))))
            raise

    def log_format(self, given: Mapping[str, Any]) -> str:
        """By what can be told of the flags."""
        return "json" if given.get("log_format") == "json" else "text"

    def _flags(self, ctx: click.Context, words: list[str]) -> dict[str, Any]:
        """As they were given, where something else is wrong; the last one may lack its value."""
        ctx.ignore_unknown_options = True
        for some in (words, words[:-1]):
            with contextlib.suppress(click.UsageError):
                return dict(self.make_parser(ctx).parse_args(list(some))[0])
        return {}
