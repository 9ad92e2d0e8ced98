"""What users may set of a request is cut to what the daemon takes: nobody else must notice."""

from __future__ import annotations

import pytest

from kvd_client.draft import MAX_ID_BYTES, StepDraft, request_context, wire_id
from tests.client.small_engine import SmallEngine
from tests.daemon_process import DaemonProcess

LONG = "x" * 300


def test_a_short_id_is_sent_as_it_is() -> None:
    assert wire_id("request-1") == "request-1"
    assert wire_id("é" * (MAX_ID_BYTES // 2)) == "é" * (MAX_ID_BYTES // 2)


@pytest.mark.parametrize("request_id", [LONG, "é" * 200, "", "lone \ud800"])
def test_any_id_becomes_one_that_the_daemon_takes(request_id: str) -> None:
    sent = wire_id(request_id)
    assert 0 < len(sent.encode()) <= MAX_ID_BYTES
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


def test_a_request_with_a_long_id_is_cached_and_the_session_lives(daemon: DaemonProcess) -> None:
    engine = SmallEngine(daemon.socket, "e0")
    try:
        engine.wait_usable()
        engine.store(LONG, "hello", 4)
        assert engine.load(LONG + "again", "hello", 4) == 4
        assert engine.connection.sessions == 1
    finally:
        engine.close()
