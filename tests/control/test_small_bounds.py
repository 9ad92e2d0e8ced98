"""Short waits, and lists that are shown in part: each ends where the page of limits says."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest

from kvd.cli import serve
from kvd.cli.status import namespace_lines
from kvd.control import http, namespaces
from kvd.control.access import door
from kvd.control.access.door import Door, GrpcConnection
from kvd.control.http import HttpServer
from kvd.control.namespaces import Namespaces
from kvd.control.registration import engine_exits
from kvd.control.registration.engine_exits import EngineExitWatcher
from kvd.control.sessions import session
from kvd.control.sessions.session import CLOSED, SchedulerSession, SessionContext
from kvd.core import events as ev
from kvd.core.keys import NamespaceId, SessionId
from kvd.runtime import damage
from kvd_proto.v1 import engine_pb2, operator_pb2
from tests.control.live_session import live_session
from tests.control.running_daemon import RunningDaemon

SHORT_S = 0.05
LONG_S = 10.0  # more than any of these waits


def test_a_namespace_is_compared_with_few_others() -> None:
    known: Any = SimpleNamespace(fields=lambda number: {"model": "m", "kv_dtype": str(number)})
    family = [NamespaceId(number) for number in range(1000)]
    found = Namespaces.differences(known, NamespaceId(0), family)
    assert len(found) == namespaces._MOST_DIFFERENCES
    assert set(found) <= {str(number) for number in range(1, 1000)}


def test_of_many_namespaces_of_a_model_each_is_shown_beside_another() -> None:
    known: Any = SimpleNamespace(fields=lambda number: {"model": "m", "kv_dtype": str(number)})
    family = [NamespaceId(number) for number in range(1, 101)]
    told = [
        operator_pb2.NamespaceStatus(
            namespace_id=n, fields=known.fields(n), differs=Namespaces.differences(known, n, family)
        )
        for n in family
    ]
    lines = list(namespace_lines(operator_pb2.StatusResponse(namespaces=told)))
    pairs = [line.split(" differ in ")[0] for line in lines if " differ in " in line]
    shown = [number for pair in pairs for number in pair.split()[1::2]]
    assert set(shown) == {str(number) for number in family}
    assert len(pairs) == len(set(pairs))
    assert shown.count("100") == 1


def test_of_many_damaged_places_the_log_names_a_few(caplog: pytest.LogCaptureFixture) -> None:
    def locate(slots: Any, _shard: int) -> Any:
        return slots, slots * 0 + 77

    most = damage.MOST_PLACES_LOGGED
    pool: Any = SimpleNamespace(locate=locate)
    damage.log_damage(pool, np.arange(most), NamespaceId(1))
    damage.log_damage(pool, np.arange(most + 1), NamespaceId(1))
    whole, cut = (record.getMessage() for record in caplog.records)
    assert whole.endswith(f"{most - 1}+77")
    assert cut.startswith(f"{most + 1} blocks")
    assert cut.count("+77") == most
    assert cut.endswith(", ...")


class SlowDriver:
    """Its movers never make their rows fast, and its jobs never end."""

    def __init__(self) -> None:
        self.fleet = self.jobs = self

    async def warm(self, _session: SessionId, within_s: float) -> bool:
        await asyncio.sleep(within_s)
        return False

    async def wait(self, _session: SessionId, _jobs: list[int], within_s: float) -> None:
        await asyncio.wait_for(asyncio.Event().wait(), within_s)


def slow_session(told: list[Any]) -> SchedulerSession:
    common = cast("SessionContext", SimpleNamespace(driver=SlowDriver()))
    session = SchedulerSession(cast("Any", None), common, cast("Any", Outbox(told)))
    session.live = live_session()
    return session


class Outbox:
    def __init__(self, told: list[Any]) -> None:
        self.put = told.append


async def test_a_session_is_ready_in_time_though_its_rows_are_not_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert session.WARM_SECONDS < LONG_S
    monkeypatch.setattr(session, "WARM_SECONDS", SHORT_S)
    told: list[engine_pb2.SessionResponse] = []
    slow_session(told).ranks_ready()
    assert not told
    await until(lambda: bool(told))
    assert told[0].HasField("ranks_ready")


async def test_a_session_closes_in_time_though_its_jobs_do_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert session.CLOSE_FLUSH_SECONDS < LONG_S
    monkeypatch.setattr(session, "CLOSE_FLUSH_SECONDS", SHORT_S)

    async def requests() -> AsyncIterator[engine_pb2.SessionRequest]:
        yield engine_pb2.SessionRequest(close=engine_pb2.CloseSession())
        raise AssertionError("nothing is read after the word that closes it")

    async with asyncio.timeout(LONG_S):
        assert await slow_session([]).handle_all(requests()) == CLOSED


@pytest.mark.parametrize("ends_in_time", [True, False])
async def test_an_engine_that_may_have_ended_is_watched_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, ends_in_time: bool
) -> None:
    assert engine_exits.WATCH_SECONDS < LONG_S
    monkeypatch.setattr(engine_exits, "WATCH_SECONDS", LONG_S if ends_in_time else SHORT_S)
    told: list[ev.Event] = []
    watching = EngineExitWatcher(cast("Any", SimpleNamespace(call=told.append)))
    with subprocess.Popen(["sleep", "60"]) as engine:  # noqa: ASYNC220 - it only is there
        pidfd = os.pidfd_open(engine.pid)
        peer: Any = SimpleNamespace(
            pid=engine.pid, token="", uid=0, watch_process=lambda: os.dup(pidfd)
        )
        watching.watch(SessionId(7), peer)
        if not ends_in_time:
            await until(lambda: not watching._watched)
        engine.kill()
        engine.wait()
        if ends_in_time:
            await until(lambda: bool(told))
        await asyncio.sleep(SHORT_S)
        os.close(pidfd)
    assert told == ([ev.SessionClosed(SessionId(7), gone=True)] if ends_in_time else [])
    assert len(watching._shares) == 0


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not true():  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(SHORT_S / 10)


async def test_an_http_request_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert http.READ_SECONDS < LONG_S
    monkeypatch.setattr(http, "READ_SECONDS", SHORT_S)
    server = HttpServer({"/": lambda: (200, http.TEXT, b"here\n")})
    await server.listen("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\n")
    async with asyncio.timeout(LONG_S):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    await server.close()


def test_a_call_without_end_does_not_keep_the_daemon_from_stopping() -> None:
    running = RunningDaemon("--drain-seconds", "0.1")
    try:
        running.start()
        with grpc.insecure_channel(f"unix:{running.socket}") as channel:
            watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
            endless = watch(b"")  # its end would be the call's
            assert next(endless) == b"\x08\x01"  # SERVING, and no last answer comes
            began = time.monotonic()
            assert running.stop(signal.SIGTERM) == 0
            assert time.monotonic() - began < LONG_S / 2
    finally:
        running.remove()


def test_who_is_shut_out_again_and_again_is_named_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(door, "time", SimpleNamespace(monotonic=lambda: now))
    mine = Door("nowhere", lambda _: False)
    too_many = [GrpcConnection(-1, n, 5) for n in range(mine.bound.each + 3)]
    monkeypatch.setattr(mine, "connections", lambda: list(too_many))
    monkeypatch.setattr(door, "_socket", _no_socket)
    for _ in range(101):
        assert mine.look() == 3
        now += door.LOG_SECONDS / 10
    assert 9 <= len(caplog.records) <= 11


def _no_socket(_fd: int) -> Any:
    raise OSError


def test_progress_of_a_large_pool_is_said_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = 1000.0
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(serve, "notify", lambda *_lines: None)
    starting: Any = SimpleNamespace(_progress_at=0.0, _stop=threading.Event(), _has_pool=False)
    for done in np.arange(1, 1001) << 20:
        serve.Daemon._preparing(starting, int(done), 1000 << 20)
        now += serve.PROGRESS_SECONDS / 100
    assert 10 <= len(caplog.records) <= 12
    assert caplog.records[-1].getMessage().endswith("1000 of 1000 MiB")


def test_systemd_waits_for_a_start_that_comes_on_and_a_stop_for_no_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(serve, "notify", lambda *lines: heard.extend(lines))
    starting: Any = SimpleNamespace(_progress_at=0.0, _stop=threading.Event(), _has_pool=False)
    serve.Daemon._preparing(starting, 1, 2)
    assert f"EXTEND_TIMEOUT_USEC={serve.START_EXTENSION_US}" in heard
    starting._stop.set()
    with pytest.raises(serve._ToldToStop):
        serve.Daemon._preparing(starting, 1, 2)
    starting._has_pool = True
    serve.Daemon._preparing(starting, 1, 2)
