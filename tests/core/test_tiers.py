"""Tiers: what is written down, sought, and brought up again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import MoverId, NamespaceId, RequestId, ScopeName, SessionId, TierId
from kvd.core.model import tiers as model
from kvd.core.model.tiers import SEARCH_BLOCKS, Reach, TierCounters, TierTerms
from kvd.core.tiers import promotion, search
from tests.core.bench import SECOND, Bench, keys, numbers_of, only, small, spec

DISK = TierTerms("disk", seek_ns=SECOND)
FAR = TierTerms("far", Reach.CLUSTER, seek_ns=SECOND)
ROW = 16  # blocks


@dataclass
class Stage:
    """A bench with tiers that are dictionaries."""

    bench: Bench
    held: dict[int, set[tuple[ScopeName, int]]] = field(default_factory=dict)
    asked: list[act.AskTier] = field(default_factory=list)
    writes: list[act.WriteToTier] = field(default_factory=list)
    reads: list[act.ReadFromTier] = field(default_factory=list)
    clears: list[act.ClearTier] = field(default_factory=list)

    def take(self, actions: list[act.Action]) -> list[act.Action]:
        self.asked += only(actions, act.AskTier)
        self.writes += only(actions, act.WriteToTier)
        self.reads += only(actions, act.ReadFromTier)
        self.clears += only(actions, act.ClearTier)
        return actions

    def feed(self, event: ev.Event) -> list[act.Action]:
        return self.take(self.bench.feed(event))

    def start(self, tier: int = 0) -> None:
        self.held.setdefault(tier, set())
        self.feed(ev.TierStarted(TierId(tier), MoverId(9000 + tier)))

    def store(self, *numbers: int, session: int = 1, account: str = "") -> None:
        started = self.take(self.bench.store(numbers, session, account=account))
        self.take(self.bench.finish(started))

    def write(self, *, failing: tuple[int, ...] = ()) -> None:
        """End what is being written; blocks of these numbers fail."""
        orders, self.writes = self.writes, []
        for order in orders:
            numbers = numbers_of(order.keys)
            done = np.array([number not in failing for number in numbers])
            names = [(order.name, n) for n, well in zip(numbers, done, strict=True) if well]
            self.held[order.tier].update(names)
            self.feed(ev.TierCopyEnded(order.tier, order.copy, done))

    def look(
        self,
        *numbers: int,
        request: str = "r",
        mode: ev.LeaseMode = ev.LeaseMode.PREFIX,
        account: str = "",
        tiers: tuple[int, ...] = (),
        first: int = 0,
        session: int = 1,
    ) -> str:
        """M(iss), H(it), P(ending)."""
        context = ev.RequestContext(RequestId(request), account=account, tiers_allowed=tiers)
        query = ev.Query(context, 0, keys(*numbers), mode, first_block=first)
        actions = self.feed(ev.LookupRequested(SessionId(session), (query,)))
        (reply,) = only(actions, act.Reply)
        return "".join("MHPR"[status & 3] for status in reply.payload[0].statuses)

    def answer(self) -> None:
        """Tiers answer truly, also what they are asked thereupon."""
        while self.asked:
            order = self.asked.pop(0)
            there = self.held[order.tier]
            held = np.array([(order.name, n) in there for n in numbers_of(order.keys)])
            self.feed(ev.TierAnswered(order.tier, order.search, held))

    def step(self) -> None:
        self.feed(ev.StepEnded(SessionId(1)))
        self.take(self.bench.work_off())

    def read(self, *, failing: tuple[int, ...] = ()) -> None:
        orders, self.reads = self.reads, []
        for order in orders:
            done = np.array([number not in failing for number in numbers_of(order.keys)])
            self.feed(ev.TierCopyEnded(order.tier, order.copy, done))

    def counters(self, tier: int = 0) -> TierCounters:
        return self.bench.machine.state.below.tiers[tier].counters

    def bring_down(self, *numbers: int, account: str = "") -> None:
        """Stored, written down, and evicted."""
        self.store(*numbers, account=account)
        self.write()
        self.evict_all()

    def order_up(self, *numbers: int) -> None:
        """These lie in the tier alone, a request looks for them, and the tier is to fill slots."""
        self.bring_down(*numbers)
        self.look(*numbers)
        self.answer()
        self.step()

    def evict_all(self) -> None:
        """Other blocks take the whole pool."""
        extents = self.bench.config.extents
        for row in range(extents):
            first = 10_000 + self.bench.fed * 100 + row * ROW
            self.store(*range(first, first + ROW))
        self.write()

    def tick(self, after_ns: int) -> None:
        self.bench.now_ns += after_ns
        self.feed(ev.TimerTicked())
        self.take(self.bench.work_off())


def stage(*rules: TierTerms, extents: int = 4, **options: object) -> Stage:
    made = Stage(small(extents, tiers=rules or (DISK,), **options))
    made.bench.open()
    for tier in range(len(rules) or 1):
        made.start(tier)
    return made


def test_what_was_evicted_is_sought_brought_up_and_found() -> None:
    on = stage()
    on.store(1, 2, 3)
    on.write()
    on.evict_all()
    assert on.look(1, 2, 3, 4) == "PPPP"
    (asked,) = on.asked
    assert numbers_of(asked.keys) == [1, 2, 3, 4]
    on.answer()
    assert on.look(1, 2, 3, 4) == "PPPM"
    assert not on.reads
    on.step()
    (read,) = on.reads
    assert numbers_of(read.keys) == [1, 2, 3]
    assert on.look(1, 2, 3, 4) == "PPPM"
    on.read()
    assert on.look(1, 2, 3, 4) == "HHHM"
    assert not on.asked
    assert on.counters().promoted == 3


def test_a_block_that_host_memory_holds_is_never_sought() -> None:
    on = stage()
    on.store(1, 2)
    on.write()
    assert on.look(1, 2) == "HH"
    assert not on.asked


def test_without_a_process_a_miss_is_a_miss() -> None:
    on = stage()
    on.bring_down(1)
    on.feed(ev.TierGone(TierId(0)))
    assert on.look(1) == "M"
    assert not on.asked
    on.start()
    assert on.look(1) == "P"


def test_tiers_are_asked_in_order_and_only_for_what_those_before_lack() -> None:
    on = stage(DISK, FAR)
    on.store(1, 2, 3)
    on.write()
    on.held[0] = {(name, n) for name, n in on.held[0] if n == 2}
    on.evict_all()
    assert on.look(1, 2, 3) == "PPP"
    assert [order.tier for order in on.asked] == [0]
    on.answer()
    on.step()
    assert [(order.tier, numbers_of(order.keys)) for order in on.reads] == [(0, [2]), (1, [1, 3])]
    on.read()
    assert on.look(1, 2, 3) == "HHH"


def test_a_request_may_leave_tiers_out() -> None:
    on = stage(DISK, FAR)
    on.bring_down(1)
    assert on.look(1, request="host", tiers=(1,)) == "M"
    assert on.look(1, request="far", tiers=(1, 3)) == "P"
    assert [order.tier for order in on.asked] == [1]


def test_two_requests_start_one_promotion() -> None:
    on = stage()
    on.bring_down(1, 2)
    assert on.look(1, 2, request="a") == "PP"
    assert on.look(1, 2, request="b") == "PP"
    on.answer()
    on.step()
    (read,) = on.reads
    assert numbers_of(read.keys) == [1, 2]
    assert on.look(1, 2, request="c") == "PP"
    assert not on.asked
    on.read()
    assert on.look(1, 2, request="b") == "HH"


def test_of_a_prefix_nothing_behind_a_gap_is_brought_up() -> None:
    on = stage()
    on.bring_down(1, 3, 4)
    assert on.look(1, 2, 3, 4) == "PPPP"
    on.answer()
    assert on.look(1, 2, 3, 4) == "PMMM"
    on.step()
    (read,) = on.reads
    assert numbers_of(read.keys) == [1]


def test_where_any_block_is_of_use_gaps_do_not_matter() -> None:
    on = stage()
    on.bring_down(1, 3, 4)
    assert on.look(1, 2, 3, 4, mode=ev.LeaseMode.ALL) == "PPPP"
    on.answer()
    assert on.look(1, 2, 3, 4, mode=ev.LeaseMode.ALL) == "PMPP"
    on.step()
    on.read()
    assert on.look(1, 2, 3, 4, mode=ev.LeaseMode.ALL) == "HMHH"


def test_a_gap_in_an_earlier_piece_of_a_query_ends_the_later_ones() -> None:
    on = stage()
    on.bring_down(1, 3, 4)
    assert on.look(1, 2, first=0) == "PP"
    assert on.look(3, 4, first=2) == "PP"
    on.answer()
    assert on.look(3, 4, first=2) == "MM"
    on.step()
    (read,) = on.reads
    assert numbers_of(read.keys) == [1]


def test_what_is_not_there_by_the_deadline_is_a_miss_and_sought_anew_later() -> None:
    on = stage()
    on.bring_down(1)
    assert on.look(1) == "P"
    on.tick(SECOND - 1)
    assert on.look(1) == "P"
    on.tick(1)
    assert on.look(1) == "M"
    on.answer()  # late
    on.step()
    assert not on.reads
    on.tick(search.BELIEVED_NS)
    assert on.look(1) == "P"
    assert len(on.asked) == 1


def test_a_promotion_that_comes_late_is_found_all_the_same() -> None:
    on = stage()
    on.order_up(1)
    on.tick(2 * SECOND)
    assert on.look(1) == "M"  # it has waited long enough
    on.read()
    assert on.look(1) == "H"


def test_of_a_promotion_that_fails_in_part_the_rest_is_kept_and_nobody_loops() -> None:
    on = stage()
    on.order_up(1, 2, 3)
    on.read(failing=(2,))
    assert on.look(1, 2, 3) == "HMH"
    on.step()
    assert not on.asked
    assert not on.reads
    assert on.look(1, 2, 3, request="another") == "HPH"


def test_nothing_is_brought_up_before_the_step_ends_nor_for_a_request_that_has_ended() -> None:
    on = stage()
    on.bring_down(1)
    on.look(1)
    on.answer()
    on.take(on.bench.work_off())
    assert not on.reads
    on.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))
    on.step()
    assert not on.reads


def test_a_session_that_closes_leaves_its_promotion_to_others() -> None:
    on = stage()
    on.order_up(1)
    on.bench.leave()
    on.read()
    on.bench.open(2, spec(shards=1))
    assert on.bench.statuses([1], session=2) == "H"


def test_a_tier_that_goes_fails_its_copies_and_the_next_one_is_asked() -> None:
    on = stage(DISK, FAR)
    on.bring_down(1, 2)
    on.look(1, request="reads")
    on.answer()
    on.step()
    on.look(2, request="asks")
    assert [order.tier for order in on.asked] == [0]
    on.asked.clear()
    on.feed(ev.TierGone(TierId(0)))
    on.take(on.bench.work_off())
    assert on.look(1, request="reads") == "M"
    assert [order.tier for order in on.asked] == [1]
    on.answer()
    on.step()
    assert [order.tier for order in on.reads if order.tier == 1] == [1]


def test_promotions_take_a_share_of_the_pool_and_leave_as_much_to_others() -> None:
    on = stage(extents=8, promotion_share=0.25)  # 32 blocks
    on.bring_down(*range(1, 41))
    on.look(*range(1, 41))
    on.answer()
    on.step()
    (read,) = on.reads
    assert numbers_of(read.keys) == list(range(1, 17))  # half of it: a tenant leaves the rest
    on.step()
    assert len(on.reads) == 1
    assert on.look(*range(1, 41)) == "P" * 40
    on.read()
    on.step()
    (read,) = on.reads
    assert numbers_of(read.keys) == list(range(17, 33))
    on.read()
    on.step()
    on.read()
    assert on.look(*range(1, 41), mode=ev.LeaseMode.NONE) == "H" * 40


def test_all_who_wait_for_room_come_up_in_turn() -> None:
    on = stage(extents=8, promotion_share=0.02)  # two blocks, of which a tenant has one
    on.bring_down(*range(1, 12))
    for number in range(1, 12):
        on.look(number, request=f"r{number}")
    on.answer()
    on.step()
    for _ in range(11):
        assert len(on.reads) == 1
        on.read()
        on.step()
    assert on.look(*range(1, 12), mode=ev.LeaseMode.NONE) == "H" * 11


def test_of_blocks_larger_than_the_share_one_comes_up_at_a_time() -> None:
    on = stage(extents=8, promotion_share=0.005)
    on.order_up(1, 2)
    for number in (1, 2):
        (read,) = on.reads
        assert numbers_of(read.keys) == [number]
        on.read()
        on.step()
    assert on.look(1, 2, mode=ev.LeaseMode.NONE) == "HH"


def test_a_long_promotion_begins_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "PROMOTED_AT_ONCE", 3)
    on = stage(extents=8, promotion_share=1.0)
    on.bring_down(*range(1, 9))
    on.look(*range(1, 9))
    on.answer()
    on.step()
    assert [numbers_of(read.keys) for read in on.reads] == [[1, 2, 3], [4, 5, 6], [7, 8]]
    on.read()
    assert on.look(*range(1, 9)) == "H" * 8


@pytest.mark.parametrize(("most", "tenants"), [(12, 100), (100, 12)])
def test_a_session_seeks_no_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch, most: int, tenants: int
) -> None:
    monkeypatch.setattr(search, "MAX_SOUGHT_BLOCKS", most)
    monkeypatch.setattr(search, "MAX_TENANT_SOUGHT_BLOCKS", tenants)
    on = stage()
    assert on.look(*range(1, 7)) == "PPPPMM"
    assert on.look(7, request="other") == "M"
    on.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))
    assert on.look(7, request="other") == "P"


def test_a_search_counts_until_its_request_is_forgotten_though_its_blocks_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that ends no request had the daemon remember every one of them."""
    monkeypatch.setattr(search, "MAX_SOUGHT_BLOCKS", 3 * (SEARCH_BLOCKS + 1))
    on = stage()
    on.bring_down(1, 2, 3, 4)
    for number in (1, 2, 3):
        assert on.look(number, request=f"r{number}") == "P"
        on.answer()
        on.step()
        on.read()
        assert on.look(number, request=f"r{number}") == "H"
    assert on.look(4, request="r4") == "M"
    on.feed(ev.RequestsEnded(SessionId(1), (RequestId("r1"),)))
    assert on.look(4, request="r4") == "P"


