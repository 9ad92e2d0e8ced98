"""Fences, preemption, ends, resets: no block is lost, none is overwritten too early."""

from __future__ import annotations

import pytest

from kvd_client import SchedulerOptions, StoreMode
from tests.client.engine_rig import FULL, TOKENS, WIDE, Rig, blocks


def storing_rig() -> tuple[Rig, int]:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS)
    rig.allocate("r", [blocks(0, 4)])
    [job] = rig.step(("r", [blocks(0, 4)], 3 * TOKENS)).stores
    return rig, job


def test_a_preempted_requests_stores_are_flushed() -> None:
    rig, job = storing_rig()
    plan = rig.step(preempted=["r"])
    assert plan.flush == (job,)
    assert rig.daemon.last_step.preempted == ["r"]


def test_a_preempted_request_waits_for_its_stores_and_then_finds_them() -> None:
    rig, job = storing_rig()
    rig.step(preempted=["r"])
    assert rig.ask("r") is None
    rig.holds("p", 3 * TOKENS)
    rig.report(job)
    assert rig.ask("r") == 3 * TOKENS


def test_a_preempted_request_stores_again_what_was_not_stored() -> None:
    rig, job = storing_rig()
    rig.step(preempted=["r"])
    rig.report(job, done=False)
    assert rig.ask("r") == 0
    rig.allocate("r", [blocks(20, 4)])
    rig.step(("r", [blocks(20, 4)], 2 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 4 * TOKENS)[0][:2]


def test_a_loading_request_cannot_be_preempted() -> None:
    rig = Rig()
    rig.begin_load(4)
    with pytest.raises(ValueError, match="loading"):
        rig.step(preempted=["r"])


def test_reallocated_blocks_wait_for_the_stores_that_read_them() -> None:
    rig, job = storing_rig()
    assert not rig.scheduler.request_finished("r", [blocks(0, 4)])
    rig.arrive("s", 4 * TOKENS, prefix="q")
    rig.ask("s")
    rig.allocate("s", [[9, 2]])
    assert rig.step(("s", [[9, 2]], TOKENS)).flush == (job,)


def test_every_store_that_reads_a_reallocated_block_is_flushed() -> None:
    rig = Rig(FULL, WIDE)
    rig.arrive("r", 8 * TOKENS)
    tables = [blocks(0, 8), blocks(20, 8)]
    first = rig.step(("r", tables, 4 * TOKENS)).stores
    second = rig.step(("r", tables, 8 * TOKENS)).stores
    rig.scheduler.request_finished("r", tables)
    rig.arrive("s", 4 * TOKENS, prefix="q")
    # One group's new block belongs to the first job, the other's to the second.
    rig.allocate("s", [[1], [26]])
    assert sorted(rig.step().flush) == sorted(first + second)


def test_an_allocation_that_loads_nothing_is_fenced_and_loads_nothing() -> None:
    rig, job = storing_rig()
    rig.holds("q", 2 * TOKENS)
    rig.arrive("s", 4 * TOKENS, prefix="q")
    assert rig.ask("s") == 2 * TOKENS
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    # The engine takes the tokens from elsewhere.
    rig.allocate("s", [[2, 8, 9]], 0)
    plan = rig.step()
    assert (plan.flush, plan.loads) == ((job,), ())
    assert rig.daemon.last_step.released_leases == [101]


def test_blocks_that_grow_into_a_running_request_are_fenced() -> None:
    rig, job = storing_rig()
    rig.arrive("s", 4 * TOKENS, prefix="q")
    rig.allocate("s", [[9]])
    rig.step(("s", [[9]], 5))
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    assert rig.step(("s", [[9, 1]], TOKENS + 3)).flush == (job,)


def test_the_devices_own_prefix_is_not_fenced() -> None:
    rig, _ = storing_rig()
    rig.arrive("s", 4 * TOKENS)
    rig.ask("s", computed=2 * TOKENS)
    rig.allocate("s", [[0, 1, 8, 9]])
    assert rig.step(("s", [[0, 1, 8, 9]], 2 * TOKENS + 3)).flush == ()


def test_loads_are_never_flushed() -> None:
    rig = Rig()
    rig.begin_load(4)
    rig.arrive("s", 4 * TOKENS, prefix="q")
    rig.allocate("s", [blocks(0, 4)])
    assert rig.step().flush == ()


def test_a_finished_job_is_fenced_no_more() -> None:
    rig, job = storing_rig()
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    rig.report(job)
    rig.arrive("s", 4 * TOKENS, prefix="q")
    rig.allocate("s", [[2]])
    assert rig.step().flush == ()


def test_a_store_that_ends_before_the_step_is_not_flushed_by_it() -> None:
    rig, job = storing_rig()
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    rig.arrive("s", 4 * TOKENS, prefix="q")
    rig.allocate("s", [[2]])
    rig.report(job)
    assert rig.step().flush == ()


def test_blocks_without_room_are_stored_at_the_requests_end() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    rig.daemon.rooms[0] = 0
    rig.step(("r", [blocks(0, 3)], 3 * TOKENS))
    rig.daemon.rooms[0] = 10
    rig.scheduler.request_finished("r", [blocks(0, 3)])
    assert rig.scheduler.has_pending_work()
    plan = rig.step()
    assert rig.stored_hashes() == rig.keys("p", 3 * TOKENS)[0]
    assert len(plan.computed_stores) == 1
    assert rig.daemon.last_step.finished == ["r"]


def test_final_stores_are_flushed_when_their_blocks_go_to_another_at_once() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    rig.daemon.rooms[0] = 0
    rig.step(("r", [blocks(0, 3)], 3 * TOKENS))
    rig.daemon.rooms[0] = 10
    rig.scheduler.request_finished("r", [blocks(0, 3)])
    rig.arrive("s", 3 * TOKENS, prefix="q")
    rig.allocate("s", [blocks(1, 3)])
    rig.arrive("t", TOKENS, prefix="t")
    rig.allocate("t", [[9]])
    plan = rig.step(("s", [blocks(1, 3)], 5), ("t", [[9]], TOKENS))
    assert plan.flush == plan.computed_stores
    said = [job.job_id for job in rig.daemon.last_step.stores if job.ready_together == 1]
    assert (tuple(said), len(plan.stores)) == (plan.computed_stores, 1)


def test_the_engine_keeps_stepping_until_the_last_job_is_reported() -> None:
    rig, job = storing_rig()
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    assert rig.scheduler.has_pending_work()
    rig.step()
    assert rig.scheduler.has_pending_work()
    rig.report(job)
    assert not rig.scheduler.has_pending_work(), "nothing is left to be said"


def test_a_requests_end_is_told_once_in_the_step_of_its_last_stores() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    rig.daemon.rooms[0] = 0
    rig.step(("r", [blocks(0, 3)], 3 * TOKENS))
    assert rig.daemon.last_step.finished == []
    rig.daemon.rooms[0] = 10
    rig.scheduler.request_finished("r", [blocks(0, 3)])
    [job] = rig.step().computed_stores
    assert (rig.daemon.last_step.finished, len(rig.daemon.last_step.stores)) == (["r"], 1)
    rig.report(job)
    rig.step()
    assert rig.daemon.last_step.finished == []


def test_an_idle_engine_takes_empty_steps_until_a_store_has_ended() -> None:
    rig, job = storing_rig()
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    for _ in range(5):
        assert rig.scheduler.has_pending_work()
        plan = rig.step()
        assert (plan.flush, plan.stores) == ((), ())  # nobody is held up for it
    rig.report(job)
    assert not rig.scheduler.has_pending_work()


def test_taking_events_only_drains() -> None:
    rig, job = storing_rig()
    rig.report(job)
    sent, asked = len(rig.daemon.steps), len(rig.daemon.lookups)
    assert len(rig.scheduler.take_events()) == 1
    assert rig.scheduler.take_events() == []
    assert (len(rig.daemon.steps), len(rig.daemon.lookups)) == (sent, asked)
    assert rig.daemon.blocking_calls == 0


def test_an_absent_daemon_leaves_no_pending_work() -> None:
    rig = Rig()
    rig.daemon.is_there = False
    rig.arrive("r", 3 * TOKENS)
    assert rig.step(("r", [blocks(0, 3)], 3 * TOKENS)).is_empty
    rig.scheduler.request_finished("r", [blocks(0, 3)])
    rig.step()
    assert not rig.scheduler.has_pending_work()


def test_a_request_aborted_while_loading_keeps_its_blocks_until_the_outcome() -> None:
    rig = Rig()
    job = rig.begin_load(4)
    assert rig.scheduler.request_finished("r", [blocks(0, 4)])
    assert rig.report(job).finished_loads == ("r",)


def test_a_request_aborted_before_it_hears_that_its_load_is_lost_keeps_its_blocks_until_then() -> (
    None
):
    rig = Rig()
    rig.begin_load(4)
    rig.daemon.restart()
    rig.arrive("s", 4 * TOKENS, prefix="q")  # there is another session: the load is lost
    assert rig.scheduler.request_finished("r", [blocks(0, 4)])
    rig.step()
    assert rig.report().failed_loads == ("r",)
    assert rig.report().failed_loads == ()


def test_finishing_an_unknown_request_does_nothing() -> None:
    rig = Rig()
    assert not rig.scheduler.request_finished("nobody", [[]])
    assert not rig.scheduler.has_pending_work()


def test_an_id_that_comes_again_is_looked_up_once_its_former_end_has_left() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    for _ in range(2):
        rig.arrive("r", 4 * TOKENS)  # the second time it begins anew
    assert rig.ask("r") is None
    assert len(rig.daemon.lookups) == 1
    rig.step()
    assert rig.daemon.last_step.finished == ["r"]
    assert rig.ask("r") == 3 * TOKENS
    rig.step()
    assert rig.daemon.last_step.finished == []


def test_an_id_that_comes_again_is_answered_once_its_former_load_has_ended() -> None:
    rig = Rig(options=SchedulerOptions(share_loads=False))
    former = rig.begin_load(4)
    assert rig.scheduler.request_finished("r", [blocks(0, 4)])
    rig.arrive("r", 4 * TOKENS)
    rig.step()
    assert rig.ask("r") is None, "an outcome that names it could mean either load"
    assert rig.report(former).finished_loads == ("r",)
    assert rig.ask("r") == 3 * TOKENS
    rig.allocate("r", [blocks(10, 4)], 3 * TOKENS)
    [job] = rig.step().loads
    assert rig.report(job).finished_loads == ("r",)


@pytest.mark.parametrize("mode", StoreMode)
def test_an_id_that_comes_again_for_another_account_has_each_store_its_own(mode: StoreMode) -> None:
    rig = Rig(options=SchedulerOptions(store_mode=mode))
    rig.daemon.rooms[0] = 0
    rig.arrive("r", TOKENS, prefix="p", account="one")
    rig.step(("r", [[1]], TOKENS))
    rig.scheduler.request_finished("r", [[1]])
    rig.daemon.rooms.clear()
    rig.arrive("r", TOKENS, prefix="q", account="two", skip_lookup=True)
    rig.step(("r", [[2]], TOKENS), near_eviction=[(0, 1), (0, 2)])
    stores = rig.daemon.last_step.stores
    assert {job.context.account: [*job.runs[0].block_hashes] for job in stores} == {
        "one": rig.keys("p", TOKENS)[0],
        "two": rig.keys("q", TOKENS)[0],
    }


def test_an_id_that_comes_again_and_skips_the_lookup_waits_for_nothing() -> None:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS)
    rig.scheduler.request_finished("r", [[]])
    rig.arrive("r", 4 * TOKENS, skip_lookup=True)
    assert rig.ask("r") == 0


