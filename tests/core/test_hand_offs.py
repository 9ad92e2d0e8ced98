"""Hand-offs: what a request leaves for another engine stays until taken, and no longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.claims import hand_off as hand_offs
from kvd.core.claims import lease as leases
from kvd.core.errors import InvalidArgument, UnknownSession
from kvd.core.keys import I32, SessionId, Slots
from kvd.core.model.leases import HandOff
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import State
from kvd.core.upkeep.statistics import Statistics
from tests.core.bench import BLOCK, MS, SECOND, Bench, context, keys, only, small, spec, verdict

PREFILL, DECODE, OTHER = 1, 2, 3


@pytest.fixture
def bench() -> Bench:
    """One row of 16 slots, half of which may be handed off; three engines."""
    bench = small(extents=1, lease_share=1.0)
    for session in (PREFILL, DECODE, OTHER):
        bench.open(session)
    return bench


def hand_off(
    bench: Bench,
    numbers: Sequence[int],
    *,
    request: str = "r",
    account: str = "",
    seconds: int = 30,
    group: int = 0,
) -> None:
    bench.feed(
        ev.HandOffRequested(
            SessionId(PREFILL), context(account, request), group, keys(*numbers), seconds * SECOND
        )
    )


def load(bench: Bench, numbers: Sequence[int], session: int = DECODE) -> None:
    started = bench.load(numbers, session)
    (end,) = only(bench.finish(started), act.EndJob)
    assert end.status is ev.JobStatus.DONE


def flood(bench: Bench) -> str:
    """Another engine stores as much as there is room for; what is left of the first 16 keys."""
    first = 1000 + 100 * len(bench.log)
    for number in range(first, first + 16):
        bench.finish(bench.store([number], OTHER))
    return bench.statuses(range(16), OTHER)


def figures(bench: Bench) -> Statistics:
    return bench.machine.statistics()


def test_what_was_handed_off_survives_its_engine_and_a_full_pool(bench: Bench) -> None:
    bench.stored(range(16))
    hand_off(bench, range(6))
    bench.close(PREFILL)
    bench.gone(100 * PREFILL)
    bench.tick(10 * SECOND)
    assert flood(bench) == "HHHHHH" + "M" * 10
    assert (figures(bench).hand_offs, figures(bench).handed_off_blocks) == (1, 6)


def test_a_load_by_another_session_takes_what_it_loads(bench: Bench) -> None:
    bench.stored(range(16))
    hand_off(bench, range(6))
    load(bench, range(2))
    assert figures(bench).handed_off_blocks == 4
    assert flood(bench) == "MMHHHH" + "M" * 10
    load(bench, range(2, 6))
    assert figures(bench).hand_offs == 0
    assert flood(bench) == "M" * 16
    counters = figures(bench).counters
    assert (counters.handed_off, counters.hand_off_taken, counters.hand_off_expired) == (6, 6, 0)


def test_a_block_is_pinned_until_its_load_has_ended_everywhere(bench: Bench) -> None:
    bench.stored(range(4))
    hand_off(bench, range(4))
    started = bench.load(range(4), DECODE)
    assert figures(bench).handed_off_blocks == 4
    bench.finish(started)
    assert figures(bench).handed_off_blocks == 0


def test_a_load_that_fails_takes_nothing(bench: Bench) -> None:
    bench.stored(range(4))
    hand_off(bench, range(4))
    bench.finish(bench.load(range(4), DECODE), ev.TransferOutcome.FAILED)
    assert figures(bench).handed_off_blocks == 4


def test_the_engine_that_handed_off_may_load_without_taking(bench: Bench) -> None:
    bench.stored(range(4))
    hand_off(bench, range(4))
    load(bench, range(4), PREFILL)
    assert figures(bench).handed_off_blocks == 4


def test_what_nobody_takes_goes_at_the_deadline(bench: Bench) -> None:
    bench.stored(range(16))
    hand_off(bench, range(4), seconds=5)
    bench.tick(4999 * MS)
    assert figures(bench).hand_offs == 1
    bench.tick(1 * MS)
    assert figures(bench).hand_offs == 0
    assert figures(bench).counters.hand_off_expired == 4
    assert flood(bench) == "M" * 16


def test_what_expires_together_is_let_go_in_bounded_portions(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_offs, "MAX_EXPIRED_AT_ONCE", 3)
    bench.stored(range(8))
    hand_off(bench, range(4), request="a", seconds=1)
    hand_off(bench, range(4, 8), request="b", seconds=1)
    bench.tick(1 * SECOND)
    assert figures(bench).handed_off_blocks == 5
    bench.tick()
    assert figures(bench).handed_off_blocks == 2
    bench.tick()
    assert figures(bench).hand_offs == 0
    assert figures(bench).counters.hand_off_expired == 8


class WatchedHandOff(HandOff):
    """Says when somebody asks for its deadline."""

    looked_at: ClassVar[list[str]] = []

    @property
    def until_ns(self) -> int:
        self.looked_at.append(self.request)
        return self._until_ns

    @until_ns.setter
    def until_ns(self, until_ns: int) -> None:
        self._until_ns = until_ns


def test_a_tick_looks_at_few_hand_offs_and_at_none_that_lasts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands of each tenant, and a tick comes four times a second."""
    monkeypatch.setattr(hand_offs, "MAX_LATE_AT_ONCE", 2)
    monkeypatch.setattr(hand_offs, "HandOff", WatchedHandOff)
    bench.stored(range(8))
    for request in range(5):
        hand_off(bench, range(2), request=f"late-{request}", seconds=1)
        hand_off(bench, range(8), request=f"lasts-{request}", seconds=9)
    WatchedHandOff.looked_at.clear()
    left = []
    for _ in range(4):
        bench.tick(1 * SECOND)
        left.append(figures(bench).hand_offs)
    assert left == [8, 6, 5, 5]
    assert not any(request.startswith("lasts") for request in WatchedHandOff.looked_at)


