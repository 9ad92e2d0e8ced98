"""How a command reaches a daemon of another machine: through its gateway, by mutual TLS."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from kvd_client.daemon import CHANNEL_OPTIONS

FILES = ("certificate", "key", "authority")


class RemoteError(Exception):
    """The flags for a remote daemon can't be used; the message names them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser --remote and what goes with it."""
    remote = parser.add_argument_group("a daemon of another machine, through its `kvd gateway`")
    remote.add_argument("--remote", metavar="HOST:PORT", help="the gateway")
    for name, what in zip(
        FILES,
        ("own certificate", "its private key", "certificate of the authority of gateways"),
        strict=True,
    ):
        remote.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"PEM file: {what}")
    remote.add_argument(
        "--server-name",
        metavar="NAME",
        help="name in the gateway's certificate, where it is not HOST (a forwarded port)",
    )


@contextmanager
def channel(arguments: argparse.Namespace) -> Iterator[grpc.Channel]:
    """A channel to the gateway; RemoteError where a file is missing or can't be read."""
    contents = [_content(name, getattr(arguments, name)) for name in FILES]
    certificate, key, authority = contents
    options = list(CHANNEL_OPTIONS)
    if arguments.server_name:
        options.append(("grpc.ssl_target_name_override", arguments.server_name))
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    with grpc.secure_channel(arguments.remote, credentials, options) as made:
        yield made


def _content(name: str, path: Path | None) -> bytes:
    if path is None:
        raise RemoteError(f"--remote needs --{name} FILE (PEM)")
    try:
        return path.read_bytes()
    except OSError as error:
        raise RemoteError(f"--{name} {path} can't be read: {error.strerror}") from None
