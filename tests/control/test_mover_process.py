"""A mover at work: real process, real shared memory, every byte on both sides compared."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvd.core.events import JobKind, JobStatus, TransferOutcome
from kvd.core.keys import JobId, RowId, TransferId
from kvd.mover import process
from kvd.mover.child import STORE_NICENESS
from kvd.mover.process import MoverProcess
from kvd.mover.transfers import MAX_READY_JOBS
from kvd_proto.layout import BOARD_BYTES, NULL_ENGINE_BLOCK
from tests.control.mover_rig import (
    BLOCKS,
    EXTENT_BYTES,
    EXTENTS,
    PART_BYTES,
    SLOTS,
    WorkerEnd,
    give,
    on_loop,
    one_part,
    proc_text,
    rig,
)

ABANDONED = TransferOutcome.ABANDONED
# As a filter of system calls without @resources has it.
NO_NICENESS = """
import os
def nice(increment):
    raise PermissionError(1, "Operation not permitted")
os.nice = nice
"""
DONE, FAILED, REVOKED = TransferOutcome.DONE, TransferOutcome.FAILED, TransferOutcome.REVOKED


@on_loop
async def test_stored_blocks_come_back_and_no_other_byte_changes() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        blocks = [5, 31, 0, 6, 7, 8]
        slots = [(0, 3), (2, SLOTS - 1), (1, 0), (0, 8), (0, 9), (0, 10)]
        engine = r.engine.copy()
        pool = [extent.copy() for extent in r.extents]
        for block, (extent, slot) in zip(blocks, slots, strict=True):
            stored = np.frombuffer(r.block_bytes(block), dtype=np.uint8)
            pool[extent][slot * PART_BYTES : (slot + 1) * PART_BYTES] = stored
        give(mover, 1, JobKind.STORE, one_part(slots, blocks))
        worker.ring.mark_ready([1])
        assert await r.sink.outcome(1) is DONE
        assert r.sink.bytes[1] == len(blocks) * PART_BYTES
        assert np.array_equal(r.engine, engine)
        assert all(np.array_equal(a, b) for a, b in zip(r.extents, pool, strict=True))

        targets = [20, 3, 9, 10, 11, 25]
        for source, target in zip(blocks, targets, strict=True):
            for here, there in zip(r.block(source), r.block(target), strict=True):
                engine[there] = r.engine[here]
        worker.ring.mark_ready([2])
        give(mover, 2, JobKind.LOAD, one_part(slots, targets))
        assert (await worker.record(2)).status == JobStatus.DONE
        assert await r.sink.outcome(2) is DONE
        assert np.array_equal(r.engine, engine)
        assert all(np.array_equal(a, b) for a, b in zip(r.extents, pool, strict=True))


@on_loop
async def test_each_sign_of_a_movers_end_counts_once_whichever_comes_first() -> None:
    async with rig() as r:
        first, second = await r.start(r.config(1)), await r.start(r.config(2))
        first.kill()  # its process ends, and with it its channel
        second.channel_closed()  # its channel ends, and the process is killed
        second.channel_closed()
        await r.sink.until(lambda: len(r.sink.gone) == 2)
        for each in (first, second):
            each.channel_closed()
            each.kill()
        assert len(r.sink.gone) == 2
        assert not r.sink.living


@on_loop
async def test_a_copy_starts_with_its_second_half_whichever_that_is() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        give(mover, 1, JobKind.STORE, one_part([(0, 0)], [1]))
        worker.ring.mark_ready([2])  # the other way round
        await asyncio.sleep(0.1)
        assert not r.sink.outcomes
        give(mover, 2, JobKind.STORE, one_part([(0, 1)], [2]))
        assert await r.sink.outcome(2) is DONE
        assert 1 not in r.sink.outcomes
        worker.ring.mark_ready([1])
        assert await r.sink.outcome(1) is DONE


@on_loop
async def test_the_rpc_says_ready_as_well_as_the_ring() -> None:
    async with rig() as r:
        mover = await r.start()
        give(mover, 1, JobKind.STORE, one_part([(0, 0)], [1]))
        mover.mark_ready(JobId(1))
        assert await r.sink.outcome(1) is DONE


@on_loop
async def test_every_piece_of_a_ready_store_starts_until_thousands_of_jobs_came_after_it() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)

        def give_piece(transfer: int, job: int) -> None:
            part = one_part([(0, transfer)], [transfer])
            mover.start_transfer(TransferId(transfer), (JobId(job),), JobKind.STORE, [part])

        worker.ring.mark_ready([7])
        for transfer in (1, 2, 3):
            give_piece(transfer, job=7)
            assert await r.sink.outcome(transfer) is DONE
        mover.post(JobId(7), JobKind.STORE, JobStatus.DONE, 3 * PART_BYTES, 5)
        assert (await worker.record(7)).bytes_copied == 3 * PART_BYTES
        last = 7 + MAX_READY_JOBS - 1
        worker.ring.mark_ready(range(8, last + 1))
        give_piece(4, job=last)
        assert await r.sink.outcome(4) is DONE
        give_piece(5, job=7)
        assert await r.sink.outcome(5) is DONE
        worker.ring.mark_ready(range(last + 1, last + MAX_READY_JOBS + 1))
        last += MAX_READY_JOBS
        give_piece(6, job=last)
        assert await r.sink.outcome(6) is DONE
        worker.ring.mark_ready([last + 1])
        give_piece(7, job=last + 1)
        assert await r.sink.outcome(7) is DONE
        give_piece(8, job=7)
        await asyncio.sleep(0.1)
        assert 8 not in r.sink.outcomes


@on_loop
async def test_the_mover_posts_loads_only() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        give(mover, 1, JobKind.STORE, one_part([(0, 0)], [1]))
        give(mover, 2, JobKind.LOAD, one_part([(0, 5)], [5]))
        worker.ring.mark_ready([1, 2])
        assert await r.sink.outcome(1) is DONE
        assert await r.sink.outcome(2) is DONE
        record = await worker.record(2)
        assert (record.kind, record.bytes_copied) == (JobKind.LOAD, PART_BYTES)
        assert record.duration_ns > 0
        assert [found.job_id for found in worker.records] == [2]


@on_loop
async def test_a_revoked_transfer_never_touches_a_byte() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        engine = r.engine.copy()
        give(mover, 1, JobKind.LOAD, one_part([(0, 0)], [1]))
        mover.revoke(TransferId(1))
        assert await r.sink.outcome(1) is REVOKED
        assert (await worker.record(1)).status == JobStatus.FAILED
        worker.ring.mark_ready([1])
        give(mover, 2, JobKind.STORE, one_part([(0, 1)], [2]))
        worker.ring.mark_ready([2])
        assert await r.sink.outcome(2) is DONE
        assert np.array_equal(r.engine, engine)


@on_loop
async def test_a_load_overtakes_stores_and_queued_stores_can_be_revoked() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        everything = one_part([(0, n % SLOTS) for n in range(4096)], [n % 31 for n in range(4096)])
        stores = range(1, 21)  # 5 GiB in all
        for number in stores:
            give(mover, number, JobKind.STORE, everything)
        worker.ring.mark_ready(list(stores))
        await asyncio.sleep(0.05)
        give(mover, 99, JobKind.LOAD, one_part([(1, 0)], [31]))
        worker.ring.mark_ready([99])
        assert (await worker.record(99)).status == JobStatus.DONE
        assert await r.sink.outcome(99) is DONE
        assert len(r.sink.outcomes) < len(stores), "the load came after all stores"
        for number in stores:
            mover.revoke(TransferId(number))
        await r.sink.until(lambda: len(r.sink.outcomes) == len(stores) + 1)
        assert list(r.sink.outcomes.values()).count(REVOKED) >= 1


@on_loop
async def test_an_abandoned_store_fails_after_its_last_byte() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        give(mover, 1, JobKind.STORE, one_part([(0, 0)], [1]))
        worker.ring.abandon(1)
        worker.ring.mark_ready([1])
        assert await r.sink.outcome(1) is ABANDONED


def give_together(mover: MoverProcess, number: int, jobs: range) -> None:
    """One store of a block for each job, from the engine block with the job's number."""
    part = one_part([(0, job) for job in jobs], list(jobs))
    named = tuple(map(JobId, jobs))
    assert mover.start_transfer(TransferId(number), named, JobKind.STORE, (part,))


