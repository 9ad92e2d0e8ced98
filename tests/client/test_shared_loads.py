"""Requests that share a prefix: it is loaded once, and nobody waits for ever for it."""

from __future__ import annotations

import time

import pytest

from kvd_client import SchedulerOptions
from tests.client.content import TOKENS as SMALL_TOKENS
from tests.client.engine_rig import FULL, RECURRENT, SLIDING, TOKENS, Rig, blocks
from tests.client.small_engine import PATIENCE_S, SmallEngine


def loading_rig() -> tuple[Rig, int]:
    """Request r loads three blocks."""
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    for name in "rs":
        rig.arrive(name, 5 * TOKENS)
    assert rig.ask("r") == 3 * TOKENS
    rig.allocate("r", [blocks(0, 5)], 3 * TOKENS)
    return rig, job_of(rig)


def job_of(rig: Rig) -> int:
    [job] = rig.step().loads
    return job


def test_a_hit_that_another_request_is_loading_is_waited_for() -> None:
    rig, job = loading_rig()
    assert rig.ask("s") is None
    assert rig.step().loads == ()
    rig.report(job)
    # The engine's own prefix cache has the blocks now: nothing is left to load.
    assert rig.ask("s", computed=3 * TOKENS) == 0


def test_requests_of_one_step_load_their_shared_prefix_once() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    for name in "abcd":
        rig.arrive(name, 5 * TOKENS)
    found = {}
    for number, name in enumerate("abcd"):
        found[name] = rig.ask(name)
        if found[name]:
            rig.allocate(name, [blocks(10 * number, 5)], 3 * TOKENS)
    assert found == {"a": 3 * TOKENS, "b": None, "c": None, "d": None}
    assert len(rig.step().loads) == 1


def test_what_lies_behind_the_shared_prefix_is_loaded_after_it() -> None:
    rig, job = loading_rig()
    rig.daemon.holds(rig.keys("p", 5 * TOKENS)[0])
    rig.arrive("t", 6 * TOKENS)
    assert rig.ask("t") is None
    rig.report(job)
    assert rig.ask("t", computed=3 * TOKENS) == 2 * TOKENS


def test_a_request_that_the_device_serves_waits_for_nobody() -> None:
    rig, _ = loading_rig()
    assert rig.ask("s", computed=3 * TOKENS) == 0


def test_another_prefix_is_not_waited_for() -> None:
    rig, _ = loading_rig()
    rig.holds("q", 3 * TOKENS)
    rig.arrive("t", 5 * TOKENS, prefix="q")
    assert rig.ask("t") == 3 * TOKENS


def test_the_same_blocks_of_another_account_are_not_waited_for() -> None:
    rig, _ = loading_rig()
    rig.arrive("t", 5 * TOKENS, account="other")
    assert rig.ask("t") == 3 * TOKENS


def test_a_shared_window_or_state_is_waited_for_too() -> None:
    for groups in ((FULL, SLIDING), (FULL, RECURRENT)):
        rig = Rig(*groups)
        for number in range(2):
            rig.holds("p", 8 * TOKENS, group=number)
        for name in "rs":
            rig.arrive(name, 9 * TOKENS)
        assert rig.ask("r") == 8 * TOKENS
        rig.allocate("r", [blocks(0, 9), blocks(20, 9)], 8 * TOKENS)
        rig.step()
        # Of its full attention the device has all; what it lacks is under way.
        assert rig.ask("s", computed=7 * TOKENS) is None


def test_a_load_that_takes_too_long_is_not_waited_for_again() -> None:
    rig, _ = loading_rig()
    assert rig.ask("s") is None
    rig.now += 1.9
    rig.step()
    assert rig.ask("s") is None
    rig.now += 0.2
    rig.step()
    assert rig.ask("s") == 3 * TOKENS
    rig.step()  # the engine has no blocks for it and asks once more
    assert rig.ask("s") == 3 * TOKENS


