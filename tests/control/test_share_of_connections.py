"""gRPC connections that say nothing: one user never takes another's, nor an operator's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from kvd.control.access import companion, descriptors
from kvd.control.access.door import (
    LOOK_SECONDS,
    MAX_UNACCEPTED,
    MAX_UNACCEPTED_IN_A_FLOOD,
    TOGETHER,
    Door,
    GrpcConnection,
    bound_of_connections,
    too_many,
    with_pauses,
)
from kvd.core.shares import Bound
from kvd_proto.v1 import operator_pb2, operator_pb2_grpc
from tests.control.daemon_of_few_connections import MOST
from tests.control.daemon_rig import Caller
from tests.control.raw_http2 import RawHttp2
from tests.control.running_daemon import RunningDaemon, daemon
from tests.waiting import wait_until

GREEDY, OTHER = 12346, 12347
TAKE_ALL = """
import os, sys, time
from tests.control.raw_http2 import RawHttp2
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
held = []
while True:
    held = [each for each in held if not each.is_over]
    while len(held) < int(sys.argv[3]):
        try:
            held.append(RawHttp2(sys.argv[1]))
        except OSError:
            break
    time.sleep(0.2)  # one that waits to be accepted may be shut out yet
    for each in held:
        each.read(0.0)
    print(sum(not each.is_over for each in held), flush=True)
    if sys.stdin.readline().strip() == "end":
        break
"""


def numbered(*users: int) -> list[GrpcConnection]:
    return [GrpcConnection(n, n, user) for n, user in enumerate(users)]


def test_there_is_room_for_all_clients_and_for_few_that_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descriptors, "most_connections", lambda: descriptors.MAX_GRPC_CONNECTIONS)
    bound = bound_of_connections()
    mine = companion.MAX_ENGINE_CONNECTIONS_OF_A_USER + companion.MAX_TOOL_CONNECTIONS_OF_A_USER
    clients = companion.MAX_ENGINE_CONNECTIONS + companion.MAX_TOOL_CONNECTIONS
    assert mine < bound.each <= 2 * mine
    assert clients < bound.most - bound.reserved
    assert bound.most <= 2 * clients
    monkeypatch.setattr(descriptors, "most_connections", lambda: 128)
    assert bound_of_connections().each == 64


def test_newest_of_who_has_too_many_go_and_the_reserve_stays() -> None:
    bound = Bound("connections", most=10, each=6, reserved=2)
    mine = numbered(*[1] * 8, 2, 2)
    assert [each.fd for each in too_many(mine, bound, lambda _: False)] == [7, 6]
    crowd = numbered(*[1] * 6, 2, 2, 3, 0)
    gone = too_many(crowd, bound, lambda user: user == 0)
    assert [each.fd for each in gone] == [5]
    assert too_many(crowd[:8], bound, lambda _: False) == []


def test_door_knows_whose_each_connection_is_and_shuts_down_the_newest(tmp_path: Path) -> None:
    path = str(tmp_path / "grpc")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as elsewhere:
        listener.bind(path)
        listener.listen(16)
        elsewhere.bind(str(tmp_path / "companion"))
        clients, accepted = [], []
        for _ in range(5):
            clients.append(RawHttp2(path, says_hello=False))
            accepted.append(listener.accept()[0])
        door = Door(path, lambda _: False)
        door.bound = Bound("connections", most=64, each=3)
        connections = door.connections()
        assert [each.fd for each in connections] == [each.fileno() for each in accepted]
        assert {each.user for each in connections} == {os.getuid()}
        assert door.look() == 2
        for each in clients:
            each.read(0.1)
        assert [each.is_over for each in clients] == [False, False, False, True, True]
        for client, connected in zip(clients, accepted, strict=True):
            client.close()
            connected.close()
        assert door.look() == 0


def test_a_long_look_lets_the_event_loop_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    pause = SimpleNamespace(sleep=lambda _: done.append("pause"))
    monkeypatch.setattr("kvd.control.access.door.time", pause)
    done.extend(map(str, with_pauses(range(2 * TOGETHER + 1))))
    assert [done.index("pause"), done.count("pause")] == [TOGETHER, 2]


class Greedy:
    """Another process of another user that holds as many connections as it is let."""

    def __init__(self, path: str, user: int, wanted: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TAKE_ALL, path, str(user), str(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._first = True

    def held(self) -> int:
        """How many it holds, once it has tried again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if not self._first:
            self._process.stdin.write("again\n")
            self._process.stdin.flush()
        self._first = False
        return int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_user_who_takes_all_connections_leaves_some_for_another_and_for_operators() -> None:
    running = RunningDaemon("--socket-mode", "0666")
    running.directory.chmod(0o755)
    running.module = "tests.control.daemon_of_few_connections"
    try:
        running.start()
        greedy = Greedy(running.socket, GREEDY, MOST)
        greedy.held()  # it has tried; what is beyond its share may have been closed by now
        other = Greedy(running.socket, OTHER, 8)
        try:
            wait_until(lambda: "of uid 12346" in running.log.read_text(), "the greedy one's share")
            wait_until(lambda: other.held() == 8, "the other's connections")
            caller = Caller(running.socket)
            assert caller.status().state
            caller.close()
            assert other.held() == 8
        finally:
            greedy.end()
            other.end()
    finally:
        running.remove()