def test_limits_are_per_session() -> None:
    assert model.MAX_SOUGHT_BLOCKS < model.MAX_TENANT_SOUGHT_BLOCKS


def test_a_clear_reaches_every_tier_and_holds_until_each_has_deleted() -> None:
    on = stage(DISK, FAR)
    on.bring_down(1)
    on.feed(ev.TierGone(TierId(1)))
    on.feed(ev.NamespaceCleared(1, NamespaceId(1)))
    on.take(on.bench.work_off())
    assert [order.tier for order in on.clears] == [0, 1]  # also one that has no process now
    assert on.look(1) == "M"
    on.store(5)
    assert not on.writes
    order, _ = on.clears
    on.feed(ev.TierCleared(order.tier, order.fingerprint))
    assert on.look(1, request="later") == "P"
    assert on.asked[0].name.generation > 0  # what it held before has another name
    on.start(1)
    on.look(6)
    assert [order.tier for order in on.asked] == [0, 0]  # the other has not deleted it


def test_a_clear_takes_back_what_is_on_its_way_up() -> None:
    on = stage()
    on.order_up(1)
    on.feed(ev.NamespaceCleared(1, NamespaceId(1)))
    on.take(on.bench.work_off())
    on.read()
    assert on.look(1, request="later") == "M"
    assert on.bench.machine.state.tally.ready == 0