def test_a_hand_off_that_comes_again_lasts_until_the_later_deadline(bench: Bench) -> None:
    bench.stored(range(8))
    hand_off(bench, range(4), seconds=2)
    hand_off(bench, range(4, 6), seconds=5)
    hand_off(bench, range(6, 8), seconds=1)
    bench.tick(4 * SECOND)
    assert figures(bench).handed_off_blocks == 8
    bench.tick(1 * SECOND)
    assert figures(bench).hand_offs == 0


def test_a_prefix_handed_off_twice_stays_until_it_was_loaded_twice(bench: Bench) -> None:
    bench.stored(range(16))
    hand_off(bench, [0, 1, 2], request="a")
    hand_off(bench, [0, 1, 3], request="b", seconds=60)
    load(bench, [0, 1, 2])
    assert figures(bench).handed_off_blocks == 3
    assert flood(bench)[:4] == "HHMH"
    load(bench, [0, 1, 3])
    assert figures(bench).hand_offs == 0


def test_the_claim_of_the_nearest_deadline_is_taken_first(bench: Bench) -> None:
    bench.stored(range(4))
    hand_off(bench, [0], request="late", seconds=60)
    hand_off(bench, [0], request="soon", seconds=5)
    load(bench, [0])
    bench.tick(10 * SECOND)
    assert figures(bench).handed_off_blocks == 1


def test_one_request_s_hand_offs_are_one_with_the_later_deadline(bench: Bench) -> None:
    bench.stored(range(6))
    hand_off(bench, range(4), seconds=10)
    hand_off(bench, range(2, 6), seconds=5)
    assert (figures(bench).hand_offs, figures(bench).handed_off_blocks) == (1, 6)
    assert figures(bench).counters.handed_off == 6
    bench.tick(9 * SECOND)
    assert figures(bench).handed_off_blocks == 6
    load(bench, range(6))
    assert figures(bench).hand_offs == 0


def test_a_block_that_is_named_again_and_again_is_one_that_is_not_there(bench: Bench) -> None:
    bench.stored(range(2))
    hand_off(bench, [0, 0, 1, 2, 2, 3, 2])
    assert figures(bench).counters.handed_off == 2
    assert figures(bench).counters.hand_off_unheld == 2


def test_beyond_their_part_of_the_cap_the_rest_is_not_held_and_counted(bench: Bench) -> None:
    bench.stored(range(16))
    hand_off(bench, range(10))
    assert figures(bench).handed_off_blocks == 8
    assert figures(bench).counters.hand_off_unheld == 2
    assert flood(bench) == "H" * 8 + "M" * 8
    (tenant,) = figures(bench).tenants
    assert tenant.leased_bytes == 8 * BLOCK


