"""A tier's process that does as it should: bytes there and back, orders, rows, bounds."""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvd.core.keys import KeyBatch, RowId
from kvd.linux.signals import IGNORED, STOPPING
from kvd.processes.framing import BadFrame, frame
from kvd.processes.parent import Channel
from kvd.tiers import process as module
from kvd.tiers.frames import MAX_PARTS_PER_ORDER, TierFrame, pack_text
from kvd.tiers.process import (
    OrderEnd,
    OrderId,
    PlacedBlocks,
    ProcessReason,
    QueueBounds,
    ScopedKeys,
)
from kvd.tiers.store import MAX_BLOCKS_PER_CALL, MAX_SCOPES_PER_CALL, Found, Outcome
from tests.tiers.tier_rig import (
    BAD,
    EXTENT_BYTES,
    OTHER_SCOPE,
    PART_BYTES,
    PER_EXTENT,
    SCOPE,
    SHARDS,
    hashes,
    keys,
    on_loop,
    owed,
    placed,
    proc_text,
    soon,
    tier_rig,
)

DONE, MISSING = Outcome.DONE, Outcome.MISSING


@on_loop
async def test_blocks_come_back_and_no_other_byte_changes() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        written = [0, 5, PER_EXTENT, PER_EXTENT + 7]
        contents = [r.content(slot) for slot in written]
        assert tier.write(r.next_order(), placed(range(4), written), soon())
        assert await r.sink.outcomes(1) == [DONE] * 4
        assert r.sink.answers[1].bytes_copied == 4 * SHARDS * PART_BYTES
        assert r.sink.answers[1].duration_ns > 0
        before = [extent.copy() for extent in r.extents]
        filled = [20, 21, PER_EXTENT + 30, 40]
        assert tier.read(r.next_order(), placed([3, 1, 99, 0], filled), soon())
        assert await r.sink.outcomes(2) == [DONE, DONE, MISSING, DONE]
        for slot, number in ((20, 3), (21, 1), (40, 0)):
            assert r.content(slot) == contents[number]
            for shard in range(SHARDS):
                extent, at = divmod(slot, PER_EXTENT)
                at *= PART_BYTES
                before[extent * SHARDS + shard][at : at + PART_BYTES] = r.part(slot, shard)
        assert all(np.array_equal(a, b) for a, b in zip(before, r.extents, strict=True))


@on_loop
async def test_questions_are_answered_key_by_key_and_scopes_are_apart() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        tier.write(r.next_order(), placed([1, 2, 3], [0, 1, 2]), soon())
        tier.write(r.next_order(), placed([1], [3], OTHER_SCOPE), soon())
        await r.sink.until(lambda: len(r.sink.answers) == 2)
        asked = [*keys(1, 9, 3), *keys(1, 2, scope=OTHER_SCOPE)]
        tier.exists(r.next_order(), asked, soon())
        assert (await r.sink.answer(3)).values.tolist() == [1, 0, 1, 1, 0]
        tier.delete_scopes(r.next_order(), [SCOPE], soon())
        assert (await r.sink.answer(4)).end is OrderEnd.ANSWERED
        tier.exists(r.next_order(), asked, soon())
        assert (await r.sink.answer(5)).values.tolist() == [0, 0, 0, 1, 0]


@on_loop
async def test_a_store_may_say_nothing_of_some() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "KnowsHalf")
        tier.write(r.next_order(), placed([1, 2], [0, 1]), soon())
        assert await r.sink.outcomes(1) == [Outcome.DONE] * 2
        tier.exists(r.next_order(), keys(1, 2, 3, 4), soon())
        found = [Found(value) for value in (await r.sink.answer(2)).values.tolist()]
        assert found == [Found.THERE, Found.UNKNOWN, Found.ABSENT, Found.UNKNOWN]


@on_loop
async def test_of_what_is_likely_there_a_store_that_would_move_it_is_given_what_it_lacks() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "TakesOnce")
        tier.write(r.next_order(), placed([1, 2], [1, 2]), soon())
        tier.write(r.next_order(), placed([1, 2, 3], [1, 2, 3]), soon(), again=True)
        tier.write(r.next_order(), placed([1, 2, 3], [1, 2, 3]), soon())
        outcomes = [await r.sink.outcomes(order) for order in (1, 2, 3)]
        assert outcomes == [[DONE] * 2, [DONE] * 3, [Outcome.FULL] * 3]


