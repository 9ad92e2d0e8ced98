"""The hint `prefetch`: blocks come up before anybody looks them up, and nobody waits for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import RequestId, SessionId
from kvd.core.model.tiers import SEARCH_BLOCKS, Reach, TierTerms
from kvd.core.tiers import search
from kvd_proto.groups import GroupKind
from tests.core.bench import SECOND, Bench, keys, numbers_of, only, small, spec
from tests.core.test_tiers import DISK, Stage, stage

SHARED = TierTerms("far", Reach.CLUSTER, seek_ns=SECOND)


def prefetch(
    on: Stage, *numbers: int, request: str = "hint", first: int = 0, session: int = 1
) -> list[act.Action]:
    context = ev.RequestContext(RequestId(request), prefetch=True)
    return on.feed(ev.Touched(SessionId(session), context, 0, keys(*numbers), first))


def brought(on: Stage) -> None:
    """Tiers answer; no step of the engine ends."""
    on.answer()
    on.take(on.bench.work_off())


def counted(on: Stage) -> dict[str, int]:
    hinted = on.bench.machine.state.counters.hinted
    assert {hint for hint, _ in hinted} <= {"prefetch"}
    return {outcome: blocks for (_, outcome), blocks in hinted.items()}


def numbers_read(on: Stage) -> list[list[int]]:
    return [numbers_of(read.keys) for read in on.reads]


def test_it_brings_up_what_was_evicted_and_a_lookup_finds_it_at_once() -> None:
    on = stage()
    on.bring_down(1, 2, 3)
    assert not only(prefetch(on, 1, 2, 3), act.Reply)
    brought(on)
    assert numbers_read(on) == [[1, 2, 3]]
    assert not on.bench.machine.state.sessions[SessionId(1)].leases
    on.read()
    assert on.look(1, 2, 3) == "HHH"
    assert not on.asked
    assert on.counters().promoted == 3
    assert counted(on) == {"followed": 3}


def test_said_again_it_costs_nothing() -> None:
    on = stage()
    on.bring_down(1, 2)
    for _ in range(3):
        prefetch(on, 1, 2)
    assert len(on.asked) == 1
    brought(on)
    prefetch(on, 1, 2)
    prefetch(on, 1, 2, request="another")
    brought(on)
    assert numbers_read(on) == [[1, 2]]
    on.read()
    prefetch(on, 1, 2)
    assert not on.asked
    assert on.bench.machine.state.below.sought_of == {"tenant": SEARCH_BLOCKS}
    assert counted(on) == {"followed": 12}


@pytest.mark.parametrize("answered", [False, True], ids=["before-the-answer", "after-it"])
@pytest.mark.parametrize("request_id", ["hint", "other"])
def test_with_a_lookup_beside_it_there_is_one_promotion(request_id: str, answered: bool) -> None:
    on = stage()
    on.bring_down(1, 2)
    prefetch(on, 1, 2)
    if answered:
        brought(on)
    assert on.look(1, 2, request=request_id) == "PP"
    questions = 1 + (request_id == "other")
    assert len(on.asked) == (0 if answered else questions)
    on.answer()
    on.step()
    assert numbers_read(on) == [[1, 2]]
    on.read()
    assert on.look(1, 2, request=request_id) == "HH"


def test_after_a_lookup_it_asks_for_the_rest_alone() -> None:
    on = stage()
    on.bring_down(1, 2, 3)
    assert on.look(1, request="hint") == "P"
    prefetch(on, 1, 2, 3)
    assert [numbers_of(asked.keys) for asked in on.asked] == [[1], [2, 3]]
    on.answer()
    on.step()
    on.read()
    assert on.look(1, 2, 3, request="hint") == "HHH"


def test_what_a_lookup_of_a_request_with_the_hint_seeks_is_counted_once() -> None:
    on = stage()
    on.bring_down(1, 2)
    context = ev.RequestContext(RequestId("hint"), prefetch=True)
    query = ev.Query(context, 0, keys(1, 2), ev.LeaseMode.PREFIX)
    for _ in range(2):
        on.feed(ev.LookupRequested(SessionId(1), (query,)))
    assert counted(on) == {"followed": 2}
    assert len(on.asked) == 1


def test_nothing_behind_a_gap_comes_up() -> None:
    on = stage()
    on.bring_down(1, 3)
    prefetch(on, 1, 2)
    brought(on)
    prefetch(on, 3, first=2)
    brought(on)
    assert numbers_read(on) == [[1]]


def test_where_any_block_is_of_use_gaps_do_not_matter() -> None:
    on = Stage(small(4, tiers=(DISK,)))
    full = spec()
    window = replace(full.groups[0], kind=GroupKind.SLIDING_WINDOW)
    on.bench.open(namespace=replace(full, groups=(window,)))
    on.start()
    on.bring_down(1, 3)
    prefetch(on, 1, 2, 3)
    brought(on)
    assert numbers_read(on) == [[1, 3]]


def test_a_lookup_waits_no_shorter_for_it_and_misses_no_more() -> None:
    on = stage()
    prefetch(on, 1)
    on.answer()  # it lies nowhere yet
    on.bring_down(1)
    assert on.look(1, request="hint") == "P"
    on.answer()
    on.step()
    on.read()
    assert on.look(1, request="hint") == "H"


def test_a_lookup_after_its_deadline_asks_anew() -> None:
    on = stage()
    on.bring_down(1)
    prefetch(on, 1)
    on.asked.clear()  # a tier that does not answer
    on.tick(SECOND)
    assert on.look(1, request="hint") == "P"
    assert len(on.asked) == 1


def test_said_again_after_its_deadline_it_asks_anew() -> None:
    on = stage()
    prefetch(on, 1)
    on.answer()
    prefetch(on, 1)
    assert not on.asked
    on.tick(SECOND)
    on.bring_down(1)
    prefetch(on, 1)
    brought(on)
    assert numbers_read(on) == [[1]]


def test_a_request_that_has_waited_for_tiers_as_long_as_it_may_seeks_no_more() -> None:
    on = stage()
    on.bring_down(1, 2)
    assert on.look(1, request="hint") == "P"
    on.asked.clear()  # a tier that does not answer
    on.tick(SECOND)
    prefetch(on, 1, 2)
    assert not on.asked
    assert counted(on) == {"followed": 2}, "it is not for want of room"


def test_a_request_that_awaits_another_node_goes_on_asking() -> None:
    on = stage(SHARED)
    context = ev.RequestContext(RequestId("r"), awaits=True, prefetch=True)
    on.feed(ev.Touched(SessionId(1), context, 0, keys(1)))
    on.answer()
    query = ev.Query(context, 0, keys(1), ev.LeaseMode.PREFIX)
    for wait_ns in (0, search.AWAITED_AGAIN_NS, 2 * search.AWAITED_AGAIN_NS):
        on.bench.now_ns += wait_ns
        on.feed(ev.LookupRequested(SessionId(1), (query,)))
        assert len(on.asked) == 1
        on.answer()


def test_the_end_of_its_request_does_not_end_it() -> None:
    on = stage()
    on.bring_down(1)
    prefetch(on, 1)
    on.feed(ev.RequestsEnded(SessionId(1), (RequestId("hint"),)))
    brought(on)
    on.read()
    assert on.look(1) == "H"
    session = on.bench.machine.state.sessions[SessionId(1)]
    assert RequestId("hint") not in session.prefixes


def test_it_is_forgotten_some_time_after_its_deadline() -> None:
    on = stage()
    prefetch(on, 1)
    on.answer()
    on.tick(SECOND + search.BELIEVED_NS)
    below = on.bench.machine.state.below
    assert (below.sought_of, len(below.expiring)) == ({}, 0)
    assert not on.bench.machine.state.sessions[SessionId(1)].sought


def test_it_takes_half_of_what_a_session_may_seek(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_SOUGHT_BLOCKS", 24)
    on = stage()
    prefetch(on, *range(1, 7))
    assert [numbers_of(asked.keys) for asked in on.asked] == [[1, 2, 3, 4]]
    prefetch(on, 7, request="second")
    assert len(on.asked) == 1
    assert counted(on) == {"followed": 4, "beyond_share": 3}
    assert on.look(11, 12, 13, 14, 15) == "PPPPM"


def test_it_takes_half_of_what_a_tenant_may_seek(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_TENANT_SOUGHT_BLOCKS", 40)
    on = stage()
    on.bench.open(2, attach=False)
    prefetch(on, *range(1, 4))
    prefetch(on, *range(11, 14), session=2)
    assert [len(asked.keys) for asked in on.asked] == [3, 1]
    assert counted(on) == {"followed": 4, "beyond_share": 2}


def test_it_leaves_lookups_room_to_bring_up() -> None:
    on = stage(extents=4, promotion_share=0.5)  # 32 blocks; of 16 a tenant leaves half to others
    on.bring_down(*range(1, 33))
    prefetch(on, *range(1, 21))
    brought(on)
    assert numbers_read(on) == [list(range(1, 9))]
    assert on.look(*range(21, 33)) == "P" * 12
    on.answer()
    on.step()
    assert numbers_read(on)[1] == list(range(21, 29)), "as many as if 8 were on their way"
    while on.reads:
        on.read()
        on.take(on.bench.work_off())
    none = ev.LeaseMode.NONE
    assert on.look(*range(1, 21), mode=none) == "H" * 20, "what had no room came later"


def test_without_a_tier_it_is_counted_and_does_nothing() -> None:
    bench = Bench(small(4).config)
    bench.open()
    bench.stored([1])
    on = Stage(bench)
    prefetch(on, 1, 2, 3)
    assert not on.asked
    assert counted(on) == {"followed": 1, "no_tier": 2}
    assert bench.statuses([1, 2]) == "HM"


def test_while_its_tier_is_away_it_does_nothing() -> None:
    on = stage()
    on.bring_down(1)
    on.feed(ev.TierGone(on.bench.machine.state.below.tiers[0].tier))
    prefetch(on, 1)
    assert not on.asked
    assert counted(on) == {"no_tier": 1}


@pytest.mark.parametrize("when", ["before", "asked", "answered", "read"])
def test_of_a_cleared_namespace_nothing_comes_up(when: str) -> None:
    on = stage()
    on.bring_down(1, 2)

    def clear_if(now: str) -> None:
        if when == now:
            on.bench.clear()

    clear_if("before")
    prefetch(on, 1, 2)
    clear_if("asked")
    on.answer()
    clear_if("answered")
    on.take(on.bench.work_off())
    assert bool(on.reads) == (when == "read")
    clear_if("read")
    on.read()
    assert on.bench.machine.state.below.promoting.whole == 0
    assert on.look(1, 2) == "MM"


def test_of_another_tenants_namespace_it_finds_and_takes_nothing() -> None:
    on = stage()
    on.bring_down(1, 2)
    on.bench.open(2, namespace=spec("theirs", "stranger"))
    prefetch(on, 1, 2, session=2)
    brought(on)
    assert not on.reads
    assert on.counters().hits == 0
    below = on.bench.machine.state.below
    assert set(below.sought_of) == {"stranger"}, "its own share"
    assert on.look(1, 2) == "PP"


def test_what_can_not_be_read_is_sought_anew_by_a_lookup() -> None:
    on = stage()
    on.bring_down(1, 2)
    prefetch(on, 1, 2)
    brought(on)
    on.read(failing=(2,))
    assert on.look(1, 2, request="hint") == "HP"
    on.answer()
    on.step()
    on.read()
    assert on.look(1, 2, request="hint") == "HH"


def test_a_session_that_goes_takes_it_along() -> None:
    on = stage()
    on.bring_down(1)
    prefetch(on, 1)
    asked = on.asked.pop()
    on.bench.close()
    on.feed(ev.TierAnswered(asked.tier, asked.search, np.array([True])))
    on.take(on.bench.work_off())
    assert not on.reads
    assert not on.bench.machine.state.below.sought_of
