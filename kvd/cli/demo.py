"""`kvd demo`: becomes the demonstration of examples/engine, whose flags are its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

import kvd
from kvd.cli.exits import Failure


@click.command(
    "demo",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(flags: Sequence[str]) -> int:
    """Show a cache that outlives its engine and its daemon, with a real model."""
    root = Path(kvd.__file__).resolve().parents[1]
    if (root / "examples" / "engine" / "demo.py").exists():
        _become_demo(root, flags)
    raise Failure(
        "the demo is not part of the installed package; it lies in examples/ of the"
        " source tree: get that and run `make demo`"
    )


def _become_demo(root: Path, flags: Sequence[str]) -> NoReturn:
    """Run the demo in our place: Ctrl-C and SIGTERM reach it, and it ends its daemon in order."""
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "examples.engine.demo", *flags]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": path})  # noqa: S606 - no shell
