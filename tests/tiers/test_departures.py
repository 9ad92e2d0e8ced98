"""What has left a store by itself, and what its calls may still say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvd.processes.framing import BadFrame
from kvd.tiers import departures as module
from kvd.tiers import frames
from kvd.tiers.child import _keys
from kvd.tiers.departures import Departures
from kvd.tiers.frames import Order, OrderEnd, OrderId, ScopedKeys, TierAnswer, TierFrame, TierLeft
from kvd.tiers.store import Outcome, TierKey, TierStore
from tests.tiers.tier_rig import (
    BAD,
    HASH_BYTES,
    OTHER_SCOPE,
    SCOPE,
    hashes,
    keys,
    on_loop,
    placed,
    soon,
    tier_rig,
)

DONE, FULL = int(Outcome.DONE), int(Outcome.FULL)


def key(number: int, scope: bytes = SCOPE) -> TierKey:
    return TierKey(scope, number.to_bytes(HASH_BYTES, "big"))


class Stage:
    """Departures of a store that loses what the test says."""

    def __init__(self) -> None:
        self.leaving: Any = []
        self.of = Departures(cast(TierStore, SimpleNamespace(take_left=self._take)))
        self.orders = 0

    def _take(self) -> Any:
        left, self.leaving = self.leaving, []
        if isinstance(left, Exception):
            raise left
        return left

    def leave(self, *numbers: int) -> None:
        self.leaving += [key(n) for n in numbers]

    def begin(self, kind: TierFrame, *numbers: int) -> Order:
        self.orders += 1
        content: Any = placed(numbers, range(len(numbers)))
        if kind is TierFrame.EXISTS:
            content = keys(*numbers)
        made = Order(OrderId(self.orders), kind, 0.0, tuple(content))
        self.of.begin(made.order)
        return made

    def end(self, order: Order, *values: int) -> list[int]:
        given = np.array(values, dtype=np.uint8)
        answer = TierAnswer(order.order, OrderEnd.ANSWERED, given)
        said: list[int] = self.of.checked(order, answer, _keys).values.tolist()
        return said

    def write(self, *numbers: int) -> list[int]:
        return self.end(self.begin(TierFrame.WRITE, *numbers), *[DONE] * len(numbers))

    def told(self) -> list[int]:
        left = self.of.some()
        return [n for part in left.parts for n in numbers_of(part)]


def numbers_of(part: ScopedKeys) -> list[int]:
    raw, size = part.keys.to_bytes(), part.keys.hash_bytes
    return [int.from_bytes(raw[at : at + size], "big") for at in range(0, len(raw), size)]


@pytest.fixture
def on() -> Stage:
    return Stage()


def test_what_left_is_told_once(on: Stage) -> None:
    on.write(1, 2, 3)
    on.leave(1, 3)
    on.write(4)
    assert on.told() == [1, 3]
    assert on.told() == []


def test_what_was_written_again_is_not_told(on: Stage) -> None:
    on.leave(1, 2)
    on.write(9)
    on.write(1)
    assert on.told() == [2]


def test_what_was_found_again_is_not_told(on: Stage) -> None:
    on.leave(1, 2)
    on.write(9)
    assert on.end(on.begin(TierFrame.EXISTS, 1, 2), 1, 0) == [1, 0]
    assert on.told() == [2]


@pytest.mark.parametrize("is_told_first", [False, True])
def test_what_left_while_it_was_written_is_not_said_to_be_there(
    on: Stage, is_told_first: bool
) -> None:
    first = on.begin(TierFrame.WRITE, 1, 2)
    on.leave(1)
    on.write(3)
    if is_told_first:
        assert on.told() == [1]
    assert on.end(first, DONE, DONE) == [FULL, DONE]
    assert on.told() == ([] if is_told_first else [1])


def test_what_left_while_it_was_asked_for_is_not_said_to_be_there(on: Stage) -> None:
    asked = on.begin(TierFrame.EXISTS, 1, 2, 3)
    on.leave(1, 3)
    on.write(9)
    assert on.told() == [1, 3]
    assert on.end(asked, 1, 1, 0) == [0, 1, 0]


def test_a_read_and_a_failed_write_say_what_they_said(on: Stage) -> None:
    read, failed = on.begin(TierFrame.READ, 1, 2), on.begin(TierFrame.WRITE, 1, 2)
    on.leave(1, 2)
    assert on.end(read, DONE, int(Outcome.MISSING)) == [DONE, int(Outcome.MISSING)]
    assert on.end(failed, int(Outcome.FAILED), DONE) == [int(Outcome.FAILED), FULL]


def test_an_order_that_was_not_answered_ends_like_any(on: Stage) -> None:
    order = on.begin(TierFrame.WRITE, 1)
    on.leave(1)
    late = TierAnswer(order.order, OrderEnd.NEVER_STARTED, reason="LATE")
    assert on.of.checked(order, late, _keys) is late
    assert not on.of._began
    assert not on.of._recent


def test_nothing_is_kept_for_calls_that_have_ended(on: Stage) -> None:
    slow = on.begin(TierFrame.WRITE, 1)
    for number in range(100):
        on.leave(number)
        on.write(1000 + number)
    on.told()
    assert len(on.of._recent) == 100
    on.end(slow, DONE)
    assert not on.of._recent


def test_they_are_told_in_pieces_of_so_many_keys_and_scopes(on: Stage) -> None:
    on.leave(*range(3000))
    on.leaving += [key(n, n.to_bytes(32, "big")) for n in range(100)]
    on.write(9000)
    said: list[TierLeft] = []
    while not said or said[-1].more:
        said.append(frames.unpack_left(frames.pack_left(on.of.some())))
        assert sum(len(part.keys) for part in said[-1].parts) <= frames.MAX_LEFT_KEYS
        assert len(said[-1].parts) <= frames.MAX_LEFT_SCOPES
    numbers = [n for left in said for part in left.parts for n in numbers_of(part)]
    assert numbers == [*range(3000), *range(100)]


def test_more_than_can_be_kept_is_told_as_doubt(on: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEFT", 100)
    on.leave(*range(100))
    slow = on.begin(TierFrame.WRITE, 500)
    on.write(1000)
    assert not on.of._in_doubt
    on.leave(100)
    on.write(1000)
    assert on.end(slow, DONE) == [FULL], "nobody knows"
    left = on.of.some()
    assert (left.parts, left.in_doubt, left.more) == ((), True, False)
    assert not on.of.some().in_doubt
    on.leave(1)
    assert on.write(7) == [DONE]
    assert on.told() == [1]


def test_what_leaves_before_a_doubt_is_told_is_doubted_after_it_too(on: Stage) -> None:
    on.leaving = None
    on.write(7)
    slow = on.begin(TierFrame.EXISTS, 2)
    on.leave(1, 2)
    on.write(8)
    assert on.of.some().in_doubt
    assert on.end(slow, 1) == [0], "it has left, and nobody noted it"


def test_what_leaves_while_one_call_runs_for_ever_is_bounded(
    on: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LEFT", 100)
    slow = on.begin(TierFrame.WRITE, 1, 2)
    for number in range(0, 1000, 50):
        on.leave(*range(100 + number, 150 + number))
        on.write(1)
        on.told()
    assert len(on.of._recent) <= 100
    assert not on.of._in_doubt
    assert on.end(slow, DONE, DONE) == [FULL, FULL]


def endless() -> Iterator[TierKey]:
    number = 0
    while True:
        number += 1
        yield key(number)


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        ValueError("a bug"),
        7,
        [7],
        [TierKey(b"short", b"1")],
        [TierKey(SCOPE, b"")],
        [TierKey(SCOPE, b"1" * 65)],
        [("a" * 32, "b")],
        endless(),
    ],
    ids=["none", "bug", "number", "numbers", "short", "empty", "long", "texts", "endless"],
)
def test_whatever_a_store_says_instead_is_doubt(on: Stage, nonsense: Any) -> None:
    on.leaving = nonsense
    assert on.write(1) == [FULL]
    left = on.of.some()
    assert (left.parts, left.in_doubt) == ((), True)
    on.leaving = []
    assert on.write(1) == [DONE]


def test_a_store_that_names_nothing_is_believed() -> None:
    of = Departures(cast(TierStore, SimpleNamespace()))
    order = Order(OrderId(1), TierFrame.WRITE, 0.0, tuple(placed([1], [1])))
    of.begin(order.order)
    answer = TierAnswer(order.order, OrderEnd.ANSWERED, np.array([DONE], dtype=np.uint8))
    assert of.checked(order, answer, _keys) is answer
    assert not of.are_named


# -- over the socket ------------------------------------------------------------------------------

BLOCK = 2 * 8192  # bytes of a block of the rig


def heard(left: Sequence[TierLeft]) -> list[int]:
    return [n for each in left for part in each.parts for n in numbers_of(part)]


@on_loop
async def test_control_hears_what_left_to_make_room() -> None:
    async with tier_rig() as r:
        tier = await r.start(capacity_bytes=8 * BLOCK)
        for number in range(20):
            order = r.next_order()
            tier.write(order, placed([number], [number]), soon())
            assert await r.sink.outcomes(order) == [Outcome.DONE]
        await r.sink.until(lambda: len(heard(r.sink.left)) >= 12)
        assert heard(r.sink.left) == list(range(12))
        assert all(part.scope == SCOPE for each in r.sink.left for part in each.parts)


@on_loop
async def test_a_hundred_thousand_that_leave_at_once_are_told_piece_by_piece() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Names", count=100_000)
        order = r.next_order()
        tier.exists(order, keys(1, scope=OTHER_SCOPE), soon())
        await r.sink.until(lambda: r.sink.left and not r.sink.left[-1].more)
        assert heard(r.sink.left) == list(range(100_000))
        assert max(len(heard([left])) for left in r.sink.left) <= frames.MAX_LEFT_KEYS


@on_loop
async def test_millions_that_leave_at_once_are_told_as_doubt_and_cost_no_memory() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Names", count=200_000)
        tier.exists(r.next_order(), keys(1), soon())
        await r.sink.until(lambda: r.sink.left)
        assert [(left.in_doubt, left.more) for left in r.sink.left] == [(True, False)]


@on_loop
async def test_what_left_is_told_only_when_control_asks() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        with pytest.raises(BadFrame):
            tier.hear(TierFrame.LEFT, frames.pack_left(TierLeft(())))


def _left(count: int, hash_bytes: int = 8, parts: int = 1) -> bytes:
    body = b"\0" * 32 + frames._KEYS.pack(count, hash_bytes)
    body += bytes(8 * count * -(-hash_bytes // 8))
    return frames._LEFT.pack(parts, 0, 0) + body * parts


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff" * 64,
        _left(1025),
        _left(512, parts=3),
        _left(1, parts=33),
        _left(1, hash_bytes=65),
        _left(1, hash_bytes=0),
        _left(1 << 31, hash_bytes=0)[:100],
        _left(2)[:-8],
        frames._LEFT.pack(1 << 31, 0, 0),
    ],
    ids=len,
)
def test_nonsense_about_what_left_is_no_frame(body: bytes) -> None:
    with pytest.raises((BadFrame, ValueError)):
        frames.unpack_left(body)
    assert len(frames.unpack_left(_left(1024)).parts[0].keys) == 1024
    assert hashes([1]).hash_bytes == HASH_BYTES


def test_a_store_that_was_emptied_is_in_doubt_and_so_is_a_call_of_that_time() -> None:
    emptied = [False]
    on = Stage()
    on.of = Departures(cast(TierStore, SimpleNamespace(was_emptied=lambda: emptied[0])))
    assert on.of.are_named
    assert on.write(1) == [DONE]
    assert not on.of.some().in_doubt
    asked = on.begin(TierFrame.EXISTS, 1)
    emptied[0] = True
    assert on.end(asked, 1) == [0]
    emptied[0] = False
    assert on.of.some().in_doubt
    assert on.write(1) == [DONE]
    assert not on.of.some().in_doubt