def test_what_a_tier_says_too_shortly_counts_as_nothing() -> None:
    on = stage()
    on.bring_down(1, 2)
    on.look(1, 2)
    order = on.asked.pop()
    on.feed(ev.TierAnswered(order.tier, order.search, np.array([True])))
    assert on.look(1, 2) == "MM"
    on.feed(ev.TierAnswered(order.tier, order.search, np.array([True, True])))  # twice
    on.step()
    assert not on.reads


def test_no_block_is_brought_up_while_the_daemon_drains() -> None:
    on = stage()
    on.bring_down(1)
    on.look(1)
    on.answer()
    on.feed(ev.DrainStarted())
    on.step()
    assert not on.reads
    assert on.look(1) == "M"


def test_accounts_are_apart_below_too() -> None:
    on = stage()
    on.bring_down(1, account="mine")
    assert on.look(1, account="theirs") == "P"
    on.answer()
    assert on.look(1, account="theirs") == "M"


def test_a_row_is_given_back_only_when_the_tier_has_unmapped_it() -> None:
    on = stage(extents=2)
    on.store(*range(1, 33))
    on.write()
    on.bench.open(2, spec("other", "else"))
    actions = on.take(on.bench.store([1], 2))
    unmaps = only(actions, act.UnmapRow)
    assert 9000 in {order.mover for order in unmaps}
    row = unmaps[0].row
    for order in unmaps:
        if order.mover != 9000:
            assert not only(on.feed(ev.RowUnmapped(order.mover, row)), act.ZeroRow)
    assert only(on.feed(ev.TierGone(TierId(0))), act.ZeroRow)