@on_loop
async def test_stores_of_one_transfer_start_once_the_worker_is_ready_for_all() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        worker.ring.mark_ready([2])  # before the order, as the ring is often quicker
        give_together(mover, 1, range(1, 4))
        worker.ring.mark_ready([1, 1, 7])
        await asyncio.sleep(0.1)
        assert not r.sink.outcomes
        worker.ring.mark_ready([3])
        assert await r.sink.outcome(1) is DONE
        for job in (1, 2, 3):
            slot = r.extents[0][job * PART_BYTES : (job + 1) * PART_BYTES]
            assert slot.tobytes() == r.block_bytes(job)
        give_together(mover, 2, range(1, 4))  # a further piece needs no other word
        assert await r.sink.outcome(2) is DONE


@on_loop
async def test_stores_of_one_transfer_are_revoked_together_and_leave_nothing() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        worker.ring.mark_ready([1])
        give_together(mover, 1, range(1, 4))
        give(mover, 2, JobKind.STORE, one_part([(0, 9)], [9]))  # waits for its own job
        mover.revoke(TransferId(1))
        assert await r.sink.outcome(1) is REVOKED
        worker.ring.mark_ready([2, 3])
        give_together(mover, 3, range(2, 4))
        assert await r.sink.outcome(3) is DONE
        worker.ring.mark_ready([2])
        assert await r.sink.outcome(2) is DONE