@on_loop
async def test_hashes_of_every_length_are_told_apart() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        for length in range(1, 65):
            batch = KeyBatch.from_bytes(bytes([7] * length), length)
            block = placed([0], [length])[0]
            part = PlacedBlocks(SCOPE, batch, block.extents, block.offsets, block.part_bytes)
            tier.write(OrderId(length), [part], soon())
            assert await r.sink.outcomes(length) == [DONE]
        for length in range(1, 65):
            block = placed([0], [100])[0]
            batch = KeyBatch.from_bytes(bytes([7] * length), length)
            part = PlacedBlocks(SCOPE, batch, block.extents, block.offsets, block.part_bytes)
            tier.read(OrderId(100 + length), [part], soon())
            assert await r.sink.outcomes(100 + length) == [DONE]
            assert r.content(100) == r.content(length)


@on_loop
async def test_a_read_waits_for_no_write_and_a_question_for_no_copy() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Slow", concurrency=3)
        tier.exists(r.next_order(), keys(0), soon())  # it is warm
        for number in range(8):
            tier.write(r.next_order(), placed([number], [number]), soon())
        await r.signed("writing")
        tier.read(OrderId(100), placed([77], [77]), soon())
        tier.exists(OrderId(101), keys(1), soon())
        assert await r.sink.outcomes(100) == [MISSING]
        assert (await r.sink.answer(101)).values.tolist() == [0]
        assert not any(2 <= order <= 9 for order in r.sink.answers)
        r.sign("go")
        await r.sink.until(lambda: len(r.sink.answers) == 11)


@on_loop
async def test_a_delete_comes_after_the_writes_that_were_ordered_before_it() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Slow", concurrency=8)
        for number in range(5):
            tier.write(r.next_order(), placed([number], [number]), soon())
        tier.delete_scopes(r.next_order(), [SCOPE], soon())
        await r.signed("writing")
        tier.exists(OrderId(100), keys(*range(5)), soon())
        await r.sink.answer(100)
        assert 6 not in r.sink.answers
        r.sign("go")
        await r.sink.answer(6)
        assert r.sink.order[-1] == 6, "a write was answered after the delete that followed it"
        tier.exists(OrderId(101), keys(*range(5)), soon())
        assert (await r.sink.answer(101)).values.tolist() == [0] * 5


@on_loop
async def test_thousands_of_small_questions_are_answered() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        tier.write(r.next_order(), placed([5], [5]), soon())
        await r.sink.answer(1)
        for number in range(10_000):
            assert tier.exists(r.next_order(), keys(number % 10), soon(20.0))
            if number % 100 == 0:
                await asyncio.sleep(0)
        await r.sink.until(lambda: len(r.sink.answers) == 10_001)
        found = [order for order, answer in r.sink.answers.items() if answer.values.tolist() == [1]]
        assert len(found) == 1_001
        assert not any(owed(tier).values())


@on_loop
async def test_rows_are_unmapped_once_no_copy_uses_them_and_can_be_mapped_again() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Slow")
        tier.write(r.next_order(), placed([1], [0]), soon())
        await r.signed("writing")
        first, second = (str(r.files.path(extent)) for extent in range(2))
        assert first in proc_text(tier.pid, "maps")
        assert tier.unmap_row(RowId(2), [2, 3])  # never mapped
        assert tier.unmap_row(RowId(0), [0, 1])
        await r.sink.until(lambda: r.sink.unmapped)
        assert r.sink.unmapped == [2]
        untouched = r.content(9)
        tier.read(r.next_order(), placed([1], [9]), soon())
        refused = await r.sink.answer(2)
        assert (refused.end, refused.reason) == (OrderEnd.NEVER_STARTED, ProcessReason.NOT_MAPPED)
        assert r.content(9) == untouched
        r.sign("go")
        await r.sink.until(lambda: 0 in r.sink.unmapped)
        assert 1 in r.sink.answers, "its row was unmapped while a copy used it"
        maps = proc_text(tier.pid, "maps")
        assert first not in maps
        assert second not in maps
        tier.read(r.next_order(), placed([1], [9]), soon())
        assert await r.sink.outcomes(3) == [DONE]
        assert r.content(9) == r.content(0)


