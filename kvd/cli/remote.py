"""How a command reaches a daemon of another machine: through its gateway, by mutual TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc

from kvd.cli.exits import EXIT_FAILED, EXIT_MISUSED, Failure
from kvd.cli.options import FILES
from kvd.gateway.certificates import CertificateError, CertificateFiles
from kvd_client.backoff import describe
from kvd_client.daemon import CHANNEL_OPTIONS

_IT_CLOSED = (
    "it closed the connection: --certificate may not be valid now, or be of another authority than"
    " the gateway's, or too many connections are open; its log tells"
)
# What gRPC says where TLS can't be spoken, and what the caller may change.
_REASONS = (
    ("Socket closed", _IT_CLOSED),
    ("Connection reset", _IT_CLOSED),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not of --authority, or not valid now"),
    ("Hostname Verification", "its certificate has another name: give --server-name NAME"),
)


@contextmanager
def channel(given: SimpleNamespace) -> Iterator[grpc.Channel]:
    """A channel to the gateway; Failure where a file is missing or TLS can't be spoken with it."""
    try:  # gRPC would say six lines of its own, and then that the gateway can't be reached
        contents = CertificateFiles(*(_path(name, getattr(given, name)) for name in FILES)).read()
    except CertificateError as error:
        raise Failure(str(error), EXIT_MISUSED) from None
    options = list(CHANNEL_OPTIONS)
    if given.server_name:
        options.append(("grpc.ssl_target_name_override", given.server_name))
    credentials = grpc.ssl_channel_credentials(
        contents.authority, contents.key, contents.certificate
    )
    with grpc.secure_channel(given.remote, credentials, options) as made:
        try:
            yield made
        except grpc.RpcError as error:
            said = describe(error)
            why = next((reason for sign, reason in _REASONS if sign in said), None)
            if error.code() is not grpc.StatusCode.UNAVAILABLE or why is None:
                raise
            raise Failure(f"the gateway on {given.remote}: {why} ({said})", EXIT_FAILED) from None


def _path(name: str, path: Path | None) -> Path:
    if path is None:
        raise Failure(f"--remote needs --{name} FILE (PEM)", EXIT_MISUSED)
    return path
