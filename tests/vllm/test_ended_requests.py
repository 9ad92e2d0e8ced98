"""What a step says: orders at once, ends with others and bounded, and what no session can use."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.kv_offload.base import ReqContext

from kvd_client.draft import BlockRun, StepDraft
from kvd_client.integrations.vllm.scheduling.requests import TrackedRequest, track
from kvd_client.integrations.vllm.scheduling.steps import (
    MAX_FINISHED,
    MAX_WAITING_ENDS,
    StepJobs,
    StepSender,
)
from kvd_client.scheduler.hand_offs import HandOffQueue
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.session import Connection, SessionView
from tests.client.interrupts import interrupted


class Sent:
    """A connection that keeps the steps that it was given."""

    world_size = 1

    def __init__(self) -> None:
        self.steps: list[StepDraft] = []
        self.is_lost = False

    def send_step(self, step: StepDraft) -> bool:
        self.steps.append(step)
        return not self.is_lost


BLOCK = b"b" * 32
SESSION = cast(SessionView, SimpleNamespace(lease_ttl_s=2.0, generation=1))


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def sender(sent: Sent) -> StepSender:
    """One that has just sent a step, so that the leases' renewal is not due."""
    sender = StepSender(cast(Connection, sent), SchedulerOptions(), lambda: 0.0)
    sender.sent_s = 0.0
    return sender


def send(sender: StepSender, session: Any = SESSION) -> None:
    sender.send(StepJobs(itertools.count(1)), session)


def test_so_many_ends_wait_for_a_step_and_one_more_sends_them(
    sender: StepSender, sent: Sent
) -> None:
    sender.draft.finished += [f"r{n}" for n in range(MAX_WAITING_ENDS - 1)]
    send(sender)
    assert sent.steps == []
    sender.draft.finished.append("last")
    send(sender)
    (step,) = sent.steps
    assert len(step.finished) == MAX_WAITING_ENDS
    assert sender.draft.finished == []


def test_of_requests_that_ended_without_a_session_the_youngest_are_remembered(
    sender: StepSender, sent: Sent
) -> None:
    sender.draft.finished += [f"r{n}" for n in range(MAX_FINISHED + 1)]
    send(sender, session=None)
    assert sent.steps == []
    assert len(sender.draft.finished) == MAX_FINISHED
    assert sender.draft.finished[0] == "r1"


def handed_off() -> TrackedRequest:
    """A request that has ended here, and goes on elsewhere with one block."""
    params = {"do_remote_decode": True}
    tracked = track(ReqContext("r", kv_transfer_params=params), 1, "")
    tracked.offered[0][0] = BLOCK
    return tracked


@pytest.mark.parametrize("said", ["preempted", "released_leases"])
def test_what_frees_memory_is_said_at_once(sender: StepSender, sent: Sent, said: str) -> None:
    getattr(sender.draft, said).append("r" if said == "preempted" else 7)
    send(sender)
    assert len(sent.steps) == 1


def test_a_hand_off_is_said_at_once_and_the_engine_steps_for_it(
    sender: StepSender, sent: Sent
) -> None:
    sender.hand_off(handed_off())
    assert sender.has_pending_work
    send(sender)
    (step,) = sent.steps
    assert [run.block_hashes for draft in step.hand_offs for run in draft.runs] == [[BLOCK]]
    assert not sender.has_pending_work


@pytest.mark.parametrize(
    ("owner", "name"), [(HandOffQueue, "put_into"), (Sent, "send_step")], ids=["made", "sent"]
)
def test_what_an_interrupted_step_was_to_hand_off_goes_with_the_next(
    sender: StepSender, sent: Sent, owner: type, name: str
) -> None:
    sender.hand_off(handed_off())
    with interrupted(owner, name, after=True):
        send(sender)
    assert sender.has_pending_work
    send(sender)
    said = list(sent.steps)
    assert [run.block_hashes for each in said[-1].hand_offs for run in each.runs] == [[BLOCK]]
    send(sender)
    assert sent.steps == said


def test_an_interrupted_hand_off_is_not_kept_without_a_session(
    sender: StepSender, sent: Sent
) -> None:
    sender.hand_off(handed_off())
    with interrupted(HandOffQueue, "put_into", after=True):
        send(sender)
    send(sender, session=None)
    send(sender)
    assert not any(step.hand_offs for step in sent.steps)


def test_without_a_session_nothing_gathers_that_none_can_use(
    sender: StepSender, sent: Sent
) -> None:
    tracked = handed_off()
    sender.hand_off(tracked)
    sender.draft.touches.append((tracked.request.context, BlockRun(0, 0, [BLOCK])))
    sender.draft.preempted.append("r")
    send(sender, session=None)
    assert not sender.has_pending_work
    assert not sender.draft.touches
    assert not sender.draft.preempted


def test_a_reset_hands_nothing_off(sender: StepSender, sent: Sent) -> None:
    sender.hand_off(handed_off())
    sender.clear()
    send(sender)
    assert sent.steps == []


def test_what_was_found_is_told_to_the_next_session_where_one_was_lost(
    sender: StepSender, sent: Sent
) -> None:
    sent.is_lost = True
    sender.draft.lookups.requests = 1
    sender.draft.preempted.append("r")
    send(sender)
    assert sender.draft.lookups.requests == 1


def test_another_session_takes_stores_at_once(sender: StepSender) -> None:
    sender.pause.note(gave_up=True, done=False)
    assert sender.pause.is_on
    sender.enter(1)
    assert not sender.pause.is_on
