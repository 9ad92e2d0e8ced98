"""What malformed requests are thrown at: a daemon with a session, a rank, and a bystander."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from kvd_proto.v1 import engine_pb2, events_pb2, operator_pb2, worker_pb2
from tests.control.daemon_rig import Caller, RawEngine, block, details_of, identity
from tests.faults.probe import Probe
from tests.faults.scene import Scene

SERVICES = {
    "EngineService": engine_pb2,
    "WorkerService": worker_pb2,
    "OperatorService": operator_pb2,
    "EventService": events_pb2,
}
ROLES = {"EngineService": "SCHEDULER", "WorkerService": "WORKER"}
Refusal = tuple[str, str]  # code and reason


@dataclass
class Stand:
    """An engine whose session and registration the requests name; another one is a stranger."""

    scene: Scene
    engine: RawEngine
    stranger: RawEngine
    tool: Caller
    bystander: Probe

    @property
    def session(self) -> int:
        return self.engine.scheduler.id

    @property
    def registration(self) -> int:
        return self.engine.worker.registration

    def next_sequence(self) -> int:
        """A refused message uses its number up, so each takes a new one."""
        self.engine.scheduler.sequence += 1
        return self.engine.scheduler.sequence

    def caller(self, service: str) -> Caller:
        if service == "EngineService":
            return self.engine.scheduler
        return self.engine.worker if service == "WorkerService" else self.tool

    def send(self, method: str, content: bytes, metadata: Any = None) -> Refusal:
        """Call `Service.Method` with these bytes; ("OK", "") where it is answered."""
        service, name = method.split(".")
        caller = self.caller(service)
        path = f"/kvd.v1.{service}/{name}"
        entries = caller.metadata if metadata is None else metadata
        channel: Any = caller.channel
        try:
            if name == "Session":
                stream = channel.stream_stream(path)(iter([content]), metadata=entries, timeout=25)
                for _ in stream:
                    pass
            elif name in {"WatchEvents", "Record"}:
                stream = channel.unary_stream(path)(content, metadata=entries, timeout=25)
                next(stream)
                stream.cancel()
            else:
                channel.unary_unary(path)(content, metadata=entries, timeout=25)
        except grpc.RpcError as error:
            info = details_of(error)
            if info is not None:
                assert info.domain == "kvd"
            return error.code().name, info.reason if info is not None else ""
        return "OK", ""


Build = Callable[[Stand], Any]


@contextmanager
def standing() -> Iterator[Stand]:
    """All of it, and at the end the bystander must not have noticed anything."""
    scene = Scene()
    try:
        scene.daemon.start()
        engine = RawEngine(scene.daemon.socket, identity=identity("engine"))
        stranger = RawEngine(scene.daemon.socket, identity=identity("stranger"))
        assert engine.store({1: block(1)}).status == 1
        bystander = scene.engine("bystander")
        generation = bystander.wait_usable()
        tool = Caller(scene.daemon.socket)
        stand = Stand(scene, engine, stranger, tool, bystander)
        yield stand
        assert bystander.wait_usable() == generation
        assert engine.load([1]) == [block(1)]
        for each in (engine, stranger, tool):
            each.close()
    finally:
        scene.close()


def resident_kib(pid: int) -> int:
    """Memory of the process's own: neither files nor shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")