@on_loop
async def test_stores_of_one_transfer_fail_where_one_of_them_is_abandoned() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        give_together(mover, 1, range(1, 4))
        worker.ring.abandon(3)
        worker.ring.mark_ready([1, 2, 3])
        assert await r.sink.outcome(1) is ABANDONED
        give_together(mover, 2, range(1, 3))
        assert await r.sink.outcome(2) is DONE


@on_loop
async def test_null_blocks_store_zeros_and_load_nothing() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        engine = r.engine.copy()
        null = one_part([(0, 0), (0, 1)], [NULL_ENGINE_BLOCK, 2])
        give(mover, 1, JobKind.STORE, null)
        give(mover, 2, JobKind.LOAD, one_part([(0, 5)], [NULL_ENGINE_BLOCK]))
        worker.ring.mark_ready([1, 2])
        assert await r.sink.outcome(1) is DONE
        assert await r.sink.outcome(2) is DONE
        assert (r.sink.bytes[1], r.sink.bytes[2]) == (PART_BYTES, 0)
        assert not r.extents[0][:PART_BYTES].any()
        assert r.extents[0][PART_BYTES : 2 * PART_BYTES].tobytes() == r.block_bytes(2)
        assert np.array_equal(r.engine, engine)


@on_loop
async def test_a_row_is_unmapped_only_after_the_last_transfer_that_uses_it() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        give(mover, 1, JobKind.STORE, one_part([(1, 0)], [1]))
        mover.unmap_row(RowId(1))
        mover.unmap_row(RowId(2))
        await r.sink.until(lambda: r.sink.unmapped)
        assert r.sink.unmapped == [2]
        worker.ring.mark_ready([1])
        assert await r.sink.outcome(1) is DONE
        await r.sink.until(lambda: 1 in r.sink.unmapped)
        maps = proc_text(mover.pid, "maps")
        assert str(r.extent_files.path(0)) in maps
        assert str(r.extent_files.path(1)) not in maps
        give(mover, 2, JobKind.STORE, one_part([(1, 0)], [1]))
        assert await r.sink.outcome(2) is FAILED
        mover.map_row(RowId(1), 1)
        give(mover, 3, JobKind.STORE, one_part([(1, 0)], [1]))
        worker.ring.mark_ready([3])
        assert await r.sink.outcome(3) is DONE


@on_loop
async def test_a_full_queue_refuses_and_leaves_the_word_to_control(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "MAX_TRANSFERS_QUEUED", 3)
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        for number in (1, 2, 3):
            assert give(mover, number, JobKind.STORE, one_part([(0, number)], [number]))
        assert not give(mover, 4, JobKind.LOAD, one_part([(0, 4)], [4]))
        worker.ring.mark_ready([1, 2, 3, 4])
        await r.sink.until(lambda: len(r.sink.outcomes) == 3)
        assert not worker.board.poll(), "control says that a refused load has failed, not the mover"
        assert give(mover, 5, JobKind.STORE, one_part([(0, 5)], [5]))


@on_loop
async def test_a_queue_takes_so_many_bytes_of_orders_and_others_once_they_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = one_part([(0, 1)], [1])
    monkeypatch.setattr(process, "MAX_ORDER_BYTES_QUEUED", 3 * part.nbytes)
    async with rig() as r:
        mover = await r.start()
        assert all(give(mover, number, JobKind.STORE, part) for number in (1, 2, 3))
        assert not give(mover, 4, JobKind.STORE, part)
        mover.mark_ready(JobId(1))
        assert await r.sink.outcome(1) is DONE
        assert give(mover, 5, JobKind.STORE, part)
        assert not give(mover, 6, JobKind.STORE, part)


