"""What a caller says of a request reaches the core with every verb that is bound to one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
from google.protobuf import struct_pb2

from kvd.control import convert
from kvd.control.sessions.verbs import Verbs
from kvd.core import events as ev
from kvd.core.actions import Answer, Verdict
from kvd.core.errors import InvalidArgument
from kvd.core.keys import SessionId
from kvd.runtime.batching import PIECE_KEYS, PIECE_TOLD
from kvd.runtime.recorder import Recorder
from kvd.runtime.told_lookups import ToldLookups
from kvd.runtime.turns import FairQueue
from kvd_proto.v1 import common_pb2
from kvd_proto.v1 import engine_pb2 as pb
from tests.control.daemon_rig import hashes, load_job, store_job
from tests.control.live_session import live_session


def struct(**fields: Any) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update(fields)
    return made


def full_context() -> common_pb2.ReqContext:
    return common_pb2.ReqContext(
        request_id="r7",
        priority=-3,
        kv_transfer_params=struct(do_remote_decode=True),
        hints=struct(retain="long"),
        tiers_allowed=[common_pb2.TIER_HOST, common_pb2.TIER_DISK],
        account="salt",
    )


class ListeningDriver:
    """Takes what verbs hand over, and answers the least."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.jobs = self
        self.turns = FairQueue()

    async def let_others_in(self, session: SessionId) -> None:
        pass

    def live(self, session: SessionId) -> frozenset[int]:
        return frozenset()

    def call(self, event: Any) -> None:
        self.events.append(event)

    def load(self, event: ev.LoadRequested) -> Verdict:
        self.events.append(event)
        return Verdict(event.job, ev.JobKind.LOAD, True, "", 1)

    async def store(self, event: ev.StoreRequested) -> Verdict:
        self.events.append(event)
        return Verdict(event.job, ev.JobKind.STORE, True, "", 1)

    async def lookup(self, session: SessionId, queries: tuple[ev.Query, ...]) -> list[Answer]:
        self.events += queries
        return [Answer(b"", None) for _ in queries]


def verbs(driver: Any) -> Verbs:
    return Verbs(driver, ToldLookups(lambda _: True), Recorder(lambda _: None))


def with_context(job: Any) -> Any:
    job.context.CopyFrom(full_context())
    return job


STEPS: dict[str, Callable[[], pb.Step]] = {
    "touch": lambda: pb.Step(
        touches=[pb.Touch(context=full_context(), runs=[common_pb2.KeyRun(hashes=hashes(1))])]
    ),
    "prepare_load": lambda: pb.Step(loads=[with_context(load_job(1, [1], [0]))]),
    "prepare_store": lambda: pb.Step(stores=[with_context(store_job(1, [1], [0]))]),
    "hand_off": lambda: pb.Step(
        hand_offs=[pb.HandOff(context=full_context(), runs=[common_pb2.KeyRun(hashes=hashes(1))])]
    ),
}


def check(context: ev.RequestContext) -> None:
    assert (context.request, context.account) == ("r7", "salt")


@pytest.mark.parametrize("verb", STEPS)
async def test_every_part_of_a_step_carries_its_requests_context(verb: str) -> None:
    driver: Any = ListeningDriver()
    step = STEPS[verb]()
    step.sequence = 1
    await verbs(driver).step(live_session(), step)
    (event,) = driver.events
    check(event.context)


async def test_others_get_on_while_a_step_tells_of_many_requests() -> None:
    driver: Any = ListeningDriver()

    async def let_others_in(_: SessionId) -> None:
        driver.events.append("others")

    driver.let_others_in = let_others_in
    many = [pb.RequestLookup(request_id=f"r{n}") for n in range(2 * PIECE_TOLD + 1)]
    step = pb.Step(sequence=1, requests=many)
    await verbs(driver).step(live_session(), step)
    first, one, second, two, rest = driver.events
    assert (one, two) == ("others", "others")
    told = [each.request for piece in (first, second, rest) for each in piece.requests]
    assert told == [f"r{n}" for n in range(2 * PIECE_TOLD + 1)]


async def events_between_others(step: pb.Step) -> list[int]:
    """How many events of the step came in one go, before others got on or the step was over."""
    driver: Any = ListeningDriver()
    between = [0]

    class Counting(FairQueue):
        async def let_others_in(self, user: Hashable = None) -> None:
            if driver.events:  # else the step is still being read
                between.append(0)
                between[-2], driver.events = len(driver.events), []
            await super().let_others_in(user)

    driver.turns = Counting()
    step.sequence = 1
    await verbs(driver).step(live_session(), step)
    between[-1] = len(driver.events)
    return between


def touch_of(keys: int) -> pb.Touch:
    run = common_pb2.KeyRun(hashes=hashes(*range(keys)))
    return pb.Touch(context=common_pb2.ReqContext(request_id="r"), runs=[run])


async def test_others_get_on_after_some_small_touches_and_loads_and_not_after_each() -> None:
    touches = await events_between_others(pb.Step(touches=[touch_of(1) for _ in range(32)]))
    assert touches == [8, 8, 8, 8, 0]
    loads = await events_between_others(
        pb.Step(loads=[load_job(n, [n], [0]) for n in range(1, 10)])
    )
    assert loads == [3, 3, 3, 0]
    large = await events_between_others(pb.Step(touches=[touch_of(2 * PIECE_KEYS)] * 2))
    assert max(large) <= 2


async def test_others_get_on_while_requests_end_that_held_much() -> None:
    driver: Any = ListeningDriver()
    left = [("r1", "r2"), ("r2",), None]

    def call(event: ev.RequestsEnded) -> Any:
        driver.events.append(event.requests)
        return left.pop(0)

    async def let_others_in(_: SessionId) -> None:
        driver.events.append("others")

    driver.call, driver.let_others_in = call, let_others_in
    step = pb.Step(sequence=1, finished_request_ids=["r0", "r1", "r2"])
    await verbs(driver).step(live_session(), step)
    assert driver.events == [("r0", "r1", "r2"), "others", ("r1", "r2"), "others", ("r2",)]


async def test_lookup_carries_its_requests_context() -> None:
    driver: Any = ListeningDriver()
    run = common_pb2.KeyRun(hashes=hashes(1))
    await verbs(driver).lookup(live_session(), [pb.Query(context=full_context(), run=run)])
    (query,) = driver.events
    check(query.context)


def test_context_with_parameters_shows_in_the_log_at_level_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "kvd.control.convert")
    convert.request_context(full_context())
    assert "do_remote_decode" in caplog.text
    caplog.clear()
    convert.request_context(common_pb2.ReqContext(request_id="plain"))
    assert not caplog.text


@pytest.mark.parametrize(
    ("changed", "field", "reason"),
    [
        ({"kv_transfer_params": struct(x="y" * 20_000)}, "kv_transfer_params", "STRING_TOO_LONG"),
        ({"hints": struct(x="y" * 20_000)}, "hints", "STRING_TOO_LONG"),
        ({"tiers_allowed": [1] * 9}, "tiers_allowed", "TOO_MANY_PARTS"),
        ({"request_id": "r" * 257}, "request_id", "STRING_TOO_LONG"),
        ({"account": "a" * 257}, "account", "STRING_TOO_LONG"),
    ],
)
def test_oversize_context_is_refused_by_its_field(
    changed: dict[str, Any], field: str, reason: str
) -> None:
    fields = {"request_id": "r", **changed}
    with pytest.raises(InvalidArgument) as refusal:
        convert.request_context(common_pb2.ReqContext(**fields))
    assert (refusal.value.field, refusal.value.reason) == (f"context.{field}", reason)
