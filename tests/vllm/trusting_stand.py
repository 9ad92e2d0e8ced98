"""A stand whose requests go by the index page's word, and what may happen before their loads.

Run in a process of its own. The daemon counts as prompt here, however busy the machine is, and
what happens in between happens just before the step's message leaves.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvd_client.daemon import greeted
from kvd_proto.v1 import companion_pb2, operator_pb2, operator_pb2_grpc
from tests.vllm.engine import prompt
from tests.vllm.scheduler_stand import Stand, StandOptions
from tests.vllm.stand_process import stand_with_kvd

LENGTH = 10 * 16
OPTIONS = StandOptions(num_blocks=256, step_tokens=4 * LENGTH)
UNTOUCHED = -1.0
TENANT = "default"
MANY_SECONDS = 30.0


class TrustingStand(Stand):
    """Has vLLM's scheduler, connector and worker hooks, and no model."""

    def __init__(self, model: str, transfer: dict[str, Any]) -> None:
        super().__init__(model, transfer, OPTIONS)


class Between:
    """A connection to the daemon that does something once, before a step's message leaves."""

    def __init__(self, connection: Any) -> None:
        self._send = connection.send_step
        self._then: Callable[[], None] | None = None
        self.connection = connection
        self.lookups = 0
        connection.is_prompt = lambda *_: True
        connection.send_step = self._send_step
        self._start = connection.start_lookup
        connection.start_lookup = self._count

    def before_the_load(self, then: Callable[[], None]) -> None:
        self._then = then

    def _send_step(self, step: Any) -> bool:
        then, self._then = (self._then, None) if step.loads else (None, self._then)
        if then is not None:
            then()
        return bool(self._send(step))

    def _count(self, queries: Any) -> int:
        self.lookups += 1
        return int(self._start(queries))


def serve(orders: Connection, socket: str, daemon_pid: int) -> None:
    """Run the case that is asked for, until none is; a case's answer is sent back."""
    with stand_with_kvd(TrustingStand, socket, silent_after_s=0.1) as (stand, connection):
        between = Between(connection)
        while (case := orders.recv()) is not None:
            orders.send(CASES[case](stand, between, socket, daemon_pid))


def store(stand: Stand, name: str) -> None:
    """Have the daemon hold the prompt of this name, and the device not."""
    stand.add(stand.request(f"{name} is stored", prompt(name, LENGTH), max_tokens=2))
    stand.drain()
    stand.take()
    stand.forget_device()


def load(stand: Stand, between: Between, name: str) -> dict[str, Any]:
    """The prompt again, to its end; what it took, and how many bytes a refused load wrote."""
    manager = stand.connector.connector_scheduler.manager
    connection, waits = between.connection, between.connection.blocking_calls
    failed: list[Any] = []
    fail_load = type(manager).fail_load

    def note(tracked: Any) -> None:
        failed.append(tracked)
        fail_load(manager, tracked)

    manager.fail_load = note
    between.lookups = 0
    caches = list(stand.caches.values())
    for cache in caches:
        cache.fill_(UNTOUCHED)
    stand.add(stand.request(f"{name} at {time.monotonic()}", prompt(name, LENGTH), max_tokens=2))
    stand.drain()
    taken = stand.take()
    stand.forget_device()
    return {
        "loads": taken.load_jobs,
        "failed": len(failed),
        "waits": connection.blocking_calls - waits,
        "lookups": between.lookups,
        "computed": taken.computed_tokens,
        "written": sum(int((cache != UNTOUCHED).sum()) for cache in caches),
    }


def shown(stand: Stand, between: Between, *_: Any) -> dict[str, Any]:
    """The page shows what the daemon has."""
    store(stand, "shown")
    return load(stand, between, "shown")


def lied(stand: Stand, between: Between, *_: Any) -> dict[str, Any]:
    """The page shows what nobody has ever stored."""
    session = between.connection.session
    session.present = lambda _group, _account, hashes: np.ones(len(hashes), dtype=np.bool_)
    session.shows = lambda *_: True
    try:
        return load(stand, between, "never stored")
    finally:
        del session.present, session.shows


def cleared(stand: Stand, between: Between, socket: str, _: int) -> dict[str, Any]:
    """An operator clears the cache after the page was read."""
    store(stand, "cleared")
    between.before_the_load(lambda: _operate(socket, "Clear", operator_pb2.ClearRequest()))
    return load(stand, between, "cleared")


def evicted(stand: Stand, between: Between, socket: str, _: int) -> dict[str, Any]:
    """All is evicted after the page was read, and the lookup whose lease forbids it is lost."""
    store(stand, "evicted")
    connection = between.connection
    calls, send = connection._lookups, connection.start_lookup

    def lose(queries: Any) -> int:
        connection.start_lookup = send
        call_id = calls.start(queries, time.monotonic())
        calls.leave()
        return int(call_id)

    connection.start_lookup = lose
    quota = operator_pb2.SetQuotaRequest(tenant=TENANT, quota_bytes=1)
    between.before_the_load(lambda: _operate(socket, "SetQuota", quota))
    try:
        return load(stand, between, "evicted")
    finally:
        _operate(socket, "SetQuota", operator_pb2.SetQuotaRequest(tenant=TENANT))


def killed(stand: Stand, between: Between, _: str, daemon_pid: int) -> dict[str, Any]:
    """The daemon dies after the page was read."""
    store(stand, "killed")
    between.before_the_load(lambda: os.kill(daemon_pid, signal.SIGKILL))
    return load(stand, between, "killed")


def _operate(socket: str, call: str, request: Any) -> None:
    role = companion_pb2.PEER_ROLE_TOOL
    with greeted(socket, role, "tests") as daemon:
        stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
        getattr(stub, call)(request, metadata=daemon.metadata, timeout=MANY_SECONDS)


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "shown": shown,
    "lied": lied,
    "cleared": cleared,
    "evicted": evicted,
    "killed": killed,
}
