"""How a batch learns what became of its jobs, whoever tells of it, and where nobody does."""

from __future__ import annotations

from typing import Any

import pytest

from kvd_client.batches import BatchOptions, SoughtKeys
from kvd_client.draft import BlockRun, StepDraft
from kvd_client.scheduler.plan import StepPlan
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.v1 import common_pb2
from tests.client.test_batches import PATIENCE_S, Memory, keys, memory
from tests.daemon_process import DaemonProcess
from tests.waiting import wait_until

__all__ = ["memory"]  # a fixture


def end_session(memory: Memory) -> None:
    """As where the stream breaks; the next one is usable."""
    connection = memory.batches._connection
    before = connection.sessions
    connection._cancel()
    wait_until(lambda: connection.sessions != before)
    assert memory.batches.wait_usable(PATIENCE_S)


def test_a_store_of_which_a_block_was_left_out_is_none(memory: Memory) -> None:
    memory.batches.options = BatchOptions(retry_deadline_s=0.0)
    prompt = keys(1, 2)
    run = BlockRun(0, 0, prompt, [3, NULL_ENGINE_BLOCK])
    assert memory.batches.store([run]) == [False]
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].tolist() == [True, False]


def test_a_store_that_the_daemon_refuses_ends_by_its_word(
    memory: Memory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mover hears of it, so none tells of its end."""
    memory.batches.options = BatchOptions(store_deadline_s=PATIENCE_S, retry_deadline_s=0.0)
    refused = common_pb2.ReqContext(request_id="long" * 100)
    monkeypatch.setattr(memory.batches, "_context", lambda _: refused)
    run = BlockRun(0, 0, keys(2, 1), [0])
    assert memory.batches.store([run]) == [False]
    assert memory.batches.refusals == {"STRING_TOO_LONG": 1}
    assert "have not ended" not in caplog.text
    monkeypatch.undo()
    assert memory.batches.store([run]) == [True]


@pytest.mark.parametrize("request_id", ["long" * 100, "\ud800", "a\0b", ""], ids=ascii)
def test_a_prompt_may_have_any_text_for_its_name(memory: Memory, request_id: str) -> None:
    prompt = keys(6, 2)
    for number, key in enumerate(prompt):
        run = BlockRun(0, number, [key], [number])
        assert memory.batches.store([run], request_id) == [True]
    assert len(memory.batches._lasting) == (1 if request_id else 0)
    memory.batches.end_request(request_id)
    assert not memory.batches._lasting
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
    assert not memory.batches.refusals


@pytest.mark.parametrize("request_id", [7, None, b"bytes"])
def test_the_name_of_a_prompt_is_text(memory: Memory, request_id: Any) -> None:
    run = BlockRun(0, 0, keys(7, 1), [0])
    for call in (
        lambda: memory.batches.store([run], request_id),
        lambda: memory.batches.end_request(request_id),
    ):
        with pytest.raises(ValueError, match=r"request_id is .*, needed is str"):
            call()
    assert memory.batches.store([run]) == [True]


@pytest.mark.parametrize("begin", ["start_loads", "finish_step"])
def test_a_job_whose_session_ends_before_it_begins_is_not_waited_for(
    memory: Memory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    begin: str,
) -> None:
    """The rank's next mover would be waited for, and never hears of it."""
    memory.batches.options = BatchOptions(store_deadline_s=PATIENCE_S, retry_deadline_s=0.0)
    run = BlockRun(0, 0, keys(3, 1), [0])
    if begin == "start_loads":
        assert memory.batches.store([run]) == [True]
    original = getattr(memory.batches._worker, begin)

    def begin_in_the_next(plan: StepPlan) -> None:
        end_session(memory)
        original(plan)

    monkeypatch.setattr(memory.batches._worker, begin, begin_in_the_next)
    if begin == "start_loads":
        assert memory.batches.load([run]) == [[False]]
    else:
        assert memory.batches.store([run]) == [False]
    assert "in time" not in caplog.text
    assert "have not ended" not in caplog.text


def test_a_load_does_not_go_to_a_session_that_begins_as_it_is_ordered(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be taken for one of the session before, and copy into blocks that are in use."""
    prompt = keys(4, 2)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(2))]) == [True]
    connection = memory.batches._connection
    sent: list[bool] = []
    send = connection.send_step

    def send_in_the_next(step: StepDraft) -> bool:
        if step.loads and not sent:
            end_session(memory)
        is_sent = send(step)
        sent.extend([is_sent] if step.loads else [])
        return is_sent

    monkeypatch.setattr(connection, "send_step", send_in_the_next)
    assert memory.batches.load([BlockRun(0, 0, prompt, range(8, 10))]) == [[False, False]]
    assert sent == [False]


def test_a_daemon_that_is_late_with_a_store_is_asked_whether_it_is_there(
    daemon: DaemonProcess,
) -> None:
    memory = Memory(daemon.socket, store_deadline_s=0.2, retry_deadline_s=0.0)
    memory.batches._connection._silence_s = 600.0  # so that no stall of the machine's ends it
    daemon.freeze()
    try:
        assert memory.batches.store([BlockRun(0, 0, keys(5, 1), [0])]) == [False]
        assert "does not answer" in memory.batches.problem
    finally:
        daemon.thaw()
        memory.close()
