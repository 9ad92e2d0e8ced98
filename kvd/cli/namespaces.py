"""`kvd namespaces`: who keeps what, by namespace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from kvd.cli.calls import Link, linked
from kvd.cli.options import daemon_options
from kvd.cli.printing import show_json, show_lines
from kvd.cli.status import as_json, namespace_lines
from kvd_proto.v1 import operator_pb2 as pb


@click.command("namespaces")
@daemon_options
def command(**flags: Any) -> int:
    """List the namespaces, and in which fields those of one model differ.

    Engines share blocks only within one namespace.
    """
    given = SimpleNamespace(**flags)
    with linked(given, "kvd namespaces") as daemon:
        found = every(daemon)
    status = pb.StatusResponse(namespaces=found)
    if given.json:
        show_json({"namespaces": as_json(status)["namespaces"]})
    else:
        show_lines(namespace_lines(status))
    return 0


def every(daemon: Link) -> list[pb.NamespaceStatus]:
    """All that the caller may see."""
    found: list[pb.NamespaceStatus] = []
    while True:
        after = found[-1].namespace_id if found else 0
        page = daemon.operator.ListNamespaces(
            pb.ListNamespacesRequest(after_namespace_id=after), **daemon.terms()
        )
        found += page.namespaces
        if not page.more:
            return found
