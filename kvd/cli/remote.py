"""How a command reaches a daemon of another machine: through its gateway, by mutual TLS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc

from kvd.cli.exits import EXIT_MISUSED, Failure
from kvd.cli.options import FILES
from kvd_client.daemon import CHANNEL_OPTIONS


@contextmanager
def channel(given: SimpleNamespace) -> Iterator[grpc.Channel]:
    """A channel to the gateway; Failure where a file is missing or can't be read."""
    contents = [_content(name, getattr(given, name)) for name in FILES]
    certificate, key, authority = contents
    options = list(CHANNEL_OPTIONS)
    if given.server_name:
        options.append(("grpc.ssl_target_name_override", given.server_name))
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    with grpc.secure_channel(given.remote, credentials, options) as made:
        yield made


def _content(name: str, path: Path | None) -> bytes:
    if path is None:
        raise Failure(f"--remote needs --{name} FILE (PEM)", EXIT_MISUSED)
    try:
        return path.read_bytes()
    except OSError as error:
        raise Failure(f"--{name} {path} can't be read: {error.strerror}", EXIT_MISUSED) from None
