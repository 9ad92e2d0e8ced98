"""The API as a whole: the gRPC server on its Unix socket, and the companion socket beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvd.config.values import gid_of
from kvd.control.access import descriptors
from kvd.control.access.companion import CompanionServer
from kvd.control.access.door import Door
from kvd.control.access.peers import Peers
from kvd.control.access.tenants import TenantPolicy
from kvd.control.errors import DrainTakenBack
from kvd.control.memory_return import MemoryReturn
from kvd.control.namespaces import Namespaces
from kvd.control.registration.gpu_capacity import GpuCapacity, GpuTerms
from kvd.control.registration.rendezvous import Rendezvous
from kvd.control.rpc import CallInterceptor, CallObserver, expect_callers_to_go
from kvd.control.services.engine import EngineServicer
from kvd.control.services.events import EventServicer
from kvd.control.services.health import HealthServicer
from kvd.control.services.operator import OperatorServicer
from kvd.control.services.status import PoolPlace, StatusReport
from kvd.control.services.worker import WorkerServicer
from kvd.control.sessions.session import SessionContext, SessionTerms
from kvd.control.sockets import (
    SocketFile,
    alone_in,
    let_group_enter,
    missing_directories,
    refuse_taken,
    unused_name,
)
from kvd.core.errors import Draining
from kvd.linux.own_directory import Wanted, require_place
from kvd.runtime.driver import Driver
from kvd_proto.limits import MAX_MESSAGE_BYTES
from kvd_proto.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    events_pb2,
    events_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

MAX_STREAMS = 16  # calls under way on one connection; a client of kvd's has a few
LOOKAHEAD_BYTES = 16 * 1024  # of a call's messages, taken in before they are asked for
STOP_SECONDS = 1.0
SERVICES = tuple(
    module.DESCRIPTOR.services_by_name[name].full_name
    for module, name in (
        (engine_pb2, "EngineService"),
        (worker_pb2, "WorkerService"),
        (events_pb2, "EventService"),
        (operator_pb2, "OperatorService"),
    )
)
_OPTIONS = (
    # gRPC looks at a message's length before it takes it in since 1.84.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # A stream of which nothing is asked holds so much; by its own measure gRPC would let who sends
    # fast send megabytes ahead.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ("grpc.so_reuseport", 0),
)


def _options() -> tuple[tuple[str, int], ...]:
    connections = descriptors.most_connections()
    # Of all that can come at once. By its own measure gRPC cancels calls from 1,000 on, by chance:
    # anybody's, for the sake of who has the most.
    calls = connections * MAX_STREAMS
    return (
        *_OPTIONS,
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server.max_pending_requests", calls),
        ("grpc.server.max_pending_requests_hard_limit", calls),
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where the API and the pool are, and how GPUs are used."""

    socket: Path
    companion: Path
    mode: int
    group: str
    pool_directory: Path
    pool_bytes: int
    gpu: GpuTerms


