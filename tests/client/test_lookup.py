"""Lookups: how many tokens are found, with how few calls."""

from __future__ import annotations

import pytest

from kvd_client import SchedulerOptions
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.v1 import common_pb2
from tests.client.engine_rig import FULL, RECURRENT, SLIDING, TOKENS, WIDE, Rig, blocks
from tests.client.fake_daemon import MISS, PENDING, RETRY


def test_a_page_miss_costs_no_call() -> None:
    rig = Rig()
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") == 0
    assert rig.daemon.lookups == []
    assert rig.daemon.blocking_calls == 0


def test_full_attention_finds_the_longest_prefix() -> None:
    rig = Rig()
    rig.holds("p", 5 * TOKENS)
    rig.daemon.holds(rig.keys("p", 10 * TOKENS)[0][6:8])
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") == 5 * TOKENS


def test_the_lookup_leaves_at_arrival_unanswered() -> None:
    rig = Rig()
    rig.daemon.answers_at_once = False
    rig.holds("p", 5 * TOKENS)
    rig.arrive("r", 10 * TOKENS)
    assert len(rig.daemon.lookups) == 1
    assert rig.daemon.blocking_calls == 0


def test_all_unanswered_requests_of_a_step_share_one_wait() -> None:
    rig = Rig()
    rig.daemon.answers_at_once = False
    for name in "abcdefgh":
        rig.holds(name, 3 * TOKENS)
        rig.arrive(name, 5 * TOKENS, prefix=name)
    assert [rig.ask(name) for name in "abcdefgh"] == [3 * TOKENS] * 8
    assert rig.daemon.blocking_calls == 1


def test_a_slow_daemon_makes_one_wait_a_step_and_then_ask_again() -> None:
    rig = Rig()
    rig.daemon.answers_at_once = rig.daemon.answers_when_waited_for = False
    for name in "ab":
        rig.holds(name, 3 * TOKENS)
        rig.arrive(name, 5 * TOKENS, prefix=name)
    assert [rig.ask("a"), rig.ask("b")] == [None, None]
    assert rig.daemon.blocking_calls == 1
    rig.step()
    rig.daemon.answer()
    assert [rig.ask("a"), rig.ask("b")] == [3 * TOKENS, 3 * TOKENS]
    assert rig.daemon.blocking_calls == 1


def test_a_daemon_that_never_answers_is_a_miss() -> None:
    rig = Rig()
    rig.daemon.answers_at_once = rig.daemon.answers_when_waited_for = False
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS)
    assert rig.ask("r") is None
    rig.now += 1.1
    rig.step()
    assert rig.ask("r") == 0


def test_an_absent_daemon_is_a_miss() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.daemon.is_there = False
    rig.arrive("r", 5 * TOKENS)
    assert rig.ask("r") == 0


@pytest.mark.parametrize("is_there", [True, False], ids=["daemon", "no-daemon"])
@pytest.mark.parametrize("place", [0, -1])
def test_hashes_of_another_length_are_refused_at_arrival(is_there: bool, place: int) -> None:
    rig = Rig()
    rig.daemon.is_there = is_there
    (hashes,) = rig.keys("p", 3 * TOKENS)
    hashes[place] += b"x"
    with pytest.raises(ValueError, match=r"block_hashes\[0\] must have hashes of \d+ bytes each"):
        rig.scheduler.on_new_request("r", 3 * TOKENS, [hashes])
    assert not rig.scheduler.has_pending_work()
    rig.arrive("r", 3 * TOKENS)
    assert rig.ask("r") == 0


def test_a_request_asked_again_is_answered_from_its_lease() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS)
    for _ in range(5):
        assert rig.ask("r") == 3 * TOKENS
        rig.step()
        rig.now += 1.0
    assert len(rig.daemon.lookups) == 1


def test_an_expired_lease_is_looked_up_again() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS)
    assert rig.ask("r") == 3 * TOKENS
    rig.now += 2.5
    rig.daemon.statuses[rig.keys("p", 3 * TOKENS)[0][2]] = MISS
    assert rig.ask("r") == 2 * TOKENS
    assert len(rig.daemon.lookups) == 2


def test_a_lease_of_a_lost_session_is_looked_up_again() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS)
    assert rig.ask("r") == 3 * TOKENS
    rig.daemon.restart()
    rig.daemon.statuses.clear()
    assert rig.ask("r") == 0


def test_an_old_miss_is_probed_again() -> None:
    rig = Rig()
    rig.arrive("r", 5 * TOKENS)
    assert rig.ask("r") == 0
    rig.holds("p", 3 * TOKENS)
    rig.now += 0.1
    assert rig.ask("r") == 3 * TOKENS


