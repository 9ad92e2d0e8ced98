"""Very many calls that come together: each is answered, nobody's is cancelled for another's."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

from kvd.control.server import MAX_STREAMS
from kvd_proto.v1 import operator_pb2, operator_pb2_grpc
from tests.control.running_daemon import DEADLINE_S, RunningDaemon, daemon

CONNECTIONS = 60  # with all their streams 3,840 calls; gRPC by itself leaves 3,000 waiting


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with daemon() as started:
        yield started


def test_calls_that_come_together_are_all_answered(running: RunningDaemon) -> None:
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(
                grpc.insecure_channel(
                    f"unix:{running.socket}", options=(("grpc.use_local_subchannel_pool", 1),)
                )
            )
            for _ in range(CONNECTIONS)
        ]
        for channel in channels:
            grpc.channel_ready_future(channel).result(DEADLINE_S)
        running.freeze()
        calls = [
            operator_pb2_grpc.OperatorServiceStub(channel).Status.future(
                operator_pb2.StatusRequest()
            )
            for channel in channels
            for _ in range(MAX_STREAMS)
        ]
        running.thaw()
        codes = Counter(call.code() for call in calls)
    assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}, codes