@on_loop
async def test_a_frozen_process_keeps_a_row_from_others_for_seconds_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody asks it anything: no deadline would end it."""
    monkeypatch.setattr(module, "UNMAP_S", 0.5)
    async with tier_rig() as r:
        tier = await r.start()
        tier.write(r.next_order(), placed([1], [0]), soon())
        assert await r.sink.outcomes(1) == [DONE]
        os.kill(tier.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert tier.unmap_row(RowId(0), [0, 1])
        await r.sink.until(lambda: r.sink.gone)
        assert 0.5 < time.monotonic() - began < 5.0
        assert r.sink.unmapped == [0]
        assert "was not unmapped" in r.sink.gone[0]


@on_loop
async def test_a_row_is_waited_for_as_long_as_a_copy_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "UNMAP_S", 0.1)
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.5)
    async with tier_rig() as r:
        tier = await r.start(BAD + "Slow")
        tier.write(r.next_order(), placed([1], [0]), soon())
        await r.signed("writing")
        assert tier.unmap_row(RowId(0), [0, 1])
        await asyncio.sleep(1.5)
        assert not r.sink.gone
        r.sign("go")
        await r.sink.until(lambda: r.sink.unmapped)
        await asyncio.sleep(1.0)
        assert not r.sink.gone, "it has done what it was told"


@on_loop
async def test_a_copy_of_an_extent_that_is_not_there_never_starts() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        gone = placed([1], [0])[0]
        elsewhere = PlacedBlocks(SCOPE, gone.keys, gone.extents + 50, gone.offsets, gone.part_bytes)
        tier.read(r.next_order(), [elsewhere], soon())
        refused = await r.sink.answer(1)
        assert (refused.end, refused.reason) == (OrderEnd.NEVER_STARTED, ProcessReason.NOT_MAPPED)
        tier.write(r.next_order(), [gone], soon())
        assert await r.sink.outcomes(2) == [DONE]


@on_loop
async def test_how_it_fares_is_told_when_it_has_changed_and_seldom() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        await r.sink.until(lambda: r.sink.usages)
        assert (r.sink.usages[0].blocks, r.sink.usages[0].capacity_bytes) == (0, 1 << 30)
        began = time.monotonic()
        for number in range(50):
            tier.write(r.next_order(), placed([number], [number]), soon())
            await asyncio.sleep(0.01)
        await r.sink.until(lambda: r.sink.usages[-1].blocks == 50)
        assert len(r.sink.usages) <= 3 + (time.monotonic() - began) / module.USAGE_S
        told = len(r.sink.usages)
        tier.exists(r.next_order(), keys(1), soon())
        await asyncio.sleep(1.3)
        assert len(r.sink.usages) == told, "nothing had changed"


@on_loop
async def test_a_note_passes_though_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTES_S", 0.2)
    async with tier_rig() as r:
        await r.start(BAD + "NotesAWhile")
        await r.sink.until(lambda: r.sink.usages)
        assert r.sink.usages[0].notes
        await r.sink.until(lambda: not r.sink.usages[-1].notes)


# -- bounds ---------------------------------------------------------------------------------------


@on_loop
async def test_beyond_what_may_be_queued_orders_are_refused_at_once() -> None:
    async with tier_rig() as r:
        tier = await r.start(
            BAD + "Slow", QueueBounds(keys=5, reads=3, writes=4), reads=True, exists=True
        )
        assert tier.write(r.next_order(), placed([1, 2, 3], [1, 2, 3]), soon())
        assert not tier.write(OrderId(90), placed([4, 5], [4, 5]), soon())
        assert tier.write(r.next_order(), placed([4], [4]), soon())
        assert not tier.write(OrderId(91), placed([5], [5]), soon())
        assert tier.read(r.next_order(), placed([6, 7, 8], [6, 7, 8]), soon())
        assert not tier.read(OrderId(92), placed([9], [9]), soon())
        assert tier.exists(r.next_order(), keys(1, 2, 3, 4), soon())
        assert not tier.exists(OrderId(93), keys(1, 2), soon())
        assert not tier.delete_scopes(OrderId(94), [SCOPE, OTHER_SCOPE], soon())
        assert tier.delete_scopes(r.next_order(), [SCOPE], soon())
        assert not tier.exists(OrderId(95), keys(5), soon())
        assert owed(tier) == {"EXISTS": 5, "READ": 3, "WRITE": 4}
        r.sign("go")
        await r.sink.until(lambda: len(r.sink.answers) == 5)
        assert not any(owed(tier).values())
        assert tier.read(r.next_order(), placed(range(10), range(10)), soon()), "the queue is empty"
        await r.sink.answer(6)


@on_loop
async def test_of_a_tiers_queue_each_tenant_has_as_much_as_it_leaves_the_others() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Slow", QueueBounds(keys=8), exists=True)
        assert tier.exists(r.next_order(), keys(*range(8)), soon(), "a"), "all, if it is alone"
        assert not tier.exists(OrderId(90), keys(1), soon(), "a")
        assert tier.exists(r.next_order(), keys(*range(4)), soon(), "b")
        assert not tier.exists(OrderId(91), keys(1), soon(), "b")
        assert tier.exists(r.next_order(), keys(1, 2), soon(), "c")
        assert tier.exists(r.next_order(), keys(*range(100)), soon(), "d"), "one, however large"
        assert not tier.exists(OrderId(92), keys(1), soon(), "e"), "twice as much as one may have"
        assert owed(tier)["EXISTS"] == 114
        r.sign("go")
        await r.sink.until(lambda: len(r.sink.answers) == 4)
        assert tier.exists(r.next_order(), keys(*range(8)), soon(), "e"), "the queue is empty"
        await r.sink.answer(5)


def test_a_tiers_queue_is_bounded_though_the_site_says_nothing() -> None:
    assert QueueBounds() == QueueBounds(65_536, 8_192, 8_192)


@pytest.mark.parametrize(
    ("count", "allowed"), [(MAX_BLOCKS_PER_CALL, True), (MAX_BLOCKS_PER_CALL + 1, False)]
)
@on_loop
async def test_an_order_has_as_many_blocks_as_a_call(count: int, allowed: bool) -> None:
    async with tier_rig() as r:
        tier = await r.start()
        blocks = placed(range(count), [0] * count)
        if not allowed:
            with pytest.raises(BadFrame, match=f"order of {count}"):
                tier.read(r.next_order(), blocks, soon())
            with pytest.raises(BadFrame, match=f"order of {count}"):
                tier.exists(r.next_order(), keys(*range(count)), soon())
            return
        assert tier.read(r.next_order(), blocks, soon())
        assert await r.sink.outcomes(1) == [MISSING] * count
        assert tier.exists(r.next_order(), keys(*range(count)), soon())
        assert (await r.sink.answer(2)).values.tolist() == [0] * count


@pytest.mark.parametrize(("concurrency", "calls"), [(1, 1), (3, 3), (63, 63), (64, 64), (65, 64)])
@on_loop
async def test_a_process_has_a_thread_for_each_call_that_its_store_takes_and_64_at_most(
    concurrency: int, calls: int
) -> None:
    async with tier_rig() as r:
        tier = await r.start(concurrency=concurrency)
        threads = os.listdir(f"/proc/{tier.pid}/task")  # noqa: PTH208
        assert len(threads) == calls + 2  # one listens, one asks how the store fares


@on_loop
async def test_an_order_has_as_many_scopes_as_a_call() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        scopes = [number.to_bytes(32, "big") for number in range(MAX_SCOPES_PER_CALL + 1)]
        with pytest.raises(BadFrame, match="order of 1025"):
            tier.delete_scopes(r.next_order(), scopes, soon())
        assert tier.delete_scopes(OrderId(9), scopes[1:], soon())
        assert (await r.sink.answer(9)).end is OrderEnd.ANSWERED


@on_loop
async def test_an_order_of_too_many_parts_is_refused_by_control() -> None:
    """With it a frame could be too large to be read."""
    async with tier_rig() as r:
        tier = await r.start()
        shards, blocks = 256, MAX_PARTS_PER_ORDER // 256

        def order(count: int) -> PlacedBlocks:
            extents = np.zeros((shards, count), dtype=np.uint32)
            offsets = np.zeros((shards, count), dtype=np.uint64)
            return PlacedBlocks(SCOPE, hashes(range(count)), extents, offsets, (8,) * shards)

        with pytest.raises(BadFrame, match="parts"):
            tier.read(r.next_order(), [order(blocks + 1)], soon())
        assert tier.read(r.next_order(), [order(blocks)], soon())
        assert (await r.sink.outcomes(2)) == [MISSING] * blocks


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("no keys", "order of 0"),
        ("a long hash", "impossible length"),
        ("a short scope", "impossible length"),
        ("an odd part", "parts of"),
        ("no part", "0 parts"),
    ],
)
@on_loop
async def test_an_order_that_breaks_the_rules_is_refused_by_control(flaw: str, said: str) -> None:
    async with tier_rig() as r:
        tier = await r.start()
        block = placed([1], [1])[0]
        wrong: Callable[[], bool] = {
            "no keys": lambda: tier.exists(OrderId(1), [ScopedKeys(SCOPE, hashes([]))], soon()),
            "a long hash": lambda: tier.exists(
                OrderId(1), [ScopedKeys(SCOPE, KeyBatch.from_bytes(bytes(65), 65))], soon()
            ),
            "a short scope": lambda: tier.exists(
                OrderId(1), [ScopedKeys(SCOPE[1:], hashes([1]))], soon()
            ),
            "an odd part": lambda: tier.read(
                OrderId(1),
                [PlacedBlocks(SCOPE, block.keys, block.extents, block.offsets, (7, 8))],
                soon(),
            ),
            "no part": lambda: tier.read(
                OrderId(1),
                [PlacedBlocks(SCOPE, block.keys, block.extents[:0], block.offsets[:0], ())],
                soon(),
            ),
        }[flaw]
        with pytest.raises(BadFrame, match=said):
            wrong()
        assert tier.exists(OrderId(1), keys(1), soon()), "nothing was changed"
        await r.sink.answer(1)


@on_loop
async def test_a_part_beyond_its_extent_ends_the_process_that_is_told_so() -> None:
    """It is control's fault, and the process must not touch what lies behind."""
    async with tier_rig() as r:
        tier = await r.start()
        block = placed([1], [1])[0]
        at_end = np.full_like(block.offsets, EXTENT_BYTES - PART_BYTES)
        fits = PlacedBlocks(SCOPE, block.keys, block.extents, at_end, block.part_bytes)
        tier.write(r.next_order(), [fits], soon())
        assert await r.sink.outcomes(1) == [DONE]
        beyond = PlacedBlocks(SCOPE, block.keys, block.extents, at_end + 8, block.part_bytes)
        tier.write(r.next_order(), [beyond], soon())
        assert (await r.sink.answer(2)).reason == ProcessReason.TIER_GONE
        await r.sink.until(lambda: r.sink.gone)


