"""`kvd clear`: makes the daemon forget blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from kvd.cli.calls import MORE_TIME, linked
from kvd.cli.exits import Failure
from kvd.cli.namespaces import every
from kvd.cli.options import NAMESPACE_ID, daemon_options
from kvd.cli.printing import show_json, size
from kvd_proto.v1 import operator_pb2 as pb


@click.command("clear")
@click.option(
    "--namespace",
    type=NAMESPACE_ID,
    metavar="ID",
    help="Clear this namespace alone (see `kvd namespaces`; default: all).",
)
@click.option("--yes", is_flag=True, help="Don't ask.")
@daemon_options
def command(**flags: Any) -> int:
    """Forget the blocks of a namespace, or all of them, in tiers too.

    Engines compute again what they would have loaded. Nothing brings the blocks back, so it asks
    first; where nobody can answer, --yes is needed.
    """
    given = SimpleNamespace(**flags)
    with linked(given, "kvd clear") as daemon:
        if not given.yes:
            _confirm(every_chosen(every(daemon), given.namespace), given.namespace)
        answer = daemon.operator.Clear(
            pb.ClearRequest(namespace_id=given.namespace or 0), **daemon.terms(MORE_TIME)
        )
    if given.json:
        show_json({"blocks_removed": answer.blocks_removed})
    else:
        click.echo(f"{answer.blocks_removed} blocks were forgotten")
    return 0


def every_chosen(
    found: list[pb.NamespaceStatus], namespace: int | None
) -> list[pb.NamespaceStatus]:
    """Those that would be cleared."""
    return [each for each in found if namespace in (None, each.namespace_id)]


def _confirm(chosen: list[pb.NamespaceStatus], namespace: int | None) -> None:
    if namespace is not None and not chosen:
        raise Failure(f"there is no namespace {namespace} that this user may see")
    blocks, held = sum(each.blocks for each in chosen), sum(each.bytes for each in chosen)
    of = f"namespace {namespace}" if namespace else f"all namespaces ({len(chosen)})"
    try:
        sure = click.confirm(f"Forget {blocks} blocks ({size(held)}) of {of}?", err=True)
    except click.Abort as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # click makes one of both
            raise
        raise Failure("nothing was cleared: nobody answered; give --yes to be asked nothing") from (
            None
        )
    if not sure:
        raise Failure("nothing was cleared")
