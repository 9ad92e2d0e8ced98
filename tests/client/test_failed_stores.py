"""What failed stores had is offered again: whole, a few times, and as the same sighting."""

from __future__ import annotations

import pytest

from kvd_client.scheduler.doubts import MAX_DOUBTS, WAIT_S
from kvd_client.scheduler.request import FAILURES
from kvd_client.scheduler.sent_jobs import REPORT_GRACE_S
from tests.client.engine_rig import FULL, TOKENS, Rig, blocks
from tests.client.fake_daemon import ADMITTED


def test_what_failed_before_its_session_was_lost_is_offered_to_the_next() -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    running = ("r", [blocks(0, 2)], 2 * TOKENS)
    [job] = rig.step(running).stores
    rig.report(job, done=False)
    rig.step(running)
    rig.daemon.restart()
    rig.step(running)
    rig.now += 2 * WAIT_S
    rig.step(running)
    assert rig.stored_hashes() == rig.keys("p", 2 * TOKENS)[0]


@pytest.mark.parametrize("threshold", [1, 2])
def test_what_failed_just_before_its_requests_end_is_offered_with_the_last(threshold: int) -> None:
    rig = Rig(store_threshold=threshold)
    keys = rig.keys("p", 3 * TOKENS)[0]
    rig.daemon.holds(keys, ADMITTED)
    rig.arrive("r", 3 * TOKENS)
    [job] = rig.step(("r", [blocks(0, 3)], 2 * TOKENS)).stores
    rig.report(job, done=False)
    rig.step(("r", [blocks(0, 3)], 3 * TOKENS))
    rig.scheduler.request_finished("r", [blocks(0, 3)])
    rig.step()
    again = keys[:2] if threshold == 1 else []  # another offer would be another sighting
    assert rig.stored_hashes() == again


def test_stores_that_fail_at_once_are_all_offered_again() -> None:
    rig = Rig(*[FULL] * (FAILURES + 1))
    keys = rig.keys("p", TOKENS)
    rig.arrive("r", TOKENS)
    running = ("r", [[0]] * len(keys), TOKENS)
    for group in range(len(keys)):
        rig.daemon.rooms = dict.fromkeys(range(len(keys)), 0) | {group: 1}
        assert len(rig.step(running).stores) == 1
    rig.daemon.rooms = {}
    rig.daemon.restart()
    rig.step(running)
    rig.now += 2 * WAIT_S
    rig.step(running)
    assert rig.stored_hashes() == [key for row in keys for key in row]


def test_stores_that_fail_one_after_the_other_within_a_moment_are_one_failure() -> None:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS)
    keys = rig.keys("p", 4 * TOKENS)[0]
    for count in range(1, 5):
        rig.report(*rig.step(("r", [blocks(0, 4)], count * TOKENS)).stores, done=False)
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    for _ in range(FAILURES - 1):
        rig.now += 2 * WAIT_S
        plan = rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
        assert rig.stored_hashes() == keys
        rig.report(*plan.stores, done=False)
        rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    rig.now += 2 * WAIT_S
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    assert rig.stored_hashes() == []


def test_failed_stores_of_any_number_of_requests_are_offered_again() -> None:
    rig = Rig()
    names = [f"r{number}" for number in range(MAX_DOUBTS + 10)]
    running = []
    for number, name in enumerate(names):
        rig.arrive(name, TOKENS, prefix=name)
        running.append((name, [[number]], TOKENS))
    rig.report(*rig.step(*running[:500]).stores, done=False)
    rig.report(*rig.step(*running[500:1000]).stores, done=False)
    rig.report(*rig.step(*running[1000:]).stores, done=False)
    rig.step()
    rig.now += 2 * WAIT_S
    rig.step(*running[:500])
    assert len(rig.stored_hashes()) == 500


def test_each_request_waits_for_its_own_failure_alone() -> None:
    rig = Rig()
    running = [(name, [[place]], TOKENS) for place, name in enumerate("ab")]
    for entry in running:
        rig.arrive(entry[0], TOKENS, prefix=entry[0])
        rig.report(*rig.step(entry).stores, done=False)
        rig.step()
        rig.now += 0.9 * WAIT_S
    rig.step(*running)
    assert rig.stored_hashes() == rig.keys("a", TOKENS)[0]
    rig.now += 0.2 * WAIT_S
    rig.step(*running)
    assert rig.stored_hashes() == rig.keys("b", TOKENS)[0]


def test_what_is_offered_again_is_no_other_sighting() -> None:
    rig = Rig(store_threshold=2)
    keys = rig.keys("p", 4 * TOKENS)[0]
    rig.daemon.holds(keys[:1], ADMITTED)
    rig.scheduler.on_new_request("r", 3 * TOKENS, rig.keys("p", 4 * TOKENS))
    running = ("r", [blocks(0, 4)], 4 * TOKENS)
    [job] = rig.step(running).stores
    assert rig.stored_hashes() == [keys[0], keys[3]], "of the last nothing is known"
    [(_, run)] = rig.daemon.last_step.touches
    assert run.block_hashes == keys[1:3]
    rig.report(job, done=False)
    rig.step(running)
    rig.now += 2 * WAIT_S
    rig.step(running)
    assert rig.daemon.last_step.touches == []
    assert rig.stored_hashes() == [keys[0]]


def test_what_is_there_is_touched_once_though_its_neighbour_is_offered_again() -> None:
    rig = Rig()
    keys = rig.keys("p", 3 * TOKENS)[0]
    rig.arrive("r", 3 * TOKENS)
    rig.daemon.on_page = {keys[1]}
    running = ("r", [blocks(0, 3)], 3 * TOKENS)
    rig.report(*rig.step(running).stores, done=False)
    rig.step(running)
    rig.now += 2 * WAIT_S
    rig.step(running)
    assert rig.stored_hashes() == [keys[0], keys[2]]
    assert rig.daemon.last_step.touches == []


def test_a_block_whose_store_always_fails_is_given_up_beside_others_that_succeed() -> None:
    rig = Rig()
    tokens = 40 * TOKENS
    keys = rig.keys("p", tokens)[0]
    rig.arrive("r", tokens)
    rig.daemon.on_page = set()
    offered = 0
    for count in range(1, 41):
        plan = rig.step(("r", [blocks(0, 40)], count * TOKENS))
        offered += keys[0] in rig.stored_hashes()
        for job, draft in zip(plan.stores, rig.daemon.last_step.stores, strict=True):
            stored = [block_hash for run in draft.runs for block_hash in run.block_hashes]
            rig.report(job, done=keys[0] not in stored)
            if keys[0] not in stored:
                rig.daemon.on_page |= set(stored)
        rig.now += 2 * WAIT_S
    assert offered == FAILURES
    assert rig.daemon.on_page == set(keys[1:])


def test_a_store_that_the_daemon_does_not_call_done_is_offered_again_without_its_reports() -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    running = ("r", [blocks(0, 2)], 2 * TOKENS)
    [job] = rig.step(running).stores
    rig.daemon.ended = [(job, False)]
    rig.step(running)
    rig.now += 2 * REPORT_GRACE_S
    rig.step(running)
    rig.step(running)
    rig.now += 2 * WAIT_S
    rig.step(running)
    assert rig.stored_hashes() == rig.keys("p", 2 * TOKENS)[0]
