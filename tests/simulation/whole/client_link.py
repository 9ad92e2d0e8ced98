"""The way from the client to a simulated daemon: in the place of its sockets and of gRPC."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import grpc

from kvd.control.access.peers import Memory, Role
from kvd.control.errors import STATUS_OF
from kvd.core.errors import KvdError
from kvd.core.keys import MoverId, NamespaceId
from kvd_client.companion import CompanionRefused
from kvd_client.daemon import CONNECT_TIMEOUT_S, DaemonLink
from kvd_proto.v1 import companion_pb2
from kvd_proto.v1 import engine_pb2 as pb
from tests.simulation.whole.bytes import RankBytes
from tests.simulation.whole.client_ranks import (
    LONGEST_WAY_S,
    Descriptors,
    Method,
    SimRegistration,
    SimRpcError,
)
from tests.simulation.whole.client_threads import SimThread, Threads
from tests.simulation.whole.daemon import SimDaemon, SimPeer, Stream
from tests.simulation.whole.movers import SimMover
from tests.simulation.whole.ranks import Engine

_ROLES = {
    companion_pb2.PEER_ROLE_SCHEDULER: Role.SCHEDULER,
    companion_pb2.PEER_ROLE_WORKER: Role.WORKER,
}


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
        SimThread(threads, lambda: self._say(requests), name="writer").start()

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

    def __init__(
        self, threads: Threads, descriptors: Descriptors, daemon: SimDaemon, memory: RankBytes
    ) -> None:
        self._threads, self._descriptors, self._daemon = threads, descriptors, daemon
        self._memory = memory
        self._channels: deque[int] = deque()
        self._number = descriptors.make(lambda: daemon.is_gone or self.peer.ended)
        self.peer: SimPeer

    def fileno(self) -> int:
        return self._number

    def hear(self, message: companion_pb2.CompanionResponse, _fds: object) -> None:
        """What the daemon says unasked: a rank's channel."""
        way_s = self._daemon.around.random.random() * LONGEST_WAY_S
        self._threads.loop.outside(way_s, self._arrive, message.rank_channel.registration_id)

    def _arrive(self, registration_id: int) -> None:
        self._channels.append(registration_id)
        self._threads.news()

    def get_page(self, namespace: int) -> int:
        self._require_daemon()
        return os.dup(self._daemon.pool.page_fd(NamespaceId(namespace)))

    def offer_memory(self, token: int, fd: int, is_device: bool) -> None:
        self._require_daemon()
        assert (token, is_device) == (1, False)
        self._daemon.around.memories[fd] = self._memory
        self.peer.memories[token] = Memory(fd, 1 << 40)

    def rank_channel(self, registration_id: int) -> tuple[SimMover, ...]:
        """The mover, in the place of four descriptors of its own."""
        self._threads.wait_until(lambda: bool(self._channels), CONNECT_TIMEOUT_S)
        self._require_daemon()
        if not self._channels:
            raise TimeoutError("timed out")
        found = self._channels.popleft()
        if found != registration_id:
            raise CompanionRefused("PROTOCOL", "the channel belongs to another registration")
        return (self._daemon.movers[MoverId(found)],) * 4

    def _require_daemon(self) -> None:
        if self._daemon.is_gone:
            raise ConnectionResetError("the daemon has gone")

    def close(self) -> None:
        self._descriptors.close(self._number)
        if not self._daemon.is_gone:
            self.peer.end()


class Links:
    """Where each engine finds its daemon, by the path that it was told: its own name."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.descriptors = Descriptors(threads)
        self.engines: dict[str, Engine] = {}
        self.calls: dict[str, SessionCall] = {}  # the last one of each

    @contextmanager
    def greeted(
        self, path: str, role: companion_pb2.PeerRole, program: str
    ) -> Iterator[DaemonLink]:
        """In the place of kvd_client.daemon.greeted."""
        engine = self.engines[path]
        daemon = engine.daemon
        if daemon is None or daemon.is_gone or not daemon.is_serving:
            raise ConnectionRefusedError("no daemon answers")
        loop = self._threads.loop
        if not self._threads.wait_until(lambda: not loop.is_stalled, CONNECT_TIMEOUT_S):
            raise TimeoutError("timed out")
        (memory,) = engine.memory
        companion: Any = Companion(self._threads, self.descriptors, daemon, memory)
        peer = daemon.greet(engine.model.uid, _ROLES[role], program, companion.hear)
        companion.peer = peer
        worker = daemon.workers

        def session(requests: Iterator[bytes], **_named: object) -> SessionCall:
            self.calls[path] = SessionCall(self._threads, daemon, peer, requests)
            return self.calls[path]

        def method(serve: Any) -> Method:
            return Method(self._threads, daemon, peer, serve)

        channel: Any = SimpleNamespace(
            stream_stream=lambda _method, **_named: session,
            RegisterRank=method(worker.RegisterRank),
            UnregisterRank=method(worker.UnregisterRank),
            MarkReady=method(worker.MarkReady),
        )
        try:
            yield DaemonLink(companion, channel, ())
        finally:
            companion.close()

    def registration(self, number: int, channel: tuple[SimMover, ...]) -> SimRegistration:
        """In the place of kvd_client.worker.registration.Registration."""
        (mover, *_) = channel
        self.engines[self._threads.process].rank_is_here(0, mover)
        return SimRegistration(self._threads, self.descriptors, number, channel)