# -- its life -------------------------------------------------------------------------------------


@on_loop
async def test_it_has_a_name_and_ignores_what_is_sent_to_the_whole_group() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        assert proc_text(tier.pid, "comm") == "kvd-tier-3\n"
        core = next(
            line for line in proc_text(tier.pid, "limits").splitlines() if "core" in line
        ).split()
        assert core[4:6] == ["0", "0"]
        for number in (*STOPPING, *IGNORED, signal.SIGHUP, signal.SIGUSR1):
            signal.pidfd_send_signal(tier.pidfd, number)
        tier.exists(r.next_order(), keys(1), soon())
        assert (await r.sink.answer(1)).values.tolist() == [0]


@on_loop
async def test_it_ends_when_it_is_told_and_its_store_is_closed() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        tier.write(r.next_order(), placed([1], [1]), soon())
        await r.sink.answer(1)
        await tier.stop()
        assert r.sink.gone == ["stopped"]
        assert not tier.exists(r.next_order(), keys(1), soon())
        assert not tier.unmap_row(RowId(0), [0])
        await tier.stop()
        assert len(r.sink.gone) == 1


@on_loop
async def test_a_process_that_says_it_ends_and_does_not_is_ended() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        Channel(tier).data_received(frame(TierFrame.LEAVING, pack_text("its store is mad")))
        await r.sink.until(lambda: r.sink.gone)
        assert r.sink.gone == ["its store is mad"]


@on_loop
async def test_after_nonsense_nothing_that_it_says_is_heard_nor_heard_again() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        heard: list[enum.IntEnum] = []
        tier.hear = lambda kind, body: heard.append(kind)  # type: ignore[method-assign]
        channel = Channel(tier)
        unknown = (8).to_bytes(4, "little") + (99).to_bytes(4, "little")
        channel.data_received(frame(TierFrame.LEFT) + unknown)
        for _ in range(3):
            channel.data_received(frame(TierFrame.USAGE))
        await r.sink.until(lambda: r.sink.gone)
        assert heard == [TierFrame.LEFT]
        assert r.sink.gone == ["wrote nonsense: a frame of kind 99"]
