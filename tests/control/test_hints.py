"""Hints as applications write them: kvd's own words, and vLLM's envelope; nothing is refused."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from google.protobuf import struct_pb2

from kvd.control.hints import (
    DEFAULT_RETAIN_S,
    MAX_HINT_ACTIONS,
    MAX_RETAIN_S,
    advice_of,
    wants_prefetch,
)
from kvd.core.events import Advice, Hint
from tests.control.daemon_rig import RawEngine, block, context, daemon, store_job
from tests.ports import free_port

SECOND = 1_000_000_000


def retained(seconds: float) -> Advice:
    return Advice(Hint.RETAIN, int(seconds * SECOND))


def action(kind: str, **payload: Any) -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": "1", "payload": payload}


def struct(values: dict[str, Any]) -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update(values)
    return made


@pytest.mark.parametrize(
    ("hints", "meant"),
    [
        ({"retain": 30}, retained(30)),
        ({"retain": {"ttl_seconds": 30}}, retained(30)),
        ({"retain": {"ttl_ms": 1500}}, retained(1.5)),
        ({"retain": True}, retained(DEFAULT_RETAIN_S)),
        ({"retain": 10**9}, retained(MAX_RETAIN_S)),
        ({"retain": -1}, retained(DEFAULT_RETAIN_S)),
        ({"pin": {"ttl": 5}}, retained(5)),
        ({"demote": True}, Advice(Hint.DEMOTE)),
        ({"release": {}}, Advice(Hint.RELEASE)),
        ({"release": False}, None),
        ({"release": None}, None),
        ({"share": True, "prefetch": {}}, None),
        ({}, None),
        ({"actions": [action("Retain", ttl_seconds=7)]}, retained(7)),
        ({"actions": [action("retain", ttl_seconds=7), action("share")]}, retained(7)),
        ({"actions": [action("retain"), action("release")]}, Advice(Hint.RELEASE)),
        ({"actions": [{"action_type": "demote"}]}, Advice(Hint.DEMOTE)),
        ({"actions": "retain"}, None),
        ({"actions": [1, None, {"action_type": 7}, []]}, None),
    ],
    ids=lambda value: None if isinstance(value, Advice) or value is None else str(value)[:60],
)
def test_what_is_known_counts_and_the_rest_is_passed_over(
    hints: dict[str, Any], meant: Advice | None
) -> None:
    assert advice_of(struct(hints)) == meant


@pytest.mark.parametrize("before", [MAX_HINT_ACTIONS - 1, MAX_HINT_ACTIONS])
def test_so_many_actions_are_looked_at(before: int) -> None:
    actions = [action("share")] * before + [action("demote")]
    looked_at = before < MAX_HINT_ACTIONS
    assert (advice_of(struct({"actions": actions})) is not None) == looked_at


@pytest.mark.parametrize(
    ("hints", "meant"),
    [
        ({"prefetch": True}, True),
        ({"prefetch": {}}, True),
        ({"retain": 30, "prefetch": 1, "release": True}, True),
        ({"prefetch": False}, False),
        ({"prefetch": None}, False),
        ({"retain": 30}, False),
        ({"actions": [action("Prefetch"), action("retain")]}, True),
        ({"actions": [{"action_type": "prefetch"}]}, True),
        ({"actions": [action("share")] * (MAX_HINT_ACTIONS - 1) + [action("prefetch")]}, True),
        ({"actions": [action("share")] * MAX_HINT_ACTIONS + [action("prefetch")]}, False),
    ],
    ids=[
        "yes", "object", "with-others", "no", "null", "others", "envelope", "bare-action",
        "the-last-looked-at", "one-too-many",
    ],
)  # fmt: skip
def test_to_prefetch_goes_with_every_other_hint(hints: dict[str, Any], meant: bool) -> None:
    assert wants_prefetch(struct(hints)) == meant


def test_a_hint_reaches_the_core_and_is_counted() -> None:
    port = free_port()
    with daemon("--http-port", str(port)) as running:
        engine = RawEngine(running.socket)
        job = store_job(1, [1], [1])
        job.context.CopyFrom(context("hinted"))
        job.context.hints.update({"retain": 60})
        engine.worker.write(1, block(1))
        engine.worker.ready(1)
        engine.scheduler.step(stores=[job], end_step=True)
        assert engine.ended(1).status == 1
        engine.scheduler.step(finished_request_ids=["hinted"], end_step=True)
        assert engine.load([1]) == [block(1)]
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
        engine.close()
    assert b'kvd_hinted_blocks_total{hint="retain",outcome="followed"} 1.0' in page
