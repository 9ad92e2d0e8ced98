"""Of one request's blocks the tail leaves before the head, whenever each was stored."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core import prefix
from kvd.core.events import LeaseMode
from kvd.core.keys import RequestId, SessionId
from tests.core.bench import Bench, context, engine_blocks, keys, small


def store_for(bench: Bench, request: str, numbers: list[int]) -> None:
    run = ev.Run(0, keys(*numbers), engine_blocks(numbers))
    event = ev.StoreRequested(
        bench._token(), SessionId(1), bench._job(0), context("", request), (run,)
    )
    bench.finish(bench.feed(event))


def test_tail_stored_behind_a_found_head_leaves_before_the_head() -> None:
    bench = small(extents=1, lease_share=1.0)
    bench.open()
    store_for(bench, "a", list(range(8)))
    answer = bench.lookup(range(8), lease=LeaseMode.PREFIX, request="b")
    store_for(bench, "b", list(range(8, 16)))
    assert answer.lease is not None
    bench.release(answer.lease)
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("b"),)))
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
    run = ev.Run(0, keys(*range(8, 16)), engine_blocks(range(8, 16)))
    started = bench.feed(
        ev.StoreRequested(bench._token(), SessionId(1), bench._job(0), context("", "a"), (run,))
    )
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("a"),)))
    bench.finish(started)
    bench.stored(range(100, 108))
    assert bench.statuses(range(16)) == "H" * 8 + "M" * 8


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
    assert [len(slots) for slots in remembered.slots.values()] == [8]
    assert bench.statuses(range(8)) == "H" * 8
    assert bench.statuses(range(60, 64)) == "HHHH"
