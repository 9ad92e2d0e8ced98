"""`kvd gateway`: lets operators on other machines in, by mutual TLS."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from kvd.cli.status import DEFAULT_SOCKET
from kvd.control.notify import notify
from kvd.gateway.certificates import CertificateError, CertificateFiles, Renewal
from kvd.gateway.server import begin
from kvd.gateway.servicer import Gateway
from kvd.gateway.upstream import Upstream
from kvd.observability import logs

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:9471"
EXIT_FAILED = 1
STOPPING = (signal.SIGTERM, signal.SIGINT)
STOP_SECONDS = 5.0  # for the calls under way


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser the command's flags."""
    parser.description = (
        "Carry operators' calls from other machines to the daemon of this one, by mutual TLS:"
        " every caller must show a certificate of the authority. Runs until SIGTERM, as an"
        " operator of the daemon (root, the daemon's user, or a uid in `operators`)."
    )
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"where to listen (default {DEFAULT_ADDRESS}); [::]:9471 is every address",
    )
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help=f"the daemon's socket (default: KVD_SOCKET, else {DEFAULT_SOCKET})",
    )
    for name, what in (
        ("certificate", "own certificate, with those that lead to its root"),
        ("key", "its private key, without a password"),
        ("authority", "certificate of the authority that vouches for callers"),
    ):
        parser.add_argument(
            f"--{name}", required=True, type=Path, metavar="FILE", help=f"PEM file: {what}"
        )
    parser.add_argument(
        "--operators",
        default="",
        metavar="NAMES",
        help="names in certificates, with commas between them, whose callers may change things:"
        " clear, quotas, drain (default: none; others may only look)",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Serve until told to stop; the exit status."""
    logs.start("info", arguments.log_format)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # before there are other threads
    socket = arguments.socket or environment.get("KVD_SOCKET") or DEFAULT_SOCKET
    files = CertificateFiles(arguments.certificate, arguments.key, arguments.authority)
    operators = frozenset(name for name in arguments.operators.split(",") if name)
    upstream = Upstream(socket)
    try:
        server, port = begin(arguments.address, Renewal(files), Gateway(upstream, operators))
    except (CertificateError, OSError) as error:
        print(f"kvd: {error}", file=sys.stderr)
        return EXIT_FAILED
    notify("READY=1", f"STATUS=listening on port {port}")
    log.info("listens on %s (port %d) for the daemon on %s", arguments.address, port, socket)
    signal.sigwait(STOPPING)
    notify("STOPPING=1")
    server.stop(STOP_SECONDS).wait()
    upstream.close()
    log.info("stopped")
    return 0