def test_a_hit_leaves_a_token_to_compute() -> None:
    rig = Rig()
    rig.holds("p", 4 * TOKENS)
    rig.arrive("r", 4 * TOKENS)
    assert rig.ask("r") == 3 * TOKENS


def test_a_partial_last_block_leaves_a_token_to_compute() -> None:
    rig = Rig(WIDE)
    rig.holds("p", 8 * TOKENS)
    rig.arrive("r", 8 * TOKENS)
    assert rig.ask("r") == 7 * TOKENS
    rig.allocate("r", [blocks(10, 8)], 7 * TOKENS)
    rig.step()
    [load] = rig.daemon.last_step.loads
    assert load.runs[0].engine_blocks == [*blocks(10, 7), NULL_ENGINE_BLOCK]


def test_only_what_the_device_lacks_is_loaded() -> None:
    rig = Rig(WIDE)
    rig.holds("p", 8 * TOKENS)
    rig.arrive("r", 9 * TOKENS)
    assert rig.ask("r", computed=5 * TOKENS) == 3 * TOKENS
    rig.allocate("r", [blocks(10, 9)], 3 * TOKENS)
    rig.step()
    [run] = rig.daemon.last_step.loads[0].runs
    assert run.block_hashes == rig.keys("p", 8 * TOKENS)[0][1:]
    assert run.first_block == 1
    assert run.engine_blocks == [NULL_ENGINE_BLOCK, 15, 16, 17]


def test_a_hole_under_the_devices_own_prefix_does_not_matter() -> None:
    rig = Rig()
    keys = rig.keys("p", 6 * TOKENS)[0]
    rig.daemon.holds(keys[2:5])
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r", computed=2 * TOKENS) == 3 * TOKENS


def asked(rig: Rig) -> list[list[tuple[int, int]]]:
    """The first block and the number of blocks of each question of each call."""
    return [
        [(q.run.first_block, len(q.run.block_hashes)) for q in call] for call in rig.daemon.lookups
    ]


def test_what_the_device_has_is_not_asked_for() -> None:
    """A lease holds the leading blocks of what is asked: from the prompt's start it'd be none."""
    rig = Rig()
    rig.daemon.holds(rig.keys("p", 6 * TOKENS)[0][2:5])
    rig.arrive("r", 6 * TOKENS)
    assert asked(rig) == []
    assert rig.ask("r", computed=2 * TOKENS) == 3 * TOKENS
    assert asked(rig) == [[(2, 4)]]


def test_what_lies_behind_a_gap_that_the_device_fills_is_asked_for_again() -> None:
    rig = Rig()
    keys = rig.keys("p", 8 * TOKENS)[0]
    rig.daemon.holds([*keys[:2], *keys[4:7]])
    rig.arrive("r", 8 * TOKENS)
    assert asked(rig) == [[(0, 8)]]
    assert rig.ask("r", computed=4 * TOKENS) == 3 * TOKENS
    assert asked(rig)[1:] == [[(4, 4)]]
    assert rig.ask("r", computed=4 * TOKENS) == 3 * TOKENS
    assert len(asked(rig)) == 2
    rig.step()
    assert rig.daemon.last_step.released_leases == [101]  # of what the first question found


def test_what_the_device_has_lost_meanwhile_is_asked_for_again() -> None:
    rig = Rig()
    keys = rig.keys("p", 8 * TOKENS)[0]
    rig.daemon.holds(keys[2:7])
    rig.arrive("r", 8 * TOKENS)
    assert rig.ask("r", computed=4 * TOKENS) == 3 * TOKENS
    assert rig.ask("r", computed=2 * TOKENS) == 5 * TOKENS
    assert asked(rig) == [[(4, 4)], [(2, 6)]]


def test_with_a_reuse_filter_all_blocks_are_asked_for_once() -> None:
    """Their admission verdicts are needed, too."""
    rig = Rig(store_threshold=2)
    keys = rig.keys("p", 8 * TOKENS)[0]
    rig.daemon.holds([*keys[:2], *keys[4:7]])
    rig.arrive("r", 8 * TOKENS)
    assert rig.ask("r", computed=4 * TOKENS) == 3 * TOKENS
    assert asked(rig) == [[(0, 8)]]


def test_a_sliding_window_finds_the_last_whole_window() -> None:
    rig = Rig(SLIDING)
    keys = rig.keys("p", 10 * TOKENS)[0]
    rig.daemon.holds([keys[1], keys[2], keys[3], keys[5], keys[8]])
    rig.arrive("r", 10 * TOKENS)
    # A window of two blocks minus a token touches two blocks: 2 and 3 are the last pair.
    assert rig.ask("r") == 4 * TOKENS


