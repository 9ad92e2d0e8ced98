"""`kvd verify`: looks for broken invariants in a running daemon."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import grpc

from kvd.cli.status import DEFAULT_SOCKET, EXIT_NO_ANSWER
from kvd_client.backoff import describe
from kvd_client.companion import CompanionRefused
from kvd_client.daemon import greeted
from kvd_proto.v1 import companion_pb2, operator_pb2, operator_pb2_grpc

EXIT_BROKEN = 3
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the command's flags."""
    parser.description = (
        "Look for broken invariants in a running daemon: its accounts, slots, records, index pages,"
        " files and, where it keeps checksums, the blocks' bytes. Reads only, a little at a time."
        f" Exits with 0 where all is whole, {EXIT_BROKEN} where something is broken,"
        f" {EXIT_NO_ANSWER} where no daemon answers."
    )
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help=f"the daemon's socket (default: KVD_SOCKET, else {DEFAULT_SOCKET})",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    parser.add_argument(
        "--no-bytes", action="store_true", help="don't compare the blocks' bytes with checksums"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long to wait for each of the daemon's answers (default 120)",
    )


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Ask until all was looked at, and print; the exit status."""
    path = arguments.socket or environment.get("KVD_SOCKET") or DEFAULT_SOCKET
    try:
        report = ask(path, arguments.timeout, with_bytes=not arguments.no_bytes)
    except (OSError, CompanionRefused) as error:
        print(f"kvd: no daemon answers on {path}: {error}", file=sys.stderr)
        return EXIT_NO_ANSWER
    except grpc.RpcError as error:
        print(f"kvd: the daemon on {path} did not answer: {describe(error)}", file=sys.stderr)
        return EXIT_NO_ANSWER
    if arguments.json:
        print(json.dumps(as_json(report), indent=2))
    else:
        print("\n".join(as_text(report)))
    return EXIT_BROKEN if report.findings else 0


def ask(path: str, timeout_s: float, *, with_bytes: bool = True) -> Report:
    """What a daemon finds, of all that there is to look at."""
    with greeted(path, companion_pb2.PEER_ROLE_TOOL, "kvd verify", HELLO_TIMEOUT_S) as daemon:
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
    compared = f", {report.bytes / (1 << 20):.1f} MiB compared" if report.bytes else ""
    yield f"{report.blocks} blocks looked at{compared}; " + (
        "something is broken: keep the log, and see docs/verify.md"
        if report.findings
        else "all is whole"
    )
    if report.unsettled:
        yield f"{report.unsettled} comparisons given up: too much changed meanwhile"
