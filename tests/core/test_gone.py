"""Why a request missed: what became of its first missing block, as the core remembers it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks.namespaces import add_scope, scope_seed
from kvd.core.keys import NamespaceId, RequestId, ScopeId, SessionId, TenantId
from kvd.core.model import gone
from kvd.core.model.gone import (
    MAX_GONE_BLOCKS,
    MAX_GONE_NOTES,
    MAX_GONE_SHARES,
    MAX_REQUESTS_RECALLED,
    Fate,
    GoneBlocks,
    WhyGone,
)
from kvd.core.model.reuse import ReuseSample
from kvd.core.model.state import Scope
from kvd.core.told import MissedBlock, ToldRequest
from kvd.core.upkeep.misses import (
    MAX_REQUESTS_EXPLAINED,
    MAX_SCOPES_PASSED,
    MAX_SCOPES_SEARCHED,
    Elsewhere,
    Explained,
)
from kvd.observability.metrics import Metrics
from tests.core.bench import BLOCK, SECOND, Bench, finished, keys, only, small, spec, verdict


def tell(
    bench: Bench, number: int | None, request: str = "r", session: int = 1, account: str = ""
) -> None:
    """A client tells of a request that missed this key first."""
    missed = None if number is None else MissedBlock(0, 3, keys(number).words, 0)
    told = ToldRequest(RequestId(request), account, 100, 0, 0, missed)
    bench.feed(ev.RequestsTold(SessionId(session), (told,), "engine"))


def explained(bench: Bench, request: str = "", tenants: tuple[str, ...] = ()) -> list[Explained]:
    everyone = set(bench.machine.state.tenants) if not tenants else set(map(TenantId, tenants))
    return bench.machine.explain(request, everyone.__contains__)


def elsewhere(bench: Bench, one: Explained) -> tuple[Elsewhere, ...]:
    return bench.machine.elsewhere(one.recalled, bench.machine.namespaces())


def cause(bench: Bench, request: str = "r") -> gone.Cause:
    (one,) = explained(bench, request)
    assert one.recalled.cause is not None
    return one.recalled.cause


def test_a_block_that_was_never_stored_has_no_fate() -> None:
    bench = small()
    bench.open()
    bench.stored([1, 2])
    tell(bench, 3)
    (one,) = explained(bench)
    assert one.recalled.cause is None
    assert one.is_all_known
    assert one.recalled.engine == "engine"


def test_an_evicted_block_says_when_for_whom_and_how_long_it_was_unused() -> None:
    bench = small(extents=1)
    bench.open()
    bench.stored(range(1, 17))
    bench.tick(10 * SECOND)
    bench.stored([100])
    bench.tick(5 * SECOND)
    missing = next(n for n in range(1, 17) if bench.statuses([n]) != "H")
    tell(bench, missing)
    found = cause(bench)
    assert found.why == WhyGone(Fate.EVICTED, by=NamespaceId(1))
    assert found.before_s == pytest.approx(5, abs=0.1)
    assert found.unused_s == pytest.approx(10, abs=0.1)


def test_the_last_fate_before_the_request_counts() -> None:
    bench = small(extents=1)
    bench.open()
    bench.stored(range(1, 17))
    bench.clear()
    bench.tick(SECOND)
    tell(bench, 1, "before")
    bench.tick(SECOND)
    bench.stored(range(1, 17))
    bench.stored([100, 101])
    gone_now = next(n for n in range(1, 17) if bench.statuses([n]) != "H")
    tell(bench, gone_now, "after")
    assert cause(bench, "after").why.fate is Fate.EVICTED
    assert cause(bench, "before").why.fate is Fate.CLEARED


def test_a_cleared_block_says_so_however_it_was_given_up() -> None:
    bench = small()
    bench.open()
    bench.stored([1, 2, 3])
    bench.clear()
    tell(bench, 2)
    assert cause(bench).why.fate is Fate.CLEARED
    (one,) = explained(bench)
    assert one.recalled.cleared_ns is not None


def test_a_refused_store_gives_its_reason() -> None:
    bench = small()
    bench.open()
    bench.quota(2 * BLOCK)
    assert not verdict(bench.store([1, 2, 3])).accepted
    tell(bench, 2)
    assert cause(bench).why == WhyGone(Fate.REFUSED, "QUOTA")


def test_a_filtered_block_says_so() -> None:
    bench = small(store_threshold=2)
    bench.open()
    bench.store([1])
    tell(bench, 1)
    assert cause(bench).why.fate is Fate.FILTERED


def test_a_failed_copy_gives_its_reason() -> None:
    bench = small()
    bench.open()
    (start,) = only(bench.store([1]), act.StartTransfer)
    bench.feed(finished(start, ev.TransferOutcome.FAILED))
    tell(bench, 1)
    found = cause(bench).why
    assert found.fate is Fate.FAILED
    assert found.reason


def test_another_tenants_fates_and_requests_are_none_of_ours() -> None:
    bench = small()
    bench.open(1, spec("a", "one"))
    bench.open(2, spec("b", "two"))
    bench.stored([1])
    bench.clear(1)
    tell(bench, 1, session=2)
    (one,) = explained(bench, tenants=("two",))
    assert one.recalled.cause is None
    assert explained(bench, tenants=("one",)) == []


def test_the_block_of_an_older_epoch_is_found_there() -> None:
    bench = small()
    bench.open()
    bench.stored([1])
    bench.feed(ev.EpochChanged(SessionId(1), "new"))
    tell(bench, 1)
    (one,) = explained(bench)
    assert one.recalled.epoch_entered_ns is not None
    assert [(each.namespace, each.epoch) for each in elsewhere(bench, one)] == [(1, "")]


def test_a_block_that_is_there_by_now_is_said_to_be() -> None:
    bench = small()
    bench.open()
    tell(bench, 1)
    bench.stored([1])
    (one,) = explained(bench)
    assert elsewhere(bench, one) == (Elsewhere(NamespaceId(1), "", ""),)
    bench.clear()
    assert elsewhere(bench, one) == ()


def test_the_block_of_a_namespace_that_differs_is_found_there() -> None:
    bench = small()
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored([1])
    tell(bench, 1, session=2)
    (one,) = explained(bench)
    assert [each.namespace for each in elsewhere(bench, one)] == [1]


def test_a_name_is_found_whole_first_and_else_by_its_beginning() -> None:
    bench = small()
    bench.open()
    tell(bench, 1, "cmpl-1")
    tell(bench, 1, "cmpl-10")
    tell(bench, None, "other")
    assert [e.recalled.told.request for e in explained(bench, "cmpl-1")] == ["cmpl-1"]
    assert [e.recalled.told.request for e in explained(bench, "cmpl")] == ["cmpl-1", "cmpl-10"]
    assert len(explained(bench, "")) == 2, "the one that found everything is not listed"


def test_requests_are_remembered_up_to_the_bound_and_told_up_to_another() -> None:
    bench = small()
    bench.open()
    for number in range(MAX_REQUESTS_RECALLED + 1):
        tell(bench, 1, f"r{number}")
    assert not explained(bench, "r0")
    assert len(explained(bench, "r")) == MAX_REQUESTS_EXPLAINED
    (last,) = explained(bench, f"r{MAX_REQUESTS_RECALLED}")
    assert last.recalled.tag


def test_one_block_that_went_many_times_takes_one_look_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = small()
    bench.open()
    bench.quota(0)
    bench.quota(BLOCK)
    for _ in range(50):
        assert not verdict(bench.store([1, 2])).accepted
    for number in range(20):
        tell(bench, 1, f"before {number}")
    bench.tick(SECOND)
    assert not verdict(bench.store([1, 2])).accepted
    tell(bench, 1, "after")
    looks: list[gone.Cause] = []
    cause_of = gone.Cause

    def counted(*of: Any) -> gone.Cause:
        looks.append(cause_of(*of))
        return looks[-1]

    monkeypatch.setattr(gone, "Cause", counted)
    assert cause(bench, "before 19").before_s == 0
    assert cause(bench, "after").before_s == 0
    assert len(looks) == 21, "one a request, however often the block was refused"


def test_few_places_are_looked_at_for_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = small()
    bench.open(1, spec("a", groups=2))
    bench.stored([1], account="first")
    state = bench.machine.state
    (session,) = state.sessions.values()
    for number in range(MAX_SCOPES_PASSED):
        name = (session.namespace, session.epoch, f"{number}", 0)
        seed = scope_seed(state, state.namespaces[session.namespace], *name[1:])
        scope = Scope(ScopeId(state.next_scope), *name, seed)
        add_scope(state, scope, session.payer)
    tell(bench, 1)
    (one,) = explained(bench)
    asked: list[int] = []
    find = type(state.index).find

    def counted(index: Any, tags: Any, words: Any, scope: Any) -> Any:
        asked.append(len(tags))
        return find(index, tags, words, scope)

    monkeypatch.setattr(type(state.index), "find", counted)
    elsewhere(bench, one)
    itself, others = asked  # these in one look
    assert itself == 1
    assert others in {MAX_SCOPES_SEARCHED - 1, MAX_SCOPES_SEARCHED}  # its own is left out


def note(blocks: GoneBlocks, tenant: str, tags: list[int], at_s: int = 1) -> None:

    why = WhyGone(Fate.EVICTED)
    array = np.array(tags, dtype=np.uint64)
    blocks.note(TenantId(tenant), array, None, why, at_s * SECOND)


def test_a_ring_forgets_the_oldest_and_says_so() -> None:
    blocks = GoneBlocks(ReuseSample(BLOCK))
    note(blocks, "t", [7])
    share = blocks.share_of(TenantId("t"))
    step = 1 << 12
    for first in range(0, MAX_GONE_BLOCKS - 1, step):
        note(blocks, "t", list(range(100 + first, 100 + min(first + step, MAX_GONE_BLOCKS - 1))))
    assert (share.is_whole, share.oldest) == (True, 0)
    note(blocks, "t", [8, 9])
    assert (share.is_whole, share.oldest) == (False, 2)


def test_notes_are_bounded_like_blocks() -> None:
    blocks = GoneBlocks(ReuseSample(BLOCK))
    for number in range(MAX_GONE_NOTES + 1):
        note(blocks, "t", [number + 1], at_s=number + 1)
    share = blocks.share_of(TenantId("t"))
    assert share.oldest == 1
    assert not share.is_whole


def test_a_forgotten_tenants_share_is_had_by_another_whose_past_is_not_all_known() -> None:
    blocks = GoneBlocks(ReuseSample(BLOCK))
    for number in range(MAX_GONE_SHARES + 1):
        note(blocks, f"t{number}", [number + 1])
    assert all(share.is_whole for share in blocks.all_shares())
    blocks.forget(TenantId("t0"))
    blocks.forget(TenantId("t0"))
    assert blocks.ages.sum() == 1, "what went stays counted"
    late = f"t{MAX_GONE_SHARES}"  # what it had before lies among the others'
    note(blocks, late, [9])
    assert len(blocks.shares) == MAX_GONE_SHARES
    assert blocks.share_of(TenantId(late)).blocks == 1
    assert not blocks.share_of(TenantId(late)).is_whole
    assert blocks.share_of(TenantId("t1")).is_whole


def test_tenants_beyond_the_bound_have_one_share_together() -> None:
    blocks = GoneBlocks(ReuseSample(BLOCK))
    for number in range(MAX_GONE_SHARES + 2):
        note(blocks, f"t{number}", [number + 1])
    assert len(blocks.shares) == MAX_GONE_SHARES
    assert blocks.others is not None
    assert blocks.others.blocks == 2


def test_ages_count_each_evicted_block_once() -> None:
    bench = small(extents=1)
    bench.open()
    bench.stored(range(1, 17))
    bench.tick(30 * SECOND)
    bench.stored(range(100, 110))
    bench.clear()
    state = bench.machine.state
    state.gone.count()
    ages = dict(zip((*gone.AGES_OF_EVICTION, "more"), state.gone.ages.tolist(), strict=True))
    assert state.counters.evicted == 10
    assert ages == {**dict.fromkeys(ages, 0), 60: 10}, "what was cleared was not evicted"
    assert state.gone.age_sum_s == pytest.approx(300, rel=0.02)


@pytest.fixture
def every(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.model.reuse.FIRST_SHARE", 1.0)


@pytest.mark.usefixtures("every")
@pytest.mark.parametrize(
    ("after_s", "counted"),
    [(50, [1, 1, 1]), (500, [0, 1, 1]), (3000, [0, 0, 1]), (4000, [0, 0, 0])],
    ids=["a minute", "ten", "an hour", "longer"],
)
def test_an_evicted_block_that_is_stored_again_is_regretted(
    after_s: int, counted: list[int]
) -> None:
    bench = small(extents=1)
    bench.open()
    bench.stored(range(1, 17))
    bench.stored([100])
    (lost,) = (n for n in range(1, 17) if bench.statuses([n]) != "H")
    bench.tick()
    bench.tick(after_s * SECOND)
    bench.stored([lost])
    assert bench.machine.state.reuse.regrets == counted


@pytest.mark.usefixtures("every")
def test_one_that_is_stored_again_before_it_was_counted_is_regretted_once() -> None:
    bench = small(extents=1)
    bench.open()
    bench.stored(range(1, 17))
    bench.stored([100])
    (lost,) = (n for n in range(1, 17) if bench.statuses([n]) != "H")
    bench.tick(0)
    bench.machine.state.reuse.regrets = [0.0] * 3
    bench.stored([lost])
    bench.tick()
    assert bench.machine.state.reuse.regrets[0] >= 1


def test_metrics_show_ages_and_regrets() -> None:
    bench = small(extents=1)
    bench.open()
    bench.stored(range(1, 17))
    bench.tick(30 * SECOND)
    bench.stored(range(100, 110))
    bench.tick()
    metrics = Metrics("test")
    metrics.watch(bench.machine.statistics)
    page = generate_latest(metrics.registry).decode()
    assert 'kvd_evicted_unused_seconds_bucket{le="10.0"} 0.0' in page
    assert 'kvd_evicted_unused_seconds_bucket{le="60.0"} 10.0' in page
    assert "kvd_evicted_unused_seconds_count 10.0" in page
    assert 'kvd_evicted_used_again_blocks_total{minutes="10"} 0.0' in page


def test_ring_goes_on_at_its_beginning_and_forgets_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gone, "MAX_GONE_BLOCKS", 8)
    ring = gone.GoneRing()

    def put(first: int, count: int, stamp: int) -> None:
        tags = np.arange(first, first + count, dtype=np.uint64)
        ring.put(tags, (tags * 10).astype(np.uint32), stamp, code=stamp + 100)

    put(1, 6, stamp=1)
    assert (ring.is_whole, ring.oldest) == (True, 0)
    put(7, 2, stamp=2)
    assert (ring.is_whole, ring.oldest) == (True, 0)
    put(9, 1, stamp=2)
    assert (ring.is_whole, ring.oldest) == (False, 1)
    put(10, 6, stamp=3)
    assert (ring.blocks, ring.notes, ring.oldest) == (15, 3, 7)
    assert ring.tags.tolist() == [9, 10, 11, 12, 13, 14, 15, 8]
    assert ring.used.tolist() == [90, 100, 110, 120, 130, 140, 150, 80]
    notes = ring.notes_of(np.array([7, 8, 9, 14]))
    assert [ring.stamps[note] for note in notes.tolist()] == [2, 2, 3, 3]
    assert [ring.codes[note] for note in notes.tolist()] == [102, 102, 103, 103]
    counts, stamps, codes = ring.notes_of_run(7, 8)
    assert (counts.tolist(), stamps.tolist(), codes.tolist()) == ([2, 6], [2, 3], [102, 103])
    counts, stamps, codes = ring.notes_of_run(7, 2)
    assert (counts.tolist(), stamps.tolist(), codes.tolist()) == ([2], [2], [102])
