"""Many orders of every kind at once, with deadlines that pass and processes that are killed or
stopped: each order ends once, and what its end promises of the slots' bytes is so."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from kvd.core.keys import RowId
from kvd.tiers.process import OrderEnd, OrderId, TierProcess
from kvd.tiers.store import Outcome
from tests.tiers.tier_rig import (
    BAD,
    PER_EXTENT,
    SCOPE,
    TierRig,
    keys,
    on_loop,
    placed,
    soon,
    tier_rig,
)

ORDERS = 400
SOURCES = range(PER_EXTENT)  # slots of the first row: what is in slot n is the block with key n
TARGETS = range(PER_EXTENT, 2 * PER_EXTENT)


class Churn:
    """Gives orders at random, and holds each end to what it means."""

    def __init__(self, r: TierRig, tier: TierProcess, seed: int) -> None:
        self._r = r
        self._tier = tier
        self._random = random.Random(seed)
        self._free = list(TARGETS)
        self._reads: dict[OrderId, tuple[list[int], list[int], list[bytes]]] = {}
        self._settled = {slot: r.content(slot) for slot in TARGETS}
        self.taken: set[OrderId] = set()
        self.ends: set[OrderEnd] = set()
        self.right = 0  # blocks that came back

    async def run(self) -> None:
        for number in range(ORDERS):
            self._give_one()
            if number % 4 == 0:
                await asyncio.sleep(0.001)
                self._settle()

    def _give_one(self) -> None:
        draw, order = self._random, self._r.next_order()
        numbers = draw.sample(SOURCES, draw.randint(1, 6))
        deadline = soon(draw.choice([0.0, 0.002, 0.01, 5.0, 5.0, 5.0]))
        match draw.randrange(8):
            case 0:
                taken = self._tier.exists(order, keys(*numbers), deadline)
            case 1 if draw.random() < 0.1:
                taken = self._tier.delete_scopes(order, [SCOPE], deadline)
            case 1 | 2 | 3 | 4:
                taken = self._tier.write(order, placed(numbers, numbers), deadline)
            case _:
                taken = self._read(order, numbers, deadline)
        if taken:
            self.taken.add(order)

    def _read(self, order: OrderId, numbers: list[int], deadline: float) -> bool:
        if len(self._free) < len(numbers):
            return False
        slots = [self._free.pop() for _ in numbers]
        if not self._tier.read(order, placed(numbers, slots), deadline):
            self._free += slots
            return False
        before = [self._settled.pop(slot) for slot in slots]
        self._reads[order] = (numbers, slots, before)
        return True

    def _settle(self) -> None:
        """Judge the reads that have ended, and give their slots back."""
        for order in [each for each in self._reads if each in self._r.sink.answers]:
            numbers, slots, before = self._reads.pop(order)
            answer = self._r.sink.answers[order]
            now = [self._r.content(slot) for slot in slots]
            if answer.end is OrderEnd.NEVER_STARTED:
                untouched = now == before  # said apart: a difference of bytes is long
                assert untouched, "a read that never started wrote"
            for number, content, outcome in zip(numbers, now, answer.values, strict=False):
                if outcome == Outcome.DONE:
                    right = content == self._r.content(number)
                    assert right, "wrong bytes"
                    self.right += 1
            self._settled.update(zip(slots, now, strict=True))
            self._free += slots

    async def end(self) -> None:
        """Every order has ended, and nobody writes any more."""
        await self._r.sink.until(lambda: self._r.sink.answers.keys() == self.taken)
        self._settle()
        assert not self._reads
        await asyncio.sleep(0.05)
        for slot, content in self._settled.items():
            quiet = self._r.content(slot) == content
            assert quiet, "somebody wrote after the end"
        self.ends = {answer.end for answer in self._r.sink.answers.values()}


@pytest.mark.parametrize("seed", range(3))
@on_loop
async def test_every_order_ends_once_and_as_it_says(seed: int) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Moody", concurrency=4)
        churn = Churn(r, tier, seed)
        sources = [r.content(slot) for slot in SOURCES]
        await churn.run()
        await churn.end()
        assert not r.sink.gone
        assert churn.ends == set(OrderEnd)
        assert churn.right > 5
        untouched = [r.content(slot) for slot in SOURCES] == sources
        assert untouched
        tier.unmap_row(RowId(0), [0, 1])
        tier.unmap_row(RowId(2), [2, 3])
        await r.sink.until(lambda: len(r.sink.unmapped) == 2)


@pytest.mark.parametrize("seed", range(6))
@on_loop
async def test_every_order_ends_once_though_the_process_dies_in_the_middle(seed: int) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Moody", concurrency=4)
        churn = Churn(r, tier, seed)
        when = random.Random(seed).random() * 0.3
        asyncio.get_running_loop().call_later(when, os.kill, tier.pid, signal.SIGKILL)
        await churn.run()
        await r.sink.until(lambda: r.sink.gone)
        await churn.end()


@on_loop
async def test_every_order_ends_once_though_the_process_stops_and_goes_on() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Moody", concurrency=4)
        churn = Churn(r, tier, 7)
        loop = asyncio.get_running_loop()
        for number in range(5):
            loop.call_later(0.1 * number, os.kill, tier.pid, signal.SIGSTOP)
            loop.call_later(0.1 * number + 0.05, os.kill, tier.pid, signal.SIGCONT)
        await churn.run()
        await asyncio.sleep(0.5)
        await churn.end()
        assert not r.sink.gone
