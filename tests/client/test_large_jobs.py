"""What is too large for one job of the daemon's goes in several, and counts as one thing."""

from __future__ import annotations

import pytest

from kvd_client.draft import BlockRun, JobDraft, in_parts
from kvd_client.scheduler import lookup
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE, MAX_RUNS
from tests.client.engine_rig import FULL, RECURRENT, TOKENS, WIDE, Rig, blocks

MOST = MAX_KEYS_PER_MESSAGE


def test_runs_are_cut_where_a_job_is_full_and_nothing_is_lost() -> None:
    runs = [
        BlockRun(0, 5, [bytes([n]) for n in range(4)], range(8)),
        BlockRun(1, 0, [bytes([n]) for n in range(4, 7)], range(8, 11)),
    ]
    parts = in_parts(runs, most=3)
    assert [[(g, first, len(hashes)) for g, first, hashes, _ in part] for part in parts] == [
        [(0, 5, 3)],
        [(0, 8, 1), (1, 0, 2)],
        [(1, 2, 1)],
    ]
    flat = [run for part in parts for run in part]
    assert [h for run in flat for h in run.block_hashes] == [bytes([n]) for n in range(7)]
    assert [place for run in flat for place in run.engine_blocks] == list(range(11))
    assert in_parts(runs, most=7) == [runs]


def test_each_part_keeps_to_the_limit_of_runs() -> None:
    runs = [BlockRun(0, 2 * n, [bytes([n])], [n]) for n in range(2 * MAX_RUNS + 2)]
    parts = in_parts(runs, most=MAX_RUNS + 1)
    assert [len(part) for part in parts] == [1, 1]
    assert [n for part in parts for run in part for n in run.engine_blocks] == list(range(130))


@pytest.mark.parametrize(("count", "jobs"), [(MOST - 1, 1), (MOST, 1), (MOST + 1, 2)])
def test_a_hit_is_found_and_loaded_whole_however_long(count: int, jobs: int) -> None:
    rig = Rig()
    rig.holds("p", count * TOKENS)
    rig.arrive("r", count * TOKENS + 1)
    assert rig.ask("r") == count * TOKENS
    rig.allocate("r", [blocks(0, count + 1)], count * TOKENS)
    plan = rig.step()
    assert len(plan.loads) == jobs
    assert sum(len(run.block_hashes) for job in _loads(rig) for run in job.runs) == count


def test_two_groups_share_no_limit() -> None:
    rig = Rig(FULL, WIDE)
    count = MOST - 4
    rig.holds("p", count * TOKENS, group=0)
    rig.holds("p", count * TOKENS, group=1)
    rig.arrive("r", count * TOKENS + 1)
    assert rig.ask("r") == count * TOKENS


def test_a_load_ends_with_its_last_part_and_fails_if_any_did() -> None:
    rig = _loading(2 * MOST)
    first, second = (job.draft.job_id for job in rig.scheduler._jobs._jobs.values())
    outcome = rig.report(first, done=False)
    assert (outcome.finished_loads, outcome.failed_loads) == ((), ())
    assert rig.ask("r") is None, "it is loading still"
    outcome = rig.report(second)
    assert (outcome.finished_loads, outcome.failed_loads) == ((), ("r",))
    assert rig.ask("r") == 0, "a failed load is not tried again"


def test_a_whole_load_is_told_once() -> None:
    rig = _loading(2 * MOST)
    first, second = (job.draft.job_id for job in rig.scheduler._jobs._jobs.values())
    assert rig.report(second).finished_loads == ()
    assert rig.report(first).finished_loads == ("r",)
    assert rig.report().finished_loads == ()


def test_loads_of_one_step_all_leave_with_it() -> None:
    rig = Rig()
    count = MOST // 2 + 1
    for number, name in enumerate("pq"):
        rig.holds(name, count * TOKENS)
        rig.arrive(name, count * TOKENS + 1, name)
        assert rig.ask(name) == count * TOKENS
        rig.allocate(name, [blocks(number * (count + 1), count + 1)], count * TOKENS)
    assert len(rig.step().loads) == 2, "their leases leave with this step"


def test_a_prefill_beyond_the_limit_is_stored_whole_and_once() -> None:
    count = 2 * MOST + 1
    rig = Rig()
    rig.holds("p", count * TOKENS)
    rig.arrive("r", count * TOKENS + 1, kv_transfer_params={"do_remote_decode": True})
    assert rig.ask("r") == count * TOKENS
    table = blocks(0, count + 1)
    rig.allocate("r", [table], count * TOKENS)
    loads = rig.step().loads
    rig.report(*loads)
    rig.scheduler.request_finished("r", [table], count * TOKENS)
    stored: list[bytes] = []
    for _ in range(10):
        plan = rig.step()
        stored += rig.stored_hashes()
        rig.report(*plan.stores, *plan.computed_stores)
    counts = (len(stored), len(set(stored)))
    assert counts == (count, count)
    assert not rig.scheduler.has_pending_work()


def test_each_call_of_a_large_lookup_asks_for_as_much_of_every_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What may be leased is shared by them: a call for one alone could take all of it."""
    monkeypatch.setattr(lookup, "KEYS_PER_CALL", 10)
    rig = Rig(FULL, RECURRENT)
    for group in range(2):
        rig.holds("p", 24 * TOKENS, group)
    rig.arrive("r", 24 * TOKENS + 1)
    asked = [
        [(query.run.group, query.run.first_block, len(query.run.block_hashes)) for query in call]
        for call in rig.daemon.lookups
    ]
    assert asked == [
        [(0, 0, 8), (1, 0, 2)],
        [(0, 8, 8), (1, 2, 2)],
        [(0, 16, 8), (1, 4, 2)],
    ]
    assert rig.ask("r") == 24 * TOKENS


def _loads(rig: Rig) -> list[JobDraft]:
    return rig.daemon.last_step.loads


def _loading(count: int) -> Rig:
    rig = Rig()
    rig.holds("p", count * TOKENS)
    rig.arrive("r", count * TOKENS + 1)
    assert rig.ask("r") == count * TOKENS
    rig.allocate("r", [blocks(0, count + 1)], count * TOKENS)
    rig.step()
    return rig
