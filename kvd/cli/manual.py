"""The man page and the page of commands, made from the commands themselves.

`python -m kvd.cli.manual` writes docs/kvd.1 and docs/commands.md; a test compares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import click

import kvd
from kvd.cli.commands import CLI, COMMANDS

PAGE = "kvd.1"
GUIDE = "commands.md"
EXIT_CODES = (
    (0, "done, and nothing is wrong; a list whose reader had enough, as `head`, counts as done"),
    (1, "failed: nobody answers, the daemon can't start, or the asked said no"),
    (2, "misused: flags, variables or the configuration file"),
    (3, "done, and what it found is bad: broken invariants, faults, jobs left"),
    (4, "the daemon answered and refused"),
    (70, "`serve` found one of its invariants broken and ended"),
    (130, "ended by Ctrl-C"),
)


def man_page() -> str:
    """The page for `man kvd`, in roff."""
    lines = [
        f'.TH KVD 1 "" "kvd {kvd.__version__}"',
        ".SH NAME",
        "kvd \\- a daemon that keeps the KV cache of LLM engines in host memory",
        ".SH SYNOPSIS",
        ".B kvd",
        "COMMAND [OPTIONS]",
        ".SH COMMANDS",
    ]
    for name, command in _commands():
        lines += [f".SS kvd {name}", *(_roff(each) for each in _said(command))]
        if usage := _usage(name, command):
            lines += [".PP", f".B {_roff(usage)}"]
        for option, what in _options(command):
            lines += [".TP", f".B {_roff(option)}", _roff(what)]
    lines += [".SH EXIT STATUS"]
    for code, what in EXIT_CODES:
        lines += [".TP", f".B {code}", _roff(what.replace("`", ""))]
    lines += [
        ".SH ENVIRONMENT",
        "Each setting NAME of",
        ".B kvd serve",
        "is the variable KVD_NAME.",
    ]
    return "\n".join(lines) + "\n"


def guide() -> str:
    """The page of commands, in Markdown."""
    lines = [
        "# Commands",
        "",
        "`python -m kvd.cli.manual` makes this page from the code. `kvd COMMAND --help` says the",
        "same, and so does `man kvd` where kvd is installed. Every command that asks a daemon",
        "finds it by `--socket`, else `KVD_SOCKET`, else the `socket` of the configuration file.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        *(f"| {code} | {what} |" for code, what in EXIT_CODES),
    ]
    for name, command in _commands():
        lines += ["", f"## kvd {name}", "", *_said(command)]
        if usage := _usage(name, command):
            lines += ["", f"`{usage}`"]
        if name == "serve":
            lines += ["", "Its settings are in [configuration.md](configuration.md)."]
        else:
            options = list(_options(command))
            lines += ["", *(f"- `{option}`: {what}" for option, what in options)] if options else []
    return "\n".join(lines) + "\n"


def _commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(CLI, info_name="kvd")
    for name, _, _ in COMMANDS:
        command = CLI.get_command(context, name)
        assert command is not None, "it is in the list"
        yield name, command


def _said(command: click.Command) -> list[str]:
    return inspect.cleandoc(command.help or "").splitlines()


def _usage(name: str, command: click.Command) -> str:
    """How it is called; empty where it takes options only."""
    if not any(isinstance(each, click.Argument) for each in command.params):
        return ""
    context = click.Context(command, info_name=name)
    return " ".join(["kvd", name, *command.collect_usage_pieces(context)])


def _options(command: click.Command) -> Iterator[tuple[str, str]]:
    context = click.Context(command, info_name=command.name)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            record = parameter.get_help_record(context)
            assert record is not None, "none is hidden"
            yield record


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def write(folder: Path) -> None:
    """Write both pages."""
    (folder / PAGE).write_text(man_page())
    (folder / GUIDE).write_text(guide())


if __name__ == "__main__":
    write(Path(kvd.__file__).resolve().parents[1] / "docs")
