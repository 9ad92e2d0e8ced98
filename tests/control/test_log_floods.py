"""Whatever clients do, they do not fill the log; and it says how much it left out."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import socket
from collections.abc import Iterator

import grpc
import pytest

from kvd.observability import floods, logs
from kvd.observability.floods import LINE_SECONDS, LINES_AT_ONCE, MAX_KINDS, Floods
from kvd_proto.v1 import companion_pb2, engine_pb2
from tests.control.daemon_of_small_bounds import VARIABLE
from tests.control.daemon_rig import Caller, identity, namespace
from tests.control.running_daemon import RunningDaemon
from tests.control.test_companion_socket import answer, connect, framed
from tests.ports import free_port
from tests.waiting import wait_until

MANY = 2000
LEFT_OUT = re.compile(r"(\d+) more like")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Log:
    """A logger behind a limit, as the daemon's is."""

    def __init__(self, clock: Clock) -> None:
        self.text = io.StringIO()
        self.floods = Floods(clock)
        self.logger = logging.Logger("some", logging.DEBUG)  # noqa: LOG001 - nobody else's
        handler = logging.StreamHandler(self.text)
        handler.addFilter(self.floods)
        self.logger.addHandler(handler)

    def say(self, count: int, user: int | None = None, level: int = logging.INFO) -> None:
        for _ in range(count):
            self.logger.log(level, "user %s came", user, extra={"user": user})

    def lines(self) -> list[str]:
        """Since the last time."""
        lines = self.text.getvalue().splitlines()
        self.text.truncate(0)
        self.text.seek(0)
        return lines


def test_so_many_lines_pass_at_once_and_then_one_in_a_while(clock: Clock) -> None:
    log = Log(clock)
    log.say(MANY)
    assert log.lines() == ["user None came"] * LINES_AT_ONCE
    clock.now += LINE_SECONDS * 0.9
    log.say(1)
    assert log.lines() == []
    clock.now += LINE_SECONDS * 0.2
    log.say(5)
    left_out = MANY - LINES_AT_ONCE + 1
    assert log.lines() == [f"user None came ({left_out} more like it were left out)"]
    clock.now += LINE_SECONDS * LINES_AT_ONCE * 5
    log.say(LINES_AT_ONCE + 1)
    assert len(log.lines()) == LINES_AT_ONCE


def test_no_line_is_left_out_of_what_comes_seldom(clock: Clock) -> None:
    log = Log(clock)
    for _ in range(3 * LINES_AT_ONCE):
        log.say(1)
        clock.now += LINE_SECONDS * 1.001
    assert log.lines() == ["user None came"] * 3 * LINES_AT_ONCE
    assert log.floods.tell() == []


def test_one_users_flood_takes_nothing_of_anothers_lines(clock: Clock) -> None:
    log = Log(clock)
    log.say(MANY, user=1)
    log.lines()
    log.say(3, user=2)
    log.logger.warning("another kind of line", extra={"user": 1})
    assert log.lines() == [*["user 2 came"] * 3, "another kind of line"]


@pytest.mark.parametrize("level", [logging.DEBUG, logging.CRITICAL])
def test_what_ends_the_daemon_and_debugging_always_pass(clock: Clock, level: int) -> None:
    log = Log(clock)
    log.say(MANY, level=level)
    assert len(log.lines()) == MANY


def test_what_a_flood_left_out_is_told_when_it_is_over_and_then_it_is_forgotten(
    clock: Clock,
) -> None:
    log = Log(clock)
    log.say(MANY, user=1, level=logging.ERROR)
    assert log.floods.tell() == []
    clock.now += LINE_SECONDS
    told = [(logging.ERROR, f"{MANY - LINES_AT_ONCE} more like 'user 1 came'")]
    assert log.floods.tell() == told
    assert log.floods.tell() == []
    assert len(log.floods) == 1
    clock.now += LINE_SECONDS * LINES_AT_ONCE
    assert log.floods.tell() == []
    assert len(log.floods) == 0


