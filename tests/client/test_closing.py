"""A client that is closed has nothing at the daemon, whatever it was doing."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvd.cli.status import ask
from kvd_client import (
    EngineIdentity,
    Group,
    NamespaceFields,
    SharedMemory,
    Worker,
    connection,
    outgoing,
)
from kvd_client.daemon import DaemonLink, greeted
from kvd_proto.v1 import companion_pb2
from tests.daemon_process import DaemonProcess
from tests.waiting import PATIENCE_SECONDS, wait_until

NAMESPACE = NamespaceFields(
    model="closing",
    kv_dtype="uint8",
    hash_algorithm="sha256",
    hash_bytes=32,
    groups=(Group(16, (4096,)),),
)


def connected(socket: str) -> connection.SchedulerConnection:
    identity = EngineIdentity(os.urandom(8).hex(), os.urandom(16))
    return connection.SchedulerConnection(socket, identity, NAMESPACE)


def threads_that_write() -> int:
    """Threads of gRPC's that wait for a session's messages."""
    waiting = outgoing.serialised.__code__
    stacks = map(traceback.walk_stack, sys._current_frames().values())
    return sum(waiting in [each.f_code for each, _ in stack] for stack in stacks)


def test_one_that_is_closed_while_a_slow_daemon_greets_it_has_no_session(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closed = threading.Event()

    @contextmanager
    def greeted_late(
        socket_path: str, role: companion_pb2.PeerRole, program: str
    ) -> Iterator[DaemonLink]:
        with greeted(socket_path, role, program) as link:
            is_closed.wait(PATIENCE_SECONDS)
            yield link

    monkeypatch.setattr(connection, "greeted", greeted_late)
    made = connected(daemon.socket)
    made.close()
    is_closed.set()
    made._thread.join(PATIENCE_SECONDS)
    assert not made._thread.is_alive(), "it goes on with a session that nobody wants"
    assert not ask(daemon.socket, 10.0).sessions


def test_an_attempt_that_finds_no_thread_for_its_timer_leaves_none_behind(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[threading.Timer] = []
    start = threading.Timer.start

    def start_seldom(timer: threading.Timer) -> None:
        attempts.append(timer)
        if len(attempts) == 1:
            raise RuntimeError("can't start new thread")
        start(timer)

    monkeypatch.setattr(threading.Timer, "start", start_seldom)
    made = connected(daemon.socket)
    wait_until(lambda: made.sessions == 1)
    wait_until(lambda: threads_that_write() == 1)
    made.close()
    wait_until(lambda: threads_that_write() == 0)


def test_who_waits_for_a_connection_or_a_rank_that_is_closed_waits_no_longer() -> None:
    worker = Worker("/nowhere", EngineIdentity("e", bytes(16)))
    fd = os.memfd_create("kv")
    worker.register([SharedMemory(fd, 0, 64)], [])
    held = connected("/nowhere")
    waits = [
        threading.Thread(target=wait, args=(100 * PATIENCE_SECONDS,), daemon=True)
        for wait in (held.wait_usable, worker.wait_registered)
    ]
    for each in waits:
        each.start()
    held.close()
    worker.close()
    for each in waits:
        each.join(PATIENCE_SECONDS)
        assert not each.is_alive()
    os.close(fd)
