"""A clear holds at once, whatever is left to be given up; and then goes on in small pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.jobs import waiters
from kvd.core.keys import NamespaceId, SessionId
from kvd.core.machine import RESIDENT_SLOTS
from kvd.core.model import backlog
from tests.core.bench import SECOND, Bench, context, done, keys, only, small, spec
from tests.core.replaying import replay
from tests.core.test_recovery import restarted

AT_ONCE = 4
MANY = 40


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "BLOCKS_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(backlog, "SCOPES_AT_ONCE", 2)


def stocked(blocks: int = MANY) -> Bench:
    bench = small(extents=8)
    bench.open()
    for first in range(0, blocks, 8):
        bench.stored(range(first, min(first + 8, blocks)))
    return bench


def begun(bench: Bench, token: int = 900) -> list[act.Action]:
    return bench.feed(ev.NamespaceCleared(token, NamespaceId(1)))


def test_nothing_is_found_before_anything_was_given_up() -> None:
    bench = stocked()
    made = begun(bench)
    assert not only(made, act.WriteFree)
    assert not done(made)
    assert bench.statuses(range(MANY)) == "M" * MANY
    assert not any(bench.machine.resident(NamespaceId(1)))
    assert bench.machine.statistics().slots.ready == MANY


def test_who_reads_what_is_resident_has_a_pause_for_so_many_slots_that_hold_nothing() -> None:
    bench = stocked()
    begun(bench)
    while bench.machine.has_work():
        bench.feed(ev.WorkContinued())
    pieces = list(bench.machine.resident(NamespaceId(1)))
    assert not any(pieces)
    assert len(pieces) * RESIDENT_SLOTS >= bench.machine.statistics().slots.free >= MANY


def test_blocks_are_given_up_a_few_in_each_event_and_the_answer_comes_last() -> None:
    bench = stocked()
    begun(bench)
    left = MANY
    while bench.machine.has_work():
        made = bench.feed(ev.WorkContinued())
        freed = sum(len(each.slots) for each in only(made, act.WriteFree))
        assert freed <= AT_ONCE
        left -= freed
        assert not done(made) or left == 0
    assert done(made) == {900: MANY}
    assert only(bench.history[-2], act.ForgetScopes)
    assert not only([a for made in bench.history for a in made], act.AnnounceRemoved)
    replay(bench)


def test_same_keys_stored_while_the_old_ones_go_are_found_and_stay() -> None:
    bench = stocked()
    begun(bench)
    bench.stored(range(8))
    bench.stored(range(MANY - 8, MANY))
    expected = "H" * 8 + "M" * (MANY - 16) + "H" * 8
    assert bench.statuses(range(MANY)) == expected
    while bench.machine.has_work():
        bench.feed(ev.WorkContinued())
        assert bench.statuses(range(MANY)) == expected
    assert bench.machine.statistics().slots.ready == 16


def test_clear_that_comes_again_and_again_is_answered_each_time() -> None:
    bench = stocked(8)
    answers: dict[int, int] = {}
    for token in range(100):
        answers |= done(begun(bench, token))
        bench.stored(range(8))
        answers |= done(bench.feed(ev.WorkContinued()))
        assert bench.statuses(range(8)) == "H" * 8
    answers |= done(bench.work_off())
    assert answers == dict.fromkeys(range(100), 8)
    assert bench.statuses(range(8)) == "H" * 8
    assert len(bench.machine.state.scopes) == len(bench.pool.scopes) == 1
    assert sum(bench.pool.tags.values()) == 8


def test_daemon_that_dies_in_the_middle_serves_nothing_of_it() -> None:
    bench = stocked()
    begun(bench)
    bench.feed(ev.WorkContinued())
    bench.stored([1000])
    next_one = restarted(bench)
    next_one.open()
    assert next_one.statuses(range(MANY)) == "M" * MANY
    assert next_one.statuses([1000]) == "H"
    assert next_one.machine.statistics().rows == bench.machine.statistics().rows
    assert len(next_one.pool.ready) == 1


def test_store_under_way_fails_whether_its_copy_ends_before_its_turn_or_after() -> None:
    bench = small(extents=8)
    bench.open()
    stores = [bench.store([number]) for number in range(3 * backlog.PARTS_AT_ONCE)]
    begun(bench)
    (first,) = only(bench.finish(stores[-1]), act.EndJob)
    made = bench.work_off() + bench.finish()
    ends = [first, *only(made, act.EndJob)]
    assert {(end.status, end.reason) for end in ends} == {(ev.JobStatus.FAILED, "RESET")}
    assert len(ends) == len(stores)
    assert not bench.pool.ready


def test_stores_of_others_are_passed_over_a_few_in_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "STORES_LOOKED_AT", AT_ONCE)
    bench = small(extents=8)
    bench.open()
    bench.stored([0])
    bench.open(2, spec("other"))
    stores = [bench.store([number], 2) for number in range(MANY)]
    begun(bench)
    clear = bench.machine.state.backlog.clears[NamespaceId(1)]
    for left in range(MANY - AT_ONCE, -1, -AT_ONCE):
        bench.feed(ev.WorkContinued())
        assert len(clear.stores) == left
    assert done(bench.work_off()) == {900: 1}
    ends = [end for store in stores for end in only(bench.finish(store), act.EndJob)]
    assert [end.status for end in ends] == [ev.JobStatus.DONE] * MANY


def test_job_that_waits_for_a_store_into_it_stores_nothing() -> None:
    bench = small()
    bench.open()
    bench.open(2)
    leading = bench.store([1, 2])
    bench.store([1, 2, 3], 2, whole=True)
    begun(bench)
    made = bench.finish(leading, ev.TransferOutcome.FAILED) + bench.work_off() + bench.finish()
    ends = {end.session: end.reason for end in only(made, act.EndJob)}
    assert ends[SessionId(2)] == "RESET"
    assert not bench.pool.ready


def test_leased_and_handed_off_blocks_go_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "BLOCKS_AT_ONCE", 1000)
    monkeypatch.setattr(backlog, "CLAIMED_AT_ONCE", 2)
    bench = small(extents=8, lease_share=1.0)
    bench.open()
    bench.stored(range(16))
    bench.lookup(range(4), lease=ev.LeaseMode.PREFIX)
    bench.feed(ev.HandOffRequested(SessionId(1), context(), 0, keys(*range(4, 16)), SECOND))
    begun(bench)
    while bench.machine.has_work():
        made = bench.feed(ev.WorkContinued())
        assert sum(len(each.slots) for each in only(made, act.WriteFree)) <= 2
    slots = bench.machine.statistics().slots
    assert (slots.ready, slots.quarantined) == (0, 4)
    assert bench.machine.statistics().hand_offs == 0


def test_namespace_that_is_taken_back_meanwhile_is_forgotten_after_the_answer() -> None:
    bench = small(extents=8)
    bench.open(1, replace(spec("own"), unshared=True))
    bench.stored(range(MANY // 2))
    made = begun(bench)
    made += bench.leave(1, gone=True)
    made += bench.work_off()
    for _ in range(4):
        made += bench.settle(bench.tick())
    assert done(made) == {900: MANY // 2}
    assert not bench.machine.namespaces()
    assert not bench.pool.rows


def test_session_that_opens_meanwhile_finds_nothing_and_stores() -> None:
    bench = stocked()
    begun(bench)
    bench.open(2)
    assert bench.statuses(range(8), 2) == "M" * 8
    bench.stored(range(8), 2)
    assert bench.statuses(range(8), 1) == "H" * 8
    bench.work_off()
    assert bench.statuses(range(8), 1) == "H" * 8


def test_epoch_that_others_are_in_is_nobodys_own_because_it_was_cleared() -> None:
    bench = small(extents=8)
    bench.open(epoch="met")
    bench.stored(range(4))
    bench.clear()
    bench.open(2, epoch="met", own=True, engine="two")
    bench.stored(range(4))
    bench.leave(2, gone=True)
    bench.work_off()
    assert bench.statuses(range(4)) == "HHHH"


def test_full_pool_gives_up_what_was_cleared_before_what_was_stored_since() -> None:
    bench = small(extents=1)
    bench.open()
    bench.stored(range(12))
    begun(bench)
    bench.stored(range(100, 104))
    bench.stored(range(104, 108))
    assert bench.statuses(range(100, 108)) == "H" * 8


def test_drain_lets_a_clear_go_on() -> None:
    bench = stocked()
    begun(bench)
    bench.feed(ev.DrainStarted())
    assert done(bench.work_off()) == {900: MANY}


def test_blocks_of_many_accounts_go_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "BLOCKS_AT_ONCE", 1000)
    monkeypatch.setattr(backlog, "SCOPES_CHANGED_AT_ONCE", 2)
    bench = small(extents=8)
    bench.open()
    for number in range(16):
        bench.stored([number], account=f"account {number}")
    begun(bench)
    freed = []
    while bench.machine.has_work():
        made = bench.feed(ev.WorkContinued())
        freed += [len(each.slots) for each in only(made, act.WriteFree)]
    assert freed == [3, 3, 3, 3, 3, 1]


def test_rows_of_one_class_are_cleared_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "BLOCKS_AT_ONCE", 1024)
    bench = small()
    bench.open(1)
    bench.stored(range(60))
    assert bench.machine.statistics().rows == 4
    before = len(bench.history)
    assert bench.clear() == 60
    orders = [each for made in bench.history[before:] for each in only(made, act.WriteFree)]
    assert [len(order.slots) for order in orders] == [60]


def test_what_becomes_of_a_block_after_it_was_stored_is_not_its_followers_concern(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiters, "WAITS_AT_ONCE", 1)
    bench = small()
    for session in (1, 2, 3):
        bench.open(session)
    leader = bench.store([1], 1)
    bench.store([1], 2, whole=True)
    bench.store([1], 3, whole=True)
    ends = only(bench.finish(leader), act.EndJob)
    assert [end.session for end in ends] == [1, 2]
    (end,) = only(bench.feed(ev.NamespaceCleared(5, NamespaceId(1))), act.EndJob)
    assert (end.session, end.status) == (3, ev.JobStatus.DONE)