def test_handed_off_blocks_can_be_leased_though_the_cap_is_reached() -> None:
    bench = small(extents=1, lease_share=0.5)
    for session in (PREFILL, DECODE, OTHER):
        bench.open(session)
    bench.stored(range(16))
    hand_off(bench, range(4))
    bench.lookup(range(8, 12), OTHER, lease=ev.LeaseMode.PREFIX)
    assert list(bench.lookup([12], DECODE, lease=ev.LeaseMode.PREFIX).statuses) == [3]
    answer = bench.lookup(range(4), DECODE, lease=ev.LeaseMode.PREFIX)
    assert bench.leased(answer, DECODE) == 4
    load(bench, range(4))
    assert figures(bench).leases == 2
    assert flood(bench)[:4] == "H" * 4


def test_what_nobody_takes_keeps_no_request_from_its_hits(bench: Bench) -> None:
    """A node of prefills whose blocks go another way: each hand-off lasts until its deadline."""
    bench.stored(range(16))
    for number in range(12):
        hand_off(bench, [number], request=f"r{number}", seconds=60)
    assert figures(bench).handed_off_blocks == 8
    answer = bench.lookup(range(8, 16), DECODE, lease=ev.LeaseMode.PREFIX)
    assert bench.leased(answer, DECODE) == 8


def test_a_block_that_is_handed_off_twice_counts_once(bench: Bench) -> None:
    bench.stored(range(16))
    hand_off(bench, range(8), request="a", seconds=1)
    hand_off(bench, range(10), request="b")
    assert figures(bench).hand_offs == 2
    assert figures(bench).counters.hand_off_unheld == 2
    tenant = bench.machine.state.tenant(spec().tenant)
    assert tenant.handed_off_bytes == 8 * BLOCK
    bench.tick(1 * SECOND)
    assert tenant.handed_off_bytes == 8 * BLOCK
    load(bench, range(8))
    assert tenant.handed_off_bytes == 0


def test_what_is_not_there_is_counted_as_not_held(bench: Bench) -> None:
    bench.stored([0, 2])
    hand_off(bench, range(4))
    assert figures(bench).handed_off_blocks == 2
    assert figures(bench).counters.hand_off_unheld == 2
    hand_off(bench, [50], request="nothing")
    assert figures(bench).hand_offs == 1


def test_a_block_still_being_stored_is_followed(bench: Bench) -> None:
    storing = bench.store([1, 2], OTHER)
    hand_off(bench, [1, 2])
    assert figures(bench).handed_off_blocks == 2
    bench.finish(storing)
    assert bench.statuses([1, 2]) == "HH"
    flood(bench)
    assert bench.statuses([1, 2]) == "HH"


def test_a_block_whose_store_fails_is_left_out(bench: Bench) -> None:
    bench.stored([1])
    storing = bench.store([2], OTHER)
    hand_off(bench, [1, 2])
    bench.finish(storing, ev.TransferOutcome.FAILED)
    assert figures(bench).handed_off_blocks == 1
    assert figures(bench).counters.hand_off_unheld == 1
    assert figures(bench).slots.quarantined == 0


def _fail_the_store(bench: Bench) -> None:
    bench.finish(outcome=ev.TransferOutcome.FAILED)


def _load_the_blocks(bench: Bench) -> None:
    bench.finish()
    load(bench, range(8))


def _pass_the_deadline(bench: Bench) -> None:
    bench.finish()
    bench.tick(60 * SECOND)


@pytest.mark.parametrize("end", [_fail_the_store, _load_the_blocks, _pass_the_deadline])
def test_however_many_hand_offs_hold_a_block_its_claims_end_in_one_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, end: Callable[[Bench], None]
) -> None:
    """One go for each hand-off took a tenth of a second, of a thousand that share a prefix."""
    goes: list[int] = []

    def unclaim(state: State, owner: SizeClass, slots: Slots, claims: I32 | int = 1) -> None:
        goes.append(len(slots))
        given_up(state, owner, slots, claims)

    given_up = leases.unclaim
    monkeypatch.setattr(leases, "unclaim", unclaim)
    bench.store(range(8))
    for number in range(8):
        hand_off(bench, [number, *range(7)], request=f"r{number}", seconds=20 + number)
    end(bench)
    assert goes == [8]