def test_a_finished_request_gives_its_lookup_up() -> None:
    rig = Rig()
    rig.daemon.answers_at_once = False
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 4 * TOKENS)
    rig.scheduler.request_finished("r", [[]])
    assert rig.daemon.given_up == [1]


def test_reset_flushes_what_is_in_flight_and_ignores_its_end() -> None:
    rig, job = storing_rig()
    rig.scheduler.reset_cache()
    assert rig.daemon.resets == 1
    assert rig.step().flush == (job,)
    assert rig.report(job).stored == ()
    assert rig.scheduler.take_events() == []


def test_after_a_reset_the_engine_steps_until_the_flushed_jobs_are_reported() -> None:
    rig, job = storing_rig()
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    rig.scheduler.reset_cache()
    rig.step()
    assert rig.scheduler.has_pending_work()
    rig.report(job)
    rig.step()
    assert not rig.scheduler.has_pending_work()


def test_after_a_reset_a_new_request_stores_the_same_blocks_anew() -> None:
    rig, _ = storing_rig()
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    rig.scheduler.reset_cache()
    rig.arrive("s", 3 * TOKENS)
    rig.allocate("s", [blocks(50, 3)])
    rig.step(("s", [blocks(50, 3)], 3 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 3 * TOKENS)[0]


def test_after_a_reset_a_live_request_stores_nothing_until_computed_anew() -> None:
    rig, job = storing_rig()
    rig.scheduler.reset_cache()
    rig.report(job)
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    assert rig.stored_hashes() == []
    rig.step(preempted=["r"])
    rig.allocate("r", [blocks(20, 4)])
    rig.step(("r", [blocks(20, 4)], 2 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 4 * TOKENS)[0][:2]


def test_a_load_in_flight_at_a_reset_fails_once_it_has_ended() -> None:
    rig = Rig()
    job = rig.begin_load(4)
    rig.scheduler.reset_cache()
    assert job not in rig.step().flush
    assert rig.report(job).failed_loads == ("r",)


def test_a_daemon_that_goes_while_stores_run_is_survived() -> None:
    rig, job = storing_rig()
    rig.daemon.is_there = False
    assert rig.step(("r", [blocks(0, 4)], 4 * TOKENS)).is_empty
    rig.report(job, done=False)
    rig.daemon.is_there = True
    rig.daemon.restart()
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 4 * TOKENS)[0][3:]


def test_drafts_that_counted_as_computed_are_no_tokens_of_a_request_that_begins_again() -> None:
    """A third block of them would have had a hash."""
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    asker = rig.scheduler._requests["r"]
    for computed, sure in ((3 * TOKENS - 1, 3 * TOKENS - 1), (3 * TOKENS + 5, 3 * TOKENS - 1)):
        asker.num_tokens = 2 * TOKENS
        asker.computed_after, asker.known_hashes = computed, (2,)
        asker.begin_again([TOKENS])
        assert asker.num_tokens == sure
