"""Messages that stop half-way hold no more than their user's share, and leave nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvd.control.access.intake import MAX_CALLS_OF_A_USER, SMALL_BYTES, SMALL_LATE_AT_ONCE
from kvd.control.server import LOOKAHEAD_BYTES, MAX_STREAMS
from kvd_proto.limits import MAX_MESSAGE_BYTES
from kvd_proto.v1 import engine_pb2, operator_pb2
from tests.control.daemon_rig import (
    Caller,
    RunningDaemon,
    daemon,
    identity,
    namespace,
    refusal,
)
from tests.control.raw_http2 import RawHttp2, message
from tests.control.running_daemon import DEADLINE_S
from tests.faults.stand import resident_kib
from tests.waiting import wait_until

SESSION = "/kvd.v1.EngineService/Session"
OPEN_TO_ALL = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
SERVING = b"\x08\x01"
HALF = message(bytes(MAX_MESSAGE_BYTES - 1), MAX_MESSAGE_BYTES)


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with daemon() as started:
        yield started


def mib_above(running: RunningDaemon, idle_kib: int) -> int:
    return (resident_kib(running.pid) - idle_kib) // 1024


def test_sessions_that_begin_with_half_a_message_hold_one_users_share(
    running: RunningDaemon,
) -> None:
    """Each of them held 6 MiB, and there could be 64 on each of 4,096 connections."""
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(contextlib.closing(Caller(running.socket, "SCHEDULER")))
        idle = resident_kib(running.pid)
        for _ in range(2):
            raw = stack.enter_context(contextlib.closing(RawHttp2(running.socket)))
            for _ in range(MAX_STREAMS):
                raw.send(raw.begin(SESSION, caller.welcome.token), HALF, 0.01)
        assert mib_above(running, idle) < 100


def test_what_half_messages_took_is_given_back_when_their_sessions_end(
    running: RunningDaemon,
) -> None:
    with contextlib.ExitStack() as stack:
        idle = resident_kib(running.pid)
        for number in range(16):
            caller = stack.enter_context(contextlib.closing(Caller(running.socket, "SCHEDULER")))
            raw = stack.enter_context(contextlib.closing(RawHttp2(running.socket)))
            stream = raw.begin(SESSION, caller.welcome.token)
            opening = engine_pb2.OpenSession(
                identity=identity(f"e{number}"), namespace=namespace(), world_size=1
            )
            content = engine_pb2.SessionRequest(open=opening).SerializeToString()
            raw.send(stream, message(content))
            assert raw.send(stream, HALF) == len(HALF), "the daemon took no half a message"
        wait_until(lambda: mib_above(running, idle) > 50, "half messages")
    wait_until(lambda: mib_above(running, idle) < 24, "its memory")


def test_calls_of_which_nothing_is_asked_hold_little_each(running: RunningDaemon) -> None:
    """Those that wait for their turn: gRPC takes in no more of each than it looks ahead."""
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(contextlib.closing(Caller(running.socket, "SCHEDULER")))
        sent: list[int] = []
        for _ in range(2):
            raw = stack.enter_context(contextlib.closing(RawHttp2(running.socket)))
            streams = [raw.begin(SESSION, caller.welcome.token) for _ in range(MAX_STREAMS)]
            sent += [raw.send(stream, HALF, 0.01) for stream in streams]
        assert sorted(sent)[len(sent) // 2] <= 2 * LOOKAHEAD_BYTES


def test_user_with_as_many_calls_as_he_may_is_told_so(running: RunningDaemon) -> None:
    with contextlib.ExitStack() as stack:
        caller = stack.enter_context(contextlib.closing(Caller(running.socket, "SCHEDULER")))
        connections = []
        for _ in range(MAX_CALLS_OF_A_USER // MAX_STREAMS + 1):
            raw = stack.enter_context(contextlib.closing(RawHttp2(running.socket)))
            connections.append(raw)
            for _ in range(MAX_STREAMS):
                raw.begin(SESSION, caller.welcome.token)

        def refused() -> int:
            for each in connections:
                each.read(0.0)
            return sum(len(each.reset) for each in connections)

        wait_until(lambda: refused() >= MAX_STREAMS, "refusals")
        status = operator_pb2.StatusRequest()
        answer = refusal(lambda: caller.call(caller.operator.Status, status))
        assert answer == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED", "")
    with contextlib.closing(Caller(running.socket)) as after:
        assert after.status().state


@pytest.mark.parametrize("method", OPEN_TO_ALL)
def test_half_messages_of_who_said_no_hello_hold_one_bound_for_all(
    running: RunningDaemon, method: str
) -> None:
    """Each held 4 MiB, on each of a user's 3,584 streams, for as long as he liked."""
    with contextlib.ExitStack() as stack:
        idle = resident_kib(running.pid)
        for _ in range(8 * SMALL_LATE_AT_ONCE // MAX_STREAMS):
            raw = stack.enter_context(contextlib.closing(RawHttp2(running.socket)))
            for _ in range(MAX_STREAMS):
                raw.send(raw.begin(method, ""), HALF, 0.01)
        assert mib_above(running, idle) < 300
        with grpc.insecure_channel(f"unix:{running.socket}") as channel:
            check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert check(b"", timeout=DEADLINE_S) == SERVING


def test_large_message_of_who_said_no_hello_is_refused(running: RunningDaemon) -> None:
    with grpc.insecure_channel(f"unix:{running.socket}") as channel:
        name = health_pb2.HealthCheckRequest(service="x" * SMALL_BYTES).SerializeToString()
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        assert refusal(lambda: next(watch(name)))[:2] == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert refusal(lambda: check(b"\xff"))[:2] == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
