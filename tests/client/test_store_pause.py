"""After stores that were given up none are sent for a while: each would be waited for in vain."""

from __future__ import annotations

from kvd_client import JobReport, StepPlan, WorkerReport
from kvd_client.scheduler.store_pause import FIRST_PAUSE_S, MAX_PAUSE_S, StorePause
from tests.client.engine_rig import TOKENS, Rig, blocks


def store(rig: Rig, request_id: str) -> StepPlan:
    """A request computes two blocks."""
    rig.arrive(request_id, 2 * TOKENS, prefix=request_id)
    assert rig.ask(request_id) == 0
    rig.allocate(request_id, [blocks(0, 2)])
    return rig.step((request_id, [blocks(0, 2)], 2 * TOKENS))


def give_up(rig: Rig, plan: StepPlan) -> None:
    ended = tuple(JobReport(job_id, done=False, given_up=True) for job_id in plan.stores)
    rig.scheduler.update_from_workers([WorkerReport(0, ended)])


def test_after_stores_that_were_given_up_none_are_sent_for_a_while() -> None:
    rig = Rig()
    plan = store(rig, "a")
    assert plan.stores
    give_up(rig, plan)
    assert not store(rig, "b").stores
    rig.now += FIRST_PAUSE_S
    assert store(rig, "c").stores


def test_a_store_that_only_failed_holds_back_no_other() -> None:
    rig = Rig()
    rig.report(*store(rig, "a").stores, done=False)
    assert store(rig, "b").stores


def test_another_session_takes_stores_at_once() -> None:
    rig = Rig()
    give_up(rig, store(rig, "a"))
    rig.daemon.restart()
    assert store(rig, "b").stores


def test_loads_go_on_meanwhile() -> None:
    rig = Rig()
    give_up(rig, store(rig, "a"))
    assert rig.begin_load(4)


def test_the_pause_is_twice_as_long_each_time_until_a_store_ends_well() -> None:
    now = 0.0
    pause = StorePause(lambda: now)

    def measure() -> float:
        nonlocal now
        began = now
        pause.note(gave_up=True, done=False)
        pause.note(gave_up=True, done=False)  # another rank says the same
        while pause.is_on:
            now += FIRST_PAUSE_S / 2
        return now - began

    lengths = [measure() for _ in range(7)]
    assert lengths == [2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    pause.note(gave_up=False, done=True)
    assert measure() == FIRST_PAUSE_S
