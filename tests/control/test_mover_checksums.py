"""A mover that sums up what it stores and compares what it loads, over real shared memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvd import native
from kvd.core.events import JobKind, JobStatus, TransferOutcome
from kvd.core.keys import NO_SUM, U64
from kvd.mover.checksums import checksums
from kvd.mover.layout import LocatedPart
from kvd.mover.process import MoverProcess
from tests.control.mover_rig import PART_BYTES, Rig, WorkerEnd, give, on_loop, one_part, rig

SLOTS = [(0, 3), (2, 7), (1, 0), (0, 4), (0, 5)]
BLOCKS = [5, 31, 0, 6, 7]
TARGETS = [20, 3, 9, 10, 11]


@pytest.fixture(params=["auto", "off"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether sums are made by the native library, as it copies, or by numpy, beside the copy."""
    if request.param == "auto" and native.library() is None:
        pytest.skip(f"no native library: {native.why_not()}")
    monkeypatch.setenv(native.VARIABLE, request.param)
    return str(request.param)


async def stored(r: Rig) -> tuple[MoverProcess, WorkerEnd, U64]:
    """A mover with checksums that has stored five blocks, and what it says of them."""
    mover = await r.start(replace(r.config(), checksums=True))
    worker = WorkerEnd(mover)
    worker.ring.mark_ready([1])
    give(mover, 1, JobKind.STORE, one_part(SLOTS, BLOCKS))
    assert await r.sink.outcome(1) is TransferOutcome.DONE
    return mover, worker, r.sink.finished[1].checksums


def loading(sums: U64, first: int = 0) -> LocatedPart:
    return replace(one_part(SLOTS[first:], TARGETS[first:]), checksums=sums[first:])


@on_loop
async def test_a_store_says_the_checksums_of_what_it_wrote() -> None:
    async with rig() as r:
        _, _, said = await stored(r)
        contents = [np.frombuffer(r.block_bytes(block), dtype=np.uint64) for block in BLOCKS]
        assert said.tolist() == checksums(np.stack(contents)).tolist()


@on_loop
async def test_what_is_whole_is_loaded() -> None:
    async with rig() as r:
        mover, worker, said = await stored(r)
        wanted = [r.block_bytes(block) for block in BLOCKS]
        worker.ring.mark_ready([2])
        give(mover, 2, JobKind.LOAD, loading(said))
        assert (await worker.record(2)).status == JobStatus.DONE
        assert [r.block_bytes(target) for target in TARGETS] == wanted
        assert await r.sink.outcome(2) is TransferOutcome.DONE
        assert len(r.sink.finished[2].damaged) == 0


@pytest.mark.parametrize("place", [0, PART_BYTES // 2 + 3, PART_BYTES - 1])
def test_a_flipped_bit_fails_the_load_and_names_the_slot(place: int, way: str) -> None:
    @on_loop
    async def flipped() -> None:
        async with rig() as r:
            mover, worker, said = await stored(r)
            extent, slot = SLOTS[0]
            r.extents[extent][slot * PART_BYTES + place] ^= 1
            expected = r.engine.copy()
            worker.ring.mark_ready([2])
            give(mover, 2, JobKind.LOAD, loading(said))
            assert (await worker.record(2)).status == JobStatus.FAILED
            assert await r.sink.outcome(2) is TransferOutcome.FAILED
            assert r.sink.finished[2].damaged.tolist() == [0]
            whole = [r.block_bytes(block) for block in BLOCKS[1:]]
            if way == "auto":  # what is whole came, what is not was wiped
                assert not any(r.block_bytes(TARGETS[0]))
                assert [r.block_bytes(target) for target in TARGETS[1:]] == whole
            else:
                assert np.array_equal(r.engine, expected), "bytes of a damaged load came"

    flipped()


@on_loop
async def test_all_damage_of_a_load_of_many_parts_is_named() -> None:
    async with rig() as r:
        mover, worker, said = await stored(r)
        for extent, slot in (SLOTS[1], SLOTS[4]):
            r.extents[extent][slot * PART_BYTES + 100] ^= 4
        worker.ring.mark_ready([2])
        both = (loading(said).rows(slice(0, 2)), loading(said, first=2))
        give(mover, 2, JobKind.LOAD, *both)
        assert await r.sink.outcome(2) is TransferOutcome.FAILED
        assert r.sink.finished[2].damaged.tolist() == [1, 4]


@on_loop
async def test_null_blocks_are_summed_up_as_the_zeros_that_they_are() -> None:
    async with rig() as r:
        mover = await r.start(replace(r.config(), checksums=True))
        worker = WorkerEnd(mover)
        worker.ring.mark_ready([1])
        null = LocatedPart(
            0,
            np.zeros(1, dtype=np.uint32),
            np.zeros(1, dtype=np.uint64),
            np.full((1, 1), 0xFFFFFFFF, dtype=np.uint32),
        )
        give(mover, 1, JobKind.STORE, null)
        assert await r.sink.outcome(1) is TransferOutcome.DONE
        zeros = np.zeros((1, PART_BYTES // 8), dtype=np.uint64)
        assert r.sink.finished[1].checksums.tolist() == checksums(zeros).tolist()


@on_loop
async def test_a_mover_that_was_not_asked_sums_up_nothing() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        worker.ring.mark_ready([1])
        give(mover, 1, JobKind.STORE, one_part(SLOTS, BLOCKS))
        assert await r.sink.outcome(1) is TransferOutcome.DONE
        assert len(r.sink.finished[1].checksums) == 0


@on_loop
async def test_slots_of_which_nothing_is_known_are_loaded_beside_those_that_are_compared() -> None:
    async with rig() as r:
        mover, worker, said = await stored(r)
        known = said.copy()
        known[[0, 3]] = NO_SUM
        for extent, slot in (SLOTS[0], SLOTS[3]):
            r.extents[extent][slot * PART_BYTES + 100] ^= 4
        worker.ring.mark_ready([2])
        give(mover, 2, JobKind.LOAD, loading(known))
        assert await r.sink.outcome(2) is TransferOutcome.DONE
        extent, slot = SLOTS[1]
        r.extents[extent][slot * PART_BYTES + 100] ^= 4
        worker.ring.mark_ready([3])
        give(mover, 3, JobKind.LOAD, loading(known))
        assert await r.sink.outcome(3) is TransferOutcome.FAILED
        assert r.sink.finished[3].damaged.tolist() == [1]
