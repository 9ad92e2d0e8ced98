"""What a step says of ended requests: with orders at once, else with others, and bounded."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd_client.draft import StepDraft
from kvd_client.integrations.vllm.scheduling.steps import (
    MAX_FINISHED,
    MAX_WAITING_ENDS,
    StepJobs,
    StepSender,
)
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.session import Connection, SessionView


class Sent:
    """A connection that keeps the steps that it was given."""

    world_size = 1

    def __init__(self) -> None:
        self.steps: list[StepDraft] = []

    def send_step(self, step: StepDraft) -> bool:
        self.steps.append(step)
        return True


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
