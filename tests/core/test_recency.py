"""What was used last is known after a crash, for a bounded amount of work at each tick."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import RequestId, SessionId
from kvd.core.model.slots import SlotState, coarse_stamp
from kvd.core.upkeep import recency
from tests.core.bench import SECOND, Bench, only, small
from tests.core.test_recovery import restarted

BLOCKS = 64


def used_again(numbers: range) -> Bench:
    """A full pool whose named blocks were stored first and used last."""
    bench = small(extents=4, lease_share=1.0)
    bench.open()
    bench.stored(range(BLOCKS))
    bench.now_ns += SECOND
    use(bench, numbers)
    return bench


def use(bench: Bench, numbers: range) -> None:
    bench.lookup(numbers, lease=ev.LeaseMode.ALL)
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))


def tick(bench: Bench) -> list[act.WriteStamps]:
    return only(bench.feed(ev.TimerTicked()), act.WriteStamps)


def test_blocks_in_use_survive_evictions_after_a_crash() -> None:
    left = used_again(range(8))
    tick(left)
    bench = restarted(left)
    bench.open()
    bench.stored(range(1000, 1000 + BLOCKS - 8))
    assert bench.statuses(range(8)) == "H" * 8


@pytest.mark.parametrize("again", [False, True], ids=["stored", "used again"])
def test_a_prompts_tail_leaves_before_its_head_after_a_crash_too(again: bool) -> None:
    """Over several rows, whose slots don't follow each other as the prompt's blocks do."""
    left = small(extents=4, lease_share=1.0)
    left.open()
    left.stored(range(BLOCKS))
    if again:
        left.now_ns += SECOND
        use(left, range(BLOCKS))
        tick(left)
    bench = restarted(left)
    bench.open()
    bench.stored(range(1000, 1040))
    assert bench.statuses(range(BLOCKS)) == "H" * 24 + "M" * 40


def test_what_is_stored_after_a_restart_is_the_tail_of_what_was_stored_before() -> None:
    left = small(extents=4, lease_share=1.0)
    left.open()
    left.stored(range(40))
    bench = restarted(left)
    bench.open()
    bench.stored(range(40, BLOCKS))
    bench.now_ns += SECOND
    use(bench, range(BLOCKS))
    tick(bench)
    bench = restarted(bench)
    bench.open()
    bench.stored(range(1000, 1030))
    assert bench.statuses(range(BLOCKS)) == "H" * 34 + "M" * 30


def test_only_what_was_used_since_is_written() -> None:
    bench = used_again(range(8))
    (written,) = tick(bench)
    assert len(written.slots) == 8
    assert tick(bench) == []
    bench.now_ns += SECOND
    use(bench, range(3))
    (written,) = tick(bench)
    assert len(written.slots) == 3
    bench = restarted(bench)
    assert tick(bench) == []


@pytest.mark.parametrize(("rows", "stamps"), [(1, 1000), (1000, 5), (3, 16)])
def test_a_tick_looks_at_few_rows_and_writes_few_stamps_and_all_come_in_turn(
    monkeypatch: pytest.MonkeyPatch, rows: int, stamps: int
) -> None:
    monkeypatch.setattr(recency, "ROWS_LOOKED_AT", rows)
    monkeypatch.setattr(recency, "STAMPS_WRITTEN", stamps)
    bench = used_again(range(BLOCKS))
    told: list[int] = []
    for _ in range(BLOCKS):
        for written in tick(bench):
            assert len(written.slots) <= min(stamps, rows * 16)
            told += written.slots.tolist()
        bench.now_ns += 1
    assert sorted(told) == sorted(set(told))
    assert len(told) == BLOCKS
    table = bench.machine.state.slots
    slots = np.array(told)
    assert (table.noted[slots] == table.stamps[slots]).all()


def test_a_block_that_was_evicted_or_is_being_stored_gets_no_stamp() -> None:
    bench = used_again(range(8))
    bench.store(range(2000, 2010))  # evicts ten; what is reserved there is young
    ((written,),) = [tick(bench)]
    assert len(written.slots) == 8


def test_uses_of_a_clock_that_was_ahead_are_of_now_and_keep_their_order() -> None:
    ahead = 400 * 24 * 3600 * SECOND
    left = small(extents=4, lease_share=1.0)
    left.now_ns += ahead
    left.open()
    left.stored(range(BLOCKS))
    left.now_ns += SECOND
    use(left, range(8))
    tick(left)
    left.now_ns -= ahead
    bench = restarted(left)
    now = coarse_stamp(bench.now_ns)
    slots = bench.machine.state.slots
    ready = slots.state == SlotState.READY
    assert ready.sum() == BLOCKS
    assert (slots.stamps[ready] <= now).all()
    bench.open()
    tick(bench)
    stamps = [bench.pool.stamps[slot] for slot in bench.pool.ready]
    assert coarse_stamp(max(stamps)) <= now  # so that the next start believes them
    bench.stored(range(1000, 1000 + BLOCKS - 8))
    assert bench.statuses(range(8)) == "H" * 8
