"""`kvd events`: what the daemon stores and removes, block by block."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import click
import grpc

from kvd.cli.calls import linked
from kvd.cli.options import NAMESPACE_ID, json_option, socket_options, timeout_option
from kvd.cli.printing import show_lines
from kvd_proto.v1 import events_pb2 as pb
from kvd_proto.v1 import events_pb2_grpc, operator_pb2

SHOWN_CHARACTERS = 16  # of a hash, in text


@click.command("events")
@click.option("--follow", is_flag=True, help="Show changes from now on, until Ctrl-C.")
@click.option("--namespace", type=NAMESPACE_ID, default=None, metavar="ID", help="This one alone.")
@click.option("--tiers", is_flag=True, help="Also what tiers below host memory hold.")
@click.option(
    "--count", type=click.IntRange(min=1), metavar="N", help="End after N blocks or changes."
)
@socket_options
@timeout_option(5.0)
@json_option
def command(**flags: Any) -> int:
    """List the blocks that are there now; --follow: what changes from now on.

    With --json each block is one JSON object on a line of its own. What takes no lines for ten
    seconds, as a pager may, is cut off where the list is long: write that to a file.
    """
    given = SimpleNamespace(**flags)
    shown = 0
    with linked(given, "kvd events") as daemon:
        request = pb.WatchEventsRequest(namespace_id=given.namespace or 0, with_tiers=given.tiers)
        if given.follow:
            now = daemon.operator.Status(operator_pb2.StatusRequest(), **daemon.terms())
            request.incarnation, request.after_sequence = now.incarnation, now.event_sequence
        stub = events_pb2_grpc.EventServiceStub(daemon.channel)
        stream = stub.WatchEvents(request, metadata=daemon.metadata)
        try:
            patience_s = None if given.follow else given.timeout
            for message in messages(stream, patience_s):
                for line in lines(message, as_json=given.json):
                    show_lines([line])
                    shown += 1
                    if shown == given.count:
                        return 0
                if message.snapshot_end and not given.follow:
                    return 0
        finally:
            stream.cancel()
    return 0


def messages(stream: Any, patience_s: float | None) -> Iterator[pb.WatchEventsResponse]:
    """What comes, each within `patience_s`; TimeoutError where a daemon hangs meanwhile.

    The whole list may take as long as it takes. Who takes nothing for long is ended by the daemon.
    """
    while True:
        watch = threading.Timer(patience_s or 0.0, stream.cancel)
        watch.daemon = True
        if patience_s is not None:
            watch.start()
        try:
            message = next(stream, None)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
            raise TimeoutError("timed out") from None
        finally:
            watch.cancel()
        if message is None:
            return
        yield message


def lines(message: pb.WatchEventsResponse, *, as_json: bool) -> Iterator[str]:
    """A line for each block that the message names, and for each change that names none."""
    for event in message.events:
        kind = f"kind_{event.kind}"  # of a later daemon
        if event.kind in pb.CacheEvent.Kind.values():
            kind = pb.CacheEvent.Kind.Name(event.kind).removeprefix("KIND_").lower()
        said: dict[str, object] = {
            "sequence": message.sequence,
            "kind": kind,
            "namespace": event.namespace_id,
            "group": event.group,
            "medium": event.medium,
        }
        said |= {"tier": event.tier} if event.tier else {}
        said |= {"epoch": event.epoch} if event.epoch else {}
        width = event.hash_bytes or len(event.hashes) or 1
        hashes = [
            event.hashes[at : at + width].hex() for at in range(0, len(event.hashes), width)
        ] or [""]
        for each in hashes:
            if as_json:
                yield json.dumps(said | ({"hash": each} if each else {}))
            else:
                place = event.tier or event.medium
                where = f"namespace {event.namespace_id} group {event.group}"
                yield f"{message.sequence} {kind:<8} {where} {place} {each[:SHOWN_CHARACTERS]}"
