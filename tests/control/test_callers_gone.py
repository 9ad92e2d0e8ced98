"""Callers that go away while an answer is being sent: nothing has failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvd.control.access import intake
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE
from kvd_proto.v1 import (
    engine_pb2,
    events_pb2,
    events_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
)
from tests.control.daemon_rig import RawScheduler, daemon, query
from tests.control.raw_http2 import RawHttp2, message
from tests.control.served_calls import EndsOfCalls, served
from tests.waiting import wait_until


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
    observer = EndsOfCalls()
    add_late_writer = partial(events_pb2_grpc.add_EventServiceServicer_to_server, LateWriter())
    async with served(tmp_path / "sock", observer, add_late_writer) as channel:
        call = events_pb2_grpc.EventServiceStub(channel).WatchEvents(
            events_pb2.WatchEventsRequest()
        )
        assert (await call.read()).sequence == 1
        call.cancel()
        assert await observer.next_end() == "CANCELLED"
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


class LargeAnswer(operator_pb2_grpc.OperatorServiceServicer):
    """Its answers are larger than what gRPC sends to who takes nothing."""

    async def Status(self, _request: Any, _context: Any) -> Any:  # noqa: N802 - gRPC's name
        return operator_pb2.StatusResponse(state="x" * (1 << 20))


async def test_a_call_whose_answer_is_not_taken_counts_among_its_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In gRPC it was held: there could be one on each stream of each connection."""
    monkeypatch.setattr(intake, "MAX_CALLS_OF_A_USER", 1)
    observer = EndsOfCalls()
    add_large_answer = partial(
        operator_pb2_grpc.add_OperatorServiceServicer_to_server, LargeAnswer()
    )
    async with served(tmp_path / "sock", observer, add_large_answer) as channel:
        status = channel.unary_stream(
            "/kvd.v1.OperatorService/Status",
            request_serializer=operator_pb2.StatusRequest.SerializeToString,
            response_deserializer=operator_pb2.StatusResponse.FromString,
        )

        async def answer() -> str:
            taken: Any = await asyncio.wait_for(slow.read(), 10)
            return str(taken.state)

        slow = status(operator_pb2.StatusRequest())
        assert await observer.next_end() == "OK"
        refused = status(operator_pb2.StatusRequest())
        await asyncio.wait_for(refused.read(), 10)  # an empty one comes with an error
        assert await asyncio.wait_for(refused.code(), 10) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "calls under way" in await refused.details()
        assert len(await answer()) == 1 << 20
        assert await slow.code() == grpc.StatusCode.OK
        slow = status(operator_pb2.StatusRequest())
        assert len(await answer()) == 1 << 20


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
