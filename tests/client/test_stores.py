"""Stores: what is offered, when, and what must not be."""

from __future__ import annotations

import pytest

from kvd_client import (
    NULL_BLOCK,
    JobReport,
    ScheduledRequest,
    SchedulerOptions,
    StepOutcome,
    StoreMode,
    WorkerReport,
)
from kvd_client.scheduler.doubts import WAIT_S
from kvd_client.scheduler.request import FAILURES
from tests.client.engine_rig import FULL, SLIDING, TOKENS, WIDE, Rig, blocks
from tests.client.fake_daemon import ADMITTED

REMOTE = {"do_remote_decode": True}


def test_stores_follow_computed_blocks() -> None:
    rig = Rig()
    rig.arrive("r", 6 * TOKENS)
    keys = rig.keys("p", 6 * TOKENS)[0]
    table = [blocks(0, 6)]
    rig.allocate("r", table)
    rig.step(("r", table, 2 * TOKENS + 5))
    assert rig.stored_hashes() == keys[:2]
    rig.step(("r", table, 2 * TOKENS + 15))
    assert rig.stored_hashes() == []
    rig.step(("r", table, 6 * TOKENS))
    assert rig.stored_hashes() == keys[2:]


def test_a_step_is_one_message_even_when_empty() -> None:
    rig = Rig()
    for _ in range(3):
        rig.step()
    assert len(rig.daemon.steps) == 3
    assert rig.daemon.last_step.to_proto(7).end_step


def test_what_was_loaded_is_not_stored() -> None:
    rig = Rig()
    job = rig.begin_load(5)
    rig.report(job)
    rig.daemon.statuses.clear()  # even if it is evicted meanwhile
    rig.step(("r", [blocks(0, 5)], 5 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 5 * TOKENS)[0][3:]


def test_what_is_ready_is_touched_and_not_stored() -> None:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS)
    keys = rig.keys("p", 4 * TOKENS)[0]
    rig.daemon.holds(keys[:2])
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    assert rig.stored_hashes() == keys[2:]
    [(_, run)] = rig.daemon.last_step.touches
    assert run.block_hashes == keys[:2]
    [store] = rig.daemon.last_step.stores
    assert store.runs[0].first_block == 2


def test_what_is_in_flight_is_not_stored_again() -> None:
    rig = Rig()
    for name, first in (("r", 0), ("s", 50)):
        rig.arrive(name, 3 * TOKENS)
        rig.step((name, [blocks(first, 3)], 3 * TOKENS))
    assert rig.stored_hashes() == []


def test_a_device_block_in_flight_is_not_offered_twice() -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS, prefix="a")
    rig.arrive("s", 2 * TOKENS, prefix="b")
    rig.step(("r", [blocks(0, 2)], 2 * TOKENS))
    rig.scheduler.get_num_new_matched_tokens("s", 2 * TOKENS - 1)
    rig.step(("s", [blocks(0, 2)], 2 * TOKENS))
    assert rig.stored_hashes() == []


def test_no_room_means_ask_later() -> None:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS)
    keys = rig.keys("p", 4 * TOKENS)[0]
    table = [blocks(0, 4)]
    rig.daemon.rooms[0] = 0
    rig.step(("r", table, 2 * TOKENS))
    assert rig.stored_hashes() == []
    rig.daemon.rooms[0] = 3
    rig.step(("r", table, 4 * TOKENS))
    assert rig.stored_hashes() == keys[:3]
    rig.step(("r", table, 4 * TOKENS))
    assert rig.stored_hashes() == keys[3:]


def test_filtered_blocks_never_become_a_job() -> None:
    rig = Rig(store_threshold=2)
    keys = rig.keys("p", 4 * TOKENS)[0]
    rig.daemon.holds(keys[1:2], ADMITTED)
    rig.arrive("r", 4 * TOKENS)
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    assert rig.stored_hashes() == keys[1:2]


