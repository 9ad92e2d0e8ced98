"""Scopes come with accounts and epochs, for months: those that hold nothing make room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks import namespaces
from kvd.core.errors import LimitExceeded
from kvd.core.keys import JobId, SessionId
from kvd.core.model.scope_shares import share_left
from kvd.core.model.state import LAST_SCOPE
from kvd_proto.limits import MAX_GROUPS
from tests.core.bench import Bench, context, engine_blocks, keys, only, small, spec, verdict
from tests.core.replaying import replay

MOST = 8
HIT, ADMIT = 1, 4


@pytest.fixture(autouse=True)
def few_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "MAX_SCOPES", MOST + 2)  # a quarter is left for others


def store_for_accounts(bench: Bench, numbers: range) -> None:
    for number in numbers:
        bench.stored([number, number + 1, number + 2, number + 3], account=f"account {number}")


@pytest.mark.parametrize("hash_bytes", [1, 8, 9, 16, 17, 32, 33, 64])
def test_keys_of_any_length_are_told_apart_by_their_last_byte(hash_bytes: int) -> None:
    bench = small()
    bench.open(1, replace(spec(), hash_bytes=hash_bytes))
    last = [byte << 8 * (hash_bytes - 1) for byte in (1, 2, 3)]
    run = ev.Run(0, keys(*last[:2], hash_bytes=hash_bytes), engine_blocks([1, 2]))
    stored = ev.StoreRequested(SessionId(1), JobId(1), context(), (run,))
    bench.finish(bench.feed(stored))
    query = ev.Query(context(), 0, keys(*last, hash_bytes=hash_bytes), ev.LeaseMode.NONE)
    (reply,) = only(bench.feed(ev.LookupRequested(SessionId(1), (query,))), act.Reply)
    assert reply.payload[0].statuses == bytes([HIT, HIT, ADMIT])


def test_only_what_needs_a_new_scope_is_refused_when_all_hold_blocks() -> None:
    bench = small()
    bench.open()
    store_for_accounts(bench, range(MOST - 1))
    refused = bench.store([1], account="one too many")
    assert verdict(refused).reason == "LIMIT_EXCEEDED"
    (post,) = only(refused, act.PostBoard)
    assert post.status is ev.JobStatus.REFUSED
    with pytest.raises(LimitExceeded):
        bench.feed(ev.EpochChanged(SessionId(1), "one too many"))
    bench.stored([50])
    bench.stored([51], account="account 3")
    bench.open(session=2)


def test_accounts_come_for_ever_as_others_lose_their_last_block() -> None:
    bench = small(extents=1)
    bench.open()
    store_for_accounts(bench, range(100))
    assert len(bench.machine.state.scopes) <= MOST
    assert bench.pool.scopes.keys() == bench.machine.state.scopes.keys()
    assert bench.statuses(range(99, 103), account="account 99") == "HHHH"
    assert bench.statuses([0], account="account 0") == "M"
    store_for_accounts(bench, range(1))
    replay(bench)


def test_scope_that_is_opened_again_has_the_same_tags_and_a_new_number() -> None:
    bench = small(extents=1)
    bench.open()
    first = only(bench.store([0], account="again"), act.OpenScope)[0]
    bench.finish()
    tags = bench.machine.state.scopes[first.scope].seed
    store_for_accounts(bench, range(100, 140))
    second = only(bench.store([0], account="again"), act.OpenScope)[0]
    assert second.scope != first.scope
    assert bench.machine.state.scopes[second.scope].seed == tags


def test_epoch_of_an_open_session_is_kept_though_it_holds_nothing() -> None:
    bench = small(extents=1)
    bench.open(session=1, epoch="empty")
    bench.open(session=2)
    for number in range(100):
        bench.stored(range(4 * number, 4 * number + 4), session=2, account=f"account {number}")
    assert any(scope.epoch == "empty" for scope in bench.machine.state.scopes.values())


def test_epochs_that_no_session_is_in_any_more_make_room() -> None:
    bench = small()
    bench.open()
    for number in range(10 * MOST):
        bench.feed(ev.EpochChanged(SessionId(1), f"epoch {number}"))
    bench.stored([1])


def test_payer_that_takes_all_scopes_it_gets_leaves_some_for_each_other() -> None:
    bench = small(extents=8)
    bench.open(payer="greedy")
    for number in range(2 * MOST):
        bench.store([number], account=f"account {number}")
        bench.finish()
    shares = bench.machine.state.scope_shares
    assert shares.taken["greedy"] == MOST
    bench.open(2, spec("b"), payer="other")
    assert verdict(bench.store([100], account="one more")).reason == "LIMIT_EXCEEDED"
    assert shares.taken == {"greedy": MOST, "other": 1}


def evict_all(bench: Bench) -> None:
    bench.quota(1)
    bench.quota(0)


def test_payer_at_its_share_loses_its_own_empty_scopes_first() -> None:
    bench = small(extents=8)
    bench.open(1, spec("b"), payer="other")
    bench.stored([1], account="soon empty")
    evict_all(bench)
    bench.open(2, spec("a"), payer="greedy")
    for number in range(100):
        bench.stored([number], 2, account=f"account {number}")
        evict_all(bench)
    assert "soon empty" in {scope.account for scope in bench.machine.state.scopes.values()}


def test_payer_without_empty_scopes_is_given_those_of_whoever_has_most() -> None:
    bench = small(extents=8)
    for session, payer, empty in ((1, "with three", 3), (2, "without many", 1)):
        bench.open(session, spec(payer), payer=payer)
        for number in range(empty):
            bench.stored([number], session, account=f"account {number}")
    evict_all(bench)
    bench.open(3, spec("new"), payer="new")
    for number in range(3):
        bench.stored([number], 3, account=f"account {number}")
    taken = bench.machine.state.scope_shares.taken
    assert taken == {"with three": 1, "without many": 2, "new": 4}


def test_shares_leave_a_part_of_what_is_free_however_many_take_all_they_can() -> None:
    whole, most = 0, 65536
    shares: list[int] = []
    for _ in range(7):
        taken = 0
        while more := share_left(taken, whole, most):
            taken += more
            whole += more
        shares.append(taken)
    assert shares[0] == 49152
    assert all(shares), shares
    assert whole < most


def test_scope_that_is_forgotten_for_another_of_the_same_store_is_opened_again() -> None:
    bench = small(extents=8)
    bench.open(1, spec(groups=2))
    bench.finish(bench.store([1], account="both", group=1))
    evict_all(bench)
    state = bench.machine.state
    for number in range(MOST - len(state.scopes)):
        bench.stored([10 + number], account=f"account {number}")
    before = next(s.scope for s in state.scopes.values() if s.account == "both")
    runs = tuple(ev.Run(group, keys(1), engine_blocks([group])) for group in range(2))
    event = ev.StoreRequested(SessionId(1), JobId(900), context("both"), runs)
    orders = bench.feed(event)
    assert [scope.group for scope in only(orders, act.OpenScope)] == [0, 1]
    assert before not in state.scopes
    bench.finish(orders)
    assert bench.pool.scopes.keys() == state.scopes.keys()
    replay(bench)


def test_an_epoch_of_another_that_may_hold_blocks_is_not_forgotten_for_a_greedy_payer() -> None:
    bench = small(extents=8)
    bench.open(1, spec("b"), payer="other", epoch="left with a block")
    bench.stored([1], account="somebody")
    for epoch in ("left", "left too", "entered"):
        bench.feed(ev.EpochChanged(SessionId(1), epoch))
    bench.open(2, spec("a"), payer="greedy")
    for number in range(10, 10 + 2 * MOST):
        bench.store([number], 2, account=f"account {number}")
        bench.finish()
    of_other = {
        (scope.epoch, scope.account)
        for scope in bench.machine.state.scopes.values()
        if scope.namespace == 1
    }
    assert of_other == {
        ("left with a block", ""),
        ("left with a block", "somebody"),
        ("entered", ""),
    }


def test_once_the_numbers_are_used_up_new_scopes_are_refused_and_the_others_serve() -> None:
    """They only rise, over restarts too: whoever resets a cache all day gets there in some days."""
    bench = small()
    bench.open()
    bench.stored([1])
    bench.machine.state.next_scope = LAST_SCOPE + 1 - MAX_GROUPS
    bench.stored([2], account="last")
    assert verdict(bench.store([3], account="late")).reason == LimitExceeded.reason
    with pytest.raises(LimitExceeded, match="all 4294967295 numbers"):
        bench.feed(ev.EpochChanged(SessionId(1), "next"))
    assert bench.statuses([1]) == bench.statuses([2], account="last") == "H"
    bench.stored([4])
    bench.clear()
    assert bench.statuses([1, 4]) == "MM"
    assert not bench.machine.state.next_scope > LAST_SCOPE
