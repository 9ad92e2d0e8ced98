"""Who sends very many calls waits in a line of his own, and nobody else waits in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvd.control.access import calls_in_line
from kvd.control.access.calls_in_line import CALLS_AT_ONCE, MIN_REMEMBERED, CallsInLine
from kvd.control.server import MAX_STREAMS
from tests.control.daemon_of_small_bounds import VARIABLE
from tests.control.daemon_rig import Caller
from tests.control.raw_http2 import RawHttp2
from tests.control.running_daemon import RunningDaemon
from tests.ports import free_port

STRANGER = 12345
CONNECTIONS, AT_ONCE = 6, 20
METHOD = "/kvd.v1.OperatorService/ListNamespaces"
# Of another user, so that its calls are not counted as this process's. It says how many of them
# were answered whenever it is asked.
FLOOD = """
import os, sys
from kvd_proto.v1 import operator_pb2
from tests.control.daemon_rig import Caller
path, user, connections, calls = sys.argv[1], *map(int, sys.argv[2:])
import encodings.idna
os.setgid(user); os.setuid(user)
callers = [Caller(path) for _ in range(connections)]
sent = [
    each.operator.ListNamespaces.future(
        operator_pb2.ListNamespacesRequest(), metadata=each.metadata, timeout=600
    )
    for each in callers
    for _ in range(calls)
]
for _ in sys.stdin:
    print(sum(each.done() and each.code().name == "OK" for each in sent), flush=True)
