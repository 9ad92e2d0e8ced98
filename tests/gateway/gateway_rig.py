"""A real `kvd gateway` in front of a real daemon, and certificates of a test's own authority."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import grpc
import trustme

from kvd_proto.v1 import operator_pb2_grpc
from tests import forked
from tests.waiting import wait_until

STOP_SECONDS = 15.0
LISTENS = re.compile(r"\(port (\d+)\)")


@dataclass(frozen=True)
class Identity:
    """Files of one certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority; writes what it vouches for into a directory."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._ca = trustme.CA()
        self._directory = directory
        self.file = directory / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def vouch(self, name: str, *hosts: str, not_after: datetime | None = None) -> Identity:
        """A certificate whose common name is `name`, or with none, for these hosts."""
        made = self._ca.issue_cert(*hosts, common_name=name or None, not_after=not_after)
        stem = name.replace("\0", "-")
        identity = Identity(self._directory / f"{stem}.crt", self._directory / f"{stem}.key")
        identity.certificate.write_bytes(b"".join(p.bytes() for p in made.cert_chain_pems))
        identity.key.write_bytes(made.private_key_pem.bytes())
        return identity


@contextmanager
def channel_to(
    target: str, authority: Authority, identity: Identity | None
) -> Iterator[grpc.Channel]:
    """A connection of this one's to whom the authority vouches for."""
    credentials = grpc.ssl_channel_credentials(
        authority.file.read_bytes(),
        identity.key.read_bytes() if identity else None,
        identity.certificate.read_bytes() if identity else None,
    )
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.secure_channel(target, credentials, options) as channel:
        yield channel


class GatewayProcess:
    """`kvd gateway` on a port of the kernel's choice."""

    def __init__(
        self,
        directory: Path,
        authority: Authority,
        socket: str,
        operators: str,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.authority = authority
        self.own = authority.vouch("gateway", "localhost", "127.0.0.1")
        self.log = directory / "gateway.log"
        with self.log.open("wb") as log:
            words = ["gateway", "--address", f"{host}:0"]
            words += ["--socket", socket, "--operators", operators]
            words += ["--certificate", str(self.own.certificate), "--key", str(self.own.key)]
            words += ["--authority", str(authority.file)]
            self.process = forked.start(
                words, output=log, errors=log, environment=os.environ | environment
            )
        wait_until(lambda: LISTENS.search(self.said) is not None, "the gateway to listen")
        found = LISTENS.search(self.said)
        assert found
        self.port = int(found.group(1))

    @property
    def said(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        return self.log.read_text()

    @property
    def target(self) -> str:
        return f"localhost:{self.port}"

    @contextmanager
    def called_by(
        self, identity: Identity | None, authority: Authority | None = None
    ) -> Iterator[operator_pb2_grpc.OperatorServiceStub]:
        """Calls as this one; None: without a certificate."""
        with self.channel_of(identity, authority) as channel:
            yield operator_pb2_grpc.OperatorServiceStub(channel)

    def channel_of(
        self, identity: Identity | None, authority: Authority | None = None
    ) -> AbstractContextManager[grpc.Channel]:
        """A connection of this one's."""
        return channel_to(self.target, authority or self.authority, identity)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            if os.environ.get("KVD_TEST_SHOW_LOGS"):
                sys.stderr.write(self.log.read_text())
