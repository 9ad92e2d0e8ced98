"""Checksums of the blocks' bytes, on the way to a tier and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvd.core.keys import NO_SUM, U64
from kvd.processes.framing import BadFrame
from kvd.tiers import frames, process
from kvd.tiers.frames import Order, OrderEnd, OrderId, TierAnswer, TierFrame
from kvd.tiers.process import PlacedBlocks, TierProcess
from kvd.tiers.store import Outcome, TierOptions
from kvd.tiers.sums import sums_of
from tests.tiers.tier_rig import (
    BAD,
    MEMORY,
    SHARDS,
    TierRig,
    keys,
    on_loop,
    placed,
    soon,
    tier_rig,
)

DISK = "kvd.tiers.disk.store:DiskStore"
DONE, MISSING, FAILED, DAMAGED = (
    Outcome.DONE,
    Outcome.MISSING,
    Outcome.FAILED,
    Outcome.DAMAGED,
)
BOTH = pytest.mark.parametrize("store", [MEMORY, DISK])


async def start(r: TierRig, store: str, *, summed: bool = True) -> TierProcess:
    options: TierOptions = {"signs": str(r.signs)}
    if store == DISK:
        place = r.directory / "disk"
        place.mkdir(mode=0o700, exist_ok=True)
        options = {"directories": str(place), "directory_bytes": "8MiB", "region_bytes": "1MiB"}
    config = replace(r.config(store), options=options, checksums=summed)
    tier = await TierProcess.start(config, r.sink)
    r.processes.append(tier)
    return tier


def sums(r: TierRig, slots: Iterable[int]) -> U64:
    """Of each shard's part in each slot, as the movers note them."""
    of_shards = [[memoryview(r.part(slot, shard)) for slot in slots] for shard in range(SHARDS)]  # type: ignore[arg-type]
    return np.stack([sums_of(parts) for parts in of_shards])


def with_sums(blocks: list[PlacedBlocks], wanted: U64) -> list[PlacedBlocks]:
    return [replace(blocks[0], sums=wanted)]


@BOTH
@on_loop
async def test_a_block_whose_bytes_have_changed_is_not_written(store: str) -> None:
    async with tier_rig() as r:
        tier = await start(r, store)
        noted = sums(r, range(6))
        r.part(2, 1)[77] ^= 1
        r.part(5, 0)[0] ^= 0x80
        blocks = with_sums(placed(range(6), range(6)), noted)
        assert tier.write(r.next_order(), blocks, soon())
        assert await r.sink.outcomes(1) == [DONE, DONE, DAMAGED, DONE, DONE, DAMAGED]
        assert r.sink.answers[1].bytes_copied == 4 * SHARDS * len(r.part(0, 0))
        assert tier.exists(r.next_order(), keys(*range(6)), soon())
        assert (await r.sink.answer(2)).values.tolist() == [1, 1, 0, 1, 1, 0]
        r.part(2, 1)[77] ^= 1  # as it was stored it may go down
        assert tier.write(r.next_order(), with_sums(placed([2], [2]), noted[:, 2:3]), soon())
        assert await r.sink.outcomes(3) == [DONE]
        assert not [usage.errors for usage in r.sink.usages if usage.errors], "the tier's fault"


@BOTH
@on_loop
async def test_parts_of_which_nothing_is_known_are_written_as_they_are(store: str) -> None:
    async with tier_rig() as r:
        tier = await start(r, store)
        noted = sums(r, range(4))
        noted[:, 0] = noted[1, 1] = NO_SUM
        for slot, shard in ((0, 0), (1, 1), (2, 1)):
            r.part(slot, shard)[77] ^= 1
        blocks = with_sums(placed(range(4), range(4)), noted)
        assert tier.write(r.next_order(), blocks, soon())
        assert await r.sink.outcomes(1) == [DONE, DONE, DAMAGED, DONE]
        assert tier.read(r.next_order(), placed([0], [20]), soon())
        assert await r.sink.outcomes(2) == [DONE]
        assert r.content(20) == r.content(0)


