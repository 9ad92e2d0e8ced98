"""Blocks whose bytes are not those that were stored: no longer found, never loaded again."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import SessionId
from tests.core.bench import SECOND, Bench, context, keys, numbers_of, only, small
from tests.core.replaying import replay


def slots_of(order: act.StartTransfer) -> list[int]:
    return [slot for part in order.parts for slot in part.slots.tolist()]


def find_damage(bench: Bench, started: Iterable[act.Action], *places: int) -> list[act.Action]:
    """Each of these loads' transfers ends: these of its blocks, by place, were damaged."""
    made: list[act.Action] = []
    for order in only(started, act.StartTransfer):
        del bench.transfers[order.transfer]
        slots = slots_of(order)
        damaged = tuple(slots[place] for place in places)
        outcome = ev.TransferOutcome.FAILED
        made += bench.feed(
            ev.TransferFinished(order.mover, order.transfer, outcome, 0, 1000, damaged)
        )
    return made


def removed(actions: Iterable[act.Action]) -> list[int]:
    return [n for order in only(actions, act.AnnounceRemoved) for n in numbers_of(order.keys)]


def test_damaged_block_fails_its_load_and_is_found_no_more() -> None:
    bench = small()
    bench.open()
    bench.stored(range(5))
    found = find_damage(bench, bench.load(range(5)), 1, 3)
    (end,) = only(found, act.EndJob)
    assert (end.status, end.reason) == (ev.JobStatus.FAILED, "CHECKSUM_MISMATCH")
    assert removed(found) == [1, 3]
    assert bench.statuses(range(5)) == "HMHMH"
    assert bench.machine.statistics().counters.damaged == 2
    assert bench.machine.statistics().slots.quarantined == 0
    replay(bench)


def test_damaged_block_is_stored_anew_and_served_again() -> None:
    bench = small()
    bench.open()
    bench.stored(range(3))
    find_damage(bench, bench.load(range(3)), 0)
    bench.stored([0])
    assert bench.statuses(range(3)) == "HHH"
    (end,) = only(bench.finish(bench.load(range(3))), act.EndJob)
    assert end.status is ev.JobStatus.DONE


def test_removal_is_told_before_the_record_goes_and_the_record_before_the_slot() -> None:
    bench = small()
    bench.open()
    bench.stored([7])
    kinds = [type(order) for order in find_damage(bench, bench.load([7]), 0)]
    order = [act.RetractTags, act.AnnounceRemoved, act.WriteFree, act.EndJob]
    assert [kind for kind in kinds if kind in order] == order


def test_slot_under_anothers_lease_and_load_is_not_given_out_before_they_end() -> None:
    bench = small(extents=1)
    bench.open()
    bench.open(session=2)
    bench.stored(range(16))
    lease = bench.lookup([5], session=2, lease=ev.LeaseMode.PREFIX).lease
    assert lease is not None
    other = bench.load([5], session=2)
    find_damage(bench, bench.load([5]), 0)
    assert bench.machine.statistics().slots.quarantined == 1
    assert bench.statuses([5], session=2) == "M"
    bench.finish(other)  # found nothing wrong: the byte was flipped behind it
    assert bench.machine.statistics().slots.quarantined == 1
    bench.release(lease, session=2)
    assert bench.machine.statistics().slots.free == 1


def test_two_loads_that_find_the_same_damage_remove_the_block_once() -> None:
    bench = small()
    bench.open()
    bench.open(session=2)
    bench.stored([1, 2])
    first, second = bench.load([1, 2]), bench.load([1, 2], session=2)
    assert removed(find_damage(bench, first, 0)) == [1]
    late = find_damage(bench, second, 0)
    assert removed(late) == []
    assert [end.reason for end in only(late, act.EndJob)] == ["CHECKSUM_MISMATCH"]
    assert bench.machine.statistics().counters.damaged == 1


def test_one_ranks_damage_fails_the_load_on_every_rank() -> None:
    bench = small()
    bench.open(ranks=2)
    bench.stored([1, 2])
    orders = only(bench.load([1, 2]), act.StartTransfer)
    whole = bench.finish([orders[0]])
    assert only(whole, act.EndJob) == []
    (end,) = only(find_damage(bench, [orders[1]], 1), act.EndJob)
    assert end.status is ev.JobStatus.FAILED
    assert bench.statuses([1, 2]) == "HM"


def test_damaged_block_is_handed_to_nobody() -> None:
    bench = small()
    bench.open()
    bench.open(session=2)
    bench.stored([1, 2])
    left = ev.HandOffRequested(SessionId(1), context(request="prefill"), 0, keys(1, 2), SECOND)
    bench.feed(left)
    assert bench.machine.statistics().handed_off_blocks == 2
    find_damage(bench, bench.load([1, 2], session=2), 0)
    assert bench.machine.statistics().handed_off_blocks == 1
    assert bench.machine.statistics().counters.hand_off_unheld == 1


def test_damage_in_a_namespace_that_was_cleared_meanwhile_is_no_news() -> None:
    bench = small()
    bench.open()
    bench.stored([1])
    started = bench.load([1])
    bench.clear()
    assert removed(find_damage(bench, started, 0)) == []
    assert bench.machine.statistics().counters.damaged == 0
    assert bench.machine.statistics().slots.quarantined == 0
