"""`kvd gateway`: lets operators on other machines in, by mutual TLS."""

from __future__ import annotations

import logging
import re
import signal
from types import SimpleNamespace
from typing import Any

import click

from kvd.cli import last_words
from kvd.cli.calls import place_of
from kvd.cli.exits import EXIT_FAILED, EXIT_MISUSED, Failure
from kvd.cli.options import LISTENING_PLACE, Checked, FilePath, socket_options
from kvd.control.notify import notify
from kvd.gateway.certificates import CertificateError, CertificateFiles, Renewal
from kvd.gateway.server import begin
from kvd.gateway.servicer import Gateway
from kvd.gateway.upstream import Upstream
from kvd.observability import logs

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:9471"
STOPPING = (signal.SIGTERM, signal.SIGINT)
STOP_SECONDS = 5.0  # for the calls under way
_FILE = FilePath()
_BETWEEN = re.compile(r"(?<!\\),")


def _names(text: str) -> frozenset[str]:
    """A comma may end them; nothing at all names nobody. A comma after a backslash is a name's."""
    names = [name.strip().replace("\\,", ",") for name in _BETWEEN.split(text.strip())]
    if len(names) > 1 and not names[-1]:
        names.pop()
    if text.strip() and not all(names):
        raise ValueError("names with one comma between two of them")
    return frozenset(filter(None, names))


@click.command("gateway", cls=last_words.Service)
@click.option(
    "--address",
    default=DEFAULT_ADDRESS,
    type=LISTENING_PLACE,
    metavar="HOST:PORT",
    help=f"Where to listen (default {DEFAULT_ADDRESS}); 0.0.0.0:9471 and [::]:9471 are both every"
    " address, of IPv4 and of IPv6.",
)
@socket_options
@click.option(
    "--certificate",
    required=True,
    type=_FILE,
    metavar="FILE",
    help="PEM file: own certificate, with those that lead to its root.",
)
@click.option(
    "--key",
    required=True,
    type=_FILE,
    metavar="FILE",
    help="PEM file: its private key, without a password.",
)
@click.option(
    "--authority",
    required=True,
    type=_FILE,
    metavar="FILE",
    help="PEM file: certificate of the authority that vouches for callers.",
)
@click.option(
    "--operators",
    type=Checked(_names, "names"),
    default=frozenset[str](),
    metavar="NAMES",
    help="Names in certificates, with commas between them, whose callers may change things:"
    " clear, quotas, drain (default: none; others may only look). A comma in a name is"
    " written \\,.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    help="How its log is written.",
)
def command(**flags: Any) -> int:
    """Carry operators' calls from other machines to the daemon of this one, by mutual TLS.

    Every caller must show a certificate of the authority. Runs until SIGTERM, as an operator of
    the daemon (root, the daemon's user, or a uid in `operators`).
    """
    return run(SimpleNamespace(**flags))


def run(given: SimpleNamespace) -> int:
    """Serve until told to stop; the exit status."""
    try:
        socket = place_of(given)
    except Failure as error:
        return last_words.end(error.message, error.exit_code, given.log_format)
    logs.start("info", given.log_format)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # before there are other threads
    files = CertificateFiles(given.certificate, given.key, given.authority)
    upstream = Upstream(socket)
    try:
        server, port = begin(given.address, Renewal(files), Gateway(upstream, given.operators))
    except CertificateError as error:
        return last_words.end(str(error), EXIT_MISUSED, given.log_format)
    except OSError as error:
        return last_words.end(str(error), EXIT_FAILED, given.log_format)
    notify("READY=1", f"STATUS=listening on port {port}")
    log.info("listens on %s (port %d) for the daemon on %s", given.address, port, socket)
    signal.sigwait(STOPPING)
    notify("STOPPING=1")
    server.stop(STOP_SECONDS).wait()
    upstream.close()
    log.info("stopped")
    return 0