def test_a_cleared_namespace_holds_nothing(bench: Bench) -> None:
    bench.stored(range(4))
    storing = bench.store([7], OTHER)
    hand_off(bench, [*range(4), 7])
    assert bench.clear() == 4
    bench.finish(storing)
    assert figures(bench).hand_offs == 0
    assert figures(bench).slots.free == 16


def test_a_hand_off_outlives_its_session_s_epoch(bench: Bench) -> None:
    bench.stored(range(4))
    hand_off(bench, range(4))
    bench.ask(ev.EpochChanged(SessionId(PREFILL), "other"))
    assert flood(bench)[:4] == "HHHH"


def test_another_account_s_blocks_are_not_held(bench: Bench) -> None:
    bench.stored([1], account="mine")
    hand_off(bench, [1], account="yours")
    assert figures(bench).handed_off_blocks == 0
    hand_off(bench, [1], account="mine")
    assert figures(bench).handed_off_blocks == 1


def test_one_block_can_be_leased_whatever_is_handed_off() -> None:
    """Half of the cap is handed off, and a block of another size is larger than the other half."""
    bench = small(extents=2, lease_share=0.125)  # 4 small blocks, or one and a third of these
    bench.open(PREFILL, spec("small"))
    bench.open(DECODE, spec("large", block_bytes=3 * BLOCK))
    bench.stored([1, 2])
    hand_off(bench, [1, 2])
    bench.finish(bench.store([7, 8], DECODE))
    answer = bench.lookup([7], DECODE, lease=ev.LeaseMode.PREFIX)
    assert bench.leased(answer, DECODE) == 1
    assert list(bench.lookup([8], DECODE, lease=ev.LeaseMode.PREFIX).statuses) == [3]
    hand_off(bench, [1, 2], request="another")
    assert figures(bench).handed_off_blocks == 2


def test_each_group_is_held_and_taken_by_itself() -> None:
    bench = small(extents=2, lease_share=1.0)
    bench.open(PREFILL, spec(groups=2))
    bench.open(DECODE, spec(groups=2))
    bench.finish(bench.store([1, 2]))
    bench.finish(bench.store([1, 2], group=1))
    hand_off(bench, [1, 2])
    hand_off(bench, [1, 2], group=1)
    assert (figures(bench).hand_offs, figures(bench).handed_off_blocks) == (1, 4)
    load(bench, [1, 2])
    assert (figures(bench).hand_offs, figures(bench).handed_off_blocks) == (1, 2)


def test_a_pool_full_of_hand_offs_refuses_stores_until_they_end() -> None:
    bench = small(extents=1, lease_share=1.0)
    bench.open(PREFILL)
    bench.stored(range(16))
    hand_off(bench, range(8), seconds=1)
    bench.lookup(range(8, 16), lease=ev.LeaseMode.PREFIX)
    assert verdict(bench.store([100])).reason == "NO_ROOM"
    bench.tick(1 * SECOND)
    assert verdict(bench.store([100])).accepted


def test_the_tables_of_hand_offs_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_offs, "MAX_HAND_OFFS_PER_TENANT", 2)
    monkeypatch.setattr(hand_offs, "MAX_CLAIMS_PER_TENANT", 4)
    bench.stored(range(8))
    hand_off(bench, [0], request="a")
    hand_off(bench, [0, 1, 2, 3], request="b")
    assert figures(bench).handed_off_blocks == 3
    hand_off(bench, [5], request="c")
    assert (figures(bench).hand_offs, figures(bench).handed_off_blocks) == (2, 3)
    assert figures(bench).counters.hand_off_unheld == 2


@pytest.mark.parametrize("lasting_ns", [0, -1, hand_offs.MAX_HAND_OFF_NS + 1])
def test_an_impossible_deadline_is_refused(bench: Bench, lasting_ns: int) -> None:
    event = ev.HandOffRequested(SessionId(PREFILL), context(), 0, keys(1), lasting_ns)
    with pytest.raises(InvalidArgument) as refused:
        bench.feed(event)
    assert refused.value.field == "deadline_ms"


def test_only_an_open_session_hands_off(bench: Bench) -> None:
    bench.close(PREFILL)
    with pytest.raises(UnknownSession):
        hand_off(bench, [1])
