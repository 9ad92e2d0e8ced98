"""Rows that a class in need can't be given, or not soon: nobody waits for them for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks import extent_fit
from kvd.core.claims import lease
from kvd.core.events import LeaseMode
from kvd.core.keys import MoverId, NamespaceId, RequestId, SessionId
from kvd.core.model import backlog, row_claims
from kvd.core.room import reclaim
from tests.core.bench import (
    MS,
    SECOND,
    Bench,
    context,
    keys,
    numbers_of,
    only,
    small,
    spec,
    verdict,
)

STEP = 100 * MS
SLOTS = 16  # of a row


def full(extents: int = 4) -> Bench:
    """Session 1 has all rows, full of blocks that could be evicted."""
    bench = small(extents=extents, lease_share=1.0, lease_ttl_ns=2 * SECOND)
    bench.open(1, spec("a"))
    bench.stored(range(extents * SLOTS), 1)
    return bench


def promise(bench: Bench, each: int = SLOTS) -> None:
    """Lease every so many blocks, with a lease each, as long as the engine takes steps."""
    for number in range(0, len(bench.pool.ready), each):
        answer = bench.lookup([number], 1, lease=LeaseMode.ALL, request=f"r{number}")
        assert bench.leased(answer) == 1


def settle(bench: Bench, made: list[act.Action]) -> None:
    """Movers and the pool do what takes rows back, and what follows from it."""
    while made:
        made = bench.unmap(made)[len(made) :]


def seconds_until_stored(bench: Bench, session: int, most: int) -> float:
    """How long the session asks until its store is accepted, while session 1 takes its steps."""
    began = bench.now_ns
    while not verdict(made := bench.store([10_000 + session], session)).accepted:
        settle(bench, made)
        settle(bench, bench.feed(ev.StepEnded(SessionId(1))))
        settle(bench, bench.tick(STEP))
        assert bench.now_ns - began < most * SECOND, "it waits for ever"
    return (bench.now_ns - began) / SECOND


def test_leases_in_every_row_keep_nobody_out_for_ever() -> None:
    bench = full()
    promise(bench)
    bench.open(2, spec("b"))
    waited = seconds_until_stored(bench, 2, 10)
    assert waited >= reclaim.PROMISED_NS / SECOND, "what was promised is kept for a while"
    assert len(bench.machine.state.sessions[SessionId(1)].leases) == 3
    assert bench.machine.statistics().counters.leases_expired == 1


def test_row_without_leases_is_taken_instead() -> None:
    bench = full()
    bench.lookup(range(3 * SLOTS), 1, lease=LeaseMode.ALL)
    bench.open(2, spec("b"))
    assert seconds_until_stored(bench, 2, 10) < 1
    assert len(bench.machine.state.sessions[SessionId(1)].leases) == 1


def test_hand_offs_in_every_row_keep_nobody_out_for_ever() -> None:
    bench = full()
    bench.feed(
        ev.HandOffRequested(
            SessionId(1), context("", "r"), 0, keys(*range(0, 4 * SLOTS, SLOTS)), 600 * SECOND
        )
    )
    bench.open(2, spec("b"))
    seconds_until_stored(bench, 2, 10)
    assert bench.machine.state.tenant(spec().tenant).hand_off_claims == 3


@pytest.mark.parametrize("bound", ["LEASES_LOOKED_AT", "SLOTS_LOOKED_AT"])
def test_leases_are_ended_a_few_in_each_event(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(lease, bound, 4)
    bench = full()
    promise(bench, each=1)
    bench.open(2, spec("b"))
    held = [64]

    def count() -> int:
        held.append(len(bench.machine.state.sessions[SessionId(1)].leases))
        return held[-2] - held[-1]

    while not verdict(bench.store([1], 2)).accepted:
        assert count() <= 4
        bench.feed(ev.StepEnded(SessionId(1)))
        assert count() <= 4
        settle(bench, bench.tick(STEP))
        count()
    assert held[-1] == 64 - SLOTS


def lease_what_is_left(bench: Bench, turn: int) -> None:
    """Session 1 leases the last blocks of a row that is being emptied, as if it had been told."""
    for row in bench.machine.state.emptying.values():
        if len(row.left):
            number = bench.pool.ready[int(row.left[-1])][1]
            bench.lookup([number], 1, lease=LeaseMode.ALL, request=f"late {turn}")


def seconds_against_who_leases_what_is_left(bench: Bench) -> float:
    """How long session 2 asks for a row. Session 1 lets its late leases go as soon as they have
    kept it a row, and stores again what it has lost.
    """
    began = bench.now_ns
    for turn in range(1000):
        made = bench.store([10_000 + turn], 2)
        settle(bench, made)
        if verdict(made).accepted:
            return (bench.now_ns - began) / SECOND
        bench.now_ns += STEP
        made = bench.feed(ev.TimerTicked()) + bench.feed(ev.StepEnded(SessionId(1)))
        lease_what_is_left(bench, turn)
        while bench.machine.has_work():
            made += bench.feed(ev.WorkContinued())
            lease_what_is_left(bench, turn)
        lost = {n for order in only(made, act.AnnounceRemoved) for n in numbers_of(order.keys)}
        if lost and bench.machine.room(NamespaceId(1))[0] >= len(lost):
            bench.finish(bench.store(sorted(lost), 1))
        if not bench.machine.state.emptying:
            bench.feed(ev.RequestsEnded(SessionId(1), (RequestId(f"late {turn}"),)))
        settle(bench, made)
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize("leased", [True, False])
def test_leases_taken_while_a_row_is_emptied_keep_nobody_out_for_ever(
    monkeypatch: pytest.MonkeyPatch, leased: bool
) -> None:
    monkeypatch.setattr(backlog, "EMPTIED_AT_ONCE", 2)
    monkeypatch.setattr(backlog, "EMPTIED_IN_PASSING", 0)
    bench = full()
    if leased:
        promise(bench)
    bench.open(2, spec("b"))
    assert seconds_against_who_leases_what_is_left(bench) < (reclaim.PROMISED_NS + SECOND) / SECOND


def test_class_of_more_shards_than_the_pool_has_extents_keeps_nothing_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A new namespace of this shape is refused; one that was read back from the pool is not.
    monkeypatch.setattr(extent_fit, "require_fit", lambda state, spec: None)
    bench = full()
    bench.open(2, spec("b", shards=5), ranks=5)
    bench.open(3, spec("c"))
    assert verdict(bench.store([1], 2)).reason == "NO_ROOM"
    assert not bench.machine.state.claims
    assert seconds_until_stored(bench, 3, 10) < 1


def test_claim_that_never_has_enough_gives_way_to_the_next() -> None:
    bench = full()
    bench.load(range(2 * SLOTS), 1)  # into an engine that never says ready
    bench.open(2, spec("b", shards=3), ranks=3)
    settle(bench, bench.store([1], 2))
    bench.open(3, spec("c"))

    def ask() -> bool:
        made = bench.store([1], 2)
        assert not verdict(made).accepted, "two of its three extents are all that there is"
        settle(bench, made)
        made = bench.store([2], 3)
        settle(bench, made)
        return verdict(made).accepted

    began = bench.now_ns
    while not ask():
        settle(bench, bench.tick(STEP))
        assert bench.now_ns - began < row_claims.FIRST_NS + SECOND, "what is free is kept for ever"


def test_row_whose_copies_hang_is_not_waited_for_where_another_comes_free() -> None:
    bench = small(extents=4)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(2 * SLOTS), 1)
    bench.now_ns += SECOND
    bench.stored(range(2 * SLOTS), 2)
    bench.load(range(2 * SLOTS), 1)  # into an engine that never says ready
    held = bench.load(range(2 * SLOTS), 2)
    bench.open(3, spec("c"))
    settle(bench, bench.store([1], 3))
    [hanging] = bench.machine.state.emptying.values()
    assert hanging.size_class.namespace == 1
    bench.tick(STEP)
    bench.finish(held)
    assert seconds_until_stored(bench, 3, 4) < (reclaim.STUCK_NS + SECOND) / SECOND


def test_row_of_many_blocks_is_emptied_a_few_in_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "EMPTIED_AT_ONCE", 3)
    monkeypatch.setattr(backlog, "EMPTIED_IN_PASSING", 2)
    bench = full(extents=1)
    bench.open(2, spec("b"))
    bench.now_ns += 3 * SECOND
    events = 0
    made = bench.store([10_000], 2)
    gone = removed(made)
    assert gone <= 3
    refused = bench.store([20_000], 1)
    assert not verdict(refused).accepted, "nobody counts on evicting the rest"
    gone += removed(refused)
    while not only(made, act.UnmapRow):
        assert bench.machine.has_work()
        made = bench.feed(ev.WorkContinued())
        gone += removed(made)
        events += 1
        assert removed(made) <= 3
    assert gone == SLOTS
    assert events >= SLOTS // 3 - 1
    settle(bench, made)
    assert verdict(bench.store([10_001], 2)).accepted


def removed(made: list[act.Action]) -> int:
    return sum(len(order.keys) for order in only(made, act.AnnounceRemoved))


def test_who_has_no_row_is_told_to_ask_though_all_is_promised() -> None:
    bench = full()
    promise(bench, each=1)
    bench.open(2, spec("b"))
    assert bench.machine.state.tally.evictable == 0
    assert bench.machine.room(NamespaceId(2)) == (1,), "or it would never ask, and never be served"
    assert bench.machine.room(NamespaceId(1)) == (0,)


def test_row_that_is_emptied_for_others_goes_with_its_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was being stored in it when that began has a pin of its own."""
    monkeypatch.setattr(backlog, "EMPTIED_IN_PASSING", 0)
    bench = small(extents=1)
    bench.open(1, replace(spec("private"), unshared=True))
    bench.open(2, spec("b"))
    bench.stored(range(4))
    bench.store([12])
    bench.now_ns += 3 * SECOND
    bench.store([1], 2)
    (row,) = bench.machine.state.emptying.values()
    assert (len(row.left), len(row.copied_into)) == (4, 1)
    bench.transfers.clear()
    bench.feed(ev.SessionClosed(SessionId(1), gone=True))
    bench.feed(ev.MoverGone(MoverId(100), "killed"))
    bench.machine.state.backlog.turn = 7  # others had theirs, the namespace's is next
    assert only(bench.work_off(), act.ForgetNamespace) == [act.ForgetNamespace(NamespaceId(1))]
    assert not bench.machine.state.emptying
    assert not bench.machine.state.slots.pins.any()
