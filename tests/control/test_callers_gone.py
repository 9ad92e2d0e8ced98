"""Callers that go away while an answer is being sent: nothing has failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvd.control.rpc import CallInterceptor
from kvd.runtime.turns import FairQueue
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE
from kvd_proto.v1 import engine_pb2, events_pb2, events_pb2_grpc
from tests.control.daemon_rig import RawScheduler, daemon, query
from tests.control.raw_http2 import RawHttp2, message
from tests.waiting import wait_until

USER = 7


class Observer:
    """Knows how calls have ended."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    def call_ended(self, _method: str, code: str, _seconds: float) -> None:
        self.ends.put_nowait(code)


class LateWriter(events_pb2_grpc.EventServiceServicer):
    """Sends its last message once the caller has gone, as happens where both come at once."""

    async def WatchEvents(self, _request: Any, context: Any) -> None:  # noqa: N802 - gRPC's name
        await context.write(events_pb2.WatchEventsResponse(sequence=1))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await context.write(events_pb2.WatchEventsResponse(sequence=2))


async def test_a_message_to_a_watcher_that_has_gone_is_no_failure_of_the_daemons(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observer: Any = Observer()
    calls = CallInterceptor(
        observer, lambda _: None, FairQueue(), lambda _: USER, lambda _user: False
    )
    server = grpc.aio.server(interceptors=[calls])
    events_pb2_grpc.add_EventServiceServicer_to_server(LateWriter(), server)
    server.add_insecure_port(f"unix:{tmp_path / 'sock'}")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'sock'}") as channel:
            call = events_pb2_grpc.EventServiceStub(channel).WatchEvents(
                events_pb2.WatchEventsRequest()
            )
            assert (await call.read()).sequence == 1
            call.cancel()
            assert await asyncio.wait_for(observer.ends.get(), 10) == "CANCELLED"
    finally:
        await server.stop(None)
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_an_answer_that_nobody_takes_is_no_error_in_the_log() -> None:
    with (
        daemon("--log-level", "debug") as running,
        contextlib.closing(RawScheduler(running.socket)) as scheduler,
    ):
        keys = query(list(range(MAX_KEYS_PER_MESSAGE)), 0)  # a small answer would be kept
        lookup = engine_pb2.LookupRequest(session_id=scheduler.id, queries=[keys])

        def leave_an_answer() -> bool:
            """Whether an answer failed by now; gRPC may see first that the caller has gone."""
            with contextlib.closing(RawHttp2(running.socket, takes_data=False)) as raw:
                stream = raw.begin("/kvd.v1.EngineService/Lookup", scheduler.welcome.token)
                raw.send(stream, message(lookup.SerializeToString()))
                wait_until(lambda: has_begun(raw, stream), "the call to be answered")
            return "its caller has gone" in running.log.read_text()

        wait_until(leave_an_answer, "an answer that could not be sent")
        assert "Traceback" not in running.log.read_text()


def has_begun(raw: RawHttp2, stream: int) -> bool:
    raw.read(0.05)
    return stream in raw.begun
