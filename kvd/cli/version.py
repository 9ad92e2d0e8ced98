"""`kvd version`."""

from __future__ import annotations

import click

import kvd


@click.command("version")
def command() -> int:
    """Print the version."""
    click.echo(f"kvd {kvd.__version__}")
    return 0
