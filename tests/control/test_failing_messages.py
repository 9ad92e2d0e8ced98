"""A message that meets a defect is refused; only a broken invariant ends the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.control.sessions.outbox import Outbox
from kvd.control.sessions.session import Request, SchedulerSession
from kvd.control.sessions.wire import UnreadableRequest
from kvd.core.errors import InvalidArgument, KvdError, SequenceGap
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


class UsingUp:
    """Takes the numbers of what could not be read; those above 6 are too far ahead."""

    def __init__(self) -> None:
        self.used: list[int] = []

    async def refuse(self, _live: Any, sequence: int, error: KvdError) -> None:
        if sequence > 6:
            raise SequenceGap("a number is missing")
        self.used.append(sequence)
        raise error


async def handle(verbs: FailingVerbs | UsingUp, *sent: Request) -> Outbox:
    common = SimpleNamespace(
        verbs=verbs, count_refusal=lambda _: None, time_message=lambda *_: None
    )
    outbox = Outbox()
    none: Any = None
    session = SchedulerSession(none, common, outbox)  # type: ignore[arg-type]
    session.live = live_session()

    async def requests() -> AsyncIterator[Request]:
        for each in sent:
            yield each

    assert await session.handle_all(requests()) == "its stream ended"
    return outbox


MESSAGES = (
    pb.SessionRequest(step=pb.Step(sequence=4)),
    pb.SessionRequest(lookup=pb.LookupCall(call_id=5)),
    pb.SessionRequest(reset_cache=pb.ResetCache(sequence=6)),
)


def test_messages_that_meet_a_defect_are_refused_with_their_numbers_and_the_stream_goes_on() -> (
    None
):
    outbox = asyncio.run(handle(FailingVerbs(ValueError("a defect")), *MESSAGES))
    step, lookup, reset = outbox._unsent
    assert (step.refused.sequence, step.refused.reason) == (4, "INTERNAL")
    assert (lookup.lookup.call_id, lookup.lookup.reason) == (5, "INTERNAL")
    assert (reset.refused.sequence, reset.refused.reason) == (6, "INTERNAL")


def test_a_broken_invariant_is_nothing_that_a_session_outlives() -> None:
    with pytest.raises(AssertionError):
        asyncio.run(handle(FailingVerbs(AssertionError("broken")), *MESSAGES))


def test_messages_that_can_not_be_read_are_refused_by_what_is_known_of_them() -> None:
    """Numbers of steps and resets are used up; where one can't be, its refusal says that."""
    verbs, error = UsingUp(), InvalidArgument("no message", reason="MALFORMED_MESSAGE")
    parts = [("step", 4), ("lookup", 5), ("reset_cache", 6), ("step", 9), ("", 0)]
    unread = [UnreadableRequest(error, kind, number) for kind, number in parts]
    step, lookup, reset, ahead, unknown = asyncio.run(handle(verbs, *unread))._unsent
    assert verbs.used == [4, 6]
    assert (lookup.lookup.call_id, lookup.lookup.reason) == (5, "MALFORMED_MESSAGE")
    said = [(each.refused.sequence, each.refused.reason) for each in (step, reset, ahead, unknown)]
    malformed = "MALFORMED_MESSAGE"
    assert said == [(4, malformed), (6, malformed), (9, "SEQUENCE_GAP"), (0, malformed)]


def test_a_message_of_a_later_release_is_told_apart_from_one_that_is_out_of_place() -> None:
    later = pb.SessionRequest.FromString(b"\xfa\x07\x00")
    sent = (later, pb.SessionRequest(), pb.SessionRequest(open=pb.OpenSession()))
    outbox = asyncio.run(handle(UsingUp(), *sent))
    reasons = [each.refused.reason for each in outbox._unsent]
    assert reasons == ["UNKNOWN_MESSAGE", "INVALID_ARGUMENT", "INVALID_ARGUMENT"]
