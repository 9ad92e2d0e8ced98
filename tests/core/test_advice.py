"""Hints: advice for a request's blocks, heeded at its end, within the tenant's share."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core.claims.advice import MAX_RETENTIONS, MAX_UNWANTED_BLOCKS, RETAINED_PART
from kvd.core.keys import RequestId, SessionId
from kvd.core.model.slots import SlotTable
from tests.core.bench import BLOCK, SECOND, Bench, engine_blocks, keys, small, verdict

RETAIN = ev.Advice(ev.Hint.RETAIN, 60 * SECOND)


def stored(bench: Bench, numbers: list[int], request: str, advice: ev.Advice | None) -> None:
    """A request with this advice stores these blocks, and ends."""
    context = ev.RequestContext(RequestId(request), advice=advice)
    run = ev.Run(0, keys(*numbers), engine_blocks(numbers))
    job = bench._job(0)
    made = bench.feed(ev.StoreRequested(SessionId(1), job, context, (run,)))
    assert verdict(made).accepted
    bench.finish(made)
    bench.feed(ev.RequestsEnded(SessionId(1), (context.request,)))


def hits(bench: Bench, numbers: list[int]) -> int:
    return bench.statuses(numbers).count("H")


@pytest.fixture
def bench() -> Bench:
    made = small(extents=1)
    made.open()
    return made


def test_retained_blocks_go_last(bench: Bench) -> None:
    stored(bench, [1, 2, 3, 4], "kept", RETAIN)
    stored(bench, list(range(10, 22)), "other", None)
    stored(bench, list(range(30, 42)), "more", None)
    assert hits(bench, [1, 2, 3, 4]) == 4
    assert hits(bench, list(range(10, 22))) == 0
    assert bench.machine.state.counters.hinted == {("retain", "followed"): 4}


def test_without_the_hint_they_would_have_gone(bench: Bench) -> None:
    stored(bench, [1, 2, 3, 4], "kept", None)
    stored(bench, list(range(10, 22)), "other", None)
    stored(bench, list(range(30, 42)), "more", None)
    assert hits(bench, [1, 2, 3, 4]) == 0


def test_it_is_no_right_where_all_is_needed(bench: Bench) -> None:
    stored(bench, [1, 2, 3, 4], "kept", RETAIN)
    stored(bench, list(range(10, 26)), "all", None)
    assert hits(bench, list(range(10, 26))) == 16


def test_it_is_over_with_its_time(bench: Bench) -> None:
    stored(bench, [1, 2, 3, 4], "kept", RETAIN)
    bench.tick(61 * SECOND)
    tenant = bench.machine.state.namespaces[bench.machine.namespaces()[0]].tenant
    assert (tenant.retained_bytes, tenant.retentions) == (0, [])
    stored(bench, list(range(10, 22)), "other", None)
    stored(bench, list(range(30, 34)), "more", None)
    assert hits(bench, [1, 2, 3, 4]) == 0


def test_the_share_bounds_it_and_the_head_is_kept(bench: Bench) -> None:
    stored(bench, list(range(1, 13)), "much", RETAIN)
    share = int(16 * RETAINED_PART)
    counted = bench.machine.state.counters.hinted
    assert counted == {("retain", "followed"): share, ("retain", "beyond_share"): 12 - share}
    stored(bench, [50], "one", RETAIN)
    assert counted["retain", "beyond_share"] == 12 - share + 1
    stored(bench, list(range(60, 71)), "others", None)
    assert hits(bench, list(range(1, share + 1))) == share


def test_a_quota_bounds_it_further(bench: Bench) -> None:
    bench.quota(8 * BLOCK)
    stored(bench, list(range(1, 9)), "much", RETAIN)
    assert bench.machine.state.counters.hinted["retain", "followed"] == 2


def test_what_many_requests_retain_is_charged_once(bench: Bench) -> None:
    for number in range(5):
        stored(bench, [1, 2, 3], f"r{number}", RETAIN)
    assert bench.machine.state.counters.hinted == {("retain", "followed"): 15}


@pytest.mark.parametrize("hint", [ev.Hint.DEMOTE, ev.Hint.RELEASE], ids=["demote", "release"])
def test_unwanted_blocks_go_first_and_the_tail_before_the_head(bench: Bench, hint: ev.Hint) -> None:
    stored(bench, [1, 2, 3], "old", None)
    stored(bench, list(range(10, 20)), "unwanted", ev.Advice(hint))
    stored(bench, [30, 31, 32], "young", None)
    stored(bench, [40, 41, 42], "next", None)
    assert hits(bench, [1, 2, 3]) == 3, "though they were used longest ago"
    assert bench.statuses(list(range(10, 20))) == "H" * 7 + "M" * 3
    assert bench.machine.state.counters.evicted == 3


def test_unwanted_blocks_that_no_room_was_needed_for_go_first_the_next_time(bench: Bench) -> None:
    stored(bench, [1, 2, 3], "old", None)
    stored(bench, list(range(10, 20)), "unwanted", ev.Advice(ev.Hint.RELEASE))
    stored(bench, [30, 31, 32], "young", None)
    for left in (8, 5, 2):
        stored(bench, [40 + left, 41 + left], "next", None)
        assert bench.statuses(list(range(10, 20))) == "H" * left + "M" * (10 - left)
        stored(bench, [60 + left], "one more", None)
        assert bench.statuses(list(range(10, 20))) == "H" * (left - 1) + "M" * (11 - left)
    assert hits(bench, [1, 2, 3]) == 3


def test_what_was_used_since_is_wanted(bench: Bench) -> None:
    stored(bench, list(range(10, 14)), "unwanted", ev.Advice(ev.Hint.RELEASE))
    stored(bench, list(range(20, 32)), "others", None)
    bench.tick(SECOND)
    bench.feed(ev.Touched(SessionId(1), ev.RequestContext(RequestId("x")), 0, keys(10, 11)))
    stored(bench, [40, 41, 42], "next", None)
    assert bench.statuses([10, 11, 12, 13]) == "HHMM"


def test_what_another_request_retains_at_once_is_wanted(bench: Bench) -> None:
    """At the very time at which it is given back: the uses have one stamp."""
    stored(bench, [1, 2], "done", ev.Advice(ev.Hint.RELEASE))
    stored(bench, [1, 2], "goes on", RETAIN)
    stored(bench, list(range(10, 24)), "others", None)
    stored(bench, list(range(30, 32)), "more", None)
    assert hits(bench, [1, 2]) == 2


@pytest.mark.parametrize("hint", [ev.Hint.DEMOTE, ev.Hint.RELEASE], ids=["demote", "release"])
def test_what_another_request_retains_is_not_given_back(bench: Bench, hint: ev.Hint) -> None:
    """Two branches share a head: whose tool runs finds it, though the other one is done."""
    stored(bench, [1, 2, 3], "waits for a tool", RETAIN)
    stored(bench, [1, 2, 4, 5], "done", ev.Advice(hint))
    stored(bench, list(range(10, 19)), "others", None)
    stored(bench, list(range(30, 34)), "more", None)
    assert bench.statuses([1, 2, 3, 4, 5]) == "HHHMM"
    assert bench.machine.state.counters.hinted == {
        ("retain", "followed"): 3,
        (hint.value, "followed"): 2,
        (hint.value, "retained"): 2,
    }


def test_once_its_time_is_over_it_is_given_back(bench: Bench) -> None:
    stored(bench, [1, 2], "retained", RETAIN)
    stored(bench, [10, 11, 12], "other", None)
    bench.tick(RETAIN.lasting_ns + 2 * SECOND)
    bench.feed(ev.Touched(SessionId(1), ev.RequestContext(RequestId("x")), 0, keys(1, 2)))
    stored(bench, [1, 2], "done", ev.Advice(ev.Hint.RELEASE))
    stored(bench, list(range(30, 43)), "more", None)
    assert bench.statuses([1, 2, 10, 11, 12]) == "MMHHH"


def test_released_twice_goes_once(bench: Bench) -> None:
    for request in ("a", "b"):
        stored(bench, [1, 2, 3, 4], request, ev.Advice(ev.Hint.RELEASE))
    stored(bench, list(range(10, 22)), "others", None)
    stored(bench, list(range(30, 38)), "next", None)
    assert hits(bench, [1, 2, 3, 4]) == 0


def test_a_block_that_another_takes_the_place_of_is_left_alone(bench: Bench) -> None:
    stored(bench, [1, 2], "gone", ev.Advice(ev.Hint.RELEASE))
    bench.clear()
    stored(bench, list(range(10, 26)), "others", None)
    stored(bench, [40], "next", None)
    assert hits(bench, [10]) == 1, "the tail of the only request goes"


def test_leased_blocks_are_not_given_back(bench: Bench) -> None:
    stored(bench, [1, 2], "released", ev.Advice(ev.Hint.RELEASE))
    bench.lookup([1, 2], lease=ev.LeaseMode.PREFIX, request="reader")
    stored(bench, list(range(10, 24)), "others", None)
    stored(bench, list(range(30, 40)), "next", None)
    assert hits(bench, [1, 2]) == 2


def test_what_many_short_requests_give_back_lies_in_few_pieces(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece for each took a kilobyte, and was looked at with each request that ended."""
    monkeypatch.setattr("kvd.core.model.unwanted.PIECE_BLOCKS", 8)
    stored(bench, [1, 2], "first", None)
    (owner,) = bench.machine.state.classes.values()
    unwanted, released = owner.unwanted, ev.Advice(ev.Hint.RELEASE)
    requests = [RequestId(f"r{number}") for number in range(64)]
    for request in requests:
        context = ev.RequestContext(request, advice=released)
        query = ev.Query(context, 0, keys(1, 2), ev.LeaseMode.PREFIX)
        bench.feed(ev.LookupRequested(SessionId(1), (query,)))
    bench.feed(ev.RequestsEnded(SessionId(1), tuple(requests)))
    bench.work_off()
    assert len(unwanted) == 2 * len(requests)
    assert len(unwanted._pieces) <= 2 * len(requests) // 8
    stored(bench, list(range(10, 24)), "others", None)
    stored(bench, [30], "next", None)
    assert bench.statuses([1, 2]) == "HM", "once, and the tail first"
    stored(bench, [31, 32], "last", None)
    assert bench.statuses([1, 2]) == "MM"
    assert not len(unwanted)


