"""Speculation: drafters' groups, and tokens whose KV is not what it seems."""

from __future__ import annotations

from dataclasses import replace

from kvd_client import Group
from tests.client.engine_rig import FULL, SLIDING, TOKENS, WIDE, Rig, blocks
from tests.client.fake_daemon import HIT, PENDING

DRAFTER = replace(FULL, drafter=True)
SLIDING_DRAFTER = replace(SLIDING, drafter=True)
WIDE_DRAFTER = replace(WIDE, drafter=True)


def rig_holding(*groups: Group, count: int) -> Rig:
    rig = Rig(*groups)
    for number in range(len(groups)):
        rig.holds("p", count * TOKENS, group=number)
    return rig


# -- lookups ----------------------------------------------------------------------------------


def test_a_drafters_hit_needs_one_block_more_which_is_popped() -> None:
    rig = rig_holding(FULL, DRAFTER, count=5)
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") == 4 * TOKENS
    rig.allocate("r", [blocks(0, 10), blocks(20, 10)], 4 * TOKENS)
    rig.step()
    [load] = rig.daemon.last_step.loads
    assert [len(run.block_hashes) for run in load.runs] == [4, 4]


def test_the_popped_block_may_lie_beyond_what_other_groups_have() -> None:
    rig = Rig(FULL, DRAFTER)
    rig.holds("p", 4 * TOKENS, group=0)
    rig.holds("p", 5 * TOKENS, group=1)
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") == 4 * TOKENS


def test_one_block_is_popped_not_one_for_each_group_that_shortens_the_hit() -> None:
    rig = Rig(FULL, DRAFTER, SLIDING, SLIDING_DRAFTER)
    for number, count in enumerate((7, 6, 9, 9)):
        rig.holds("p", count * TOKENS, group=number)
    rig.arrive("r", 12 * TOKENS)
    assert rig.ask("r") == 5 * TOKENS


def test_a_drafters_window_needs_the_block_behind_it_too() -> None:
    rig = Rig(SLIDING_DRAFTER)
    keys = rig.keys("p", 10 * TOKENS)[0]
    rig.daemon.holds(keys[2:5])
    rig.arrive("r", 10 * TOKENS)
    # Blocks 2 and 3 are the window of a hit after 4, and 4 is there to prove them.
    assert rig.ask("r") == 4 * TOKENS
    rig.allocate("r", [blocks(0, 10)], 4 * TOKENS)
    rig.step()
    [run] = rig.daemon.last_step.loads[0].runs
    assert (run.first_block, len(run.block_hashes)) == (2, 2)


def test_a_hit_inside_a_drafters_block_is_proved_by_that_block() -> None:
    rig = Rig(WIDE_DRAFTER)
    rig.holds("p", 8 * TOKENS)
    rig.arrive("r", 12 * TOKENS)
    assert rig.ask("r") == 7 * TOKENS


def test_a_drafters_only_block_makes_no_hit() -> None:
    rig = rig_holding(DRAFTER, count=1)
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") == 0


def test_a_pending_block_that_would_be_popped_defers() -> None:
    rig = rig_holding(FULL, DRAFTER, count=5)
    last = rig.keys("p", 5 * TOKENS)[1][4]
    rig.daemon.holds([last], PENDING)
    rig.daemon.on_page = set(rig.daemon.statuses)
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r") is None
    rig.daemon.holds([last], HIT)
    rig.now += 0.01
    rig.step()
    assert rig.ask("r") is None  # the question leaves again
    assert rig.ask("r") == 4 * TOKENS


# -- stores -----------------------------------------------------------------------------------


def decoding_rig() -> tuple[Rig, list[list[int]]]:
    """A prompt of two blocks is stored and five more are known as they come."""
    rig = Rig(FULL, DRAFTER)
    rig.scheduler.on_new_request("r", 2 * TOKENS, rig.keys("p", 7 * TOKENS))
    tables = [blocks(0, 7), blocks(20, 7)]
    rig.step(("r", tables, 2 * TOKENS))
    assert stored(rig) == [[0, 1], [0, 1]]
    return rig, tables


