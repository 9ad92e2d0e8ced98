"""What users may set of a request is cut to what the daemon takes: nobody else must notice."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format

from kvd_client.draft import (
    MAX_STRUCT_DEPTH,
    StepDraft,
    bare_context,
    read_only_from,
    request_context,
    wire_id,
    wire_text,
)
from kvd_proto.limits import MAX_STRING_BYTES
from kvd_proto.v1 import common_pb2
from tests.client.engine_rig import TOKENS, Rig
from tests.client.small_engine import SmallEngine

LONG = "x" * 300


def test_a_short_id_is_sent_as_it_is() -> None:
    assert wire_id("request-1") == "request-1"
    assert wire_id("é" * (MAX_STRING_BYTES // 2)) == "é" * (MAX_STRING_BYTES // 2)


@pytest.mark.parametrize("request_id", [LONG, "é" * 200, "", "lone \ud800"])
def test_any_id_becomes_one_that_the_daemon_takes(request_id: str) -> None:
    sent = wire_id(request_id)
    assert 0 < len(sent.encode()) <= MAX_STRING_BYTES
    assert request_context(request_id, "", 0, ()).request_id == sent
    step = StepDraft(finished=[request_id], preempted=[request_id]).to_proto(1)
    assert [*step.finished_request_ids, *step.preempted_request_ids] == [sent, sent]


def test_long_ids_that_differ_stay_different() -> None:
    assert wire_id(LONG + "a") != wire_id(LONG + "b")


def test_parameters_that_are_too_long_stay_here() -> None:
    extras: list[tuple[str, dict[str, object]]] = [
        ("kv_transfer_params", {"note": "y" * 20_000}),
        ("hints", {"keep": True}),
    ]
    context = request_context("r", "", 0, extras)
    assert not context.HasField("kv_transfer_params")
    assert context.hints["keep"]


def nested(depth: int, lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    return value


@pytest.mark.parametrize(
    "values",
    [
        {"a": nested(MAX_STRUCT_DEPTH, lists=False)},
        {"a": nested(MAX_STRUCT_DEPTH, lists=True)},
        nested(33, lists=False),
        {"a": nested(48, lists=True)},
        nested(100_000, lists=False),
        {"n": float("nan")},
        {"n": float("inf")},
        {"n": 10**400},
        {"n": complex(1, 2)},
        {"n": b"bytes"},
        {"n": "half a pair \ud800"},
        {"half a pair \ud800": 1},
        {1: "a key that is no string"},
        {"many": [0] * 20_000},
        {str(number): 0 for number in range(20_000)},
        {"far too long": "x" * 50_000_000},
    ],
)
def test_parameters_that_cannot_be_sent_stay_here(values: dict[str, object]) -> None:
    context = request_context("r", "", 0, [("kv_transfer_params", values), ("hints", {"keep": 1})])
    assert not context.HasField("kv_transfer_params")
    assert context.hints["keep"] == 1
    assert common_pb2.ReqContext.FromString(context.SerializeToString()) == context


@pytest.mark.parametrize(
    "values",
    [
        nested(MAX_STRUCT_DEPTH, lists=False),
        {"a": nested(MAX_STRUCT_DEPTH - 1, lists=True)},
        {"n": None, "t": True, "i": -5, "f": 0.5, "s": "ü", "l": [1, "2", []], "d": {}},
    ],
)
def test_parameters_within_the_bounds_are_sent(values: dict[str, object]) -> None:
    context = request_context("r", "", 0, [("kv_transfer_params", values)])
    sent = common_pb2.ReqContext.FromString(context.SerializeToString())
    assert json_format.MessageToDict(sent.kv_transfer_params) == values


def test_parameters_that_hold_themselves_stay_here() -> None:
    endless: dict[str, object] = {}
    endless["again"] = endless
    assert not request_context("r", "", 0, [("hints", endless)]).HasField("hints")


@pytest.mark.parametrize("priority", [1 << 31, -(1 << 40), (1 << 31) - 1, -(1 << 31)])
def test_any_priority_becomes_one_of_32_bits(priority: int) -> None:
    sent = request_context("r", "", priority, ()).priority
    assert (sent > 0) is (priority > 0)


def test_a_long_account_becomes_another_that_only_it_becomes() -> None:
    assert (wire_text(""), wire_text("salt")) == ("", "salt")
    assert wire_text(LONG + "a") != wire_text(LONG + "b")
    assert len(wire_text(LONG).encode()) <= MAX_STRING_BYTES


def test_a_request_with_a_long_id_is_cached_and_the_session_lives(engine: SmallEngine) -> None:
    engine.store(LONG, "hello", 4)
    assert engine.load(LONG + "again", "hello", 4) == 4
    assert engine.connection.sessions == 1


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        (None, []),
        ((), [common_pb2.TIER_HOST]),
        ((common_pb2.TIER_CLUSTER,), [common_pb2.TIER_HOST, common_pb2.TIER_CLUSTER]),
        (range(1000), [common_pb2.TIER_HOST, common_pb2.TIER_DISK, common_pb2.TIER_CLUSTER]),
    ],
)
def test_a_request_names_the_tiers_that_it_may_be_read_from(wanted: Any, sent: list[int]) -> None:
    rig = Rig()
    rig.holds("p", 4 * TOKENS)
    rig.arrive("r", 4 * TOKENS, load_tiers=wanted)
    assert rig.ask("r") == 3 * TOKENS
    ((query,),) = rig.daemon.lookups
    assert list(query.context.tiers_allowed) == sent


def test_a_context_without_its_parameters_still_says_which_tiers_may_be_read() -> None:
    context = request_context("r", "", 0, ())
    read_only_from(context, ())
    assert list(bare_context(context).tiers_allowed) == [common_pb2.TIER_HOST]
