"""Lookups, leases and loads: what is promised stays, and no longer than promised."""

from __future__ import annotations

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.errors import UnknownSession
from kvd.core.keys import RequestId, SessionId, TenantId
from kvd.core.spec import NamespaceSpec
from tests.core.bench import BLOCK, MS, SECOND, Bench, context, keys, only, small, spec, verdict

PREFIX, ALL = ev.LeaseMode.PREFIX, ev.LeaseMode.ALL


@pytest.fixture
def bench() -> Bench:
    """One row of 16 slots, half of which may be leased."""
    bench = small(extents=1, lease_share=0.5)
    bench.open()
    return bench


def fill(bench: Bench) -> None:
    bench.stored(range(16))


def test_leased_block_survives_a_full_pool(bench: Bench) -> None:
    fill(bench)
    bench.lookup(range(4), lease=PREFIX)
    bench.stored(range(100, 112))
    assert bench.statuses(range(4)) == "HHHH"
    assert verdict(bench.store([200])).accepted


def test_released_lease_lets_its_blocks_go(bench: Bench) -> None:
    fill(bench)
    answer = bench.lookup(range(4), lease=PREFIX)
    assert answer.lease
    bench.release(answer.lease)
    bench.stored(range(100, 116))
    assert bench.statuses(range(4)) == "MMMM"


def test_lease_that_has_ended_is_released_again_without_a_word(bench: Bench) -> None:
    fill(bench)
    first, second = (bench.lookup([n], lease=PREFIX, request="r") for n in (1, 2))
    assert first.lease
    assert second.lease
    bench.release(first.lease)
    bench.release(first.lease, second.lease)
    assert bench.machine.statistics().leases == 0


def test_lease_expires_without_steps(bench: Bench) -> None:
    fill(bench)
    bench.lookup(range(4), lease=PREFIX)
    bench.tick(1900 * MS)
    assert bench.machine.statistics().leases == 1
    bench.tick(101 * MS)
    assert bench.machine.statistics().leases == 0


def test_steps_renew_the_session_s_leases(bench: Bench) -> None:
    fill(bench)
    bench.lookup(range(4), lease=PREFIX)
    for _ in range(5):
        bench.tick(1 * SECOND)
        bench.feed(ev.StepEnded(SessionId(1)))
    assert bench.machine.statistics().leases == 1
    bench.tick(2 * SECOND)
    assert bench.machine.statistics().leases == 0


def test_steps_of_one_session_renew_no_lease_of_another(bench: Bench) -> None:
    fill(bench)
    bench.open(2)
    bench.lookup(range(4), 1, lease=PREFIX)
    bench.lookup(range(4), 2, lease=PREFIX)
    bench.now_ns += SECOND
    bench.feed(ev.StepEnded(SessionId(1)))
    bench.tick(1 * SECOND)
    sessions = bench.machine.state.sessions
    assert [len(sessions[SessionId(number)].leases) for number in (1, 2)] == [1, 0]
    assert bench.machine.statistics().counters.leases_expired == 1


def test_prefix_lease_ends_at_the_first_miss(bench: Bench) -> None:
    bench.stored([0, 1, 3])
    answer = bench.lookup([0, 1, 2, 3], lease=PREFIX)
    assert bench.leased(answer) == 2
    answer = bench.lookup([0, 1, 2, 3], lease=ALL)
    assert bench.leased(answer) == 3


def test_later_piece_of_a_lookup_joins_the_lease_of_the_first(bench: Bench) -> None:
    fill(bench)
    first = bench.lookup(range(4), lease=PREFIX)
    later = ev.Query(context(), 0, keys(*range(2, 8)), PREFIX, extends=first.lease)
    (second,) = only(bench.feed(ev.LookupRequested(SessionId(1), (later,))), act.Reply)
    assert isinstance(second.payload, tuple)
    assert [answer.lease for answer in second.payload] == [first.lease]
    assert bench.leased(first) == 8
    assert first.lease is not None
    bench.release(first.lease)
    bench.stored(range(100, 116))
    assert bench.statuses(range(8)) == "M" * 8


def test_miss_takes_no_lease(bench: Bench) -> None:
    answer = bench.lookup([1], lease=PREFIX)
    assert answer.lease is None


def test_beyond_the_cap_the_answer_is_retry(bench: Bench) -> None:
    fill(bench)
    answer = bench.lookup(range(10), lease=PREFIX)
    assert bench.leased(answer) == 8
    assert list(answer.statuses) == [1] * 8 + [3] * 2
    assert list(bench.lookup([12], lease=PREFIX).statuses) == [3]


