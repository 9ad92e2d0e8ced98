"""Of one request's blocks the tail leaves before the head, whenever each was stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks import slot_lifecycle
from kvd.core.claims import prefix
from kvd.core.events import LeaseMode
from kvd.core.keys import U64, MoverId, RequestId, SessionId, Slots, TenantId
from kvd.core.policy import LruPolicy, Sight, TurnsPolicy
from kvd.core.policy.base import UNKNOWN
from tests.contract.turns_reference import turn_of
from tests.core.bench import Bench, context, engine_blocks, keys, only, small


def admit_for(bench: Bench, request: str, numbers: Sequence[int]) -> list[act.Action]:
    """Offer blocks that stand in the prompt where their numbers say; their copy begins."""
    run = ev.Run(0, keys(*numbers), engine_blocks(numbers), first_block=numbers[0])
    event = ev.StoreRequested(SessionId(1), bench._job(0), context("", request), (run,))
    return bench.feed(event)


def store_for(bench: Bench, request: str, numbers: Sequence[int]) -> None:
    bench.finish(admit_for(bench, request, numbers))


def end(bench: Bench, request: str) -> None:
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId(request),)))


@pytest.mark.parametrize("short", [prefix.SHORT_BLOCKS, 4])
def test_tail_stored_behind_a_found_head_leaves_before_the_head(
    short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "SHORT_BLOCKS", short)
    bench = small(extents=1, lease_share=1.0)
    bench.open()
    store_for(bench, "a", list(range(8)))
    answer = bench.lookup(range(8), lease=LeaseMode.PREFIX, request="b")
    store_for(bench, "b", list(range(8, 16)))
    assert answer.lease is not None
    bench.release(answer.lease)
    end(bench, "b")
    bench.stored(range(100, 108))
    assert bench.statuses(range(16)) == "H" * 8 + "M" * 8


def test_pieces_of_one_store_leave_in_the_order_of_one_batch() -> None:
    bench = small(extents=1)
    bench.open()
    for first in range(0, 16, 4):
        store_for(bench, "a", list(range(first, first + 4)))
    bench.stored(range(100, 104))
    assert bench.statuses(range(16)) == "H" * 12 + "M" * 4


def test_store_that_ends_after_its_request_still_renews_the_head() -> None:
    bench = small(extents=1)
    bench.open()
    store_for(bench, "a", list(range(8)))
    started = admit_for(bench, "a", range(8, 16))
    end(bench, "a")
    bench.finish(started)
    bench.stored(range(100, 108))
    assert bench.statuses(range(16)) == "H" * 8 + "M" * 8


def test_late_copy_makes_nothing_young() -> None:
    bench = small(extents=1)
    bench.open()
    late = admit_for(bench, "old", range(8))
    end(bench, "old")
    store_for(bench, "new", range(8, 16))
    bench.finish(late)
    bench.stored(range(100, 104))
    assert bench.statuses(range(16)) == "H" * 4 + "M" * 4 + "H" * 8


def test_end_of_a_request_is_the_last_use_of_its_blocks() -> None:
    bench = small(extents=1)
    bench.open()
    store_for(bench, "long", range(8))
    store_for(bench, "short", range(8, 16))
    end(bench, "short")
    end(bench, "long")
    bench.stored(range(100, 104))
    assert bench.statuses(range(16)) == "H" * 12 + "M" * 4


def test_requests_that_used_much_end_some_in_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "ENDED_BLOCKS_AT_ONCE", 4)
    bench = small(extents=3)
    bench.open()
    for account in ("x", "y", "z"):
        numbers = list(range(4))
        run = ev.Run(0, keys(*numbers), engine_blocks(numbers))
        job = bench._job(0)
        wide = ev.StoreRequested(SessionId(1), job, context(account, "wide"), (run,))
        bench.finish(bench.feed(wide))
    for number in range(3):
        store_for(bench, f"r{number}", list(range(100 + 2 * number, 102 + 2 * number)))
    session, pieces = bench.machine.state.sessions[SessionId(1)], []
    left = tuple(RequestId(name) for name in ("wide", "r0", "r1", "r2"))
    while left:
        replies = only(bench.feed(ev.RequestsEnded(SessionId(1), left)), act.Reply)
        left = replies[0].payload if replies else ()
        pieces.append((len(left), session.remembered.blocks))
    assert pieces == [(4, 14), (4, 10), (3, 6), (1, 2), (0, 0)]
    assert not session.prefixes


def test_requests_that_used_a_little_of_many_scopes_end_some_in_each_event() -> None:
    bench = small()
    bench.open()
    many = prefix.ENDED_SCOPES_AT_ONCE + 1
    names = [f"r{number}" for number in range(many)]
    for number, name in enumerate(names):
        store_for(bench, name, [number])
    session, pieces = bench.machine.state.sessions[SessionId(1)], []
    left = tuple(RequestId(name) for name in names)
    while left:
        replies = only(bench.feed(ev.RequestsEnded(SessionId(1), left)), act.Reply)
        left = replies[0].payload if replies else ()
        pieces.append((len(left), session.remembered.blocks))
    assert pieces == [(1, 1), (0, 0)]
    assert not session.prefixes


def test_blocks_offered_out_of_order_leave_in_the_order_of_the_prompt() -> None:
    bench = small(extents=1)
    bench.open()
    for first in (0, 8, 4, 12):
        store_for(bench, "a", range(first, first + 4))
    for first in range(8, 0, -4):
        bench.stored(range(100 * first, 100 * first + 4))
        assert bench.statuses(range(16)) == "H" * (4 + first) + "M" * (12 - first)


def test_failed_store_that_is_tried_again_keeps_the_prompts_order() -> None:
    bench = small(extents=1)
    bench.open()
    bench.finish(admit_for(bench, "a", range(8)), ev.TransferOutcome.FAILED)
    store_for(bench, "a", range(8))
    store_for(bench, "a", range(8, 16))
    bench.stored(range(100, 108))
    assert bench.statuses(range(16)) == "H" * 8 + "M" * 8


def test_touch_of_a_block_that_is_being_stored_makes_it_young() -> None:
    bench = small(extents=1)
    bench.open()
    started = admit_for(bench, "a", range(8))
    store_for(bench, "b", range(8, 16))
    bench.feed(ev.Touched(SessionId(1), context(), 0, keys(*range(8))))
    bench.finish(started)
    bench.stored(range(100, 108))
    assert bench.statuses(range(16)) == "H" * 8 + "M" * 8


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_storing_in_pieces_is_no_second_use(policy: str) -> None:
    """What two requests used stays; what one stored bit by bit goes, though it is younger."""
    bench = small(extents=1, policy=policy, lease_share=1.0)
    bench.open()
    store_for(bench, "a", range(8))
    for reader in ("b", "c"):
        answer = bench.lookup(range(8), lease=LeaseMode.PREFIX, request=reader)
        assert answer.lease is not None
        bench.release(answer.lease)
    for first in range(8, 16, 2):
        store_for(bench, "d", range(first, first + 2))
    end(bench, "d")
    bench.stored(range(100, 107))
    assert bench.statuses(range(8)) == "H" * 8


def test_policy_is_told_by_which_request_and_behind_which_block() -> None:
    """Lookups, pieces and loads of one request are one turn of its session."""
    bench = small(extents=1, policy="turns", lease_share=1.0)
    bench.open()
    for first in (0, 4):
        store_for(bench, "a", range(first, first + 4))
    end(bench, "a")
    assert turns(bench) == [1] * 8
    for _ in range(3):
        answer = bench.lookup(range(8), lease=LeaseMode.PREFIX, request="b")
        assert answer.lease is not None
        bench.release(answer.lease)
    for first in (8, 10):
        store_for(bench, "b", range(first, first + 2))
    end(bench, "b")
    assert turns(bench) == [2] * 12


def test_policy_is_told_of_the_block_before_though_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = small(extents=1)
    bench.open()
    store_for(bench, "a", [0])
    (owner,) = bench.machine.state.classes.values()
    first = int(owner.policy.coldest(1)[0])
    parents = []
    sound = LruPolicy.insert

    def insert(self: LruPolicy, slots: Slots, tags: U64, sight: Sight = UNKNOWN) -> None:
        parents.append(sight.parent)
        sound(self, slots, tags, sight)

    monkeypatch.setattr(LruPolicy, "insert", insert)
    store_for(bench, "a", [1])
    assert parents == [first]


def turns(bench: Bench) -> list[int]:
    (owner,) = bench.machine.state.classes.values()
    policy = owner.policy
    assert isinstance(policy, TurnsPolicy)
    return [turn_of(policy, int(slot)) for slot in policy.coldest(100)]


def test_slot_that_went_to_another_scope_is_not_renewed_with_the_old_prefix() -> None:
    bench = small(extents=1)
    bench.open()
    store_for(bench, "a", list(range(4)))
    bench.stored(range(200, 216), account="salt")  # takes every slot
    store_for(bench, "a", list(range(4, 8)))
    assert bench.statuses(range(200, 216), account="salt").count("H") == 12


def test_touch_of_an_unknown_block_counts_as_a_sighting() -> None:
    bench = small(extents=1, store_threshold=2)
    bench.open()
    assert bench.statuses([5]) == "m"
    bench.feed(ev.Touched(SessionId(1), context(), 0, keys(5)))
    assert bench.statuses([5]) == "M"


def test_request_that_never_ends_is_remembered_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix, "MAX_PREFIX_BLOCKS", 8)
    bench = small(extents=1)
    bench.open()
    for first in range(0, 64, 4):
        store_for(bench, "a", list(range(first, first + 4)))
    (remembered,) = bench.machine.state.sessions[SessionId(1)].prefixes.values()
    assert [len(used.slots) for used in remembered.used.values()] == [8]
    assert bench.statuses(range(8)) == "H" * 8
    assert bench.statuses(range(60, 64)) == "HHHH"


def test_oldest_of_a_session_s_requests_is_forgotten_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix, "MAX_PREFIXES", 2)
    bench = small(extents=1)
    bench.open()
    for number, request in enumerate("abc"):
        store_for(bench, request, [number])
    assert list(bench.machine.state.sessions[SessionId(1)].prefixes) == ["b", "c"]


def test_what_is_remembered_of_requests_that_never_end_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix, "MAX_SESSION_BLOCKS", 20)
    monkeypatch.setattr(prefix, "MAX_TENANT_BLOCKS", 30)
    bench = small(extents=8)
    bench.open(1)
    bench.open(2)
    for first in range(0, 60, 6):
        started = bench.store(range(first, first + 6), 1)
        sessions = bench.machine.state.sessions
        remembered = sessions[SessionId(1)].remembered.blocks
        assert remembered == min(18, first + 6), "of its three newest requests"
        bench.finish(started)
        assert sessions[SessionId(1)].remembered.blocks == remembered
    for first in range(60, 120, 6):
        bench.stored(range(first, first + 6), 2)
    tenant = bench.machine.state.tenants[TenantId("tenant")]
    assert tenant.remembered.blocks == 30
    assert sessions[SessionId(2)].remembered.blocks == 12, "what was left of its tenant's"
    bench.leave(1)
    bench.leave(2)
    assert tenant.remembered.blocks == 0


def test_requests_of_a_session_that_is_over_go_some_in_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session may have 4,096, whose memory takes ten milliseconds to give back."""
    monkeypatch.setattr(prefix, "FORGOTTEN_AT_ONCE", 3)
    bench = small(extents=8)
    bench.open(1)
    state = bench.machine.state
    for first in range(0, 60, 6):
        bench.stored(range(first, first + 6))
    remembered = state.sessions[SessionId(1)].prefixes
    assert len(remembered) == 10
    bench.close(1)
    bench.feed(ev.MoverGone(MoverId(100), "killed"))
    assert SessionId(1) not in state.sessions
    left = [len(remembered)]
    while bench.machine.has_work():
        bench.feed(ev.WorkContinued())
        left.append(len(remembered))
    assert left == [10, 7, 4, 1, 0]
    assert not state.backlog.forgotten


def test_a_long_prompt_is_not_renewed_with_every_small_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = small(extents=200)
    bench.check_every = 1000
    bench.open(1)
    renewed = []
    sound = slot_lifecycle.touch_each

    def touch_each(state: Any, owner: Any, slots: Any, *rest: Any, **named: Any) -> None:
        renewed.append(len(slots))
        sound(state, owner, slots, *rest, **named)

    monkeypatch.setattr(slot_lifecycle, "touch_each", touch_each)
    started: list[act.Action] = []
    pieces, piece = 64, 32
    for number in range(pieces):
        last = number == pieces - 1
        keys = range(number * piece, (number + 1) * piece)
        started += bench.store(keys, job=1, last=last)
    total = pieces * piece
    assert total <= sum(renewed) <= 12 * total, "each block some times, not with each piece"
    bench.finish(started)