def test_what_is_unwanted_no_longer_takes_no_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.core.claims.advice.MAX_UNWANTED_BLOCKS", 8)
    monkeypatch.setattr("kvd.core.model.unwanted.PIECE_BLOCKS", 3)
    released = ev.Advice(ev.Hint.RELEASE)
    for request in range(10):  # of one conversation
        bench.tick(SECOND)
        stored(bench, [1, 2, 3, 4], f"r{request}", released)
    stored(bench, [5, 6, 7, 8], "last", released)
    assert bench.machine.state.counters.hinted == {("release", "followed"): 44}
    stored(bench, list(range(10, 18)), "others", None)
    stored(bench, list(range(20, 28)), "next", None)
    assert hits(bench, list(range(1, 9))) == 0
    assert hits(bench, list(range(10, 18))) == 8
    (owner,) = bench.machine.state.classes.values()
    assert not len(owner.unwanted)


def test_unwanted_blocks_are_not_looked_through_for_each_that_has_no_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.core.claims.advice.MAX_UNWANTED_BLOCKS", 8)
    monkeypatch.setattr("kvd.core.claims.advice.STALE_PART", 2)
    (owner,) = bench.machine.state.classes.values()
    looks: list[int] = []
    forget = owner.unwanted.forget_stale

    def noted(table: SlotTable) -> None:
        looks.append(len(owner.unwanted))
        forget(table)

    monkeypatch.setattr(owner.unwanted, "forget_stale", noted)
    released = ev.Advice(ev.Hint.RELEASE)
    stored(bench, list(range(1, 9)), "all", released)
    for number in range(9, 16):
        stored(bench, [number], f"r{number}", released)
    assert looks == [8, 8]
    counted = bench.machine.state.counters.hinted
    assert counted == {("release", "followed"): 8, ("release", "beyond_share"): 7}


def test_bounds_hold(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (MAX_RETENTIONS, MAX_UNWANTED_BLOCKS) == (4096, 65536)
    monkeypatch.setattr("kvd.core.claims.advice.MAX_RETENTIONS", 1)
    monkeypatch.setattr("kvd.core.claims.advice.MAX_UNWANTED_BLOCKS", 3)
    stored(bench, [1], "a", RETAIN)
    stored(bench, [2], "b", RETAIN)
    stored(bench, [3, 4], "c", ev.Advice(ev.Hint.DEMOTE))
    stored(bench, [5, 6], "d", ev.Advice(ev.Hint.DEMOTE))
    assert bench.machine.state.counters.hinted == {
        ("retain", "followed"): 1,
        ("retain", "beyond_share"): 1,
        ("demote", "followed"): 3,
        ("demote", "beyond_share"): 1,
    }
