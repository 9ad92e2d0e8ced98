"""The gateway's own connection to the daemon, made anew when the daemon was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kvd_client.companion import CompanionRefused
from kvd_client.daemon import DaemonLink, greeted
from kvd_proto.v1 import companion_pb2

CONNECT_SECONDS = 2.0

Metadata = Sequence[tuple[str, str]]


class NoDaemonError(Exception):
    """Nobody answers on the daemon's socket."""


@dataclass(slots=True, eq=False)
class _Connection:
    """A greeted connection, open while the newest one or used by a call."""

    link: DaemonLink
    ends: contextlib.ExitStack
    calls: int = 0


class Upstream:
    """One greeted connection for all calls; safe from any thread.

    One that proved to be of no use serves no further call. Those that it carries get an answer of
    their own from it first.
    """

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._lock = threading.Lock()
        self._newest: _Connection | None = None
        self._open: set[_Connection] = set()

    def call(self, method: str, request: bytes, timeout_s: float, metadata: Metadata) -> bytes:
        """The daemon's answer. grpc.RpcError where it refuses, NoDaemonError where it is away."""
        with self._connected() as connection:
            try:
                return _call(connection.link, method, request, timeout_s, metadata)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    # gRPC would look for the next daemon seldom; we do at once
                    self._forget(connection)
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
            # It knows our token no longer: it is another daemon by now, and has done nothing yet.
            self._forget(connection)
        with self._connected() as connection:
            return _call(connection.link, method, request, timeout_s, metadata)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[_Connection]:
        """The newest connection, for a call."""
        with self._lock:
            connection = self._newest
            if connection is not None:
                connection.calls += 1
        if connection is None:
            made = self._connect()  # not under the lock: a daemon that hangs takes its time
            with self._lock:
                self._open.add(made)
                connection = self._newest = self._newest or made
                connection.calls += 1
                self._close_unused()
        try:
            yield connection
        finally:
            with self._lock:
                connection.calls -= 1
                self._close_unused()

    def _connect(self) -> _Connection:
        ends = contextlib.ExitStack()
        try:
            link = ends.enter_context(
                greeted(self._path, companion_pb2.PEER_ROLE_TOOL, "kvd gateway", CONNECT_SECONDS)
            )
        except (OSError, CompanionRefused) as error:
            raise NoDaemonError(f"no daemon answers on {self._path}: {error}") from None
        return _Connection(link, ends)

    def _forget(self, connection: _Connection) -> None:
        """Unless another call has done so, and there is a newer one."""
        with self._lock:
            if self._newest is connection:
                self._newest = None

    def _close_unused(self) -> None:
        for connection in [each for each in self._open if not each.calls]:
            if connection is not self._newest:
                self._open.remove(connection)
                connection.ends.close()

    def close(self) -> None:
        """Close every connection; calls under way end as cancelled."""
        with self._lock:
            self._newest = None
            for connection in self._open:
                connection.ends.close()
            self._open.clear()


def _call(
    link: DaemonLink, method: str, request: bytes, timeout_s: float, metadata: Metadata
) -> bytes:
    ask: Any = link.channel.unary_unary(method)
    answer: bytes = ask(request, timeout=timeout_s, metadata=(*link.metadata, *metadata))
    return answer
