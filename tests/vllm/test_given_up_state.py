"""What vLLM's manager gives up and says as sessions, preemptions and resets come."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

from kvd_client.draft import StepDraft
from kvd_client.integrations.vllm.options import KvdOptions
from kvd_client.integrations.vllm.scheduling.lookups import Prompt
from kvd_client.integrations.vllm.scheduling.manager import KvdManager
from kvd_client.integrations.vllm.scheduling.steps import StepJobs, StepSender
from kvd_client.scheduler.lookup import LookupQueue
from kvd_client.scheduler.request import GivenUp, Knowledge
from tests.vllm.conftest import StartRig
from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.rank_rig import BLOCK_TOKENS, RankRig, cache_config, keys, offloading_config
from tests.waiting import wait_until

BLOCKS = 2
PROMPT = Prompt([keys("kept", BLOCKS)], BLOCKS * BLOCK_TOKENS + 8)


class Managed:
    """A manager at a real daemon that has the prompt's blocks; `now` is its time in seconds."""

    def __init__(self, rig: RankRig, min_load_tokens: int = 0) -> None:
        rig.store("kept", [1, 2])
        self.now = 1000.0
        config = offloading_config(0, 1, caches=cache_config())
        self.manager = KvdManager(
            config, KvdOptions(min_load_tokens=min_load_tokens), lambda: self.now
        )
        self.manager.open(rig.connection)
        assert self.manager.steps is not None
        assert self.manager._queue is not None
        self.steps: StepSender = self.manager.steps
        self.queue: LookupQueue = self.manager._queue
        self.context = ReqContext("r")
        self.manager.on_new_request(self.context)

    def send_step(self) -> None:
        self.manager.send_step(StepJobs(itertools.count(1)))

    def leases(self) -> list[int]:
        return list(self.manager.tracked(self.context).request.lookup.leases)

    def find(self) -> list[int]:
        """Look the prompt up until its blocks are found and leased; the leases."""

        def is_found() -> bool:
            self.send_step()
            found = self.manager.begin_lookup(self.context, PROMPT)
            return found is Knowledge.STATUSES and bool(self.leases())

        wait_until(is_found, "the lookup's answer")
        return self.leases()


@pytest.fixture
def managed(kvd: NodeDaemon, start_rig: StartRig) -> Managed:
    return Managed(start_rig(kvd))


def preempt(manager: KvdManager) -> None:
    manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=["r"]))


@pytest.mark.parametrize("lose", [preempt, KvdManager.reset_cache], ids=["preempted", "reset"])
def test_who_loses_its_place_keeps_no_lease(
    managed: Managed, lose: Callable[[KvdManager], None]
) -> None:
    leases = managed.find()
    lose(managed.manager)
    assert managed.queue.released_leases == leases
    assert managed.steps.draft.preempted == ["r"] * (lose is preempt)
    assert not managed.leases(), "it would be looked up no more"


def test_what_is_released_after_an_arrival_in_a_new_session_is_said(
    managed: Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is that session's own."""
    said: list[int] = []
    connection = managed.manager.connection
    assert connection is not None
    send_step = connection.send_step

    def note(step: StepDraft) -> bool:
        said.extend(step.released_leases)
        return send_step(step)

    monkeypatch.setattr(connection, "send_step", note)
    managed.manager.arrive(managed.context, PROMPT)
    managed.queue.released_leases.append(7)
    managed.send_step()
    assert said == [7]


def test_a_step_that_is_not_sent_renews_no_lease(managed: Managed) -> None:
    managed.find()
    managed.steps.draft.preempted.append("nobody")  # which is sent at once
    managed.send_step()
    renewed_s = managed.queue._renewed_s
    assert renewed_s == managed.now
    managed.now += 0.001
    managed.send_step()
    assert managed.queue._renewed_s == renewed_s


def test_a_prompt_too_short_to_be_looked_up_is_told_with_what_the_device_had(
    kvd: NodeDaemon, start_rig: StartRig
) -> None:
    managed = Managed(start_rig(kvd), min_load_tokens=2 * BLOCK_TOKENS)
    managed.manager.arrive(managed.context, PROMPT)
    later = PROMPT._replace(num_tokens=PROMPT.num_tokens + 1, computed_tokens=BLOCK_TOKENS)
    assert managed.manager.begin_lookup(managed.context, later) is Knowledge.NOTHING
    managed.manager.begin(managed.context, 0)
    (told,) = managed.steps.draft.lookups.told
    assert (told.prompt_tokens, told.device_tokens) == (later.num_tokens, BLOCK_TOKENS)


def test_a_lookup_without_a_session_counts_as_given_up(
    managed: Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed.manager, "enter_session", lambda: None)
    assert managed.manager.begin_lookup(managed.context, PROMPT) is Knowledge.NOTHING
    assert managed.queue.given_up == {GivenUp.NO_SESSION: 1}


def test_a_reset_hands_nothing_off_that_ended_before(managed: Managed) -> None:
    tracked = managed.manager.tracked(managed.context)
    tracked.offered[0][0] = PROMPT.hashes[0][0]
    managed.steps.hand_off(tracked)
    assert managed.manager.has_pending_work()
    managed.manager.reset_cache()
    assert not managed.steps.has_pending_work