def test_a_wait_that_has_ended_counts_for_nothing_later() -> None:
    rig, job = loading_rig()
    rig.arrive("t", 5 * TOKENS)
    assert rig.ask("s") is None
    rig.now += 1.5
    rig.report(job)
    assert rig.ask("s") == 3 * TOKENS  # for which the engine has no blocks yet
    assert rig.ask("t") == 3 * TOKENS
    rig.allocate("t", [blocks(20, 5)], 3 * TOKENS)
    rig.now += 1.0
    assert rig.ask("s") is None


def test_one_deadline_covers_all_loads_that_are_waited_for_in_turn() -> None:
    rig, job = loading_rig()
    rig.arrive("t", 5 * TOKENS)
    assert [rig.ask("s"), rig.ask("t")] == [None, None]
    rig.now += 1.5
    rig.report(job)
    # An engine without a prefix cache: s loads, and t would wait for that one as well.
    assert rig.ask("s") == 3 * TOKENS
    rig.allocate("s", [blocks(20, 5)], 3 * TOKENS)
    assert rig.ask("t") is None
    rig.now += 0.6
    assert rig.ask("t") == 3 * TOKENS


def test_a_failed_load_is_not_waited_for_any_more() -> None:
    rig, job = loading_rig()
    assert rig.ask("s") is None
    rig.report(job, done=False)
    assert rig.ask("s") == 3 * TOKENS
    assert rig.ask("r") == 0


def test_a_daemon_that_goes_is_not_waited_for() -> None:
    rig, _ = loading_rig()
    assert rig.ask("s") is None
    rig.daemon.is_there = False
    assert rig.ask("s") == 0


def test_after_a_reset_nobody_waits_for_an_old_load() -> None:
    rig, _ = loading_rig()
    assert rig.ask("s") is None
    rig.scheduler.reset_cache()
    assert rig.ask("s") == 3 * TOKENS  # as others stored it in the new epoch


def test_an_aborted_requests_load_is_waited_for_until_it_has_ended() -> None:
    rig, job = loading_rig()
    assert rig.ask("s") is None
    rig.scheduler.request_finished("r", [blocks(0, 5)])
    assert rig.ask("s") is None
    rig.report(job)
    assert rig.ask("s") == 3 * TOKENS


@pytest.mark.parametrize("shared", [True, False])
def test_prefix_sharing_is_an_option(shared: bool) -> None:
    rig = Rig(options=SchedulerOptions(share_loads=shared))
    rig.holds("p", 3 * TOKENS)
    for number, name in enumerate("rs"):
        rig.arrive(name, 5 * TOKENS)
        if rig.ask(name):
            rig.allocate(name, [blocks(10 * number, 5)], 3 * TOKENS)
    assert len(rig.step().loads) == (1 if shared else 2)


def test_eight_requests_of_one_prefix_copy_it_once_through_a_real_daemon(
    engine: SmallEngine,
) -> None:
    engine.store("a", "hello", 8)
    names = "bcdefghi"
    for name in names:
        hashes = engine.arrive(name, "hello", 8)
    table = list(range(100, 108))
    assert engine.match("b") == 8 * SMALL_TOKENS
    engine.scheduler.update_state_after_alloc("b", [table], 8 * SMALL_TOKENS)
    waiting = [engine.scheduler.get_num_new_matched_tokens(name, 0) for name in names[1:]]
    assert waiting == [None] * 7
    loads = 0
    deadline = time.monotonic() + PATIENCE_S
    while "b" not in engine.finished_loads:
        assert time.monotonic() < deadline, engine.failed_loads
        plan, _ = engine.step()
        loads += len(plan.loads)
    engine.check(table, engine.contents(hashes))
    # They find the blocks on the device, where every byte is right.
    for name in names[1:]:
        assert engine.match(name, computed=8 * SMALL_TOKENS) == 0
        engine.scheduler.update_state_after_alloc(name, [table], 0)
    plan, _ = engine.step()
    assert loads + len(plan.loads) == 1
