"""`kvd undrain`: takes a drain back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from kvd.cli.calls import linked
from kvd.cli.options import daemon_options
from kvd.cli.printing import show_json
from kvd_proto.v1 import operator_pb2 as pb


@click.command("undrain")
@daemon_options
def command(**flags: Any) -> int:
    """End a drain: sessions, ranks and stores are accepted again."""
    given = SimpleNamespace(**flags)
    with linked(given, "kvd undrain") as daemon:
        was_draining = daemon.operator.Undrain(pb.UndrainRequest(), **daemon.terms()).was_draining
    if given.json:
        show_json({"was_draining": was_draining})
    else:
        click.echo("it takes work again" if was_draining else "it was not draining")
    return 0
