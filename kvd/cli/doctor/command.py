"""`kvd doctor`, and `kvd serve --check`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from kvd import config
from kvd.cli.calls import place_of
from kvd.cli.doctor.checks import Diagnosis, Subject, findings
from kvd.cli.doctor.system import System
from kvd.cli.exits import EXIT_FOUND, EXIT_MISUSED, Failure
from kvd.cli.options import json_option, socket_options, timeout_option
from kvd.cli.printing import show_json
from kvd.cli.status import look
from kvd.config.settings import Config, ConfigError
from kvd.observability.printable import printable_lines
from kvd_proto.v1 import operator_pb2 as pb


@click.command("doctor")
@socket_options
@timeout_option(5.0)
@json_option
def command(**flags: Any) -> int:
    """Find what is wrong with this machine or the daemon, each with what to change.

    Looks at shared memory, limits, huge pages, NUMA nodes, control groups, the socket's rights,
    GPUs, versions, and what the daemon says of itself. Changes nothing. Exits with 3 where
    something is wrong; what could only be better does not count.
    """
    given = SimpleNamespace(**flags, remote=None)
    try:
        settings = config.load({"config": given.config}, os.environ)
    except ConfigError as error:
        fault = Diagnosis("settings", str(error), "correct it; docs/configuration.md has them all")
        return _tell([fault], as_json=given.json)
    settings = replace(settings, socket=Path(place_of(given)))
    status, why = _status(given)
    if status is not None and status.pool.directory:  # flags may have given it another pool
        settings = replace(
            settings,
            pool_directory=Path(status.pool.directory),
            pool_bytes=status.pool.bytes,
            extent_bytes=status.pool.extent_bytes,
        )
    system = System.read(status.process_id if status is not None else None)
    found = findings(Subject(system, settings, status, why))
    return _tell(found, as_json=given.json)


def check_place(settings: Config) -> int:
    """Whether a daemon with these settings could start here, now and as this user."""
    subject = Subject(System.read(), settings, before_start=True)
    return _tell(findings(subject), as_json=False)


def _status(given: SimpleNamespace) -> tuple[pb.StatusResponse | None, str]:
    try:
        return look(given), ""
    except Failure as error:
        if error.exit_code == EXIT_MISUSED:
            raise
        return None, error.message


def _tell(found: Sequence[Diagnosis], *, as_json: bool) -> int:
    faults = sum(each.is_fault for each in found)
    if as_json:
        show_json({"faults": faults, "findings": [asdict(each) for each in found]})
    else:
        colour = False if os.environ.get("NO_COLOR") else None  # None: where a terminal is
        click.echo("\n".join(_lines(found)), color=colour)
    return EXIT_FOUND if faults else 0


def _lines(found: Sequence[Diagnosis]) -> Iterator[str]:
    for each in sorted(found, key=lambda each: not each.is_fault):
        word, colour = ("WRONG ", "red") if each.is_fault else ("BETTER", "yellow")
        yield f"{click.style(word, fg=colour)} {each.about}: {_shown(each.problem)}"
        yield f"       fix: {_shown(each.fix)}"
    faults = sum(each.is_fault for each in found)
    if not found:
        yield "nothing is wrong"
    else:
        yield f"{faults} wrong, {len(found) - faults} could be better"


def _shown(text: str) -> str:
    """Further lines stand in from the edge, so that no finding can be forged by an engine's id."""
    return printable_lines(text).replace("\n", "\n       ")