@BOTH
@on_loop
async def test_what_was_read_comes_with_the_sums_of_what_was_written(store: str) -> None:
    async with tier_rig() as r:
        tier = await start(r, store)
        noted = sums(r, range(5))
        assert tier.write(r.next_order(), with_sums(placed(range(5), range(5)), noted), soon())
        assert await r.sink.outcomes(1) == [DONE] * 5
        assert tier.read(r.next_order(), placed([4, 9, 0], [20, 21, 22]), soon())
        assert await r.sink.outcomes(2) == [DONE, MISSING, DONE]
        found = r.sink.answers[2].sums.reshape(3, SHARDS)
        assert found[[0, 2]].tolist() == noted.T[[4, 0]].tolist()
        assert r.content(20) == r.content(4)


@BOTH
@on_loop
async def test_no_sums_come_where_none_are_wanted(store: str) -> None:
    async with tier_rig() as r:
        tier = await start(r, store, summed=False)
        assert tier.write(r.next_order(), placed([1], [1]), soon())
        assert await r.sink.outcomes(1) == [DONE]
        assert tier.read(r.next_order(), placed([1], [9]), soon())
        assert await r.sink.outcomes(2) == [DONE]
        assert not len(r.sink.answers[2].sums)


@on_loop
async def test_a_store_that_says_damaged_of_a_good_block_costs_host_memory_nothing() -> None:
    async with tier_rig() as r:
        tier = await start(r, BAD + "SaysDamaged")
        noted = sums(r, range(3))
        r.part(1, 0)[8] ^= 1
        assert tier.write(r.next_order(), with_sums(placed(range(3), range(3)), noted), soon())
        assert await r.sink.outcomes(1) == [FAILED, DAMAGED, FAILED]
        assert tier.write(r.next_order(), placed([7], [7]), soon())
        assert await r.sink.outcomes(2) == [FAILED]


def order_of(kind: TierFrame, blocks: list[PlacedBlocks]) -> Order:
    return Order(OrderId(1), kind, soon(), tuple(blocks))


def test_sums_survive_the_wire() -> None:
    wanted = np.arange(6, dtype=np.uint64).reshape(2, 3) << np.uint64(60)
    order = order_of(TierFrame.WRITE, with_sums(placed(range(3), range(3)), wanted))
    body = frames.pack_order(order)
    found: Any = frames.unpack_order(TierFrame.WRITE, body).content[0]
    assert found.sums.tolist() == wanted.tolist()
    answer = TierAnswer(OrderId(1), OrderEnd.ANSWERED, np.ones(3, dtype=np.uint8), sums=wanted[0])
    assert frames.unpack_answer(frames.pack_answer(answer)).sums.tolist() == wanted[0].tolist()


@pytest.mark.parametrize("count", [0, 5, 7])
def test_an_answer_with_too_few_or_too_many_sums_is_none(count: int) -> None:
    order = order_of(TierFrame.READ, placed(range(3), range(3)))
    values, none = np.ones(3, dtype=np.uint8), np.zeros(count, dtype=np.uint64)
    answer = TierAnswer(OrderId(1), OrderEnd.ANSWERED, values, sums=none)
    with pytest.raises(BadFrame, match="sums"):
        process._require_sums(answer, order, wanted=True)
    if count:
        with pytest.raises(BadFrame, match="sums"):
            process._require_sums(answer, order, wanted=False)
    failed = TierAnswer(OrderId(1), OrderEnd.FAILED)
    process._require_sums(failed, order, wanted=True)


@BOTH
@on_loop
async def test_a_block_that_changed_after_it_was_written_is_compared_anew(store: str) -> None:
    """Promoted, damaged in host memory, and given to the tier again under another key."""
    async with tier_rig() as r:
        tier = await start(r, store)
        noted = sums(r, [0])
        assert tier.write(r.next_order(), with_sums(placed([0], [0]), noted), soon())
        assert await r.sink.outcomes(1) == [DONE]
        assert tier.read(r.next_order(), placed([0], [30]), soon())
        assert await r.sink.outcomes(2) == [DONE]
        come = r.sink.answers[2].sums.reshape(1, SHARDS).T
        r.part(30, 1)[4096] ^= 4
        assert tier.write(r.next_order(), with_sums(placed([1], [30]), come), soon())
        assert await r.sink.outcomes(3) == [DAMAGED]
