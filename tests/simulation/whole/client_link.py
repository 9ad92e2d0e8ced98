"""The way from the client to a simulated daemon: in the place of its sockets and of gRPC."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import grpc

from kvd.control.access.peers import Role
from kvd.control.errors import STATUS_OF
from kvd.core.errors import KvdError
from kvd.core.keys import NamespaceId
from kvd_client.daemon import DaemonLink
from kvd_proto.v1 import engine_pb2 as pb
from tests.simulation.whole.client_threads import SimThread, Threads
from tests.simulation.whole.daemon import SimDaemon, SimPeer, Stream
from tests.simulation.whole.ranks import Engine


class SimRpcError(grpc.RpcError):
    """How a call ended."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class ClientStream(Stream):
    """A session's stream whose client hears of its end."""

    def __init__(
        self, daemon: SimDaemon, peer: SimPeer, receive: Callable[[Any], None], end: Any
    ) -> None:
        self._ended = end
        super().__init__(daemon, peer, receive)

    def _cut_here(self) -> None:
        super()._cut_here()
        self._ended()

    def cut(self) -> None:
        super().cut()
        self._ended()


class SessionCall:
    """What gRPC gives for a call of Session."""

    def __init__(
        self, threads: Threads, daemon: SimDaemon, peer: SimPeer, requests: Iterator[bytes]
    ) -> None:
        self._threads = threads
        self._heard: deque[pb.SessionResponse] = deque()
        self._end: grpc.StatusCode | None = None
        self.stream = ClientStream(daemon, peer, self._hear, self._ended)
        SimThread(threads, lambda: self._say(requests), "writer").start()

    def _say(self, requests: Iterable[bytes]) -> None:
        for body in requests:
            self.stream.send(pb.SessionRequest.FromString(body))

    def _hear(self, message: pb.SessionResponse) -> None:
        self._heard.append(message)
        self._threads.news()

    def _ended(self) -> None:
        if self._end is None:
            error = self.stream.error
            self._end = grpc.StatusCode.UNAVAILABLE
            if isinstance(error, KvdError):
                self._end = STATUS_OF[error.reason]
        self._threads.news()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.SessionResponse:
        self._threads.wait_until(lambda: bool(self._heard) or self._end is not None, None)
        if self._heard:
            return self._heard.popleft()
        assert self._end is not None
        raise SimRpcError(self._end, str(self.stream.error or "the connection is lost"))

    def cancel(self) -> None:
        if self._end is None:
            self._end = grpc.StatusCode.CANCELLED
            self.stream.cut()


class Companion:
    """The companion socket's connection."""

    def __init__(self, daemon: SimDaemon) -> None:
        self._daemon = daemon

    def get_page(self, namespace: int) -> int:
        if self._daemon.is_gone:
            raise ConnectionResetError("the daemon has gone")
        return os.dup(self._daemon.pool.page_fd(NamespaceId(namespace)))


class Links:
    """Where each engine finds its daemon, by the path that it was told: its own name."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.engines: dict[str, Engine] = {}
        self.calls: dict[str, SessionCall] = {}  # the last one of each

    @contextmanager
    def greeted(self, path: str, _role: object, program: str) -> Iterator[DaemonLink]:
        """In the place of kvd_client.daemon.greeted."""
        engine = self.engines[path]
        daemon = engine.daemon
        if daemon is None or daemon.is_gone or not daemon.is_serving:
            raise ConnectionRefusedError("no daemon answers")
        peer = daemon.greet(engine.model.uid, Role.SCHEDULER, program)

        def session(requests: Iterator[bytes], **_named: object) -> SessionCall:
            self.calls[path] = SessionCall(self._threads, daemon, peer, requests)
            return self.calls[path]

        channel: Any = SimpleNamespace(stream_stream=lambda _method, **_named: session)
        companion: Any = Companion(daemon)
        try:
            yield DaemonLink(companion, channel, ())
        finally:
            if not daemon.is_gone:
                peer.end()