class ControlServer:
    """The gRPC server, its servicers and the companion socket: all between sockets and driver."""

    def __init__(
        self,
        driver: Driver,
        tenants: TenantPolicy,
        terms: SessionTerms,
        observer: CallObserver,
        on_broken_invariant: Callable[[AssertionError], None],
    ) -> None:
        self.driver = driver
        self.peers = Peers()
        self.engines = Rendezvous(driver)
        driver.fleet.on_mover_gone = self.engines.mover_gone
        self.common = SessionContext(driver, self.engines, tenants, terms)
        self.common.count_refusal = observer.refused
        self.common.time_message = observer.message_answered
        self.namespaces = Namespaces(driver, tenants)
        self.companion = CompanionServer(
            self.peers,
            self.namespaces.page_of,
            tenants.user_operates,
            self.common.ends,
        )
        report = StatusReport(driver, self.engines, self.namespaces, self.common)
        self.operator = OperatorServicer(
            driver, self.peers, tenants, self.namespaces, report, self.common
        )
        self.operator.drain = self.drain
        self.operator.undrain = self.undrain
        self.tenants = tenants
        self.stopping = False  # for good: no operator takes that back
        self.on_drain: Callable[[], None] = lambda: None  # as a drain begins, or is taken back
        self._interceptor = CallInterceptor(
            observer,
            on_broken_invariant,
            driver.turns,
            self.peers.user_behind,
            tenants.user_operates,
        )
        self._memory = MemoryReturn()
        self._door: Door | None = None
        self._health = HealthServicer(SERVICES)
        self._server: grpc.aio.Server | None = None
        self._files: list[SocketFile] = []

    async def listen(self, place: Place) -> None:
        """Take calls from now on. SocketTaken where another daemon does."""
        make_directory(place.socket, place.group)
        self.operator.place = PoolPlace(str(place.pool_directory), place.pool_bytes)
        expect_callers_to_go()
        server = grpc.aio.server(interceptors=[self._interceptor], options=_options())
        engine_pb2_grpc.add_EngineServiceServicer_to_server(
            EngineServicer(self.common, self.peers), server
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(
            WorkerServicer(self.common, self.peers, GpuCapacity(place.gpu)),
            server,
        )
        events_pb2_grpc.add_EventServiceServicer_to_server(
            EventServicer(self.driver, self.namespaces, self.peers), server
        )
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(self.operator, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            async with alone_in(place.socket.parent):
                refuse_taken(place.socket, place.companion)
                self._bind(server, place)
        except (OSError, RuntimeError) as error:  # gRPC's is a RuntimeError
            raise OSError(
                f"can't listen on {place.socket}: {error}; choose another --socket"
            ) from error
        await server.start()
        self._server = server
        self._memory.begin()
        assert self._door is not None, "it is bound"
        self._door.begin()

    def _bind(self, server: grpc.aio.Server, place: Place) -> None:
        # The companion first: whoever reaches the gRPC socket can say hello.
        self.companion.listen(str(place.companion), place.mode)
        self._files.append(SocketFile.of(place.companion))
        bound = unused_name(place.socket)
        old_mask = os.umask(0o777 & ~place.mode)
        try:
            server.add_insecure_port(f"unix:{bound}")
        finally:
            os.umask(old_mask)
        try:
            for path in (bound, place.companion):
                path.chmod(place.mode)
                if place.group:
                    os.chown(path, -1, gid_of(place.group))
            bound.rename(place.socket)
        except OSError:
            bound.unlink()
            raise
        file = SocketFile.of(place.socket)
        self._files.append(file)
        self._door = Door(
            str(bound), self.tenants.user_operates, file, self._interceptor.has_shut_out
        )
        self._interceptor.on_wait = self._door.hurry

    async def drain(self, deadline_s: float) -> int:
        """No new session or store from now on; waits for the copies under way.

        DrainTakenBack where it is undrained meanwhile.
        """
        self.common.draining = True
        self._health.say(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.on_drain()
        left = await self.driver.drain(deadline_s)
        if not self.common.draining:
            raise DrainTakenBack("somebody undrained the daemon meanwhile: it takes work again")
        return left

    async def undrain(self) -> bool:
        """Take sessions and stores again; whether it did not before. Draining where it stops."""
        if self.stopping:
            raise Draining("the daemon is stopping")
        was_draining, self.common.draining = self.common.draining, False
        self.driver.undrain()
        self._health.say(health_pb2.HealthCheckResponse.SERVING)
        self.on_drain()
        return was_draining

    def lost_socket(self) -> Path | None:
        """A socket of ours whose file somebody took away: nobody new can connect."""
        return next((file.path for file in self._files if not file.is_there()), None)

    async def close(self) -> None:
        """End every call and peer; leave no socket file of ours."""
        self._memory.close()
        if self._door is not None:
            self._door.close()
        self._interceptor.close()
        self.companion.close()  # ends the peers, and with them their streams
        if self._server is not None:
            await self._server.stop(STOP_SECONDS)
            self._server = None
        self.common.departures.close()
        if any(file.is_there() for file in self._files):  # else their directory may be gone, too
            async with alone_in(self._files[0].path.parent):
                for file in self._files:
                    file.remove()


def make_directory(path: Path, group: str = "") -> None:
    """Make a socket's directory, where others can't put a socket of theirs in its place.

    The group, where one is named, may enter what is made here. OSError, with the setting to
    change, where that can't be; NotTrustedError where others could.
    """
    try:
        missing = missing_directories(path.parent)
        require_place(Wanted("the socket's directory", path.parent, 0o750))
        if group:
            let_group_enter(missing, group)
    except OSError as error:
        raise OSError(
            f"the socket's directory {path.parent} can't be made: {error.strerror}; choose another"
            " --socket, or have it made"
        ) from error
