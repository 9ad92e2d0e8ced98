"""A message that meets a defect is refused; only a broken invariant ends the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.control.sessions.outbox import Outbox
from kvd.control.sessions.session import SchedulerSession
from kvd_proto.v1 import engine_pb2 as pb
from tests.control.live_session import live_session


class FailingVerbs:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def step(self, *_: Any) -> None:
        raise self.error

    async def lookup(self, *_: Any) -> None:
        raise self.error

    async def reset_cache(self, *_: Any) -> None:
        raise self.error


async def handle(error: Exception) -> Outbox:
    common = SimpleNamespace(
        verbs=FailingVerbs(error), count_refusal=lambda _: None, time_message=lambda *_: None
    )
    outbox = Outbox()
    none: Any = None
    session = SchedulerSession(none, common, outbox)  # type: ignore[arg-type]
    session.live = live_session()

    async def requests() -> AsyncIterator[pb.SessionRequest]:
        yield pb.SessionRequest(step=pb.Step(sequence=4))
        yield pb.SessionRequest(lookup=pb.LookupCall(call_id=5))
        yield pb.SessionRequest(reset_cache=pb.ResetCache(sequence=6))

    assert await session.handle_all(requests()) == "its stream ended"
    return outbox


def test_messages_that_meet_a_defect_are_refused_with_their_numbers_and_the_stream_goes_on() -> (
    None
):
    outbox = asyncio.run(handle(ValueError("a defect")))
    step, lookup, reset = outbox._unsent
    assert (step.refused.sequence, step.refused.reason) == (4, "INTERNAL")
    assert (lookup.lookup.call_id, lookup.lookup.reason) == (5, "INTERNAL")
    assert (reset.refused.sequence, reset.refused.reason) == (6, "INTERNAL")


def test_a_broken_invariant_is_nothing_that_a_session_outlives() -> None:
    with pytest.raises(AssertionError):
        asyncio.run(handle(AssertionError("broken")))