def test_a_sliding_window_loads_only_its_window() -> None:
    rig = Rig(SLIDING)
    rig.holds("p", 8 * TOKENS)
    rig.arrive("r", 9 * TOKENS)
    assert rig.ask("r") == 8 * TOKENS
    rig.allocate("r", [blocks(0, 9)], 8 * TOKENS)
    rig.step()
    [run] = rig.daemon.last_step.loads[0].runs
    assert (run.first_block, list(run.engine_blocks)) == (6, [6, 7])


def test_a_pending_block_behind_a_gap_does_not_defer() -> None:
    rig = Rig(SLIDING)
    keys = rig.keys("p", 10 * TOKENS)[0]
    rig.daemon.holds(keys[0:4])
    rig.daemon.holds(keys[6:7], PENDING)
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") == 4 * TOKENS


def test_a_recurrent_group_finds_its_last_state() -> None:
    rig = Rig(RECURRENT)
    keys = rig.keys("p", 20 * TOKENS)[0]
    rig.daemon.holds([keys[0], keys[2]])
    rig.arrive("r", 20 * TOKENS)
    assert rig.ask("r") == 12 * TOKENS
    rig.allocate("r", [[7, 7, 9, 7, 7]], 12 * TOKENS)
    rig.step()
    [run] = rig.daemon.last_step.loads[0].runs
    assert (run.block_hashes, run.engine_blocks) == ([keys[2]], [9])


def test_groups_converge_on_what_suits_all() -> None:
    rig = Rig(FULL, SLIDING, RECURRENT)
    rig.holds("p", 14 * TOKENS, group=0)
    sliding = rig.keys("p", 20 * TOKENS)[1]
    rig.daemon.holds(sliding[6:8] + sliding[9:13])
    rig.daemon.holds(rig.keys("p", 20 * TOKENS)[2][:3])
    rig.arrive("r", 20 * TOKENS)
    # Full attention allows 14, the last state is at 12, whose window (10 and 11) is there.
    assert rig.ask("r") == 12 * TOKENS
    rig.daemon.statuses[sliding[11]] = MISS
    rig.arrive("s", 20 * TOKENS)
    assert rig.ask("s") == 8 * TOKENS


def test_retry_defers_for_100_ms_and_then_the_run_is_cut() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.daemon.holds(rig.keys("p", 5 * TOKENS)[0][3:4], RETRY)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r") is None
    rig.now += 0.05
    rig.step()
    assert rig.ask("r") is None
    rig.now += 0.06
    rig.step()
    assert rig.ask("r") == 3 * TOKENS


def test_pending_defers_for_2_s_and_then_the_run_is_cut() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.daemon.holds(rig.keys("p", 5 * TOKENS)[0][3:4], PENDING)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r") is None
    rig.now += 1.9
    rig.step()
    assert rig.ask("r") is None
    rig.now += 0.2
    rig.step()
    assert rig.ask("r") == 3 * TOKENS


def test_a_pending_block_that_becomes_ready_is_loaded() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.daemon.holds(rig.keys("p", 5 * TOKENS)[0][3:4], PENDING)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r") is None
    rig.holds("p", 4 * TOKENS)
    rig.now += 0.01
    rig.step()
    assert rig.ask("r") is None  # the question leaves again
    rig.step()
    assert rig.ask("r") == 4 * TOKENS


def test_max_load_tokens_caps_and_zero_disables() -> None:
    rig = Rig()
    rig.holds("p", 5 * TOKENS)
    rig.arrive("r", 6 * TOKENS, max_load_tokens=2 * TOKENS)
    rig.arrive("s", 6 * TOKENS, max_load_tokens=0)
    rig.arrive("t", 6 * TOKENS, skip_lookup=True)
    assert [rig.ask("r"), rig.ask("s"), rig.ask("t")] == [2 * TOKENS, 0, 0]


def test_a_failed_load_makes_later_lookups_miss() -> None:
    rig = Rig()
    job = rig.begin_load(5)
    assert rig.report(job, done=False).failed_loads == ("r",)
    assert rig.ask("r") == 0


def test_a_load_counts_when_every_rank_has_it() -> None:
    rig = Rig(world_size=2)
    job = rig.begin_load(5)
    assert rig.report(job, ranks=[1]).finished_loads == ()
    assert rig.report(job, ranks=[1]).finished_loads == ()  # said twice counts once
    assert rig.report(job, ranks=[0]).finished_loads == ("r",)


