"""A client that is closed has nothing at the daemon, whatever it was doing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvd.cli.status import ask
from kvd_client import EngineIdentity, Group, NamespaceFields, connection
from kvd_client.daemon import DaemonLink, greeted
from kvd_proto.v1 import companion_pb2
from tests.daemon_process import DaemonProcess
from tests.waiting import PATIENCE_SECONDS


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
    namespace = NamespaceFields(
        model="closing",
        kv_dtype="uint8",
        hash_algorithm="sha256",
        hash_bytes=32,
        groups=(Group(16, (4096,)),),
    )
    made = connection.SchedulerConnection(
        daemon.socket, EngineIdentity(os.urandom(8).hex(), os.urandom(16)), namespace
    )
    made.close()
    is_closed.set()
    made._thread.join(PATIENCE_SECONDS)
    assert not made._thread.is_alive(), "it goes on with a session that nobody wants"
    assert not ask(daemon.socket, 10.0).sessions
