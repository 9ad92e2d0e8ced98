"""Much that ends at once is tidied up in pieces, and what its end promises holds before that."""

from __future__ import annotations

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.claims import lease
from kvd.core.errors import MOVER_GONE, SESSION_CLOSED
from kvd.core.keys import MoverId, RequestId, SessionId
from kvd.core.model import backlog
from kvd.core.model.backlog import LEASES_AT_ONCE, PARTS_AT_ONCE
from kvd.core.tiers import search
from kvd.core.upkeep.session import CLOSE_GRACE_NS
from tests.core.bench import SECOND, Bench, context, finished, keys, only, small
from tests.core.replaying import replay
from tests.core.test_tiers import stage

HIT, RETRY = 1, 3
MANY = 3 * LEASES_AT_ONCE


def leased(bench: Bench, session: int = 1) -> None:
    """MANY leases, each on the same four blocks."""
    for number in range(MANY):
        bench.lookup(range(4), session, lease=ev.LeaseMode.PREFIX, request=f"r{number}")


def storing(jobs: int = 4 * PARTS_AT_ONCE) -> Bench:
    """That many stores of one block each under way, none of them finished."""
    bench = small()
    bench.open()
    for number in range(jobs):
        bench.store([number])
    return bench


def pins(bench: Bench) -> int:
    return int(bench.machine.state.slots.pins.sum())


def ended(actions: list[act.Action]) -> list[act.EndJob]:
    return only(actions, act.EndJob)


# -- leases --------------------------------------------------------------------------------------


def test_claims_of_many_leases_go_a_few_in_each_event() -> None:
    bench = small()
    bench.open()
    bench.stored(range(4))
    bench.open(2, attach=False)
    leased(bench, 2)
    left = pins(bench)
    bench.feed(ev.SessionClosed(SessionId(2)))
    while bench.machine.has_work():
        assert 0 < left - pins(bench) <= 4 * LEASES_AT_ONCE
        left = pins(bench)
        bench.feed(ev.WorkContinued())
    assert pins(bench) == 0
    assert list(bench.machine.state.sessions) == [1]
    replay(bench)


def test_of_leases_on_many_blocks_fewer_go_in_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "LEASED_BLOCKS_AT_ONCE", 8)
    bench = small()
    bench.open()
    bench.stored(range(4))
    leased(bench)
    assert pins(bench) == 4 * MANY
    bench.feed(ev.SessionClosed(SessionId(1)))
    for ended_leases in range(2, MANY, 2):
        assert pins(bench) == 4 * (MANY - ended_leases)
        assert bench.machine.has_work()
        bench.feed(ev.WorkContinued())
    assert pins(bench) == 0
    assert not bench.machine.has_work()


def ended_in_pieces(bench: Bench, requests: tuple[RequestId, ...]) -> list[int]:
    """End them as control does. The leases that each event ended."""
    held = bench.machine.state.sessions[SessionId(1)].leases
    counts, left = [], requests
    while left:
        before = len(held)
        replies = only(bench.feed(ev.RequestsEnded(SessionId(1), left)), act.Reply)
        counts.append(before - len(held))
        left = replies[0].payload if replies else ()
    return counts


@pytest.mark.parametrize("requests", [1, 5, MANY])
def test_leases_of_requests_that_end_go_some_in_each_event(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "ENDED_AT_ONCE", 10)
    bench = small()
    bench.open()
    bench.stored(range(4))
    for number in range(MANY):
        name = f"r{number % requests}"
        bench.lookup(range(4), lease=ev.LeaseMode.PREFIX, request=name)
    other = bench.lookup(range(4), lease=ev.LeaseMode.PREFIX, request="other")
    counts = ended_in_pieces(bench, tuple(RequestId(f"r{n}") for n in range(requests)))
    assert counts == [10] * (MANY // 10) + [MANY % 10]
    assert list(bench.machine.state.sessions[SessionId(1)].leases) == [other.lease]
    replay(bench)


def test_requests_that_seek_much_end_some_in_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "ENDED_SOUGHT_AT_ONCE", 3)
    on = stage()
    for account in range(7):
        on.look(account, request="wide", account=f"a{account}")
    on.look(10, request="narrow")
    sought = on.bench.machine.state.sessions[SessionId(1)].sought
    left: tuple[RequestId, ...] = (RequestId("wide"), RequestId("narrow"))
    pieces = []
    while left:
        replies = only(on.feed(ev.RequestsEnded(SessionId(1), left)), act.Reply)
        left = replies[0].payload if replies else ()
        pieces.append((len(left), sum(len(of_request) for of_request in sought.values())))
    assert pieces == [(2, 5), (2, 2), (0, 0)]


