"""`kvd verify`: looks for broken invariants in a running daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import click

from kvd.cli.calls import place_of, said_plainly
from kvd.cli.exits import EXIT_FOUND
from kvd.cli.options import json_option, socket_options, timeout_option
from kvd.cli.printing import show_json, show_lines, size
from kvd_client.daemon import greeted
from kvd_proto.v1 import companion_pb2, operator_pb2, operator_pb2_grpc

HELLO_TIMEOUT_S = 5.0
KEPT_FINDINGS = 1024  # more are only counted


@dataclass(slots=True)
class Report:
    """What a whole look at a daemon found."""

    findings: list[operator_pb2.Finding] = field(default_factory=list)
    more_findings: int = 0  # than these
    blocks: int = 0
    bytes: int = 0
    unsettled: int = 0
    looks: int = 0

    def add(self, look: operator_pb2.VerifyResponse) -> None:
        """Take one answer in."""
        room = KEPT_FINDINGS - len(self.findings)
        self.findings += look.findings[:room]
        self.more_findings += look.more_findings + len(look.findings[room:])
        self.blocks += look.blocks
        self.bytes += look.bytes
        self.unsettled += look.unsettled
        self.looks += 1


@click.command("verify")
@socket_options
@json_option
@click.option("--no-bytes", is_flag=True, help="Don't compare the blocks' bytes with checksums.")
@timeout_option(120.0, "each of the daemon's answers")
def command(**flags: Any) -> int:
    """Look for broken invariants in a running daemon.

    Its accounts, slots, records, index pages, files and, where it keeps checksums, the blocks'
    bytes. Reads only, a little at a time.
    """
    given = SimpleNamespace(**flags)
    place = place_of(given)
    with said_plainly(place, given.config):
        report = ask(place, given.timeout, with_bytes=not given.no_bytes)
    if given.json:
        show_json(as_json(report))
    else:
        show_lines(as_text(report))
    return EXIT_FOUND if report.findings else 0


def ask(path: str, timeout_s: float, *, with_bytes: bool = True) -> Report:
    """What a daemon finds, of all that there is to look at."""
    hello_s = min(HELLO_TIMEOUT_S, timeout_s)
    with greeted(path, companion_pb2.PEER_ROLE_TOOL, "kvd verify", hello_s) as daemon:
        stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
        return whole_report(
            lambda r: stub.Verify(r, timeout=timeout_s, metadata=daemon.metadata),
            with_bytes=with_bytes,
        )


def whole_report(
    call: Callable[[operator_pb2.VerifyRequest], operator_pb2.VerifyResponse], *, with_bytes: bool
) -> Report:
    """All looks, one after the other."""
    report = Report()
    request = operator_pb2.VerifyRequest(with_bytes=with_bytes)
    while True:
        look = call(request)
        report.add(look)
        if not look.next_part:
            return report
        request = operator_pb2.VerifyRequest(
            part=look.next_part, after=look.next_after, with_bytes=with_bytes
        )


def as_json(report: Report) -> dict[str, object]:
    """The report with names for everything."""
    return {
        "whole": not report.findings,
        "findings": [
            {"invariant": each.invariant, "place": each.place, "problem": each.problem}
            for each in report.findings
        ],
        "more_findings": report.more_findings,
        "blocks": report.blocks,
        "bytes": report.bytes,
        "unsettled": report.unsettled,
    }


def as_text(report: Report) -> Iterator[str]:
    """The lines of the readable form."""
    for each in report.findings:
        yield f"BROKEN {each.invariant}: {each.place}: {each.problem}"
    if report.more_findings:
        yield f"and {report.more_findings} more"
    compared = f", {size(report.bytes)} compared" if report.bytes else ""
    yield f"{report.blocks} blocks looked at{compared}; " + (
        "something is broken: keep the log, and see docs/verify.md"
        if report.findings
        else "all is whole"
    )
    if report.unsettled:
        yield (
            f"comparisons given up: {report.unsettled}; what they compare changed all the time, or"
            " is too large for one look, which is no damage"
        )
