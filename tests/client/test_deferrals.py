"""No request is deferred for ever: each deadline runs from the first deferral to the last."""

from __future__ import annotations

import pytest

from kvd_client import SchedulerOptions
from tests.client.engine_rig import TOKENS, Rig, blocks
from tests.client.fake_daemon import HIT, PENDING, RETRY

STEP_S = 0.3  # slower than a miss stays fresh, as steps of a busy engine are


@pytest.mark.parametrize(("status", "deadline_s"), [(RETRY, 0.1), (PENDING, 2.0)])
def test_slow_steps_do_not_begin_a_deferrals_deadline_anew(status: int, deadline_s: float) -> None:
    rig = Rig()
    [first, *_] = rig.keys("p", 5 * TOKENS)[0]
    rig.daemon.holds([first], status)
    rig.daemon.on_page = {first}  # its tag is there, its lease is not to be had
    rig.arrive("r", 6 * TOKENS)
    began = rig.now
    while rig.ask("r") is None:
        rig.step()
        rig.now += STEP_S
        assert rig.now - began <= deadline_s + 2 * STEP_S, "deferred for ever"


def test_a_deadline_that_was_met_counts_for_nothing_later() -> None:
    rig = Rig()
    [first, *_] = rig.keys("p", 5 * TOKENS)[0]
    rig.daemon.holds([first], RETRY)
    rig.daemon.on_page = {first}
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r") is None
    rig.daemon.holds([first], HIT)
    rig.now += STEP_S
    assert rig.ask("r") == TOKENS
    rig.now += 10.0  # the lease has expired meanwhile
    rig.daemon.holds([first], RETRY)
    assert rig.ask("r") is None


def test_a_preempted_request_does_not_wait_for_ever_for_its_own_store() -> None:
    rig = Rig(options=SchedulerOptions(pending_deadline_s=2.0))
    rig.arrive("r", 3 * TOKENS)
    assert rig.ask("r") == 0
    table = [blocks(0, 3)]
    rig.allocate("r", table)
    plan = rig.step(("r", table, 3 * TOKENS))
    assert plan.stores
    rig.step(preempted=["r"])
    assert rig.ask("r") is None  # what it stores will be the hit
    rig.now += 2.1
    rig.step()
    assert rig.ask("r") == 0


def test_a_hit_does_not_wait_for_ever_for_a_free_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd_client.scheduler.sent_jobs.MAX_JOBS_IN_FLIGHT", 1)
    rig = Rig(options=SchedulerOptions(pending_deadline_s=2.0))
    rig.arrive("w", 3 * TOKENS, prefix="q")
    assert rig.ask("w") == 0
    rig.allocate("w", [blocks(0, 3)])
    [store] = rig.step(("w", [blocks(0, 3)], 3 * TOKENS)).stores
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 4 * TOKENS)
    assert rig.ask("r") is None
    rig.now += 2.1
    rig.step()
    assert rig.ask("r") == 0
    rig.report(store)
    assert rig.ask("r") == 3 * TOKENS