@pytest.mark.parametrize("mode", [ev.LeaseMode.PREFIX, ev.LeaseMode.ALL])
def test_a_query_that_names_a_block_twice_seeks_it_once(mode: ev.LeaseMode) -> None:
    on = stage()
    on.bring_down(1, 2)
    assert on.look(1, 1, 2, 1, mode=mode) == "PPPP"
    (asked,) = on.asked
    assert numbers_of(asked.keys) == [1, 2]
    on.answer()
    on.step()
    on.read()
    assert on.look(1, 1, 2, 1, mode=mode) == "HHHH"
    on.feed(ev.RequestsEnded(SessionId(1), (RequestId("r"),)))
    assert not on.bench.machine.state.below.sought_of


def test_requests_that_have_ended_leave_nothing_to_expire() -> None:
    on = stage()
    for number in range(3 * search.EXPIRED_REQUESTS_AT_ONCE):
        assert on.look(number, request=str(number)) == "P"
        on.feed(ev.RequestsEnded(SessionId(1), (RequestId(str(number)),)))
    assert not on.bench.machine.state.below.expiring


def test_a_request_begins_so_many_searches_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_SEARCHES", 3)
    on = stage()
    looks = [on.look(number, mode=ev.LeaseMode.ALL, first=number) for number in range(5)]
    assert looks == ["P", "P", "P", "M", "M"]
    assert on.look(4, request="another") == "P"