"""


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    running = RunningDaemon("--socket-mode", "0666")
    running.flags["http-port"] = free_port()
    running.module = "tests.control.daemon_of_small_bounds"
    module = calls_in_line.__name__
    bounds = {"CALLS_A_SECOND": 2, "CALLS_AT_ONCE": AT_ONCE, "GIVEN_UP_A_SECOND": 2}
    running.environment[VARIABLE] = " ".join(f"{module}:{k}={v}" for k, v in bounds.items())
    try:
        running.start()
        running.directory.chmod(0o755)
        yield running
    finally:
        running.remove()


@contextlib.contextmanager
def flood(path: str) -> Iterator[subprocess.Popen[str]]:
    arguments = map(str, (path, STRANGER, CONNECTIONS, MAX_STREAMS))
    process = subprocess.Popen(
        [sys.executable, "-c", FLOOD, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answered(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("how many\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def lined_up(running: RunningDaemon) -> float:
    url = f"http://127.0.0.1:{running.flags['http-port']}/metrics"
    page = urllib.request.urlopen(url, timeout=30).read().decode()
    shown = next(line for line in page.splitlines() if line.startswith("kvd_calls_lined_up_t"))
    return float(shown.split()[1])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_users_flood_waits_in_its_line_and_another_users_call_does_not(
    running: RunningDaemon,
) -> None:
    with flood(running.socket) as process, contextlib.closing(Caller(running.socket)) as caller:
        while (done := answered(process)) < AT_ONCE:
            time.sleep(0.05)
        for _ in range(AT_ONCE // 2):
            assert caller.status().state
        assert done <= answered(process) < CONNECTIONS * MAX_STREAMS
        shown = lined_up(running)
        assert running.log.read_text().count(f"uid {STRANGER} sends more than 2 calls") == 1
        assert shown >= CONNECTIONS * MAX_STREAMS - AT_ONCE - done


def test_who_gives_calls_up_as_fast_as_he_makes_them_has_no_more_taken_up(
    running: RunningDaemon,
) -> None:
    calls = 4000
    with (
        contextlib.closing(Caller(running.socket)) as caller,
        contextlib.closing(RawHttp2(running.socket)) as hasty,
    ):
        began = time.monotonic()
        for _ in range(calls):
            hasty.give_up(hasty.begin(METHOD, caller.welcome.token))
            hasty.read(0.0)
        hasty.read(1.0)
        assert not hasty.is_over
        taken_up = AT_ONCE + MAX_STREAMS + 4 * (time.monotonic() - began)
        assert lined_up(running) <= taken_up < calls
    assert running.stop() == 0  # though some have yet to end


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The lines' time, which a test says. Not the event loop's."""
    now = [1000.0]
    monkeypatch.setattr(calls_in_line, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def test_a_users_calls_go_on_in_the_order_in_which_they_came_and_users_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = clock(monkeypatch)
    line = CallsInLine()
    went: list[tuple[int, int]] = []

    async def call(user: int, number: int) -> None:
        assert line.must_wait(user)
        await line.wait(user)
        went.append((user, number))

    for user in (1, 2):
        assert not any(line.must_wait(user) for _ in range(CALLS_AT_ONCE))
    tasks = [asyncio.create_task(call(1, number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(call(2, number)) for number in range(2)]
    await asyncio.sleep(0)
    assert not line.must_wait(3)
    tasks[1].cancel()  # given up: the next goes in its place
    while not all(each.done() for each in tasks):
        now[0] += 1.001 / calls_in_line.CALLS_A_SECOND  # one call's time
        await asyncio.sleep(0.002)
    assert went == [(1, 0), (2, 0), (1, 2), (2, 1), (1, 3)]


async def test_who_sent_much_may_send_again_as_soon_as_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = clock(monkeypatch)
    line = CallsInLine()
    assert not any(line.must_wait(1) for _ in range(CALLS_AT_ONCE))
    assert line.must_wait(1)
    now[0] += 1.001 / calls_in_line.CALLS_A_SECOND
    assert not line.must_wait(1)
    assert line.must_wait(1)
    now[0] += 1.001 * CALLS_AT_ONCE / calls_in_line.CALLS_A_SECOND
    assert not any(line.must_wait(1) for _ in range(CALLS_AT_ONCE))


async def test_users_are_forgotten_when_their_calls_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = clock(monkeypatch)
    line = CallsInLine()
    for user in range(20_000):
        line.must_wait(user)
        now[0] += 0.0005
    assert len(line) <= 2 * MIN_REMEMBERED
    for user in range(20_000):  # together: each is owed its time
        assert not line.must_wait(user)
    assert len(line) >= 20_000


async def test_a_late_loop_lets_few_go_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    line = CallsInLine()
    while not line.must_wait(1):
        pass
    went: list[int] = []

    async def call(number: int) -> None:
        await line.wait(1)
        went.append(number)

    tasks = [asyncio.create_task(call(number)) for number in range(30)]
    await asyncio.sleep(0)
    time.sleep(0.05)  # noqa: ASYNC251 - the loop is late
    at_most = 0
    while len(went) < len(tasks):
        before = len(went)
        await asyncio.sleep(0)
        at_most = max(at_most, len(went) - before)
    assert at_most <= calls_in_line._MOST_AT_A_LOOK
    await asyncio.gather(*tasks)
    assert went == sorted(went)


async def give_up(line: CallsInLine, user: int, count: int) -> list[asyncio.Task[None]]:
    while not line.must_wait(user):
        pass
    tasks = [asyncio.create_task(line.wait(user)) for _ in range(count)]
    await asyncio.sleep(0)
    for each in tasks:
        each.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_calls_given_up_in_line_end_one_after_the_other_and_their_users_next_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_in_line, "GIVEN_UP_A_SECOND", 20)
    line = CallsInLine()
    began = time.monotonic()
    tasks = await give_up(line, 1, 10)
    assert not any(each.done() for each in tasks)
    await asyncio.sleep(0.2)  # longer than who sent so much has to wait
    assert line.must_wait(1)
    assert not line.must_wait(2)
    await asyncio.wait(tasks)
    assert time.monotonic() - began >= 0.5
    assert all(each.cancelled() for each in tasks)
    assert not line._given_up


async def test_more_given_up_calls_than_may_have_yet_to_end_end_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_in_line, "GIVEN_UP_A_SECOND", 0.01)
    monkeypatch.setattr(calls_in_line, "MAX_GIVEN_UP", 4)
    line = CallsInLine()
    tasks = await give_up(line, 1, 10)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(each.done() for each in tasks) == 6
    line.close()
    await asyncio.wait_for(asyncio.wait(tasks), 30)
    assert not line._given_up
    assert all(each.cancelled() for each in await give_up(line, 2, 3) if each.done())
    assert not line._given_up


async def test_given_up_calls_of_closed_connections_end_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_in_line, "GIVEN_UP_A_SECOND", 0.001)
    line = CallsInLine()
    before = await give_up(line, 1, 10)
    others = await give_up(line, 2, 1)
    line.connections_closed(1)
    after = await give_up(line, 1, 10)
    await asyncio.wait_for(asyncio.wait(before + after), 30)
    assert not any(each.done() for each in others)
    line.close()
    await asyncio.wait(others)
