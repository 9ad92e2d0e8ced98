"""A message that was worked off leaves nothing in the daemon, not even for the collector."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvd_proto.v1 import common_pb2, engine_pb2
from tests.control.daemon_rig import (
    RawScheduler,
    daemon,
    identity,
    refusal,
)
from tests.faults.stand import resident_kib
from tests.waiting import wait_until

LARGE_RUN = common_pb2.KeyRun(hashes=bytes(3 << 20))  # far too many keys
LARGE = engine_pb2.Query(run=LARGE_RUN)
LARGE_TOUCH = engine_pb2.Touch(runs=[LARGE_RUN])


def test_refused_messages_that_come_side_by_side_are_not_kept() -> None:
    """Of 720 messages of 5 MiB 650 MiB were left, of which most never went."""
    with daemon() as running, contextlib.closing(RawScheduler(running.socket)) as scheduler:
        request = engine_pb2.LookupRequest(session_id=scheduler.id, queries=[LARGE])

        def refuse(_: int) -> str:
            return refusal(lambda: scheduler.call(scheduler.engine.Lookup, request))[0]

        idle = resident_kib(running.pid)
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(refuse, range(480))) == {"INVALID_ARGUMENT"}
        wait_until(lambda: resident_kib(running.pid) - idle < 48 << 10, "its memory")


@pytest.mark.parametrize(
    ("request_fields", "answer"),
    [
        ({"lookup": engine_pb2.LookupCall(call_id=1, queries=[LARGE])}, "lookup"),
        ({"step": engine_pb2.Step(sequence=1, touches=[LARGE_TOUCH])}, "refused"),
    ],
    ids=["lookup", "step"],
)
def test_session_that_is_silent_after_a_large_message_holds_nothing_of_it(
    request_fields: dict[str, Any], answer: str
) -> None:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(daemon())
        schedulers = [
            stack.enter_context(
                contextlib.closing(RawScheduler(running.socket, identity=identity(f"e{number}")))
            )
            for number in range(30)
        ]
        assert len({scheduler.id for scheduler in schedulers}) == len(schedulers)
        idle = resident_kib(running.pid)
        for scheduler in schedulers:
            scheduler.send(**request_fields)
            assert scheduler.next(answer).reason == "INVALID_ARGUMENT"
        wait_until(lambda: resident_kib(running.pid) - idle < 48 << 10, "its memory")