def test_ticks_alone_end_long_work_too() -> None:
    bench = small()
    bench.open()
    bench.stored(range(4))
    leased(bench)
    bench.feed(ev.SessionClosed(SessionId(1)))
    for _ in range(MANY // LEASES_AT_ONCE):
        bench.tick()
    assert not bench.machine.has_work()
    assert pins(bench) == 0


def test_of_leases_that_expire_together_some_end_in_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.core.claims.lease.EXPIRED_AT_ONCE", LEASES_AT_ONCE // 2)
    bench = small()
    bench.open()
    bench.stored(range(4))
    for session in (2, 3):
        bench.open(session, attach=False)
        leased(bench, session)
    bench.now_ns += 3 * SECOND
    left = pins(bench)
    bench.feed(ev.TimerTicked())
    while bench.machine.has_work():
        assert 0 < left - pins(bench) <= 4 * LEASES_AT_ONCE
        left = pins(bench)
        bench.feed(ev.WorkContinued())
    assert pins(bench) == 0
    assert bench.machine.statistics().counters.leases_expired == 2 * MANY
    replay(bench)


def test_claims_of_leases_of_many_sessions_that_expire_together_go_a_few_in_each_event() -> None:
    bench = small()
    bench.open()
    bench.stored(range(4))
    for session in range(2, 6):
        bench.open(session, attach=False)
        leased(bench, session)
    bench.now_ns += 3 * SECOND
    left = pins(bench)
    bench.feed(ev.TimerTicked())
    assert bench.machine.statistics().counters.leases_expired == 4 * MANY, "all at once"
    while bench.machine.has_work():
        assert 0 < left - pins(bench) <= 4 * LEASES_AT_ONCE
        left = pins(bench)
        bench.feed(ev.WorkContinued())
    assert pins(bench) == 0
    replay(bench)


@pytest.mark.parametrize(
    ("ranks", "each"), [(1, [[100, 200], [300, 400], [500]]), (2, [[100, 101], [200, 201]])]
)
def test_of_many_closed_sessions_whose_copies_run_on_some_lose_their_movers_in_each_event(
    monkeypatch: pytest.MonkeyPatch, ranks: int, each: list[list[int]]
) -> None:
    monkeypatch.setattr("kvd.core.upkeep.session.LINGERING_AT_ONCE", 2)
    bench = small()
    sessions = range(1, 1 + sum(map(len, each)) // ranks)
    for session in sessions:
        bench.open(session, ranks=ranks)
        bench.store([session], session)
    for session in sessions:
        bench.close(session)
    bench.now_ns += CLOSE_GRACE_NS
    pieces = [only(bench.feed(ev.TimerTicked()), act.KillMover)]
    while bench.machine.has_work():
        pieces.append(only(bench.feed(ev.WorkContinued()), act.KillMover))
    assert [[kill.mover for kill in piece] for piece in pieces] == each
    replay(bench)


def test_lease_of_a_step_that_came_before_its_turn_to_expire_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.core.claims.lease.EXPIRED_AT_ONCE", 1)
    bench = small()
    bench.open()
    bench.stored(range(4))
    leased(bench)
    bench.now_ns += 3 * SECOND
    bench.feed(ev.TimerTicked())
    bench.feed(ev.StepEnded(SessionId(1)))
    bench.work_off()
    assert pins(bench) == 4 * (MANY - 1)


def test_ended_leases_count_until_their_claims_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.claims.lease.MAX_LEASES_PER_SESSION", MANY)
    bench = small()
    bench.open()
    bench.stored(range(4))
    leased(bench)
    assert list(_one_more(bench).statuses) == [RETRY] * 4
    bench.feed(ev.EpochChanged(SessionId(1), "next"))
    bench.feed(ev.EpochChanged(SessionId(1), ""))
    state = bench.machine.state
    assert state.sessions[SessionId(1)].ended_leases == MANY - LEASES_AT_ONCE
    bench.work_off()
    assert list(_one_more(bench).statuses) == [HIT] * 4


def test_blocks_of_a_tenants_leases_are_bounded_however_often_each_is_leased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.core.claims.lease.MAX_LEASED_PER_TENANT", 4 * MANY + 3)
    bench = small()
    bench.open()
    bench.open(2)
    bench.stored(range(4))
    leased(bench)
    assert list(_one_more(bench, 2).statuses) == [HIT] * 3 + [RETRY]
    held = bench.machine.state.sessions[SessionId(2)].leases
    assert [each.slots.base for each in held.values()] == [None], "it keeps what it doesn't hold"
    assert list(_one_more(bench, 2).statuses) == [RETRY] * 4
    bench.feed(ev.EpochChanged(SessionId(1), "next"))
    bench.work_off()
    assert list(_one_more(bench, 2).statuses) == [HIT] * 4


def test_a_lease_that_grows_counts_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.claims.lease.MAX_LEASED_PER_TENANT", 4)
    bench = small()
    bench.open()
    bench.stored(range(4))
    first = bench.lookup(range(2), lease=ev.LeaseMode.PREFIX)
    query = ev.Query(context(), 0, keys(1, 2), ev.LeaseMode.PREFIX, extends=first.lease)
    bench.feed(ev.LookupRequested(SessionId(1), (query,)))
    assert bench.leased(first) == 3
    assert list(_one_more(bench).statuses) == [HIT, RETRY, RETRY, RETRY]


def _one_more(bench: Bench, session: int = 1) -> act.Answer:
    return bench.lookup(range(4), session, lease=ev.LeaseMode.PREFIX, request="one more")


def test_blocks_of_an_epoch_go_after_the_leases_on_them() -> None:
    bench = small()
    bench.open(epoch="own", own=True)
    bench.stored(range(4))
    leased(bench)
    bench.feed(ev.EpochChanged(SessionId(1), "next"))
    assert bench.machine.statistics().slots.ready == 4, "a claimed block was given up"
    bench.work_off()
    bench.tick()
    bench.work_off()
    assert bench.machine.statistics().slots.ready == 0
    assert {scope.epoch for scope in bench.machine.state.scopes.values()} == {"next"}


# -- transfers -----------------------------------------------------------------------------------


def test_jobs_of_a_mover_that_is_gone_end_a_few_in_each_event() -> None:
    bench = storing()
    started = len(bench.transfers)
    bench.transfers.clear()
    made = ended(bench.feed(ev.MoverGone(MoverId(100), "killed")))
    assert len(made) == PARTS_AT_ONCE
    while bench.machine.has_work():
        some = ended(bench.feed(ev.WorkContinued()))
        assert 0 < len(some) <= PARTS_AT_ONCE
        made += some
    assert len(made) == started
    assert {end.reason for end in made} == {MOVER_GONE}
    assert pins(bench) == 0
    assert bench.machine.statistics().slots.quarantined == 0
    replay(bench)


def test_store_that_ends_before_its_turn_is_not_readable_once_its_rank_is_ending() -> None:
    bench = storing()
    order = list(bench.transfers.values())[-1]
    bench.feed(ev.RankEnding(MoverId(100), "test"))
    assert bench.machine.has_work()
    (end,) = ended(bench.finish([order]))
    assert (end.status, end.reason) == (ev.JobStatus.FAILED, MOVER_GONE)
    made = bench.work_off()
    made += bench.gone(100)
    assert {each.reason for each in ended(made)} == {MOVER_GONE}
    assert bench.machine.statistics().slots.ready == 0
    assert not bench.machine.state.sessions[SessionId(1)].jobs


def test_word_of_a_mover_after_its_end_changes_nothing() -> None:
    bench = storing()
    order = list(bench.transfers.values())[-1]
    bench.feed(ev.MoverGone(MoverId(100), "killed"))
    assert bench.feed(finished(order, ev.TransferOutcome.DONE)) == []
    bench.transfers.clear()
    bench.work_off()
    assert bench.machine.statistics().slots.ready == 0


def test_next_mover_of_a_rank_hears_nothing_of_the_jobs_of_the_one_before() -> None:
    bench = storing()
    bench.transfers.clear()
    made = bench.feed(ev.MoverGone(MoverId(100), "killed"))
    attached = bench.feed(ev.RankAttached(SessionId(1), MoverId(7), 0, 0, True))
    made += attached + bench.work_off()
    assert len(ended(made)) == 4 * PARTS_AT_ONCE
    assert only(made, act.PostBoard) == []
    assert len(ended(attached)) == 3 * PARTS_AT_ONCE
    assert not bench.machine.state.sessions[SessionId(1)].jobs


def test_movers_are_asked_a_few_at_a_time_to_give_up_what_a_session_left() -> None:
    bench = storing()
    waiting = {order.transfer for order in bench.transfers.values()}
    made = bench.feed(ev.SessionClosed(SessionId(1)))
    while bench.machine.has_work():
        assert len(only(made, act.RevokeTransfer)) <= PARTS_AT_ONCE
        waiting -= {order.transfer for order in only(made, act.RevokeTransfer)}
        made = bench.feed(ev.WorkContinued())
    waiting -= {order.transfer for order in only(made, act.RevokeTransfer)}
    assert waiting == set()
    made = bench.finish(outcome=ev.TransferOutcome.REVOKED)
    assert {end.reason for end in ended(made)} == {SESSION_CLOSED}


def test_late_transfers_are_looked_for_while_others_wait_for_their_end() -> None:
    bench = storing()
    bench.transfers.clear()
    bench.feed(ev.MoverGone(MoverId(100), "killed"))
    for _ in range(3):
        bench.tick(100 * SECOND)
    assert not bench.machine.state.transfers


def test_ends_of_a_gone_movers_copies_are_to_come_until_they_are_worked_off() -> None:
    bench = storing()
    assert not bench.machine.has_ends_to_come(SessionId(1))
    bench.feed(ev.MoverGone(MoverId(100), "killed"))
    assert bench.machine.has_ends_to_come(SessionId(1))
    assert not bench.machine.has_ends_to_come(SessionId(2))
    bench.work_off()
    assert not bench.machine.has_ends_to_come(SessionId(1))


# -- deadlines -----------------------------------------------------------------------------------


def test_copies_that_are_late_together_are_given_up_a_few_in_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "LATE_AT_ONCE", 16)
    bench = storing(64)
    config = bench.machine.state.config
    bench.now_ns += config.submit_deadline_ns
    revoked: list[act.RevokeTransfer] = []
    made = bench.feed(ev.TimerTicked())
    while some := only(made, act.RevokeTransfer):
        assert len(some) <= 16
        revoked += some
        made = bench.feed(ev.WorkContinued()) if bench.machine.has_work() else []
    assert len(revoked) == len({order.transfer for order in revoked}) == 64, "each is asked once"
    assert not only(bench.tick(), act.RevokeTransfer)
    bench.now_ns += config.copy_deadline_ns
    assert len(only(bench.tick(), act.KillMover)) == 1
    bench.gone(100)
    bench.work_off()
    assert not bench.machine.state.late


def test_movers_that_are_late_together_are_ended_a_few_in_each_event() -> None:
    bench = small()
    for session in range(1, 9):
        bench.open(session)
        bench.store([session], session)
    config = bench.machine.state.config
    bench.now_ns += config.submit_deadline_ns + config.copy_deadline_ns
    first = only(bench.feed(ev.TimerTicked()), act.KillMover)
    assert 1 < len(first) < 8
    assert len(first) + len(only(bench.work_off(), act.KillMover)) == 8
