"""`kvd drain`: has the daemon take no more work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from kvd.cli.calls import linked
from kvd.cli.exits import EXIT_FOUND
from kvd.cli.options import Checked, daemon_options
from kvd.cli.printing import show_json
from kvd.config.values import number
from kvd.control.services.operator import MAX_DRAIN_MS
from kvd_proto.v1 import operator_pb2 as pb


@click.command("drain")
@click.option(
    "--wait",
    type=Checked(number(0, MAX_DRAIN_MS / 1e3), "seconds"),
    default=30.0,
    metavar="SECONDS",
    help="How long to wait for what is under way (default 30).",
)
@daemon_options
def command(**flags: Any) -> int:
    """Accept no more sessions, ranks and stores, and wait for the copies under way.

    /readyz fails from then on, until `kvd undrain` or a restart. Exits with 3 where jobs are left.
    """
    given = SimpleNamespace(**flags)
    with linked(given, "kvd drain") as daemon:
        request = pb.DrainRequest(deadline_ms=round(given.wait * 1e3))
        left = daemon.operator.Drain(request, **daemon.terms(given.wait)).jobs_left
    if given.json:
        show_json({"jobs_left": left})
    else:
        click.echo(f"drained; {left} jobs still run" if left else "drained; no job is left")
    return EXIT_FOUND if left else 0