def test_one_failing_rank_fails_the_load() -> None:
    rig = Rig(world_size=2)
    job = rig.begin_load(5)
    rig.report(job, ranks=[0], done=False)
    assert rig.report(job, ranks=[1]).failed_loads == ("r",)


def test_a_daemon_lost_before_the_load_left_fails_the_load() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS)
    rig.ask("r")
    rig.daemon.is_there = False
    rig.allocate("r", [blocks(0, 5)], 3 * TOKENS)
    assert rig.step().loads == ()
    assert rig.scheduler.has_pending_work()
    assert rig.report().failed_loads == ("r",)
    assert not rig.scheduler.has_pending_work()


def test_a_new_session_ends_the_loads_of_the_old_one() -> None:
    rig = Rig()
    job = rig.begin_load(5)
    rig.daemon.restart()
    plan = rig.step()
    assert plan.forget == (job,)
    assert rig.report().failed_loads == ("r",)


def test_an_end_told_by_the_daemon_counts_when_a_board_was_lost() -> None:
    rig = Rig()
    job = rig.begin_load(5)
    rig.daemon.ended = [(job, False)]
    assert rig.step().forget == ()
    rig.now += 1.5
    assert rig.step().forget == (job,)
    assert rig.report().failed_loads == ("r",)


def test_the_lease_is_released_with_the_load() -> None:
    rig = Rig()
    rig.begin_load(5)
    assert rig.daemon.last_step.released_leases == [101]


def test_an_engine_without_a_prefix_cache_loads_the_same_prefix_for_each_request() -> None:
    rig = Rig(options=SchedulerOptions(share_loads=False))
    rig.holds("p", 3 * TOKENS)
    for name, first in (("r", 0), ("s", 50)):
        rig.arrive(name, 5 * TOKENS)
        assert rig.ask(name) == 3 * TOKENS
        rig.allocate(name, [blocks(first, 5)], 3 * TOKENS)
    assert len(rig.step().loads) == 2


def test_a_reuse_filter_is_asked_about_a_miss_without_waiting() -> None:
    rig = Rig(store_threshold=2)
    rig.daemon.answers_at_once = False
    rig.arrive("r", 5 * TOKENS)
    assert rig.ask("r") == 0
    assert len(rig.daemon.lookups) == 1
    assert rig.daemon.blocking_calls == 0


def test_deadlines_can_be_set() -> None:
    rig = Rig(options=SchedulerOptions(retry_deadline_s=0.0))
    rig.holds("p", 3 * TOKENS)
    rig.daemon.holds(rig.keys("p", 5 * TOKENS)[0][3:4], RETRY)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r") == 3 * TOKENS


def test_of_a_prompt_without_a_whole_block_nothing_is_asked_though_the_page_hides_some() -> None:
    rig = Rig()
    rig.daemon.page_hides_some = True
    rig.arrive("r", TOKENS - 1)
    assert rig.ask("r") == 0
    assert rig.daemon.lookups == []
    rig.step(("r", [[7]], TOKENS - 1))
    assert rig.ask("r") == 0


def test_where_a_tier_may_hold_more_the_page_hides_no_block() -> None:
    rig = Rig()
    rig.daemon.on_page = set()
    rig.holds("p", 5 * TOKENS)
    rig.arrive("before", 10 * TOKENS)
    assert rig.ask("before") == 0
    assert rig.daemon.lookups == []
    rig.daemon.page_hides_some = True
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") == 5 * TOKENS
    assert len(rig.daemon.lookups) == 1


def test_a_block_that_a_tier_still_brings_up_is_asked_for_again() -> None:
    rig = Rig()
    rig.daemon.page_hides_some = True
    keys = rig.keys("p", 5 * TOKENS)[0]
    rig.daemon.statuses = dict.fromkeys(keys, PENDING)
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") is None
    rig.daemon.holds(keys)
    rig.now += 0.1
    rig.step()
    assert rig.ask("r") == 5 * TOKENS


def test_a_lookup_knows_which_tier_brought_up_what_it_found() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.daemon.sources = {rig.keys("p", 3 * TOKENS)[0][1]: common_pb2.TIER_DISK}
    rig.arrive("r", 5 * TOKENS)
    assert rig.ask("r") == 3 * TOKENS
    lookup = rig.scheduler._requests["r"].lookup
    assert {group: row.tolist() for group, row in lookup.sources.items()} == {0: [0, 2, 0, 0, 0]}
    rig.daemon.sources = {}
    rig.arrive("r", 5 * TOKENS)
    rig.step()  # the former request's end leaves with it
    assert rig.ask("r") == 3 * TOKENS
    assert rig.scheduler._requests["r"].lookup.sources == {}