def test_one_block_may_be_leased_though_it_is_larger_than_the_cap() -> None:
    """Else whoever asks is told to ask again, for ever: a simulated world found it."""
    bench = small(extents=1, lease_share=0.01)
    bench.open()
    fill(bench)
    first = bench.lookup(range(2), lease=PREFIX)
    assert first.statuses == b"\x01\x03"
    assert first.lease
    assert bench.lookup([2], lease=PREFIX).statuses == b"\x03"
    bench.release(first.lease)
    assert bench.lookup([2], lease=PREFIX).lease


def test_block_under_many_leases_counts_once_against_the_cap(bench: Bench) -> None:
    fill(bench)
    for request in "abcdef":
        assert bench.leased(bench.lookup(range(8), lease=PREFIX, request=request)) == 8


def test_cap_follows_the_tenant_s_quota(bench: Bench) -> None:
    fill(bench)
    bench.quota(16 * 4096)
    assert bench.leased(bench.lookup(range(16), lease=PREFIX)) == 8
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))
    bench.quota(8 * 4096)
    assert bench.leased(bench.lookup(range(16), lease=ALL)) <= 4


def test_ended_request_lets_go_only_its_own_leases(bench: Bench) -> None:
    fill(bench)
    bench.lookup(range(2), lease=PREFIX, request="a")
    bench.lookup(range(2), lease=PREFIX, request="b")
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("a"),)))
    assert bench.machine.statistics().leases == 1


def test_full_pool_of_leased_blocks_refuses_stores_and_serves_loads() -> None:
    bench = small(extents=1, lease_share=1.0)
    bench.open()
    fill(bench)
    bench.lookup(range(16), lease=PREFIX)
    assert verdict(bench.store([100])).reason == "NO_ROOM"
    assert bench.machine.room(bench.machine.namespaces()[0]) == (0,)
    assert verdict(bench.load(range(16))).accepted


def test_load_goes_to_every_rank() -> None:
    bench = small()
    bench.open(ranks=2)
    bench.stored([1, 2])
    orders = only(bench.load([2, 1], job=7), act.StartTransfer)
    told = [(order.mover, order.jobs[0], order.kind) for order in orders]
    assert told == [(100, 7, ev.JobKind.LOAD), (101, 7, ev.JobKind.LOAD)]
    assert [p.engine_blocks.ravel().tolist() for p in orders[0].parts] == [[2, 1]]


def test_load_is_all_or_nothing(bench: Bench) -> None:
    bench.stored([1])
    actions = bench.load([1, 2])
    assert verdict(actions).reason == "KEY_MISSING"
    assert not only(actions, act.StartTransfer)
    assert [b.status for b in only(actions, act.PostBoard)] == [ev.JobStatus.REFUSED]
    assert [e.status for e in only(actions, act.EndJob)] == [ev.JobStatus.REFUSED]


def test_block_being_stored_can_not_be_loaded(bench: Bench) -> None:
    bench.store([1])
    assert verdict(bench.load([1])).reason == "KEY_MISSING"


def test_block_being_loaded_survives_a_full_pool(bench: Bench) -> None:
    fill(bench)
    loading = bench.load(range(4))
    bench.finish(bench.store(range(100, 112)))
    assert verdict(bench.store([200, 201, 202, 203, *range(300, 309)])).reason == "NO_ROOM"
    assert bench.statuses(range(4)) == "HHHH"
    bench.finish(loading)
    assert verdict(bench.store(range(300, 304))).accepted


def test_pins_last_until_every_rank_s_copy_has_ended() -> None:
    bench = small(extents=2)
    bench.open(ranks=2)
    bench.stored(range(16))
    first, second = only(bench.load(range(16)), act.StartTransfer)
    bench.finish([first])
    assert verdict(bench.store([100])).reason == "NO_ROOM"
    bench.finish([second])
    assert verdict(bench.store([100])).accepted


def test_board_of_a_load_is_left_to_the_mover(bench: Bench) -> None:
    bench.stored([1])
    actions = bench.finish(bench.load([1]))
    assert not only(actions, act.PostBoard)
    (end,) = only(actions, act.EndJob)
    assert (end.kind, end.status, end.blocks) == (ev.JobKind.LOAD, ev.JobStatus.DONE, 1)


def test_load_that_the_mover_never_took_is_failed_on_its_board(bench: Bench) -> None:
    bench.stored([1])
    actions = bench.finish(bench.load([1]), ev.TransferOutcome.REVOKED)
    assert [b.status for b in only(actions, act.PostBoard)] == [ev.JobStatus.FAILED]
    (end,) = only(actions, act.EndJob)
    assert (end.status, end.reason) == (ev.JobStatus.FAILED, "QUEUE_FULL")