def test_what_a_lost_tier_was_asked_goes_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "UNANSWERED_AT_ONCE", 2)
    on = stage(DISK, FAR)
    for number in range(5):
        on.look(number, request=str(number))
    on.asked.clear()
    on.feed(ev.TierGone(TierId(0)))
    on.feed(ev.WorkContinued())
    assert len(on.asked) == 2
    on.take(on.bench.work_off())
    assert [order.tier for order in on.asked] == [1] * 5


def test_what_can_get_no_room_is_a_miss_at_once_however_much_it_is() -> None:
    on = stage(extents=1, promotion_share=0.5)  # 8 blocks, 4 of one tenant
    on.bring_down(*range(1, 9))
    lasting = range(100, 100 + ROW)
    on.store(*lasting)
    on.bench.load(lasting)  # pins the whole pool
    on.look(*range(1, 9), mode=ev.LeaseMode.ALL)
    on.answer()
    on.step()
    assert not on.reads
    assert on.look(*range(1, 9), mode=ev.LeaseMode.ALL) == 8 * "M"
    assert not on.bench.machine.state.below.stalled


def test_what_a_request_brought_up_makes_no_room_for_the_rest_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promotion, "PROMOTED_AT_ONCE", 8)
    on = stage(promotion_share=0.5)
    on.bring_down(*range(1, 61))
    on.bring_down(*range(61, 81))
    on.look(*range(1, 81))
    on.answer()
    on.step()
    while on.reads:
        on.read()
        on.step()
    # The pool holds 64.
    assert on.look(*range(1, 81), mode=ev.LeaseMode.NONE) == "H" * 64 + "M" * 16


def test_a_tier_that_has_gone_before_its_turn_is_passed_over() -> None:
    on = stage(DISK, TierTerms("middle", seek_ns=SECOND), FAR)
    on.bring_down(1)
    on.held[0].clear()
    assert on.look(1) == "P"
    on.feed(ev.TierGone(TierId(1)))
    on.take(on.bench.work_off())
    on.answer()
    on.step()
    assert [order.tier for order in on.reads] == [2]
    on.read()
    assert on.look(1) == "H"


@pytest.mark.parametrize("why", ["reset", "cleared"])
def test_what_was_found_before_a_reset_or_a_clear_does_not_come_up(why: str) -> None:
    on = stage()
    on.bring_down(1)
    on.look(1)
    on.answer()
    on.feed(
        ev.EpochChanged(SessionId(1), "next")
        if why == "reset"
        else ev.NamespaceCleared(5, NamespaceId(1))
    )
    on.step()
    assert not on.reads
    assert on.bench.machine.state.below.promoting.whole == 0
    assert on.bench.machine.state.tally.reserved == 0


def test_what_is_settled_of_a_tier_is_told() -> None:
    on = stage(DISK, FAR)
    assert [on.bench.machine.terms_of(TierId(n)) for n in (0, 1)] == [DISK, FAR]
