"""`kvd explain`: why a request missed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import click

from kvd.cli.calls import linked
from kvd.cli.exits import EXIT_FAILED, Failure
from kvd.cli.options import WORDS, daemon_options
from kvd.cli.printing import duration, show_json, show_lines
from kvd_proto.v1 import operator_pb2 as pb

_PREFIX = "MISS_CAUSE_"
SHOWN_CHARACTERS = 16  # of a hash, in text

# What became of the first block that was missing; {ago}: how long before the request.
_SAID = {
    "NEVER_STORED": "it was never stored since the daemon started, {ago} before the request",
    "EVICTED": "it was evicted {ago} before the request, {by}, unused for {unused}",
    "ROW_TAKEN": "its memory was given to others who waited for it {ago} before the request;"
    " it was unused for {unused}",
    "QUOTA_LOWERED": "it was evicted {ago} before the request, when the tenant's quota was lowered",
    "CLEARED": "an operator cleared it {ago} before the request",
    "UNUSABLE": "it went {ago} before the request: no engine could use its epoch or namespace"
    " any more",
    "DAMAGED": "it was removed {ago} before the request: its bytes were not those that were stored",
    "FILTERED": "the reuse filter kept it out {ago} before the request: it was seen too few times",
    "REFUSED": "its store was refused with {reason} {ago} before the request",
    "FAILED": "its store failed with {reason} {ago} before the request",
    "EPOCH": "it was never stored since the engine reset its cache {ago} before the request;"
    " what was stored before that is of no use to it",
    "NAMESPACE_CLEARED": "nothing is known of it since the namespace was cleared, {ago} before the"
    " request",
    "PENDING": "it was still being stored",
    "LEASES": "it was there, but the tenant's leases had their share of the pool or of its quota"
    " (lease_share): a longer prompt needs a larger pool, quota or share (docs/sizing.md)",
    "NO_SESSION": "the engine had no usable session: the daemon was away or silent, or a rank was"
    " not registered",
    "UNANSWERED": "the daemon did not answer the engine in time",
    "NOT_TAKEN": "it was there, and the engine loaded less: a bound of the engine's, or blocks of"
    " another group that were missing",
}


@click.command("explain")
@click.argument("request", required=False, default="", type=WORDS)
@daemon_options
def command(**flags: Any) -> int:
    """Tell why a request missed.

    REQUEST is the engine's id of it, or how that begins; without it, the last requests that missed
    anything are listed. A daemon remembers the last 1,024 of a tenant.
    """
    given = SimpleNamespace(**flags)
    with linked(given, "kvd explain") as daemon:
        asked = pb.ExplainRequest(request_id=given.request)
        found = list(daemon.operator.Explain(asked, **daemon.terms()).requests)
    if given.json:
        show_json({"requests": [as_json(each) for each in found]})
    elif found:
        for number, each in enumerate(found):
            show_lines(["", *lines(each)] if number else lines(each))
    elif not given.request:
        click.echo("no request that missed anything is remembered")
    if given.request and not found:
        raise Failure(
            f"no request {given.request!r} is remembered: it was too long ago, of another tenant,"
            " or of an engine whose client does not tell",
            EXIT_FAILED,
        )
    return 0


def cause_of(message: pb.ExplainedRequest) -> str:
    """The cause's name, in lower case; of one that a later daemon has, its number."""
    if message.cause not in pb.MissCause.values():
        return f"cause_{message.cause}"
    return pb.MissCause.Name(message.cause).removeprefix(_PREFIX).lower()


def as_json(message: pb.ExplainedRequest) -> dict[str, Any]:
    """All that the daemon said of a request."""
    said: dict[str, Any] = {
        name: getattr(message, name)
        for name in (
            "request_id", "engine_id", "tenant", "namespace_id", "epoch", "account", "age_seconds",
            "prompt_tokens", "device_tokens", "found_tokens",
        )
    }  # fmt: skip
    if not message.missed_hash:
        return said | {"missed": None}
    said["missed"] = {
        "group": message.missed_group,
        "block": message.missed_block,
        "hash": message.missed_hash.hex(),
        "cause": cause_of(message),
        "reason": message.reason,
        "cause_seconds": message.cause_seconds,
        "unused_seconds": message.unused_seconds,
        "by_namespace_id": message.by_namespace_id,
        "by_tenant": message.by_tenant,
        "all_known": message.all_known,
        "elsewhere": [
            {
                "namespace_id": each.namespace_id,
                "epoch": each.epoch,
                "other_account": each.other_account,
                "differs": each.differs,
            }
            for each in message.elsewhere
        ],
    }
    return said


def lines(message: pb.ExplainedRequest) -> Iterator[str]:
    """A request, for people."""
    yield (
        f"request {message.request_id} of engine {message.engine_id}, tenant {message.tenant},"
        f" namespace {message.namespace_id}, {duration(message.age_seconds)} ago"
    )
    sought = message.prompt_tokens - message.device_tokens
    yield (
        f"  {message.prompt_tokens} tokens; the device had {message.device_tokens},"
        f" kvd brought {message.found_tokens} of {sought}"
    )
    if not message.missed_hash:
        yield "  nothing was missed"
        return
    yield (
        f"  first missed: block {message.missed_block} of group {message.missed_group},"
        f" {message.missed_hash.hex()[:SHOWN_CHARACTERS]}"
    )
    yield f"  why: {_why(message)}"
    for each in message.elsewhere:
        yield f"  a block of the same hash is {_where(message, each)}"


def _why(message: pb.ExplainedRequest) -> str:
    name = cause_of(message).upper()
    by = f"for namespace {message.by_namespace_id}" if message.by_namespace_id else "for others"
    if name not in _SAID:
        return f"this release of kvd has no words for what the daemon says ({name.lower()})"
    said = _SAID[name].format(
        ago=duration(message.cause_seconds),
        unused=duration(message.unused_seconds),
        reason=message.reason,
        by=by,
    )
    if name in {"NEVER_STORED", "EPOCH", "NAMESPACE_CLEARED"} and not message.all_known:
        said += ", or it went so long ago that it is forgotten"
    return said


def _where(message: pb.ExplainedRequest, place: pb.FoundElsewhere) -> str:
    if place.namespace_id != message.namespace_id:
        return f"in namespace {place.namespace_id}, which differs in {place.differs}"
    if place.epoch != message.epoch:
        return f"in epoch {place.epoch!r} of the namespace; the engine is in {message.epoch!r}"
    if place.other_account:
        return "there under another cache salt"
    return "there now: it was stored since, or the engine did not see it"
