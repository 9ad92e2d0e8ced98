"""Health as gRPC's protocol tells it, to probes that say no hello: nobody holds it up."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvd_proto.v1 import operator_pb2
from tests.control.daemon_rig import Caller, RunningDaemon, daemon
from tests.control.raw_http2 import RawHttp2, message
from tests.control.running_daemon import DEADLINE_S
from tests.waiting import wait_until

WATCH = "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with daemon() as started:
        yield started


@contextlib.contextmanager
def watcher(running: RunningDaemon) -> Iterator[queue.SimpleQueue[bytes]]:
    """What a watcher of the whole daemon is told; SERVING was the first, and is taken."""
    told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    options = (("grpc.use_local_subchannel_pool", 1),)
    with grpc.insecure_channel(f"unix:{running.socket}", options) as channel:
        watch: Any = channel.unary_stream(WATCH)
        endless = watch(b"")

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):
                for answer in endless:
                    told.put(answer)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            assert told.get(timeout=DEADLINE_S) == SERVING
            yield told
        finally:
            endless.cancel()
            reader.join(DEADLINE_S)


@contextlib.contextmanager
def watcher_who_takes_nothing(running: RunningDaemon) -> Iterator[None]:
    with contextlib.closing(RawHttp2(running.socket, takes_data=False)) as raw:
        stream = raw.begin(WATCH, "")
        raw.send(stream, message(b""))
        wait_until(lambda: has_begun(raw, stream), "the call to be answered")
        yield


def has_begun(raw: RawHttp2, stream: int) -> bool:
    raw.read(0.05)
    return stream in raw.begun


def test_watcher_who_takes_nothing_keeps_no_operator_from_a_drain(running: RunningDaemon) -> None:
    """The new status waited for it, for ever."""
    operator = Caller(running.socket)
    drain = operator_pb2.DrainRequest(deadline_ms=100)
    with contextlib.closing(operator), watcher_who_takes_nothing(running):
        assert operator.call(operator.operator.Drain, drain).jobs_left == 0


def test_watcher_who_takes_nothing_keeps_no_daemon_from_its_end(running: RunningDaemon) -> None:
    with watcher_who_takes_nothing(running):
        assert running.stop(signal.SIGTERM) == 0


def test_a_watcher_is_told_though_another_has_left(running: RunningDaemon) -> None:
    operator = Caller(running.socket)
    with contextlib.closing(operator), watcher(running) as told:
        with watcher(running):
            pass
        assert operator.status().state  # the daemon sees its end meanwhile
        operator.call(operator.operator.Drain, operator_pb2.DrainRequest(deadline_ms=100))
        assert told.get(timeout=DEADLINE_S) == NOT_SERVING
        operator.call(operator.operator.Undrain, operator_pb2.UndrainRequest())
        assert told.get(timeout=DEADLINE_S) == SERVING