def test_load_fails_for_the_request_when_one_rank_fails() -> None:
    bench = small()
    bench.open(ranks=2)
    bench.stored([1])
    first, second = only(bench.load([1]), act.StartTransfer)
    bench.finish([first], ev.TransferOutcome.FAILED)
    (end,) = only(bench.finish([second]), act.EndJob)
    assert (end.status, end.blocks) == (ev.JobStatus.FAILED, 0)
    assert bench.statuses([1]) == "H"


def test_lease_that_its_load_outlives_is_released_by_name_or_with_its_request(
    bench: Bench,
) -> None:
    fill(bench)
    answer = bench.lookup(range(4), lease=PREFIX)
    assert answer.lease is not None
    bench.finish(bench.load(range(4)))
    assert bench.machine.statistics().leases == 1
    bench.feed(ev.LeasesReleased(SessionId(1), (answer.lease,)))
    assert bench.machine.statistics().leases == 0
    bench.lookup(range(4), lease=PREFIX)
    bench.finish(bench.load(range(4)))
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))
    assert bench.machine.statistics().leases == 0


def test_one_key_may_be_loaded_into_two_engine_blocks(bench: Bench) -> None:
    bench.stored([1])
    (order,) = only(bench.load([1, 1]), act.StartTransfer)
    assert len(order.parts[0].slots) == 2
    bench.finish([order])


def test_accounts_never_meet(bench: Bench) -> None:
    bench.stored([1], account="mine")
    assert bench.statuses([1], account="mine") == "H"
    assert bench.statuses([1], account="yours") == "M"
    assert bench.statuses([1]) == "M"
    assert verdict(bench.load([1], account="yours")).reason == "KEY_MISSING"


def test_namespaces_never_meet() -> None:
    bench = small()
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored([1], 1)
    assert bench.statuses([1], 2) == "M"


def test_engines_of_one_namespace_share_blocks() -> None:
    bench = small()
    bench.open(1)
    bench.open(2)
    bench.stored([1], 1)
    assert bench.statuses([1], 2) == "H"


def test_least_recently_used_block_goes_first_and_tail_before_head(bench: Bench) -> None:
    fill(bench)
    bench.feed(ev.Touched(SessionId(1), context(), 0, keys(*range(8))))
    bench.stored([100, 101])
    assert bench.statuses(range(16)) == "H" * 14 + "MM"


def test_unknown_session_is_an_error(bench: Bench) -> None:
    bench.close()
    with pytest.raises(UnknownSession):
        bench.lookup([1])


def of_groups(bench: Bench, *counts: int, first: int = 0) -> list[act.Answer]:
    """Lookup by one request of so many keys of each group."""
    queries = tuple(
        ev.Query(context(), group, keys(*range(first, first + count)), ALL if group else PREFIX)
        for group, count in enumerate(counts)
    )
    answers = bench.ask(ev.LookupRequested(SessionId(1), queries))
    assert isinstance(answers, tuple)
    return list(answers)


def test_the_groups_of_a_request_share_what_it_may_lease() -> None:
    bench = small(extents=4, lease_share=12 / 64)
    bench.open(namespace=spec(groups=3))
    for group in range(3):
        bench.finish(bench.store(range(16), group=group))
    whole = of_groups(bench, 4, 4, 4)
    assert [bench.leased(answer) for answer in whole] == [4, 4, 4]
    bench.release(*(answer.lease or 0 for answer in whole))
    cut = of_groups(bench, 16, 8, 0)
    assert [bench.leased(answer) for answer in cut] == [7, 4, 0]
    assert list(cut[0].statuses) == [1] * 7 + [3] * 9
    assert list(of_groups(bench, 16, 8)[1].statuses) == [1] * 4 + [3] * 4


def test_one_block_of_each_group_can_be_leased_however_large() -> None:
    large = spec(block_bytes=3 * BLOCK).groups[0]
    bench = small(extents=2, lease_share=3 / 32)
    bench.open(namespace=NamespaceSpec("ns", TenantId("tenant"), 32, (*spec().groups, large)))
    for group in range(2):
        bench.finish(bench.store(range(4), group=group))
    answers = of_groups(bench, 4, 4)
    assert [bench.leased(answer) for answer in answers] == [1, 1]
    assert [bench.leased(answer) for answer in of_groups(bench, 2, 2, first=2)] == [0, 0]