@on_loop
async def test_rows_and_present_engine_pages_are_warm_before_the_first_copy() -> None:
    async with rig() as r:
        mover = await r.start()
        assert await mover.warm(5.0)
        assert _shared_rss(mover.pid) >= EXTENTS * EXTENT_BYTES + BLOCKS * PART_BYTES
        mover.map_row(RowId(8), 8)  # there is no such extent: nothing to wait for
        assert await mover.warm(5.0)


@on_loop
async def test_warming_allocates_nothing_in_the_engines_holes() -> None:
    async with rig() as r:
        fd = os.memfd_create("sparse")
        os.ftruncate(fd, BLOCKS * PART_BYTES + 8192)
        os.pwrite(fd, b"x", 3 << 20 >> 1)
        region = process.Region(fd, 4096, BLOCKS * PART_BYTES)
        await r.start(replace(r.config(), regions=(region,)))
        assert os.fstat(fd).st_blocks * 512 == mmap.PAGESIZE
        os.close(fd)


@on_loop
async def test_a_mover_that_is_stopped_ends_in_order_with_what_it_copies() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        worker.ring.mark_ready([1])
        give(mover, 1, JobKind.STORE, one_part([(0, 3)], [5]))
        assert await r.sink.outcome(1) is DONE
        child = mover._child
        await mover.stop()
        assert child.returncode == 0
        assert r.sink.gone == [(mover.mover, "stopped")]


@on_loop
async def test_the_end_of_a_mover_that_was_killed_says_by_which_signal_and_no_more() -> None:
    async with rig() as r:
        mover = await r.start()
        os.kill(mover.pid, signal.SIGKILL)
        await r.sink.until(lambda: r.sink.gone)
        [(_, reason)] = r.sink.gone
        assert reason == "killed by SIGKILL"


@on_loop
async def test_the_worker_cannot_write_its_board() -> None:
    async with rig() as r:
        mover = await r.start()
        with pytest.raises(PermissionError):
            mmap.mmap(mover.board_fd, BOARD_BYTES)


@on_loop
async def test_a_waiting_mover_is_small_and_sleeps() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        give(mover, 1, JobKind.STORE, one_part([(0, 0)], [1]))
        worker.ring.mark_ready([1])
        assert await r.sink.outcome(1) is DONE
        for _ in range(10):  # on a busy machine it may be long in coming to rest
            before = _cpu_ticks(mover.pid)
            await asyncio.sleep(1.0)
            if _cpu_ticks(mover.pid) == before:
                break
        else:
            pytest.fail("it worked in each of ten seconds, and nobody had asked for anything")
        rollup = proc_text(mover.pid, "smaps_rollup")
        pss = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
        assert int(pss.split()[1]) << 10 < 100 << 20
        maps = proc_text(mover.pid, "maps")
        assert "grpc" not in maps
        assert "protobuf" not in maps


def _shared_rss(pid: int) -> int:
    status = proc_text(pid, "status")
    line = next(line for line in status.splitlines() if line.startswith("RssShmem:"))
    return int(line.split()[1]) << 10


def _cpu_ticks(pid: int) -> int:
    fields = proc_text(pid, "stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@on_loop
async def test_a_movers_stores_leave_scarce_processors_to_others_and_its_loads_do_not() -> None:
    async with rig() as r:
        mover = await r.start()
        here = os.getpriority(os.PRIO_PROCESS, 0)
        # Niceness ends at 19: a test that is run with some of its own may leave no room for it.
        expected = min(STORE_NICENESS, 19 - here)

        def nices() -> list[int]:
            threads = [int(path.name) for path in Path(f"/proc/{mover.pid}/task").iterdir()]
            return sorted(os.getpriority(os.PRIO_PROCESS, each) - here for each in threads)

        async with asyncio.timeout(30):
            while nices()[-1] != expected:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        found = nices()
        assert len(found) >= 4, "one listens, two copy, one warms"
        assert found[:-1] == [0] * (len(found) - 1)


@on_loop
async def test_a_mover_that_may_not_be_nicer_stores_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_NICENESS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        give(mover, 1, JobKind.STORE, one_part([(0, 0)], [5]))
        worker.ring.mark_ready([1])
        assert await r.sink.outcome(1) is DONE