def stored(rig: Rig) -> list[list[int]]:
    """Numbers of the blocks that the last step stores, by group."""
    keys = rig.keys("p", 7 * TOKENS)
    runs = [run for job in rig.daemon.last_step.stores for run in job.runs]
    return [
        [keys[number].index(h) for run in runs if run.group == number for h in run.block_hashes]
        for number in range(len(keys))
    ]


def test_a_drafters_last_block_is_not_stored_while_decoding() -> None:
    rig, tables = decoding_rig()
    rig.step(("r", tables, 3 * TOKENS + 2))
    assert stored(rig) == [[2], []]
    rig.step(("r", tables, 4 * TOKENS))
    assert stored(rig) == [[3], [2]]


def test_a_prompts_last_block_is_stored_at_once() -> None:
    rig = Rig(DRAFTER)
    rig.arrive("r", 3 * TOKENS)
    rig.step(("r", [blocks(0, 3)], 3 * TOKENS))
    assert stored(rig) == [[0, 1, 2]]


def test_a_drafters_last_block_is_stored_at_the_end() -> None:
    rig, tables = decoding_rig()
    rig.step(("r", tables, 4 * TOKENS + 5))
    assert stored(rig) == [[2, 3], [2]]
    rig.scheduler.request_finished("r", tables)
    rig.step()
    assert stored(rig) == [[], [3]]


def test_a_drafters_blocks_are_stored_without_a_hole() -> None:
    rig, tables = decoding_rig()
    seen = []
    for computed in (2 * TOKENS + 3, 3 * TOKENS, 3 * TOKENS + 9, 5 * TOKENS + 1, 6 * TOKENS):
        rig.step(("r", tables, computed))
        seen += stored(rig)[1]
    rig.scheduler.request_finished("r", tables)
    rig.step()
    assert seen + stored(rig)[1] == [2, 3, 4, 5]


def test_without_room_a_drafters_blocks_wait_and_leave_no_hole() -> None:
    rig, tables = decoding_rig()
    rig.daemon.rooms[1] = 0
    rig.step(("r", tables, 5 * TOKENS))
    assert stored(rig) == [[2, 3, 4], []]
    rig.daemon.rooms[1] = 10
    rig.step(("r", tables, 6 * TOKENS))
    assert stored(rig) == [[5], [2, 3, 4]]


# -- tokens without KV of their own -----------------------------------------------------------


def test_the_slot_of_the_last_sampled_token_completes_no_stored_block() -> None:
    """The engine's lists of hashes grow as it samples, and it counts its drafts as computed."""
    rig = Rig()
    keys = rig.keys("p", 3 * TOKENS)
    known = [keys[0][:2]]
    rig.scheduler.on_new_request("r", 2 * TOKENS + 9, known)
    table = [blocks(0, 3)]
    rig.step(("r", table, 3 * TOKENS))
    assert rig.stored_hashes() == keys[0][:2]
    known[0].append(keys[0][2])  # its last token was sampled in this step
    rig.scheduler.request_finished("r", table)
    rig.step()
    assert rig.stored_hashes() == []


def test_an_engine_that_counts_exactly_has_its_last_whole_block_stored() -> None:
    rig = Rig()
    keys = rig.keys("p", 3 * TOKENS)
    known = [keys[0][:2]]
    rig.scheduler.on_new_request("r", 2 * TOKENS + 9, known)
    table = [blocks(0, 4)]
    rig.step(("r", table, 3 * TOKENS + 2))
    known[0].append(keys[0][2])  # accepted drafts filled it
    rig.scheduler.request_finished("r", table, 3 * TOKENS + 1)
    rig.step()
    assert rig.stored_hashes() == keys[0][2:]


def test_drafts_that_were_counted_never_leave_a_preempted_request_nothing_to_compute() -> None:
    rig = Rig()
    keys = rig.keys("p", 4 * TOKENS)
    known = [keys[0][:3]]
    rig.scheduler.on_new_request("r", 3 * TOKENS + 15, known)
    table = [blocks(0, 5)]
    rig.report(*rig.step(("r", table, 4 * TOKENS + 2)).stores)
    known[0].append(keys[0][3])  # the one token that was sampled ends the block
    rig.step(preempted=["r"])
    rig.daemon.holds(keys[0])
    assert rig.ask("r") == 3 * TOKENS
