"""How a command reaches a daemon of another machine: through its gateway, by mutual TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc

from kvd.cli.exits import EXIT_MISUSED, Failure
from kvd.cli.options import FILES
from kvd.gateway.certificates import CertificateError, CertificateFiles
from kvd_client.daemon import CHANNEL_OPTIONS


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
        yield made


def _path(name: str, path: Path | None) -> Path:
    if path is None:
        raise Failure(f"--remote needs --{name} FILE (PEM)", EXIT_MISUSED)
    return path