def test_kinds_are_few_however_many_users_there_are(clock: Clock) -> None:
    log = Log(clock)
    for user in range(10 * MAX_KINDS):
        log.say(1, user)
    assert len(log.floods) == MAX_KINDS + 1
    assert len(log.lines()) == MAX_KINDS + LINES_AT_ONCE


def test_a_line_has_an_end(clock: Clock) -> None:
    log = Log(clock)
    log.logger.info("%s", "x" * floods.MAX_LINE_CHARACTERS)
    log.logger.info("%s", "x" * 1_000_000)
    whole, cut = log.lines()
    assert whole == "x" * floods.MAX_LINE_CHARACTERS
    assert cut == whole + "..."


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_daemons_log_is_limited_in_both_its_forms(form: str) -> None:
    root = logging.getLogger()
    before, level, stream = list(root.handlers), root.level, io.StringIO()
    try:
        limits = logs.start("info", form, stream)
        for _ in range(MANY):
            logging.getLogger("kvd.some").warning("too often")
        limits._now_s = lambda: 1e12
        logs.tell(limits)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = stream.getvalue().splitlines()
    assert len(lines) == LINES_AT_ONCE + 1
    last = json.loads(lines[-1])["message"] if form == "json" else lines[-1]
    assert f"left out: {MANY - LINES_AT_ONCE} more like 'too often'" in last


@contextlib.contextmanager
def daemon_that_tells_soon() -> Iterator[tuple[RunningDaemon, int]]:
    port = free_port()
    bounds = "kvd.observability.floods:LINE_SECONDS=3.0"
    running = RunningDaemon("--http-port", str(port), environment={VARIABLE: bounds})
    running.module = "tests.control.daemon_of_small_bounds"
    try:
        running.start()
        yield running, port
    finally:
        running.remove()


ENGINES_HELLO = framed(  # of a tool that comes and goes nothing is said
    companion_pb2.CompanionRequest(
        hello=companion_pb2.Hello(role=companion_pb2.PEER_ROLE_WORKER, program="raw")
    )
)
WRONG_HELLO = framed(companion_pb2.CompanionRequest(hello=companion_pb2.Hello(role=99)))  # type: ignore[arg-type]


def come_and_go(running: RunningDaemon) -> None:
    with connect(running) as connected:
        connected.sendall(ENGINES_HELLO)
        assert answer(connected).welcome.token


def be_refused(running: RunningDaemon) -> None:
    with connect(running) as connected:
        connected.sendall(WRONG_HELLO)
        assert answer(connected).error.reason


def talk_nonsense(port: int, path: str) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connected:
        connected.sendall(b"\xff\x00 nonsense\r\n\r\n")
    with socket.socket(socket.AF_UNIX) as connected, contextlib.suppress(OSError):
        connected.connect(path)
        connected.sendall(b"GET / HTTP/1.1\r\nHost: nonsense\r\n\r\n")


def test_clients_that_come_without_end_leave_few_lines_and_their_number() -> None:
    with daemon_that_tells_soon() as (running, port):
        for _ in range(MANY):
            come_and_go(running)
        for _ in range(MANY // 4):
            be_refused(running)
            talk_nonsense(port, running.socket)
        caller = Caller(running.socket, "SCHEDULER")
        session = caller.engine.Session
        for number in range(MANY // 10):
            opening = engine_pb2.SessionRequest(
                open=engine_pb2.OpenSession(
                    identity=identity(f"e{number}"), namespace=namespace(), world_size=1
                )
            )
            stream = session(iter([opening]), metadata=caller.metadata)  # which breaks at once
            with contextlib.suppress(grpc.RpcError):
                for _response in stream:
                    pass
            wrong = engine_pb2.SessionRequest(open=engine_pb2.OpenSession())
            with contextlib.suppress(grpc.RpcError):
                for _response in session(iter([wrong]), metadata=caller.metadata):
                    pass
        caller.close()

        def told() -> int:
            return sum(map(int, LEFT_OUT.findall(running.log.read_text())))

        passed = 2 * MANY + 2 * (MANY // 10) - 4 * LINES_AT_ONCE
        wait_until(lambda: told() >= passed - 60, "the number of those left out")
        lines = running.log.read_text().splitlines()
        assert len(lines) < 6 * LINES_AT_ONCE
