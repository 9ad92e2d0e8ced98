"""What no session uses any more: kept, given up or forgotten, and never while somebody uses it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks import namespaces
from kvd.core.errors import LimitExceeded
from kvd.core.keys import MoverId, NamespaceId, SessionId
from kvd.core.model import backlog
from kvd.core.model.state import Namespace, State
from kvd.core.room import expiry
from tests.core.bench import SECOND, Bench, context, keys, numbers_of, only, small, spec, verdict
from tests.core.replaying import replay
from tests.core.test_recovery import restarted

GRACE = 60 * SECOND
PRIVATE = replace(spec("private"), unshared=True)


def removed(actions: Iterable[act.Action]) -> list[int]:
    return sorted(n for each in only(actions, act.AnnounceRemoved) for n in numbers_of(each.keys))


def reset(bench: Bench, epoch: str, session: int = 1) -> list[act.Action]:
    return bench.feed(ev.EpochChanged(SessionId(session), epoch)) + bench.work_off()


def known(bench: Bench) -> list[str]:
    state = bench.machine.state
    return [state.namespaces[n].spec.fingerprint for n in bench.machine.namespaces()]


# -- private namespaces --------------------------------------------------------------------------


def test_private_namespace_goes_with_its_blocks_when_its_engine_has_ended() -> None:
    bench = small()
    bench.open(1, PRIVATE)
    bench.stored(range(20))
    news = bench.leave(1, gone=True)
    assert removed(news) == list(range(20))
    assert only(news, act.ForgetNamespace) == [act.ForgetNamespace(NamespaceId(1))]
    assert known(bench) == []
    statistics = bench.machine.statistics()
    assert statistics.extents_free == statistics.extents
    assert statistics.counters.dropped == 20
    assert statistics.counters.namespaces_forgotten == 1
    assert bench.machine.state.scopes == {}
    assert bench.machine.state.tenants["tenant"].used_bytes == 0  # type: ignore[index]
    replay(bench)


def test_scopes_of_a_namespace_go_a_few_at_a_time_and_it_goes_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "SCOPES_AT_ONCE", 4)
    bench = small()
    bench.open(1, PRIVATE)
    for number in range(16):
        bench.stored([number], account=f"account {number}")
    bench.leave(1, gone=True)  # works off what it left, without a tick
    orders = [order for made in bench.history for order in only(made, act.ForgetScopes)]
    assert [len(order.scopes) for order in orders] == [4, 4, 4, 4]
    assert known(bench) == []
    assert bench.machine.state.scopes == {}
    replay(bench)


def test_blocks_of_a_private_namespace_go_a_few_in_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "DROPPED_AT_ONCE", 3)
    bench = small()
    bench.open(1, PRIVATE)
    bench.stored(range(20))
    before = len(bench.history)
    news = bench.leave(1, gone=True)
    assert max(len(removed(made)) for made in bench.history[before:]) == 3
    assert removed(news) == list(range(20))
    assert known(bench) == []
    replay(bench)


def test_session_that_comes_while_blocks_of_its_namespace_go_has_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "DROPPED_AT_ONCE", 3)
    bench = small()
    bench.open(1, PRIVATE)
    bench.stored(range(10))
    bench.feed(ev.SessionClosed(SessionId(1), gone=True))
    assert removed(bench.feed(ev.MoverGone(MoverId(100), "gone"))) == []
    assert len(removed(bench.feed(ev.WorkContinued()))) == 3
    assert bench.machine.has_work()
    bench.open(2, PRIVATE)
    assert removed(bench.work_off()) == []
    assert bench.statuses(range(10), 2).count("H") == 7
    bench.stored(range(10), 2)
    assert bench.statuses(range(10), 2) == 10 * "H"


def test_private_namespaces_go_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "DROPPED_AT_ONCE", 1)
    bench = small()
    for number in range(1, 6):
        bench.open(number, replace(PRIVATE, fingerprint=str(number)))
        bench.leave(number)
    before = len(bench.history)
    bench.settle(bench.tick(GRACE))
    forgotten = [len(only(each, act.ForgetNamespace)) for each in bench.history[before:]]
    assert (sum(forgotten), max(forgotten)) == (5, 1)
    assert known(bench) == []


def test_private_namespace_waits_for_an_engine_that_may_come_back() -> None:
    bench = small()
    first = bench.open(1, PRIVATE)
    bench.stored(range(4))
    assert removed(bench.leave(1)) == []
    bench.tick(GRACE - SECOND)
    assert bench.open(2, PRIVATE) == first
    bench.tick(2 * GRACE)
    assert bench.statuses(range(4), 2) == "HHHH"


def test_private_namespace_goes_when_nobody_came_back_in_time() -> None:
    bench = small()
    bench.open(1, PRIVATE)
    bench.stored(range(4))
    bench.leave(1)
    bench.settle(bench.tick(GRACE))
    assert known(bench) == []


def test_news_of_an_engines_end_may_come_after_its_sessions() -> None:
    bench = small()
    bench.open(1, PRIVATE)
    bench.open(2, replace(PRIVATE, fingerprint="another"))
    for session in (1, 2):
        bench.stored([session], session)
        bench.leave(session)
    news = bench.close(1, gone=True)
    assert removed(news) == [1]
    assert known(bench) == ["another"]


def test_news_of_an_engines_end_while_its_movers_still_end() -> None:
    bench = small()
    bench.open(1, PRIVATE)
    bench.stored([1])
    bench.close(1)
    assert removed(bench.close(1, gone=True)) == []
    assert removed(bench.gone(100)) == [1]


def test_session_that_comes_while_the_namespace_goes_has_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expiry, "ROWS_AT_ONCE", 1)
    bench = small()
    first = bench.open(1, PRIVATE)
    bench.stored(range(40))
    bench.close(1, gone=True)
    going = bench.gone(100)
    gone = len(removed(going))
    assert 0 < gone < 40
    assert bench.open(2, PRIVATE) == first
    bench.settle(going)
    bench.tick(2 * GRACE)
    assert bench.statuses(range(40), 2).count("H") == 40 - gone
    bench.leave(2, gone=True)
    assert known(bench) == []


def test_copy_of_a_dead_engine_is_waited_for() -> None:
    bench = small()
    bench.open(1, PRIVATE)
    bench.stored([1])
    bench.store([2])
    assert only(bench.close(1, gone=True), act.ForgetNamespace) == []
    assert known(bench) == ["private"]
    assert only(bench.gone(100), act.ForgetNamespace)


def test_nobody_waits_for_what_a_private_engine_handed_off() -> None:
    bench = small()
    bench.open(1, PRIVATE)
    bench.stored([1])
    bench.feed(ev.HandOffRequested(SessionId(1), context(), 0, keys(1), 500 * SECOND))
    bench.leave(1, gone=True)
    assert known(bench) == []
    assert bench.machine.statistics().hand_offs == 0


def test_engines_that_crash_in_a_loop_leave_nothing() -> None:
    bench = small(extents=8)
    bench.check_every = 101
    for number in range(1, 5001):
        mine = replace(PRIVATE, fingerprint=f"start {number}")
        bench.open(number, mine)
        bench.stored([number], number)
        bench.leave(number, gone=True)
        bench.log.clear()
        bench.history.clear()
    state = bench.machine.state
    left = (state.namespaces, state.classes, state.scopes, state.by_fingerprint, state.sessions)
    assert [len(table) for table in left] == [0] * 5
    assert (len(state.expiring.namespaces), len(state.expiring.epochs)) == (0, 0)
    assert len(state.free_extents) == 8


# -- shared namespaces ---------------------------------------------------------------------------


@pytest.fixture
def few_namespaces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(namespaces, "MAX_NAMESPACES", 10)  # a quarter is left for others
    monkeypatch.setattr(expiry, "ROOM_KEPT", 2)
    return 8


def test_shared_namespace_outlives_its_engines() -> None:
    bench = small()
    bench.open()
    bench.stored([1])
    bench.leave(gone=True)
    bench.tick(1000 * GRACE)
    bench.open(2)
    assert bench.statuses([1], 2) == "H"


def test_namespace_longest_unused_and_empty_makes_room_for_a_new_one(few_namespaces: int) -> None:
    bench = small(extents=16)
    for number in range(few_namespaces):
        bench.open(number + 1, spec(f"ns {number}"))
        if number % 2:
            bench.stored([number], number + 1)
    for number in (2, 0, 1, 3):
        bench.leave(number + 1)
    opened = bench.ask(ev.SessionOpened(SessionId(50), spec("new"), "", 1))
    assert isinstance(opened, act.SessionAccepted)
    assert "ns 2" not in known(bench)
    assert {"ns 0", "ns 1", "ns 3", "new"} <= set(known(bench))
    bench.open(51, spec("newer"))
    assert "ns 0" not in known(bench)
    replay(bench)


def test_few_namespaces_are_weighed_for_their_room_and_the_others_make_it_later(
    few_namespaces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighed = []

    def is_small(_state: State, namespace: Namespace) -> bool:
        weighed.append(namespace.spec.fingerprint)
        return False

    monkeypatch.setattr(expiry, "NAMESPACES_WEIGHED", 2)
    bench = small(extents=16)
    for number in range(few_namespaces):
        bench.open(number + 1, spec(f"ns {number}"))
    for number in range(3):
        bench.leave(number + 1)
    with monkeypatch.context() as patched:
        patched.setattr(expiry, "_is_small", is_small)
        with pytest.raises(LimitExceeded):
            bench.feed(ev.SessionOpened(SessionId(50), spec("new"), "", 1))
    assert weighed == ["ns 0", "ns 1"]
    for _ in range(4):
        bench.tick()
        bench.work_off()
    opened = bench.ask(ev.SessionOpened(SessionId(51), spec("new"), "", 1))
    assert isinstance(opened, act.SessionAccepted)


def test_new_namespace_is_refused_where_all_are_used_or_hold_blocks(few_namespaces: int) -> None:
    bench = small(extents=16)
    for number in range(few_namespaces):
        bench.open(number + 1, spec(f"ns {number}"))
        bench.stored([number], number + 1)
    bench.leave(1)
    with pytest.raises(LimitExceeded):
        bench.feed(ev.SessionOpened(SessionId(50), spec("new"), "", 1))
    assert len(known(bench)) == few_namespaces
    bench.open(51, spec("ns 0"))
    assert bench.statuses([0], 51) == "H"


def test_payer_with_all_namespaces_it_may_have_leaves_some_for_others(few_namespaces: int) -> None:
    bench = small(extents=32)
    for number in range(few_namespaces):
        bench.open(number + 1, spec(f"ns {number}"), payer="greedy")
        bench.stored([number], number + 1)
    with pytest.raises(LimitExceeded, match="greedy has 8 of 8 namespaces") as refused:
        bench.open(50, spec("one more"), payer="greedy")
    assert refused.value.field == "namespace"
    bench.open(51, spec("another's"), payer="other")
    bench.leave(51)
    for number in (1, 2):
        bench.clear(number)
        bench.leave(number)
    with pytest.raises(LimitExceeded):
        bench.open(52, spec("too early"), payer="greedy")  # its share is smaller beside another
    assert {"ns 0", "ns 1", "another's"} <= set(known(bench))
    bench.settle(bench.tick())
    bench.open(53, spec("in its own place"), payer="greedy")
    assert "ns 0" not in known(bench)


def test_empty_namespaces_are_taken_apart_ahead_of_need(few_namespaces: int) -> None:
    bench = small(extents=16)
    for number in range(few_namespaces):
        bench.open(number + 1, spec(f"ns {number}"))
        bench.leave(number + 1)
    bench.settle(bench.tick() + bench.work_off())
    bench.work_off()
    assert known(bench) == [f"ns {number}" for number in range(2, few_namespaces)]


def test_namespace_that_is_opened_again_after_it_was_forgotten_begins_anew(
    few_namespaces: int,
) -> None:
    bench = small(extents=16)
    for number in range(few_namespaces):
        bench.open(number + 1, spec(f"ns {number}"))
        bench.leave(number + 1)
    bench.settle(bench.tick())
    again = bench.open(100, spec("ns 0"))
    assert again.namespace == few_namespaces + 1
    bench.stored([7], 100)
    assert bench.statuses([7], 100) == "H"


# -- epochs --------------------------------------------------------------------------------------


def test_own_epoch_goes_when_its_engine_has_ended() -> None:
    bench = small()
    bench.open(1)
    bench.stored([1])
    reset(bench, "mine")
    bench.stored([2, 3])
    news = bench.leave(1, gone=True)
    assert removed(news) == [2, 3]
    (gone,) = only(news, act.ForgetScopes)
    assert [s.epoch for s in bench.machine.state.scopes.values()] == [""]
    assert len(gone.scopes) == 1
    bench.open(2)
    assert bench.statuses([1], 2) == "H"
    replay(bench)


def test_own_epoch_waits_for_an_engine_that_may_come_back() -> None:
    bench = small()
    bench.open(1)
    reset(bench, "mine")
    bench.stored([2], account="salt")
    bench.leave(1)
    bench.tick(GRACE - SECOND)
    bench.open(2, epoch="mine", own=True)
    bench.tick(2 * GRACE)
    assert bench.statuses([2], 2, account="salt") == "H"
    bench.leave(2)
    assert removed(bench.tick(GRACE)) == [2]


def test_epoch_left_by_another_reset_goes_at_once_and_nobody_elses() -> None:
    bench = small()
    bench.open(1)
    bench.open(2)
    bench.stored([1])
    reset(bench, "first")
    bench.stored([2])
    assert removed(reset(bench, "second")) == [2]
    assert bench.statuses([1], 2) == "H"


def test_store_under_way_into_an_epoch_that_was_left_goes_once_it_has_ended() -> None:
    bench = small()
    bench.open(1)
    reset(bench, "first")
    started = bench.store([2])
    reset(bench, "second")
    bench.finish(started)
    assert bench.machine.statistics().slots.ready == 1
    assert removed(bench.tick()) == [2]
    assert {s.epoch for s in bench.machine.state.scopes.values()} == {"", "second"}


def test_follower_in_an_epoch_that_was_left_may_still_lead() -> None:
    bench = small()
    bench.open(1)
    reset(bench, "first")
    bench.open(2, epoch="first", own=True)
    leader = bench.store([5], 1)
    bench.store([5], 2, whole=True)
    reset(bench, "second")
    bench.leave(2)
    bench.tick(GRACE)
    bench.finish(leader)
    bench.tick()
    assert bench.machine.statistics().slots.ready == 0


def test_epoch_that_two_sessions_of_an_engine_are_in_goes_with_the_second() -> None:
    bench = small()
    bench.open(1, engine="e")
    reset(bench, "weights 2")
    bench.open(2, epoch="weights 2", own=True, engine="e")
    bench.stored([5])
    assert removed(bench.leave(1, gone=True)) == []
    assert bench.statuses([5], 2) == "H"
    assert removed(bench.leave(2, gone=True)) == [5]


@pytest.mark.parametrize("comes", ["opens it", "resets to it"])
def test_nobody_makes_a_shared_epoch_its_own(comes: str) -> None:
    bench = small()
    bench.open(1, epoch="weights 2", engine="honest")
    bench.stored([5])
    bench.leave(1, gone=True)
    if comes == "opens it":
        bench.open(2, epoch="weights 2", own=True, engine="other")
    else:
        bench.open(2, engine="other")
        reset(bench, "weights 2", 2)
    bench.stored([6], 2)
    assert removed(bench.leave(2, gone=True)) == []
    bench.tick(1000 * GRACE)
    bench.open(3, epoch="weights 2")
    assert bench.statuses([5, 6], 3) == "HH"
    replay(bench)


@pytest.mark.parametrize("own", [True, False])
def test_own_epoch_to_which_another_engine_comes_is_shared_from_then_on(own: bool) -> None:
    bench = small()
    bench.open(1, engine="first")
    reset(bench, "mine")
    bench.stored([5], account="salt")
    bench.leave(1)
    bench.open(2, epoch="mine", own=own, engine="second")
    assert removed(bench.leave(2, gone=True)) == []
    bench.tick(GRACE)
    again = restarted(bench)
    again.tick(1000 * GRACE)
    again.open(3, epoch="mine", own=True, engine="first")
    assert again.statuses([5], 3, account="salt") == "H"
    assert removed(again.leave(3, gone=True)) == []


def test_engine_comes_back_to_its_own_epoch_after_a_restart_and_it_goes_with_it() -> None:
    bench = small()
    bench.open(1, engine="e")
    reset(bench, "mine")
    bench.stored([5])
    again = restarted(bench)
    again.open(2, epoch="mine", own=True, engine="e")
    assert again.statuses([5], 2) == "H"
    assert removed(again.leave(2, gone=True)) == [5]


def test_epoch_that_an_operator_named_outlives_its_engines() -> None:
    bench = small()
    bench.open(1, epoch="weights 2")
    bench.stored([5])
    bench.leave(1, gone=True)
    bench.tick(1000 * GRACE)
    bench.open(2, epoch="weights 2")
    assert bench.statuses([5], 2) == "H"


def test_engine_that_comes_back_in_the_middle_of_the_sweep_has_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expiry, "ROWS_SWEPT_AT_ONCE", 1)
    bench = small(extents=8)
    bench.open(1)
    reset(bench, "mine")
    bench.stored(range(40))
    bench.leave(1)
    bench.now_ns += GRACE
    bench.feed(ev.TimerTicked())
    gone = len(removed(bench.feed(ev.WorkContinued())))
    assert 0 < gone < 40
    bench.open(2, epoch="mine", own=True)
    for _ in range(5):
        assert removed(bench.tick()) == []
    assert bench.statuses(range(40), 2).count("H") == 40 - gone
    bench.leave(2, gone=True)
    for _ in range(5):
        bench.tick()
    assert bench.machine.statistics().slots.ready == 0


def test_blocks_and_scopes_of_an_epoch_go_a_few_in_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "DROPPED_AT_ONCE", 3)
    monkeypatch.setattr(backlog, "SCOPES_AT_ONCE", 4)
    bench = small()
    bench.open(1)
    reset(bench, "mine")
    for number in range(10):
        bench.stored([number, 100 + number], account=f"account {number}")
    before = len(bench.history)
    reset(bench, "another")
    bench.work_off()
    sizes = [len(removed(made)) for made in bench.history[before:]]
    assert (sum(sizes), max(sizes)) == (20, 3)
    orders = [each for made in bench.history for each in only(made, act.ForgetScopes)]
    assert [len(order.scopes) for order in orders] == [4, 4, 3]
    assert {scope.epoch for scope in bench.machine.state.scopes.values()} == {"", "another"}
    replay(bench)


def test_resets_without_end_leave_nothing() -> None:
    bench = small()
    bench.check_every = 101
    bench.open(1)
    for number in range(3000):
        reset(bench, f"epoch {number}")
        if number % 100 == 0:
            bench.stored([number])
            bench.log.clear()
            bench.history.clear()
    state = bench.machine.state
    assert {scope.epoch for scope in state.scopes.values()} == {"", "epoch 2999"}
    assert len(state.expiring.epochs) == 0
    assert bench.machine.statistics().slots.ready == 0


# -- after a restart -----------------------------------------------------------------------------


def test_what_was_an_engines_own_waits_for_it_after_a_restart() -> None:
    left = small()
    left.open(1, PRIVATE)
    left.stored([1], 1)
    left.open(2, spec("shared"))
    reset(left, "mine", 2)
    left.stored([2], 2)
    for comes_back in (True, False):
        bench = restarted(left)
        bench.tick(GRACE - SECOND)
        if comes_back:
            bench.open(11, PRIVATE)
            bench.open(12, spec("shared"), epoch="mine", own=True)
        bench.settle(bench.tick(2 * SECOND))
        assert bench.machine.statistics().slots.ready == (2 if comes_back else 0)
        assert known(bench) == (["private", "shared"] if comes_back else ["shared"])


def test_row_that_an_orphaned_mover_may_write_keeps_its_namespace_but_no_block() -> None:
    left = small()
    left.open(1, PRIVATE)
    left.stored([1, 2])
    bench = restarted(left, quarantined=True)
    news = bench.tick(GRACE)
    assert removed(news) == [1, 2]
    assert known(bench) == ["private"]
    assert verdict(_stored_again(bench)).accepted


def _stored_again(bench: Bench) -> list[act.Action]:
    bench.open(5, PRIVATE)
    return bench.store([1], 5)


def test_what_is_being_taken_apart_counts_as_room(few_namespaces: int) -> None:
    bench = small(extents=16)
    for number in range(few_namespaces):
        bench.open(number + 1, spec(f"ns {number}"))
        bench.leave(number + 1)
    for _ in range(3):
        bench.feed(ev.TimerTicked())
    bench.settle(bench.work_off())
    assert known(bench) == [f"ns {number}" for number in range(2, few_namespaces)]


def test_private_namespace_goes_with_the_epochs_that_its_engine_made() -> None:
    bench = small()
    bench.open(1, PRIVATE)
    bench.stored([1])
    reset(bench, "mine")
    bench.stored([2])
    bench.leave(1, gone=True)
    for _ in range(3):
        bench.tick()
    assert known(bench) == []
    expiring = bench.machine.state.expiring
    assert (expiring.epochs, expiring.sweep, bench.machine.state.scopes) == ({}, None, {})
