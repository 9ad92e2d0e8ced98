"""A caller that gives up: in line it leaves nothing behind, and what it began is done whole."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.control.sessions.verbs import LiveSession, Verbs
from kvd.core import events as ev
from kvd.core.keys import NamespaceId, SessionId, TenantId
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd.runtime.driver import Driver
from kvd.runtime.recorder import Recorder
from kvd.runtime.told_lookups import ToldLookups
from kvd.runtime.turns import FairQueue
from kvd_proto.groups import GroupKind
from kvd_proto.v1 import common_pb2
from kvd_proto.v1 import engine_pb2 as pb
from tests.control.daemon_rig import HASH_BYTES, context, hashes

CALLS = 500
TOUCHES = 64  # far more than are done without letting others in
GROUP = GroupSpec(GroupKind.FULL_ATTENTION, 1, (4096,))
SPEC = NamespaceSpec("f", TenantId("t"), HASH_BYTES, (GROUP,))


class TouchingDriver:
    """Takes touches down, and stands in for the rest."""

    def __init__(self) -> None:
        self.turns = FairQueue()
        self.began = asyncio.Event()
        self.touched: list[ev.Touched] = []

    def call(self, event: ev.Event) -> None:
        if isinstance(event, ev.Touched):
            self.touched.append(event)
            self.began.set()

    async def let_others_in(self, _session: SessionId) -> None:
        await self.turns.let_others_in(0)


@pytest.fixture
def live() -> LiveSession:
    peer: Any = SimpleNamespace(uid=0)
    return LiveSession(SessionId(1), NamespaceId(1), SPEC, peer, "e0", 1)


def verbs_over(driver: TouchingDriver) -> Verbs:
    told = ToldLookups(lambda _namespace: True)
    return Verbs(cast(Driver, driver), told, Recorder(lambda _is_on: None))


def step(sequence: int) -> pb.Step:
    run = common_pb2.KeyRun(hashes=hashes(1))
    touch = pb.Touch(context=context(), runs=[run])
    return pb.Step(sequence=sequence, touches=[touch] * TOUCHES)


async def some_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_calls_that_are_given_up_before_their_turn_leave_nothing(live: LiveSession) -> None:
    """Each was kept, with its message, until its turn came: so many that memory ran out."""
    driver = TouchingDriver()
    verbs = verbs_over(driver)
    before = len(asyncio.all_tasks())
    async with live.turn:
        calls = [asyncio.ensure_future(verbs.step(live, step(1))) for _ in range(CALLS)]
        await some_turns(4)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert len(asyncio.all_tasks()) == before
    await some_turns(4)
    assert live.book.applied == 0
    await verbs.step(live, step(1))
    assert len(driver.touched) == TOUCHES


async def test_what_is_given_up_half_way_is_done_whole_before_the_next(live: LiveSession) -> None:
    driver = TouchingDriver()
    verbs = verbs_over(driver)
    call = asyncio.ensure_future(verbs.step(live, step(1)))
    await driver.began.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert len(driver.touched) < TOUCHES
    await verbs.step(live, pb.Step(sequence=2, end_step=True))
    assert len(driver.touched) == TOUCHES
