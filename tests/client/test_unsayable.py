"""No message ends the session: what can't be said fails alone, what is refused fails alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import message

from kvd_client import RequestParams
from kvd_client.draft import BlockRun, JobDraft, QueryDraft, StepDraft, request_context
from kvd_client.lookup_calls import SharedCall
from kvd_client.outgoing import lookup_bytes, step_bytes
from kvd_proto.limits import MAX_MESSAGE_BYTES
from kvd_proto.v1 import common_pb2, engine_pb2
from tests.client.content import TOKENS, block_hashes
from tests.client.small_engine import SmallEngine

KEY = bytes(32)


def too_deep() -> common_pb2.ReqContext:
    """What protobuf builds and then refuses to take into a message."""
    context = common_pb2.ReqContext(request_id="deep")
    inner = context.kv_transfer_params
    for _ in range(60):
        inner = inner.fields["a"].struct_value
    inner.fields["end"].bool_value = True
    with pytest.raises(message.DecodeError):
        engine_pb2.Query(context=context)
    return context


def large() -> common_pb2.ReqContext:
    context = common_pb2.ReqContext(request_id="large")
    context.hints.fields["note"].string_value = "x" * (MAX_MESSAGE_BYTES // 2)
    return context


def said(body: bytes) -> engine_pb2.SessionRequest:
    assert len(body) <= MAX_MESSAGE_BYTES
    return engine_pb2.SessionRequest.FromString(body)


def job(number: int, context: common_pb2.ReqContext, key: Any = KEY) -> JobDraft:
    return JobDraft(number, context, [BlockRun(0, 0, [key], [number])])


@pytest.mark.parametrize("bad", [too_deep, large])
def test_parameters_that_break_a_step_are_left_out_and_its_jobs_stay(
    bad: Callable[[], common_pb2.ReqContext],
) -> None:
    step = StepDraft(loads=[job(1, bad())], stores=[job(2, bad())], finished=["r"])
    body, left_out = step_bytes(step, 7)
    assert left_out == []
    sent = said(body).step
    assert (sent.sequence, list(sent.finished_request_ids)) == (7, ["r"])
    assert [sent.loads[0].job_id, sent.stores[0].job_id] == [1, 2]
    assert not sent.loads[0].context.HasField("kv_transfer_params")


def test_a_job_that_no_message_can_carry_fails_alone() -> None:
    plain = request_context("r", "", 0, ())
    step = StepDraft(
        loads=[job(1, plain), job(2, plain, key="no bytes")],
        stores=[job(3, plain, key=b"k" * MAX_MESSAGE_BYTES), job(4, plain)],
        released_leases=[9],
    )
    body, left_out = step_bytes(step, 3)
    assert left_out == [2, 3]
    sent = said(body).step
    assert ([j.job_id for j in sent.loads], [j.job_id for j in sent.stores]) == ([1], [4])
    assert list(sent.released_leases) == [9]


def test_a_step_of_which_nothing_can_be_said_still_says_its_number() -> None:
    plain = request_context("r", "", 0, ())
    step = StepDraft(loads=[job(1, plain)], released_leases=[-1])
    body, left_out = step_bytes(step, 3)
    assert left_out == [1]
    assert said(body).step == engine_pb2.Step(sequence=3, end_step=True)


def test_a_lookup_goes_without_parameters_or_not_at_all() -> None:
    call = SharedCall(5, 0.0)
    call.add(1, [QueryDraft(too_deep(), BlockRun(0, 0, [KEY]), False)])
    body = lookup_bytes(call)
    assert body is not None
    assert said(body).lookup.queries[0].context.request_id == "deep"
    call.add(2, [QueryDraft(too_deep(), BlockRun(0, -1, [KEY]), False)])
    assert lookup_bytes(call) is None


# -- with a real daemon -----------------------------------------------------------------------


def nested(depth: int, lists: bool) -> dict[str, Any]:
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return {"a": value}


@pytest.mark.parametrize(("depth", "lists"), [(33, False), (48, True), (900, False), (5000, True)])
def test_deep_parameters_of_a_request_cost_nobody_a_hit(
    engine: SmallEngine, depth: int, lists: bool
) -> None:
    engine.store("first", "hello", 4)
    deep = RequestParams(kv_transfer_params=nested(depth, lists), hints=nested(depth, lists))
    keys = block_hashes("hello", 4)
    engine.scheduler.on_new_request("deep", 4 * TOKENS + 1, [keys], deep)
    assert engine.load("again", "hello", 4) == 4
    assert engine.connection.sessions == 1


def test_a_job_that_cannot_be_said_ends_and_the_session_goes_on(engine: SmallEngine) -> None:
    engine.store("first", "hello", 4)
    bad = job(10_000, request_context("bad", "", 0, ()), key="no bytes")
    assert engine.connection.send_step(StepDraft(stores=[bad]))
    assert ended(engine, 10_000) is False
    assert engine.connection.refusals["UNSENDABLE"] == 1
    assert engine.load("again", "hello", 4) == 4
    assert engine.connection.sessions == 1


def test_a_refused_steps_jobs_fail_and_its_ends_are_said_again(engine: SmallEngine) -> None:
    engine.store("first", "hello", 4)
    context = request_context("bad", "", 0, ())
    wrong = JobDraft(10_000, context, [BlockRun(7, 0, [KEY], [1])])  # there is no group 7
    assert engine.connection.send_step(StepDraft(stores=[wrong], finished=["first"]))
    assert ended(engine, 10_000) is False
    assert engine.load("again", "hello", 4) == 4
    assert engine.connection.sessions == 1


def ended(engine: SmallEngine, job_id: int) -> bool:
    """How the daemon, or the connection for it, says that the job has ended."""
    deadline = time.monotonic() + 20
    while True:
        for each, done in engine.connection.take_ended():
            if each == job_id:
                return done
        assert time.monotonic() < deadline
        time.sleep(0.005)
