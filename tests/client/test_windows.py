"""Sliding windows and recurrent states: what is loaded, and what is worth storing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd_client import NULL_BLOCK, Group, GroupKind, SchedulerOptions, StoreMode
from kvd_client.scheduler.retention import Retention
from tests.client.engine_rig import FULL, RECURRENT, SLIDING, TOKENS, WIDE, Rig, blocks

# Hits end every 4 * TOKENS where the other group is WIDE's state; the window is 2 blocks.
SPARSE = (RECURRENT, SLIDING)
WIDE_SLIDING = replace(SLIDING, tokens_per_block=4 * TOKENS, blocks_per_block=4)


def stored(rig: Rig, group: int) -> list[bytes]:
    """What the last step asked the daemon to store of a group."""
    runs = [run for job in rig.daemon.last_step.stores for run in job.runs]
    return [h for run in runs if run.group == group for h in run.block_hashes]


# -- loads ------------------------------------------------------------------------------------


def test_a_window_with_an_unaligned_right_edge_loads_every_block_that_it_touches() -> None:
    rig = Rig(WIDE, WIDE_SLIDING)
    rig.holds("p", 12 * TOKENS, group=0)
    rig.holds("p", 12 * TOKENS, group=1)
    rig.arrive("r", 12 * TOKENS)
    # The window is engine blocks 7 and 8: in kvd's blocks 1 and 2.
    assert rig.ask("r", most=9 * TOKENS) == 9 * TOKENS
    rig.allocate("r", [blocks(0, 9), blocks(20, 9)], 9 * TOKENS)
    rig.step()
    [load] = rig.daemon.last_step.loads
    assert [(run.group, run.first_block, len(run.block_hashes)) for run in load.runs] == [
        (0, 0, 3),
        (1, 1, 2),
    ]


def test_an_unaligned_window_is_no_hit_when_a_block_that_it_touches_is_missing() -> None:
    rig = Rig(WIDE_SLIDING)
    keys = rig.keys("p", 12 * TOKENS)[0]
    rig.daemon.holds([keys[0], keys[2]])
    rig.arrive("r", 12 * TOKENS)
    assert rig.ask("r", most=10 * TOKENS) == 10 * TOKENS
    # A hit after 9 engine blocks reaches back into kvd's block 1.
    assert rig.ask("r", most=9 * TOKENS) == 4 * TOKENS


def test_a_hit_of_a_model_with_states_leaves_a_token_and_ends_on_a_state() -> None:
    rig = Rig(FULL, RECURRENT)
    rig.holds("p", 8 * TOKENS, group=0)
    rig.holds("p", 8 * TOKENS, group=1)
    rig.arrive("r", 8 * TOKENS)
    assert rig.ask("r") == 4 * TOKENS
    rig.arrive("s", 8 * TOKENS + 1)
    assert rig.ask("s") == 8 * TOKENS


# -- stores: what no hit could use ------------------------------------------------------------


def test_blocks_that_no_windows_hit_could_use_are_not_stored() -> None:
    rig = Rig(*SPARSE)
    rig.arrive("r", 8 * TOKENS)
    rig.step(("r", [blocks(0, 2), blocks(20, 8)], 8 * TOKENS))
    keys = rig.keys("p", 8 * TOKENS)[1]
    # A hit ends after 4 or 8 blocks; the window before it touches two.
    assert stored(rig, 1) == [*keys[2:4], *keys[6:8]]


def test_a_prompt_stored_with_gaps_is_found_again_whole() -> None:
    rig = Rig(*SPARSE)
    rig.arrive("r", 8 * TOKENS + 1)
    rig.step(("r", [blocks(0, 3), blocks(20, 9)], 8 * TOKENS))
    rig.daemon.holds(rig.stored_hashes())
    rig.arrive("s", 8 * TOKENS + 1)
    assert rig.ask("s") == 8 * TOKENS


def test_blocks_that_were_passed_over_are_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(*SPARSE)
    rig.arrive("r", 20 * TOKENS)
    tables = [blocks(0, 5), blocks(20, 20)]
    rig.step(("r", tables, 6 * TOKENS))
    assert len(stored(rig, 1)) == 2
    looked_at = []
    holds = Retention.holds

    def note(self: Retention, group: int, block: int, ends: list[int]) -> bool:
        looked_at.append((group, block))
        return holds(self, group, block, ends)

    monkeypatch.setattr(Retention, "holds", note)
    rig.step(("r", tables, 7 * TOKENS))
    assert looked_at == [(1, 6)]
    assert stored(rig, 1) == rig.keys("p", 20 * TOKENS)[1][6:7]


def test_a_model_whose_hits_end_at_every_block_stores_every_block_of_its_windows() -> None:
    rig = Rig(FULL, SLIDING)
    rig.arrive("r", 6 * TOKENS)
    rig.step(("r", [blocks(0, 6), blocks(20, 6)], 6 * TOKENS))
    assert stored(rig, 1) == rig.keys("p", 6 * TOKENS)[1]


def test_a_job_of_many_gaps_keeps_to_the_protocols_limit_of_runs() -> None:
    rig = Rig(FULL, SLIDING, options=SchedulerOptions(null_block=0))
    count = 200
    rig.arrive("r", count * TOKENS)
    holey = [0 if place % 2 else place + 1 for place in range(count)]
    rig.step(("r", [blocks(0, count), holey], count * TOKENS))
    [job] = rig.daemon.last_step.stores
    assert len(job.runs) <= 64
    assert stored(rig, 1) == rig.keys("p", count * TOKENS)[1][::2]
    [run] = [run for run in job.runs if run.group == 1]
    assert run.engine_blocks == holey[::2]


# -- retention --------------------------------------------------------------------------------


def test_retention_stores_windows_at_its_intervals_and_at_the_prompts_end() -> None:
    rig = Rig(FULL, SLIDING, options=SchedulerOptions(retention_tokens=8 * TOKENS))
    rig.arrive("r", 13 * TOKENS + 1)
    tables = [blocks(0, 14), blocks(20, 14)]
    rig.step(("r", tables, 13 * TOKENS))
    full, sliding = rig.keys("p", 13 * TOKENS)
    assert stored(rig, 0) == full
    assert stored(rig, 1) == [*sliding[6:8], *sliding[11:13]]


def test_retention_stores_the_window_at_the_requests_end() -> None:
    rig = Rig(FULL, SLIDING, options=SchedulerOptions(retention_tokens=0))
    keys = rig.keys("p", 11 * TOKENS)
    rig.scheduler.on_new_request("r", 4 * TOKENS, keys)
    tables = [blocks(0, 11), blocks(20, 11)]
    rig.step(("r", tables, 4 * TOKENS))
    assert stored(rig, 1) == keys[1][1:4]  # of hits after 3 blocks, and after 4
    rig.step(("r", tables, 11 * TOKENS))
    assert stored(rig, 1) == []
    rig.scheduler.request_finished("r", tables)
    rig.step()
    assert stored(rig, 1) == keys[1][9:11]


def test_retention_must_suit_the_boundaries_of_the_groups() -> None:
    with pytest.raises(ValueError, match="retention_tokens is 24"):
        Rig(FULL, SLIDING, options=SchedulerOptions(retention_tokens=24))


# -- blocks that went stale -------------------------------------------------------------------


def test_a_window_block_that_found_no_room_and_slid_out_is_never_stored() -> None:
    rig = Rig(SLIDING)
    rig.arrive("r", 6 * TOKENS)
    keys = rig.keys("p", 6 * TOKENS)[0]
    rig.daemon.rooms[0] = 0
    rig.step(("r", [blocks(0, 6)], 3 * TOKENS))
    rig.daemon.rooms[0] = 100
    # The engine has let go of the first two; block 0 is another request's already.
    rig.arrive("s", TOKENS, prefix="q")
    rig.allocate("s", [[0]])
    rig.step(("r", [[NULL_BLOCK, NULL_BLOCK, 2, 3, 4, 5]], 4 * TOKENS))
    assert rig.stored_hashes() == keys[2:4]


def test_a_window_block_let_go_in_flight_is_fenced_from_its_stores_creation_on() -> None:
    rig = Rig(FULL, SLIDING)
    rig.arrive("r", 6 * TOKENS)
    [job] = rig.step(("r", [blocks(0, 6), blocks(20, 6)], 4 * TOKENS)).stores
    # The request lives on; its block 20 slid out of the window and is given to another.
    rig.arrive("s", 3 * TOKENS, prefix="q")
    rig.allocate("s", [[50], [20]])
    slid = [NULL_BLOCK, NULL_BLOCK, *blocks(22, 4)]
    assert rig.step(("r", [blocks(0, 6), slid], 5 * TOKENS)).flush == (job,)


def test_lazy_never_stores_a_window_block_that_has_another_owner() -> None:
    rig = Rig(SLIDING, options=SchedulerOptions(store_mode=StoreMode.LAZY))
    rig.arrive("r", 6 * TOKENS)
    rig.step(("r", [blocks(0, 6)], 4 * TOKENS))
    rig.arrive("s", 3 * TOKENS, prefix="q")
    rig.allocate("s", [[0]])
    rig.step(near_eviction=[(0, 0), (0, 1)])
    assert rig.stored_hashes() == rig.keys("p", 6 * TOKENS)[0][1:2]


# -- recurrent states -------------------------------------------------------------------------


def test_a_state_is_stored_by_the_step_that_ends_on_its_boundary() -> None:
    rig = Rig(FULL, RECURRENT)
    rig.arrive("r", 20 * TOKENS)
    tables = [blocks(0, 20), blocks(40, 5)]
    rig.step(("r", tables, 8 * TOKENS))
    assert stored(rig, 1) == rig.keys("p", 20 * TOKENS)[1][1:2]
    [run] = [run for run in rig.daemon.last_step.stores[0].runs if run.group == 1]
    assert list(run.engine_blocks) == [41]


def test_a_state_that_the_step_passed_by_is_not_stored() -> None:
    rig = Rig(FULL, RECURRENT)
    rig.arrive("r", 20 * TOKENS)
    tables = [blocks(0, 20), blocks(40, 5)]
    rig.step(("r", tables, 9 * TOKENS))
    assert stored(rig, 1) == []
    rig.step(("r", tables, 10 * TOKENS))
    assert stored(rig, 1) == []
    rig.scheduler.request_finished("r", tables)
    rig.step()
    assert stored(rig, 1) == []


def test_a_state_without_room_is_given_up_when_the_next_step_moves_it_on() -> None:
    rig = Rig(FULL, RECURRENT)
    rig.arrive("r", 20 * TOKENS)
    tables = [blocks(0, 20), blocks(40, 5)]
    rig.daemon.rooms[1] = 0
    rig.step(("r", tables, 4 * TOKENS))
    rig.daemon.rooms[1] = 10
    rig.step(("r", tables, 5 * TOKENS))
    assert stored(rig, 1) == []


def test_a_request_that_ends_on_a_boundary_stores_its_state_at_its_end() -> None:
    rig = Rig(FULL, RECURRENT)
    rig.arrive("r", 4 * TOKENS)
    tables = [blocks(0, 4), [40]]
    rig.daemon.rooms[1] = 0
    rig.step(("r", tables, 4 * TOKENS))
    rig.daemon.rooms[1] = 10
    rig.scheduler.request_finished("r", tables)
    rig.step()
    assert stored(rig, 1) == rig.keys("p", 4 * TOKENS)[1]


def test_a_running_state_that_moves_on_in_place_waits_for_its_store() -> None:
    rig = Rig(FULL, RECURRENT)
    rig.arrive("r", 20 * TOKENS)
    [job] = rig.step(("r", [blocks(0, 4), [40]], 4 * TOKENS)).stores
    # The same block of memory now stands for the next state.
    assert rig.step(("r", [blocks(0, 5), [NULL_BLOCK, 40]], 5 * TOKENS)).flush == (job,)


def test_an_engine_that_keeps_every_state_has_every_state_stored() -> None:
    rig = Rig(FULL, RECURRENT, options=SchedulerOptions(keeps_every_state=True))
    rig.arrive("r", 20 * TOKENS)
    rig.step(("r", [blocks(0, 20), blocks(40, 5)], 13 * TOKENS))
    assert stored(rig, 1) == rig.keys("p", 20 * TOKENS)[1][:3]


def test_states_off_the_other_groups_boundaries_are_not_stored() -> None:
    small = Group(tokens_per_block=2 * TOKENS, shard_bytes=(64,), kind=GroupKind.RECURRENT_STATE)
    rig = Rig(RECURRENT, small, options=SchedulerOptions(keeps_every_state=True))
    rig.arrive("r", 8 * TOKENS)
    rig.step(("r", [blocks(0, 2), blocks(20, 4)], 8 * TOKENS))
    assert stored(rig, 1) == rig.keys("p", 8 * TOKENS)[1][1::2]
