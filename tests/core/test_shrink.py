"""A lowered quota holds at once for stores, and what is beyond it goes in small pieces.

So does what gives way for a store of much larger blocks.
"""

from __future__ import annotations

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import NamespaceId, TenantId
from kvd.core.model import backlog
from kvd.core.model.gone import Fate
from tests.core.bench import BLOCK, Bench, done, only, small, spec, verdict
from tests.core.replaying import replay

AT_ONCE = 4
MANY = 40


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "EVICTED_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(backlog, "EVICTED_IN_A_BATCH", 2)
    monkeypatch.setattr(backlog, "EVICTED_FOR_A_STORE", 2 * AT_ONCE)


def stocked() -> Bench:
    bench = small(extents=8)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    for first in range(0, MANY, 4):
        bench.stored(range(first, first + 4), 1 + first // 4 % 2)
    return bench


def lowered(bench: Bench, blocks: int, token: int = 900) -> list[act.Action]:
    return bench.feed(ev.QuotaSet(token, TenantId("tenant"), blocks * BLOCK))


def test_blocks_beyond_a_quota_go_a_few_in_each_event_coldest_first() -> None:
    bench = stocked()
    assert not only(lowered(bench, 8), act.WriteFree)
    while bench.machine.has_work():
        made = bench.feed(ev.WorkContinued())
        assert 0 < sum(len(each.slots) for each in only(made, act.WriteFree)) <= AT_ONCE
    assert done(made) == {900: MANY - 8}
    assert bench.machine.statistics().slots.ready == 8
    replay(bench)


def test_blocks_of_many_accounts_make_few_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "EVICTED_AT_ONCE", 1000)
    monkeypatch.setattr(backlog, "NEWS_AT_ONCE", 6)
    bench = small(extents=8)
    bench.open()
    for number in range(MANY):
        bench.stored([number], account=f"account {number}")
    lowered(bench, 1)
    while bench.machine.has_work():
        made = bench.feed(ev.WorkContinued())
        assert len(made) <= 6 + 2 + 2 + 1
    assert bench.machine.statistics().slots.ready == 1


def test_nothing_is_stored_while_more_than_the_quota_is_there() -> None:
    bench = stocked()
    lowered(bench, 8)
    while bench.machine.state.tenants[TenantId("tenant")].excess(0) > 0:
        assert verdict(bench.store([1000])).reason == "QUOTA"
        assert bench.machine.room(NamespaceId(1)) == (0,)
        bench.feed(ev.WorkContinued())
    bench.work_off()
    bench.stored([1000])


def test_quota_set_again_meanwhile_answers_both() -> None:
    bench = stocked()
    lowered(bench, 20)
    bench.feed(ev.WorkContinued())
    lowered(bench, 8, 901)
    assert done(bench.work_off()) == {900: MANY - 8, 901: MANY - 8 - AT_ONCE}


def test_quota_taken_away_meanwhile_keeps_what_is_left() -> None:
    bench = stocked()
    lowered(bench, 8)
    bench.feed(ev.WorkContinued())
    assert done(lowered(bench, 0, 901)) == {900: AT_ONCE, 901: 0}
    assert not bench.machine.has_work()
    assert bench.machine.statistics().slots.ready == MANY - AT_ONCE
    bench.stored([1000])


def test_clear_meanwhile_ends_both() -> None:
    bench = stocked()
    made = lowered(bench, 8)
    made += bench.feed(ev.NamespaceCleared(901, NamespaceId(1)))
    made += bench.feed(ev.NamespaceCleared(902, NamespaceId(2)))
    made += bench.work_off()
    assert done(made).keys() == {900, 901, 902}
    assert bench.machine.statistics().slots.ready == 0
    bench.stored([1000])


def test_tenant_whose_pins_end_without_a_block_to_evict_may_store_again() -> None:
    bench = small()
    bench.open()
    bench.store(range(4))
    assert bench.quota(2 * BLOCK) == 0
    bench.finish(outcome=ev.TransferOutcome.FAILED)
    bench.tick()
    bench.work_off()
    assert bench.machine.room(NamespaceId(1)) == (2,)
    bench.stored([7])


def with_larger_blocks() -> Bench:
    """A quota that small blocks fill, and an engine whose blocks are eight times as large."""
    bench = stocked()
    bench.open(3, spec("large", block_bytes=8 * BLOCK))
    bench.quota(MANY * BLOCK)
    return bench


def test_few_blocks_give_way_for_a_larger_one_in_its_own_event() -> None:
    bench = with_larger_blocks()
    bench.stored([1000], 3)
    assert bench.machine.statistics().slots.ready == MANY - 8 + 1


def test_many_blocks_that_give_way_for_larger_ones_go_a_few_in_each_event() -> None:
    bench = with_larger_blocks()
    asked = bench.store([1000, 1001], 3)
    assert verdict(asked).reason == "QUOTA"
    assert not only(asked, act.WriteFree)
    gone = 0
    while bench.machine.has_work():
        made = bench.feed(ev.WorkContinued())
        freed = sum(len(each.slots) for each in only(made, act.WriteFree))
        assert 0 < freed <= AT_ONCE
        gone += freed
    assert gone == 16
    bench.stored([1000, 1001], 3)
    replay(bench)


def test_others_store_while_room_is_made_and_blocks_go_for_whom_it_is_made() -> None:
    bench = with_larger_blocks()
    bench.store([1000, 1001], 3)
    bench.feed(ev.WorkContinued())
    bench.stored([1002], 1)
    bench.work_off()
    bench.stored([1000, 1001], 3)
    ring = bench.machine.state.gone.share_of(TenantId("tenant"))
    assert Fate.EVICTED | 3 << 16 in ring.codes


@pytest.mark.parametrize(("between", "finds_room"), [(2 * AT_ONCE, True), (2 * AT_ONCE + 1, False)])
def test_room_is_not_kept_and_suffices_unless_others_take_more_than_one_event_evicts(
    between: int, *, finds_room: bool
) -> None:
    """A known limit: see docs/limits.md, blocks that give way for a quota."""
    bench = with_larger_blocks()
    asked = []
    for attempt in range(5):
        asked.append(verdict(bench.store([1000, 1001], 3)).accepted)
        bench.work_off()
        for number in range(between):
            bench.stored([2000 + between * attempt + number], 1)
    assert asked[1:] == [finds_room] * 4
    assert not asked[0]


def test_room_that_a_store_wanted_is_not_made_for_a_quota_set_meanwhile() -> None:
    bench = with_larger_blocks()
    bench.store([1000, 1001], 3)
    assert bench.quota((MANY - 4) * BLOCK) == 4
    assert bench.machine.statistics().slots.ready == MANY - 4
