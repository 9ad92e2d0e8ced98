"""Room: eviction, quotas, rows granted and taken back, clear."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.errors import InvalidArgument, UnknownNamespace
from kvd.core.events import LeaseMode
from kvd.core.keys import JobId, MoverId, NamespaceId, RequestId, SessionId
from kvd.core.model import size_class
from kvd.core.policy import ArcPolicy
from kvd.core.room import reclaim, row_rights
from tests.core.bench import (
    BLOCK,
    EXTENT,
    MS,
    SECOND,
    Bench,
    context,
    engine_blocks,
    keys,
    numbers_of,
    only,
    small,
    spec,
    verdict,
)


def room(bench: Bench, namespace: int = 1) -> tuple[int, ...]:
    return bench.machine.room(NamespaceId(namespace))


def test_full_pool_evicts_before_it_starts_a_copy() -> None:
    bench = small(extents=1)
    bench.open()
    bench.stored(range(16))
    actions = bench.store([100])
    assert [type(a) for a in actions] == [
        act.RetractTags,
        act.AnnounceRemoved,
        act.WriteFree,
        act.StartTransfer,
        act.Reply,
    ]


def test_eviction_is_all_or_nothing() -> None:
    bench = small(extents=1, lease_share=1.0)
    bench.open()
    bench.stored(range(16))
    bench.lookup(range(10), lease=ev.LeaseMode.PREFIX)
    assert verdict(bench.store(range(100, 107))).reason == "NO_ROOM"
    assert bench.statuses(range(16)) == "H" * 16


def test_block_just_offered_is_not_evicted_for_the_rest_of_the_offer() -> None:
    bench = small(extents=1)
    bench.open()
    bench.stored(range(16))
    bench.store([0, 1, *range(100, 114)])
    assert bench.statuses([0, 1]) == "HH"
    assert verdict(bench.store([0, 1, *range(100, 115)])).reason == "NO_ROOM"


def test_slot_in_flight_is_never_given_out() -> None:
    bench = small(extents=1)
    bench.open()
    bench.store(range(16))
    assert verdict(bench.store([100])).reason == "NO_ROOM"


def test_one_group_may_use_all_of_the_pool() -> None:
    bench = small(extents=8)
    bench.open()
    for start in range(0, 128, 16):
        bench.stored(range(start, start + 16))
    assert bench.statuses(range(128)) == "H" * 128


def test_groups_of_one_job_get_room_together_or_not_at_all() -> None:
    bench = small(extents=2)
    bench.open(namespace=spec(groups=2))
    bench.stored(range(16))
    bench.finish(bench.store(range(16), group=1))
    bench.lookup(range(4), group=1, lease=ev.LeaseMode.PREFIX)
    runs = tuple(
        ev.Run(group, keys(*numbers), engine_blocks(numbers))
        for group, numbers in ((0, range(100, 103)), (1, range(100, 113)))
    )
    request = ev.StoreRequested(SessionId(1), JobId(99), context(), runs)
    assert verdict(bench.feed(request)).reason == "NO_ROOM"
    assert bench.statuses(range(16)) == "H" * 16
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))
    assert verdict(bench.feed(request)).blocks == 16


# -- quotas --------------------------------------------------------------------------------------


def test_quota_holds_by_evicting_the_tenant_s_own_blocks() -> None:
    bench = small(extents=4)
    bench.open(1, spec("a", tenant="one"))
    bench.open(2, spec("b", tenant="two"))
    bench.quota(4 * BLOCK, "one")
    bench.stored(range(10, 14), 2)
    bench.stored(range(4), 1)
    bench.stored([4, 5], 1)
    assert bench.statuses(range(6), 1).count("H") == 4
    assert bench.statuses(range(10, 14), 2) == "HHHH"


def test_quota_evicts_from_the_tenant_s_other_namespaces_too() -> None:
    bench = small(extents=4)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.quota(4 * BLOCK)
    bench.stored(range(4), 1)
    bench.stored(range(3), 2)
    assert bench.statuses(range(4), 1).count("H") == 1


def test_quota_full_of_pinned_blocks_refuses_with_its_name() -> None:
    bench = small(extents=4, lease_share=1.0)
    bench.open()
    bench.quota(4 * BLOCK)
    bench.stored(range(4))
    bench.lookup(range(4), lease=ev.LeaseMode.PREFIX)
    assert verdict(bench.store([10])).reason == "QUOTA"
    assert verdict(bench.store(range(20, 30))).reason == "QUOTA"


def test_smaller_quota_evicts_at_once_and_says_how_much() -> None:
    bench = small(extents=4)
    bench.open()
    bench.stored(range(10))
    assert bench.quota(4 * BLOCK) == 6
    assert room(bench) == (4,)


def test_quota_a_byte_below_what_is_used_costs_a_block() -> None:
    bench = small(extents=4)
    bench.open()
    bench.stored(range(4))
    assert bench.quota(4 * BLOCK) == 0
    assert bench.quota(4 * BLOCK - 1) == 1
    assert bench.statuses(range(4)).count("H") == 3


def test_quota_below_what_is_pinned_is_kept_as_soon_as_pins_end() -> None:
    bench = small(extents=4, lease_share=1.0)
    bench.open()
    bench.stored(range(10))
    answer = bench.lookup(range(10), lease=ev.LeaseMode.PREFIX)
    assert bench.quota(4 * BLOCK) == 0
    assert verdict(bench.store([100])).reason == "QUOTA"
    assert room(bench) == (0,)
    assert answer.lease
    bench.release(answer.lease)
    bench.tick()
    assert bench.machine.statistics().tenants[0].used_bytes == 4 * BLOCK


def test_negative_quota_is_an_error() -> None:
    with pytest.raises(InvalidArgument):
        small().quota(-1)


# -- rows ----------------------------------------------------------------------------------------


def test_row_takes_one_extent_for_each_shard() -> None:
    bench = small(extents=4)
    bench.open(ranks=2)
    (row,) = only(bench.store([1]), act.GrantRow)
    assert row.extents == (0, 1)
    assert row.row == row.extents[0]
    assert (row.first_slot, row.slots) == (0, 16)
    assert list(bench.machine.granted_rows(row.namespace, 2)) == [[row]]


def test_rows_are_granted_ahead_of_need_but_not_beyond_an_eighth_of_the_pool() -> None:
    bench = small(extents=32)
    assert len(bench.machine.namespaces()) == 0
    bench.open()
    assert bench.machine.statistics().rows == 4
    bench.stored(range(16))
    assert bench.machine.statistics().rows == 5
    bench = small(extents=32, spare_bytes=2 * EXTENT)
    bench.open()
    assert bench.machine.statistics().rows == 2


def starving() -> Bench:
    """Session 1 has all rows; session 2, of another namespace, has none."""
    bench = small(extents=2)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(32), 1)
    bench.now_ns += SECOND
    return bench


def test_class_that_owns_nothing_takes_the_coldest_row() -> None:
    bench = starving()
    bench.lookup(range(16), 1, lease=ev.LeaseMode.PREFIX)  # these were used since
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))
    used = set(range(16))
    assert room(bench, 2) == (1,), "an offer is worth while"
    refused = bench.store([1], 2)
    assert verdict(refused).reason == "NO_ROOM"
    (removed,) = only(refused, act.AnnounceRemoved)
    assert not used & set(numbers_of(removed.keys))
    assert bench.machine.statistics().counters.evicted == len(removed.keys)
    made = bench.unmap(refused)
    taken = [a for a in made if isinstance(a, act.ZeroRow | act.ReleaseRow | act.GrantRow)]
    assert [type(a) for a in taken] == [act.ZeroRow, act.ReleaseRow, act.GrantRow]
    assert verdict(bench.store([1], 2)).accepted


def test_row_is_zeroed_only_when_every_mover_has_unmapped_it() -> None:
    bench = small(extents=2)
    bench.open(1, spec("a"))
    bench.open(3, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(32), 1)
    first, second = only(bench.store([1], 2), act.UnmapRow)
    assert {first.mover, second.mover} == {100, 300}
    assert not bench.feed(ev.RowUnmapped(first.mover, first.row))
    assert [type(a) for a in bench.feed(ev.RowUnmapped(second.mover, second.row))] == [act.ZeroRow]


def test_dead_mover_counts_as_unmapped() -> None:
    bench = starving()
    assert only(bench.store([1], 2), act.UnmapRow)
    assert only(bench.gone(100), act.ZeroRow)


def test_row_with_a_leased_block_is_not_taken() -> None:
    bench = small(extents=1, lease_share=1.0)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(16), 1)
    bench.now_ns += 3 * SECOND
    bench.lookup([3], 1, lease=LeaseMode.PREFIX)
    assert not only(bench.store([1], 2), act.UnmapRow)
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))
    assert only(bench.tick(100 * MS), act.UnmapRow)


def test_row_in_use_is_emptied_for_a_class_that_has_none() -> None:
    bench = small(extents=1)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(12), 1)
    loading, storing = bench.load([3], 1), bench.store([12], 1)
    bench.now_ns += 3 * SECOND
    asked = bench.store([1], 2)
    (removed,) = [r for r in only(asked, act.AnnounceRemoved) if len(r.keys) > 1]
    assert 12 not in numbers_of(removed.keys)
    assert verdict(bench.store([13], 1)).reason == "NO_ROOM", "it gives no slot out any more"
    assert not only(bench.finish(loading), act.UnmapRow)
    done = bench.finish(storing)
    assert [e.status for e in only(done, act.EndJob)] == [ev.JobStatus.DONE]
    assert only(bench.unmap(done), act.GrantRow)[0].namespace == 2
    assert verdict(bench.store([1], 2)).accepted


def test_slots_beside_a_row_that_is_emptied_are_given_out_again() -> None:
    bench = small(extents=2, lease_share=1.0)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(16), 1)
    bench.load([0, 15], 1)
    failing = bench.store([16], 1)  # the first slot of the second row
    bench.stored(range(17, 32), 1)
    bench.lookup(range(17, 32), 1, lease=LeaseMode.ALL)
    bench.store([1], 2)
    assert list(bench.machine.state.emptying) == [0]
    bench.finish(only(failing, act.StartTransfer), ev.TransferOutcome.FAILED)
    again = bench.store([32], 1)
    assert verdict(again).accepted
    (order,) = only(again, act.StartTransfer)
    assert order.parts[0].slots.tolist() == [16]


def test_row_whose_block_is_claimed_while_it_is_emptied_stays() -> None:
    bench = small(extents=1)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    storing = bench.store(range(4), 1)
    bench.now_ns += 3 * SECOND
    bench.store([1], 2)
    assert bench.machine.state.emptying
    bench.feed(ev.HandOffRequested(SessionId(1), context(), 0, keys(2), SECOND))
    assert not bench.machine.state.emptying
    bench.finish(storing)
    assert bench.statuses(range(4), 1) == "HHHH"
    bench.stored(range(20, 32), 1)


def test_empty_row_is_taken_before_one_with_blocks() -> None:
    bench = starving()
    bench.clear(1)
    bench.stored([5], 1)
    actions = bench.store([1], 2)
    assert only(actions, act.UnmapRow)
    assert not only(actions, act.AnnounceRemoved)


def test_class_with_colder_blocks_of_its_own_takes_no_row() -> None:
    bench = small(extents=4)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(32), 1)
    bench.now_ns += SECOND
    bench.stored(range(32), 2)
    bench.now_ns += SECOND
    assert not only(bench.store([100], 1), act.UnmapRow), "its own are the oldest"
    bench.finish()
    assert only(bench.store([100], 2), act.UnmapRow)


def test_row_just_granted_is_not_taken_for_one_who_grows() -> None:
    bench = small(extents=4)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(32), 1)
    bench.now_ns += SECOND
    bench.stored(range(32), 2)
    assert not only(bench.store([100], 2), act.UnmapRow)
    bench.now_ns += SECOND
    assert only(bench.store([101], 2), act.UnmapRow)


def test_class_that_stores_keeps_one_row_however_cold_it_is() -> None:
    bench = small(extents=4)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(16), 1)
    bench.stored(range(48), 2)
    for _ in range(20):
        bench.now_ns += SECOND
        assert not only(bench.store([next_key()], 2), act.UnmapRow)
        bench.finish()
    assert bench.statuses(range(16), 1) == "H" * 16


@pytest.mark.parametrize(("extents", "taken"), [(4, []), (3, [0])])
def test_class_that_has_not_stored_for_long_keeps_a_row_where_each_can_have_two(
    extents: int, taken: list[int]
) -> None:
    bench = small(extents=extents)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(16), 1)
    bench.now_ns += SECOND
    bench.stored(range(16 * (extents - 1)), 2)
    bench.tick(row_rights.IN_USE_NS + SECOND)
    orders = only(bench.store([next_key()], 2), act.UnmapRow)
    assert sorted({order.row for order in orders}) == taken


@pytest.mark.parametrize("coldest", [0, 1, 2])
@pytest.mark.parametrize("looked_at", [1, 2, 128])
def test_of_rows_in_use_the_coldest_is_emptied_in_whichever_search_it_was_seen(
    monkeypatch: pytest.MonkeyPatch, coldest: int, looked_at: int
) -> None:
    monkeypatch.setattr(reclaim, "ROWS_LOOKED_AT", looked_at)
    bench = small(extents=3)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    rows = [range(first, first + 16) for first in (0, 16, 32)]
    for blocks in rows:
        bench.stored(blocks, 1)
    for blocks in rows:
        bench.load(blocks[:1], 1)
    bench.now_ns += SECOND
    for row, blocks in enumerate(rows):
        if row != coldest:
            bench.feed(ev.Touched(SessionId(1), context(), 0, keys(*blocks)))
    bench.store([1], 2)
    for _ in range(3):
        bench.tick(MS)
    assert list(bench.machine.state.emptying) == [coldest]


def next_key(keys: itertools.count[int] = itertools.count(1000)) -> int:  # noqa: B008 - goes on
    return next(keys)


def test_one_row_at_a_time_is_taken_for_a_class() -> None:
    bench = small(extents=4)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(16), 1)
    bench.stored(range(16, 32), 1)
    bench.stored(range(32, 64), 1)
    assert only(bench.store([1], 2), act.UnmapRow)
    bench.now_ns += 60 * MS
    assert not only(bench.store([1], 2), act.UnmapRow)


# -- clear ---------------------------------------------------------------------------------------


def test_cleared_namespace_holds_nothing_and_says_so_once() -> None:
    bench = small()
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored([1, 2], 1)
    bench.stored([3], 2)
    assert bench.clear(1) == 2
    assert bench.statuses([1, 2], 1) == "MM"
    assert bench.statuses([3], 2) == "H"


def test_pinned_block_of_a_cleared_namespace_keeps_its_slot_until_its_pin_ends() -> None:
    bench = small()
    bench.open()
    bench.stored([1, 2])
    loading = bench.load([1])
    bench.clear()
    slots = bench.machine.statistics().slots
    assert (slots.ready, slots.quarantined) == (0, 1)
    assert bench.statuses([1]) == "M"
    bench.finish(loading)
    assert bench.machine.statistics().slots.quarantined == 0


def test_store_running_into_a_cleared_namespace_comes_to_nothing() -> None:
    bench = small()
    bench.open()
    started = bench.store([1])
    bench.clear()
    (end,) = only(bench.finish(started), act.EndJob)
    assert (end.status, end.reason) == (ev.JobStatus.FAILED, "RESET")
    assert bench.statuses([1]) == "M"


def test_cleared_namespace_forgets_what_its_policy_had_learned() -> None:
    bench = small(extents=1, policy="arc", lease_share=1.0)
    bench.open()
    use_half_again(bench, blocks=16)
    bench.stored([16, 17])
    bench.statuses(range(16))  # two of them were pushed out too early
    assert arc_of(bench).target == 2
    bench.clear()
    assert arc_of(bench).target == 0


def test_quota_bounds_what_a_policy_takes_for_the_capacity() -> None:
    bench = small(policy="arc", lease_share=1.0)
    bench.open()
    bench.quota(4 * BLOCK)
    use_half_again(bench, blocks=4)
    for first in range(4, 16, 2):
        bench.stored([first, first + 1])
    bench.statuses(range(4, 8))  # left long ago, for a policy of 4 blocks
    assert arc_of(bench).target == 0


def use_half_again(bench: Bench, blocks: int) -> None:
    bench.stored(range(blocks))
    lease = bench.lookup(range(blocks // 2), lease=LeaseMode.PREFIX).lease
    assert lease is not None
    bench.release(lease)


def arc_of(bench: Bench) -> ArcPolicy:
    policy = bench.machine.state.namespaces[NamespaceId(1)].classes[0].policy
    assert isinstance(policy, ArcPolicy)
    return policy


def test_unknown_namespace_can_not_be_cleared() -> None:
    with pytest.raises(UnknownNamespace):
        small().clear(9)


def test_row_unmapped_without_being_asked_changes_nothing() -> None:
    bench = small()
    bench.open()
    (row,) = only(bench.store([1]), act.GrantRow)
    assert not bench.feed(ev.RowUnmapped(MoverId(100), row.row))
    assert not bench.feed(ev.RowZeroed(row.row))


def test_class_that_waits_for_extents_holds_nobody_up_once_its_engine_is_gone() -> None:
    bench = small(extents=32)
    bench.open(1, spec("a"))
    bench.stored(range(32 * 16), 1)
    bench.open(2, spec("b", shards=2), ranks=2)
    bench.now_ns += SECOND
    bench.unmap(bench.store([1], 2))
    assert len(bench.machine.state.free_extents) == 1, "one of the two that it needs"
    opened = ev.SessionOpened(SessionId(3), spec("c"), "", 1)
    assert not only(bench.feed(opened), act.GrantRow), "the next extent is for the one who waits"
    bench.close(2)
    bench.gone(200)
    bench.gone(201)
    assert only(bench.tick(), act.GrantRow)


def test_row_is_found_though_the_coldest_blocks_are_all_pinned() -> None:
    bench = small(extents=2, lease_share=1.0)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(32), 1)
    coldest = next(iter(bench.machine.state.classes.values())).policy.coldest(8)
    row = int(coldest[0]) // bench.machine.state.slots_per_extent
    pinned = [k for k in range(32) if _row_of(bench, k) == row]
    assert len(pinned) == 16
    bench.now_ns += SECOND
    bench.lookup(pinned, 1, lease=LeaseMode.ALL)
    (order,) = only(bench.store([1], 2), act.UnmapRow)
    assert order.row != row


def _row_of(bench: Bench, key: int) -> int:
    (slot,) = [slot for slot, (_, number) in bench.pool.ready.items() if number == key]
    return slot // bench.machine.state.slots_per_extent


def refuse(bench: Bench, row: act.GrantRow) -> object:
    """As the driver says it, once the transfers that were to write to the row have ended."""
    bench.pool.rows.pop(row.row, None)
    return bench.ask(ev.RowRefused(row.row))


def test_row_that_the_pool_could_not_have_is_no_room_and_is_tried_again_later() -> None:
    bench = small(extents=2)
    bench.open()
    bench.stored(range(16))
    started = bench.store(range(20, 24))
    (row,) = only(started, act.GrantRow)
    (order,) = only(started, act.StartTransfer)
    assert refuse(bench, row) is False  # a transfer that was to write there has not ended
    revoked = ev.TransferOutcome.REVOKED
    ended = bench.feed(
        ev.TransferFinished(order.mover, order.transfer, revoked, 0, 0, reason="NO_ROOM")
    )
    bench.transfers.pop(order.transfer)
    assert only(ended, act.EndJob)[0].reason == "NO_ROOM"
    assert refuse(bench, row) is True
    assert len(bench.machine.state.free_extents) == 1
    # Meanwhile the class makes do with what it has.
    assert room(bench) == (16,)
    assert only(bench.store(range(30, 32)), act.GrantRow) == []
    bench.finish()
    granted = []
    for _ in range(size_class.FIRST_PAUSE_TICKS):
        assert room(bench) == (16,)
        granted += only(bench.feed(ev.TimerTicked()), act.GrantRow)
    assert room(bench) == (32,)
    assert len(granted) == 1, "the class has asked for it meanwhile"
    assert verdict(bench.store(range(40, 44))).accepted


def test_pool_that_goes_on_having_no_memory_for_rows_is_asked_less_and_less_often() -> None:
    pause = size_class.GrantPause()
    asked = []
    for tick in range(2000):
        if not pause.ticks_left:
            asked.append(tick)
            pause.begin()
        pause.tick()
    apart = [later - earlier for earlier, later in pairwise(asked)]
    assert apart[0] == size_class.FIRST_PAUSE_TICKS
    assert max(apart) == size_class.LONGEST_PAUSE_TICKS
    assert sorted(apart) == apart
    for _ in range(size_class.LONGEST_PAUSE_TICKS * 2):
        pause.tick()
    pause.begin()
    assert pause.ticks_left == size_class.FIRST_PAUSE_TICKS