def taken_in(path: str, most: int) -> int:
    """How many connections the kernel takes for a listener before one would have to wait."""
    with contextlib.ExitStack() as stack:
        for count in range(most):
            connecting = stack.enter_context(socket.socket(socket.AF_UNIX))
            connecting.setblocking(False)
            try:
                connecting.connect(path)
            except BlockingIOError:
                return count
    return most


def has_stopped(pid: int) -> bool:
    """True once none of its threads runs: until then they go on accepting."""
    states = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)


async def test_very_few_wait_while_somebody_with_too_many_connects_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.control.access.door.FLOOD_SECONDS", 2 * LOOK_SECONDS)
    path = str(tmp_path / "grpc")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(16)
        listener.setblocking(False)

        def taken() -> int:
            count = taken_in(path, 4 * MAX_UNACCEPTED)
            with contextlib.suppress(BlockingIOError):
                while True:
                    listener.accept()[0].close()
            return count

        door = Door(path, lambda _: False)
        door.bound = Bound("connections", most=64, each=3)
        door.begin()
        stack.callback(door.close)
        assert taken() in range(MAX_UNACCEPTED, MAX_UNACCEPTED + 3)
        for _ in range(4):
            stack.callback(RawHttp2(path, says_hello=False).close)
            stack.enter_context(listener.accept()[0])
        assert door.look() == 1
        assert taken() in range(MAX_UNACCEPTED_IN_A_FLOOD, MAX_UNACCEPTED_IN_A_FLOOD + 3)
        for _ in range(40):
            await asyncio.sleep(LOOK_SECONDS)
            if taken() >= MAX_UNACCEPTED:  # the flood is over
                break
        else:
            pytest.fail("the queue stays short")


async def test_door_looks_sooner_while_calls_wait_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvd.control.access.door.LOOK_SECONDS", 3600.0)
    looks: list[int] = []
    door = Door(str(tmp_path / "grpc"), lambda _: False)

    def look() -> None:
        looks.append(1)
        if len(looks) == 1:
            raise OSError("no such process")

    monkeypatch.setattr(door, "look", look)
    door.begin()
    with contextlib.ExitStack() as comers, contextlib.closing(door):
        for count in (1, 2):  # the first of which fails
            for _ in range(400):
                comers.enter_context(socket.socket())  # where nobody comes, nothing is looked at
                door.hurry()
                await asyncio.sleep(0.01)
                if len(looks) == count:
                    break
            assert len(looks) == count
    assert "no such process" in caplog.text


def test_few_connections_wait_at_a_daemon_that_does_not_accept() -> None:
    with daemon() as running:

        def taken() -> int:
            time.sleep(2 * LOOK_SECONDS)  # gRPC listens when it likes, and the door looks again
            running.process.send_signal(signal.SIGSTOP)
            try:
                wait_until(lambda: has_stopped(running.pid), "the daemon's stop")
                return taken_in(running.socket, 4 * MAX_UNACCEPTED)
            finally:
                running.process.send_signal(signal.SIGCONT)

        few = range(MAX_UNACCEPTED, MAX_UNACCEPTED + 3)  # one more as Linux counts
        wait_until(lambda: taken() in few, "a short queue")
        wait_until(lambda: serves(running.socket), "the end of the queue")


def serves(path: str) -> bool:
    """Whether a newcomer is served: one who finds the queue still full is not."""
    caller = Caller(path)
    try:
        return bool(caller.status().state)
    except grpc.RpcError:
        return False
    finally:
        caller.close()


def test_clients_that_connect_at_once_while_the_daemon_is_busy_all_come_in() -> None:
    with daemon() as running, contextlib.ExitStack() as stack:
        time.sleep(2 * LOOK_SECONDS)
        caller = Caller(running.socket)
        stack.callback(caller.close)
        running.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: has_stopped(running.pid), "the daemon's stop")
            answers = []
            for _ in range(MAX_UNACCEPTED - 8):
                alone = (("grpc.use_local_subchannel_pool", 1),)
                channel = grpc.insecure_channel(f"unix:{running.socket}", options=alone)
                stack.callback(channel.close)
                stub = operator_pb2_grpc.OperatorServiceStub(channel)
                request = operator_pb2.StatusRequest()
                answers.append(stub.Status.future(request, metadata=caller.metadata))
            time.sleep(0.5)  # all are connecting, and none may fail
            failed = [answer.code() for answer in answers if answer.done()]
        finally:
            running.process.send_signal(signal.SIGCONT)
        assert failed == []
        assert all(answer.result(timeout=30).state for answer in answers)
