"""The gateway's own connection to the daemon, made anew when the daemon was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import grpc

from kvd_client.companion import CompanionRefused
from kvd_client.daemon import DaemonLink, greeted
from kvd_proto.v1 import companion_pb2

CONNECT_SECONDS = 2.0

Metadata = Sequence[tuple[str, str]]


class NoDaemonError(Exception):
    """Nobody answers on the daemon's socket."""


class Upstream:
    """One greeted connection for all calls; safe from any thread."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._lock = threading.Lock()
        self._link: DaemonLink | None = None
        self._open = contextlib.ExitStack()

    def call(self, method: str, request: bytes, timeout_s: float, metadata: Metadata) -> bytes:
        """The daemon's answer. grpc.RpcError where it refuses, NoDaemonError where it is away."""
        link = self._linked()
        try:
            return _call(link, method, request, timeout_s, metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                self._forget(link)  # gRPC would look for the next daemon seldom; we do at once
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise
        # It knows our token no longer: it is another daemon by now, and has done nothing yet.
        self._forget(link)
        return _call(self._linked(), method, request, timeout_s, metadata)

    def _linked(self) -> DaemonLink:
        with self._lock:
            if self._link is None:
                try:
                    self._link = self._open.enter_context(
                        greeted(
                            self._path,
                            companion_pb2.PEER_ROLE_TOOL,
                            "kvd gateway",
                            CONNECT_SECONDS,
                        )
                    )
                except (OSError, CompanionRefused) as error:
                    raise NoDaemonError(f"no daemon answers on {self._path}: {error}") from None
            return self._link

    def _forget(self, link: DaemonLink) -> None:
        """Unless another call has done so, and there is a newer one."""
        with self._lock:
            if self._link is link:
                self._unlink()

    def _unlink(self) -> None:
        self._link = None
        self._open.close()

    def close(self) -> None:
        with self._lock:
            self._unlink()


def _call(
    link: DaemonLink, method: str, request: bytes, timeout_s: float, metadata: Metadata
) -> bytes:
    ask: Any = link.channel.unary_unary(method)
    answer: bytes = ask(request, timeout=timeout_s, metadata=(*link.metadata, *metadata))
    return answer