def test_a_refused_store_is_harmless() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    table = [blocks(0, 3)]
    [job] = rig.step(("r", table, 2 * TOKENS)).stores
    outcome = rig.report(job, done=False)
    assert outcome == StepOutcome()
    rig.step(("r", table, 3 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 3 * TOKENS)[0][2:]


def test_what_a_failed_store_had_is_offered_again_after_a_while() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    keys = rig.keys("p", 3 * TOKENS)[0]
    table = [blocks(0, 3)]
    [first] = rig.step(("r", table, 2 * TOKENS)).stores
    rig.report(first, done=False)
    [second] = rig.step(("r", table, 3 * TOKENS)).stores
    rig.report(second)
    rig.daemon.on_page = {keys[2]}
    rig.now += 2 * WAIT_S
    rig.step(("r", table, 3 * TOKENS))
    assert rig.stored_hashes() == keys[:2]


def test_what_fails_every_time_is_offered_a_few_times() -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    offers = 0
    for _ in range(2 * FAILURES):
        plan = rig.step(("r", [blocks(0, 2)], 2 * TOKENS))
        offers += len(plan.stores)
        rig.report(*plan.stores, done=False)
        rig.step(("r", [blocks(0, 2)], 2 * TOKENS))
        rig.now += 2 * WAIT_S
    assert offers == FAILURES


def test_what_a_lost_session_was_storing_is_offered_to_the_next() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    running = ("r", [blocks(0, 3)], 3 * TOKENS)
    rig.step(running)
    rig.daemon.restart()
    rig.step(running)
    rig.now += 2 * WAIT_S
    rig.step(running)
    assert rig.stored_hashes() == rig.keys("p", 3 * TOKENS)[0]


def test_what_an_ended_request_failed_to_store_is_let_be() -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    [job] = rig.step(("r", [blocks(0, 2)], 2 * TOKENS)).stores
    rig.scheduler.request_finished("r", [blocks(0, 2)])
    rig.report(job, done=False)
    rig.step()
    rig.now += 2 * WAIT_S
    rig.step()
    assert rig.stored_hashes() == []


def test_stored_keys_come_out_once_every_rank_has_stored() -> None:
    rig = Rig(world_size=2)
    rig.arrive("r", 2 * TOKENS)
    [job] = rig.step(("r", [blocks(0, 2)], 2 * TOKENS)).stores
    assert rig.report(job, ranks=[0]).stored == ()
    assert rig.scheduler.take_events() == []
    [stored] = rig.report(job, ranks=[1]).stored
    assert list(stored.block_hashes) == rig.keys("p", 2 * TOKENS)[0]
    assert rig.scheduler.take_events() == [stored]
    assert rig.scheduler.take_events() == []


def test_a_block_of_many_engine_blocks_is_stored_whole() -> None:
    rig = Rig(WIDE)
    rig.arrive("r", 8 * TOKENS)
    table = [blocks(10, 8)]
    rig.step(("r", table, 7 * TOKENS))
    [run] = rig.daemon.last_step.stores[0].runs
    assert run.engine_blocks == blocks(10, 4)


def test_a_block_with_a_null_engine_block_is_not_stored() -> None:
    rig = Rig(SLIDING, options=SchedulerOptions(null_block=0))
    rig.arrive("r", 5 * TOKENS)
    rig.step(("r", [[0, NULL_BLOCK, 7, 8, 9]], 5 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 5 * TOKENS)[0][2:]


def test_max_store_tokens_and_prompt_only_clamp() -> None:
    rig = Rig(options=SchedulerOptions(prompt_only=True))
    rig.arrive("r", 4 * TOKENS, max_store_tokens=2 * TOKENS)
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    assert len(rig.stored_hashes()) == 2
    rig.arrive("s", 2 * TOKENS, prefix="q")
    generated = ScheduledRequest("s", [blocks(10, 6)], 6 * TOKENS, rig.keys("q", 6 * TOKENS))
    rig.scheduler.build_step([generated])
    assert rig.stored_hashes() == rig.keys("q", 2 * TOKENS)[0]


def test_prompt_only_stores_no_generated_token_after_a_preemption_either() -> None:
    rig = Rig(options=SchedulerOptions(prompt_only=True))
    rig.arrive("r", 2 * TOKENS)
    keys = rig.keys("p", 5 * TOKENS)
    rig.scheduler.build_step([ScheduledRequest("r", [blocks(0, 5)], 5 * TOKENS, keys)])
    rig.report(*[job.job_id for job in rig.daemon.last_step.stores])
    rig.step(preempted=["r"])
    assert rig.ask("r") == 0
    again = [blocks(10, 5)]
    rig.allocate("r", again)
    rig.scheduler.build_step([ScheduledRequest("r", again, 5 * TOKENS, keys)])
    assert rig.stored_hashes() == keys[0][:2]
    rig.scheduler.request_finished("r", again, 5 * TOKENS)
    rig.step()
    assert rig.daemon.last_step.stores == []


def test_hashes_that_come_late_are_stored_late() -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    keys = rig.keys("p", 3 * TOKENS)
    table = [blocks(0, 3)]
    rig.step(("r", table, 3 * TOKENS))
    assert rig.stored_hashes() == keys[0][:2]
    rig.scheduler.build_step([ScheduledRequest("r", table, 3 * TOKENS + 1, keys)])
    assert rig.stored_hashes() == keys[0][2:]


# -- prefill/decode disaggregation ------------------------------------------------------------


def test_a_request_level_request_stores_also_what_it_loaded() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS, kv_transfer_params=REMOTE)
    assert rig.ask("r") == 3 * TOKENS
    rig.allocate("r", [blocks(0, 5)], 3 * TOKENS)
    [job] = rig.step().loads
    rig.report(job)
    rig.step(("r", [blocks(0, 5)], 5 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 5 * TOKENS)[0]
    assert rig.daemon.last_step.stores[0].request_level


def test_a_request_level_request_follows_what_others_store() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    rig.step(("r", [blocks(0, 3)], 3 * TOKENS))
    rig.arrive("s", 3 * TOKENS, kv_transfer_params=REMOTE)
    rig.daemon.rooms[0] = 0
    rig.step(("s", [blocks(50, 3)], 3 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 3 * TOKENS)[0]


def test_a_failed_request_level_store_is_tried_again() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS, kv_transfer_params=REMOTE)
    table = [blocks(0, 3)]
    [job] = rig.step(("r", table, 2 * TOKENS)).stores
    rig.report(job, done=False)
    rig.step(("r", table, 3 * TOKENS))
    assert rig.stored_hashes() == rig.keys("p", 3 * TOKENS)[0]


# -- lazy -------------------------------------------------------------------------------------

LAZY = SchedulerOptions(store_mode=StoreMode.LAZY)


def test_lazy_stores_only_what_is_about_to_be_evicted() -> None:
    rig = Rig(options=LAZY)
    rig.arrive("r", 4 * TOKENS)
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    assert rig.stored_hashes() == []
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    plan = rig.step(near_eviction=[(0, 1), (0, 2), (0, 99)])
    assert rig.stored_hashes() == rig.keys("p", 4 * TOKENS)[0][1:3]
    assert len(plan.computed_stores) == 1


def test_lazy_does_not_store_what_was_overwritten() -> None:
    rig = Rig(options=LAZY)
    rig.arrive("r", 2 * TOKENS, prefix="a")
    rig.step(("r", [blocks(0, 2)], 2 * TOKENS))
    rig.scheduler.request_finished("r", [blocks(0, 2)])
    rig.arrive("s", 2 * TOKENS, prefix="b")
    rig.allocate("s", [[1]])
    rig.step(near_eviction=[(0, 0), (0, 1)])
    assert rig.stored_hashes() == rig.keys("a", 2 * TOKENS)[0][:1]


def test_lazy_stores_a_near_block_once_and_goes_on_to_the_next() -> None:
    rig = Rig(options=LAZY)
    rig.arrive("r", 100 * TOKENS)
    rig.step(("r", [blocks(0, 100)], 100 * TOKENS))
    rig.scheduler.request_finished("r", [blocks(0, 100)])
    keys = rig.keys("p", 100 * TOKENS)[0]
    near = [(0, block) for block in range(100)]
    rig.step(near_eviction=near)
    assert rig.stored_hashes() == keys[:64]
    rig.daemon.holds(keys[:64])
    rig.step(near_eviction=near)
    assert rig.stored_hashes() == keys[64:]
    assert rig.daemon.last_step.touches == []


def test_lazy_stores_a_block_again_that_was_used_and_is_near_once_more() -> None:
    rig = Rig(options=LAZY)
    rig.arrive("r", 2 * TOKENS)
    rig.step(("r", [blocks(0, 2)], 2 * TOKENS))
    rig.report(*rig.step(near_eviction=[(0, 0)]).computed_stores)
    rig.step(near_eviction=[(0, 0)])
    assert rig.stored_hashes() == []
    rig.step()
    rig.step(near_eviction=[(0, 0)])  # and the daemon has it no more
    assert rig.stored_hashes() == rig.keys("p", 2 * TOKENS)[0][:1]


def test_lazy_keeps_a_block_without_room_for_later() -> None:
    rig = Rig(options=LAZY)
    rig.arrive("r", 2 * TOKENS)
    rig.step(("r", [blocks(0, 2)], 2 * TOKENS))
    rig.daemon.rooms[0] = 0
    rig.step(near_eviction=[(0, 0)])
    assert rig.stored_hashes() == []
    rig.daemon.rooms[0] = 10
    rig.step(near_eviction=[(0, 0)])
    assert rig.stored_hashes() == rig.keys("p", 2 * TOKENS)[0][:1]


def test_lazy_keeps_no_engine_stepping_for_blocks_that_lie_on_the_device() -> None:
    rig = Rig(options=LAZY)
    rig.arrive("r", 2 * TOKENS)
    rig.step(("r", [blocks(0, 2)], 2 * TOKENS))
    rig.scheduler.request_finished("r", [blocks(0, 2)])
    rig.step()
    assert not rig.scheduler.has_pending_work()


def test_lazy_flushes_what_it_stores_of_a_block_that_is_given_away_next() -> None:
    rig = Rig(options=LAZY)
    rig.arrive("r", 2 * TOKENS)
    rig.step(("r", [blocks(0, 2)], 2 * TOKENS))
    rig.scheduler.request_finished("r", [blocks(0, 2)])
    [job] = rig.step(near_eviction=[(0, 0)]).computed_stores
    rig.arrive("s", 2 * TOKENS, prefix="b")
    rig.allocate("s", [[0]])
    assert rig.step().flush == (job,)


def test_lazy_forgets_a_wide_block_when_one_of_its_parts_is_overwritten() -> None:
    rig = Rig(WIDE, options=LAZY)
    rig.arrive("r", 4 * TOKENS, prefix="a")
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    rig.scheduler.request_finished("r", [blocks(0, 4)])
    rig.arrive("s", 4 * TOKENS, prefix="b")
    rig.allocate("s", [[2]])
    rig.step(near_eviction=[(0, 0), (0, 1)])
    assert rig.stored_hashes() == []


def test_a_request_level_request_stores_at_once_in_lazy_mode() -> None:
    rig = Rig(options=LAZY)
    rig.arrive("r", 2 * TOKENS, kv_transfer_params=REMOTE)
    rig.step(("r", [blocks(0, 2)], 2 * TOKENS))
    assert len(rig.stored_hashes()) == 2


def test_eager_stores_in_the_step_that_computes_a_block_and_not_before() -> None:
    rig = Rig()
    rig.arrive("r", 3 * TOKENS)
    table = [blocks(0, 3)]
    rig.allocate("r", table)
    assert rig.step().stores == ()
    plan = rig.step(("r", table, 2 * TOKENS - 1))
    assert (len(plan.stores), rig.stored_hashes()) == (1, rig.keys("p", TOKENS)[0])
    assert plan.computed_stores == ()


def test_a_device_block_is_offered_again_once_its_copy_has_ended() -> None:
    rig = Rig()
    for name, prefix in (("r", "a"), ("s", "b")):
        rig.arrive(name, 2 * TOKENS, prefix=prefix)
    [job] = rig.step(("r", [blocks(0, 2)], 2 * TOKENS)).stores
    rig.report(job)
    rig.step(("s", [blocks(0, 2)], 2 * TOKENS))
    assert rig.stored_hashes() == rig.keys("b", 2 * TOKENS)[0]


def test_what_is_ready_is_offered_once() -> None:
    rig = Rig()
    rig.holds("p", 2 * TOKENS)
    rig.arrive("r", 2 * TOKENS)
    rig.step(("r", [blocks(0, 3)], 2 * TOKENS))
    assert len(rig.daemon.last_step.touches) == 1
    rig.step(("r", [blocks(0, 3)], 2 * TOKENS + 5))
    assert rig.daemon.last_step.touches == []


def test_a_jobs_end_names_its_own_keys_and_no_others() -> None:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS)
    table = [blocks(0, 4)]
    [first] = rig.step(("r", table, 2 * TOKENS)).stores
    [second] = rig.step(("r", table, 4 * TOKENS)).stores
    keys = rig.keys("p", 4 * TOKENS)[0]
    [stored] = rig.report(second).stored
    assert list(stored.block_hashes) == keys[2:]
    [stored] = rig.report(first).stored
    assert list(stored.block_hashes) == keys[:2]


def test_a_step_holds_no_more_jobs_than_the_protocol_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd_client.scheduler.stores.MAX_PARTS_PER_STEP", 3)
    rig = Rig()
    names = "abcde"
    for name in names:
        rig.arrive(name, TOKENS, prefix=name)
    everyone = [(name, [[number]], TOKENS) for number, name in enumerate(names)]
    rig.step(*everyone)
    assert len(rig.daemon.last_step.stores) == 3
    rig.step(*everyone)
    assert rig.stored_hashes() == [rig.keys(name, TOKENS)[0][0] for name in "de"]
    for number, name in enumerate("vwxyz"):
        rig.holds(name, TOKENS)
        rig.arrive(name, 2 * TOKENS, prefix=name)
        assert rig.ask(name) == TOKENS
        rig.allocate(name, [[10 + number, 20 + number]], TOKENS)
    # Loads all leave, in as many messages as it takes: their leases leave with the same step.
    assert [len(rig.step().loads) for _ in range(2)] == [5, 0]


def test_groups_are_stored_in_one_job() -> None:
    rig = Rig(FULL, WIDE)
    rig.arrive("r", 4 * TOKENS)
    rig.step(("r", [blocks(0, 4), blocks(100, 4)], 4 * TOKENS))
    [job] = rig.daemon.last_step.stores
    assert [run.group for run in job.runs] == [0, 1]


def test_admission_is_remembered_after_allocation() -> None:
    rig = Rig(store_threshold=2)
    keys = rig.keys("p", 4 * TOKENS)[0]
    rig.daemon.holds(keys[1:2], ADMITTED)
    rig.arrive("r", 4 * TOKENS)
    assert rig.ask("r") == 0
    rig.allocate("r", [blocks(0, 4)])
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    assert rig.stored_hashes() == keys[1:2]


# -- what was left to other engines --------------------------------------------------------------


def left(rig: Rig, *job_ids: int) -> StepOutcome:
    """Each rank reports these stores as done, with some of their keys left to others."""
    ended = tuple(JobReport(job_id, done=True, left=True) for job_id in job_ids)
    return rig.scheduler.update_from_workers([WorkerReport(0, ended)])


def test_a_partial_store_counts_only_what_the_page_shows() -> None:
    rig = Rig()
    keys = rig.keys("p", 3 * TOKENS)[0]
    rig.arrive("p", 3 * TOKENS + 1)
    rig.ask("p")
    rig.allocate("p", [blocks(1, 3)])
    plan = rig.step(("p", [blocks(1, 3)], 3 * TOKENS))
    rig.daemon.on_page = {keys[1]}
    outcome = left(rig, *plan.stores)
    assert [stored.block_hashes for stored in outcome.stored] == [(keys[1],)]


def test_what_was_left_to_another_engine_is_offered_again_until_it_is_there() -> None:
    rig = Rig()
    keys = rig.keys("p", 3 * TOKENS)[0]
    running = ("p", [blocks(1, 3)], 3 * TOKENS)
    rig.arrive("p", 3 * TOKENS + 1)
    rig.ask("p")
    rig.allocate("p", [blocks(1, 3)])
    plan = rig.step(running)
    rig.daemon.on_page = {keys[0]}
    left(rig, *plan.stores)
    rig.step(running)
    assert rig.stored_hashes() == [], "the other store has some time"
    rig.now += 2 * WAIT_S
    plan = rig.step(running)
    assert rig.stored_hashes() == keys[1:]
    left(rig, *plan.stores)
    rig.step(running)
    rig.daemon.on_page = set(keys)
    rig.now += 2 * WAIT_S
    rig.step(running)
    assert rig.stored_hashes() == []
    (stored,) = rig.report().stored
    assert stored.block_hashes == tuple(keys[1:])


def test_what_the_reuse_filter_kept_out_is_not_offered_again_by_the_same_request() -> None:
    rig = Rig(store_threshold=2)
    running = ("p", [blocks(1, 3)], 3 * TOKENS)
    rig.holds("p", 3 * TOKENS, status=ADMITTED)
    rig.daemon.on_page = set()
    rig.arrive("p", 3 * TOKENS + 1)
    rig.ask("p")
    rig.allocate("p", [blocks(1, 3)])
    plan = rig.step(running)
    assert plan.stores
    left(rig, *plan.stores)
    rig.step(running)
    rig.now += 2 * WAIT_S
    rig.step(running)
    assert rig.stored_hashes() == []
