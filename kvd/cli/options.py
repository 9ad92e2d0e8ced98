"""Options that several commands have, declared once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

AN_HOUR = 3600.0
MOST_NAMESPACE_ID = 1 << 63  # messages carry up to twice that
Decorated = TypeVar("Decorated", bound=Callable[..., Any])
FILES = ("certificate", "key", "authority")


class Checked(click.ParamType[Any]):
    """A value that one of the settings' readers takes; what it refuses is a misuse."""

    def __init__(self, read: Callable[[str], Any], name: str) -> None:
        self._read = read
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What the text says; a default is taken as it is."""
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(f"{value!r} must be {error}", param, ctx)


def _seconds(text: str) -> float:
    from kvd.config.values import number  # noqa: PLC0415 - only where it is wanted

    value: float = number(0.001, AN_HOUR)(text)
    return value


def _namespace_id(text: str) -> int:
    from kvd.config.values import whole_number  # noqa: PLC0415 - only where it is wanted

    value: int = whole_number(1, MOST_NAMESPACE_ID)(text)
    return value


def _place(least_port: int) -> Callable[[str], str]:
    def read(text: str) -> str:
        from kvd.config.values import place  # noqa: PLC0415 - only where it is wanted

        return place(least_port)(text)

    return read


def _words(text: str) -> str:
    from kvd.config.values import is_utf8  # noqa: PLC0415 - only where it is wanted

    if not is_utf8(text):
        raise ValueError("text in UTF-8")
    return text


class FilePath(click.Path):
    """A file's or folder's path. An empty one, as of a variable that isn't set, is a misuse."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a default is taken as it is."""
        if value == "":
            self.fail("'' must be a path", param, ctx)
        return super().convert(value, param, ctx)


SECONDS = Checked(_seconds, "seconds")
NAMESPACE_ID = Checked(_namespace_id, "id")
PLACE = Checked(_place(1), "place")
LISTENING_PLACE = Checked(_place(0), "place")  # port 0: any that is free
WORDS = Checked(_words, "text")  # that goes to the daemon


def json_option(command: Decorated) -> Decorated:
    """--json."""
    option = click.option("--json", is_flag=True, help="Print everything as one JSON object.")
    return option(command)


def socket_options(command: Decorated) -> Decorated:
    """--socket and --config: where the daemon of this machine is."""
    command = click.option(
        "--config",
        metavar="FILE",
        help="The daemon's configuration file (default: KVD_CONFIG, else /etc/kvd/kvd.toml).",
    )(command)
    return click.option(
        "--socket",
        metavar="PATH",
        help="The daemon's socket (default: KVD_SOCKET, else that of the configuration file).",
    )(command)


def timeout_option(default: float, what: str = "the daemon's answer") -> Callable[..., Any]:
    """--timeout."""
    return click.option(
        "--timeout",
        type=SECONDS,
        default=default,
        metavar="SECONDS",
        help=f"How long to wait for {what} (default {default:g}).",
    )


def remote_options(command: Decorated) -> Decorated:
    """--remote and what goes with it: a daemon of another machine, through its gateway."""
    command = click.option(
        "--server-name",
        metavar="NAME",
        help="Name in the gateway's certificate, where it is not HOST (a forwarded port).",
    )(command)
    whats = ("own certificate", "its private key", "certificate of the authority of gateways")
    for name, what in reversed(list(zip(FILES, whats, strict=True))):
        command = click.option(
            f"--{name}",
            type=FilePath(),
            metavar="FILE",
            help=f"With --remote, a PEM file: {what}.",
        )(command)
    return click.option(
        "--remote",
        type=PLACE,
        metavar="HOST:PORT",
        help="A daemon of another machine, through its `kvd gateway` there.",
    )(command)


def daemon_options(command: Decorated) -> Decorated:
    """All that says which daemon, and --json."""
    timed: Decorated = timeout_option(5.0)(remote_options(json_option(command)))
    return socket_options(timed)
