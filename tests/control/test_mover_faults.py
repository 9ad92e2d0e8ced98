"""A mover and its neighbours when something is wrong: the registration, the worker, the engine's
memory, the mover itself, or control."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvd import native
from kvd.core.errors import InvalidArgument, KvdError, LayoutMismatch
from kvd.core.events import JobKind, JobStatus, TransferOutcome
from kvd.core.keys import JobId, MoverId, RowId, TransferId
from kvd.linux.signals import IGNORED, STOPPING
from kvd.mover import registration_errors
from kvd.mover.facts import GpuFacts, MoverFacts
from kvd.mover.frames import (
    Finished,
    FrameKind,
    Refusal,
    pack_finished,
    pack_refusal,
    unpack_refusal,
)
from kvd.mover.layout import CudaRegion, GpuConfig
from kvd.mover.process import (
    MAX_FACTS_DUE,
    GroupMap,
    LocatedPart,
    MoverConfig,
    MoverProcess,
    MoverStartError,
    Region,
)
from kvd.processes import parent
from kvd.processes.framing import MAX_TEXT_CHARS, BadFrame, frame, pack_number
from kvd.tiers import frames as tier_frames
from kvd_proto import layout
from kvd_proto.limits import MAX_IDS
from tests.control.mover_rig import (
    BLOCKS,
    EXTENT_BYTES,
    EXTENTS,
    PART_BYTES,
    PATIENCE_S,
    SLOTS,
    Rig,
    WorkerEnd,
    give,
    on_loop,
    one_part,
    proc_text,
    rig,
)
from tests.waiting import wait_until

DONE, FAILED = TransferOutcome.DONE, TransferOutcome.FAILED
SENT_TO_GROUPS = (*STOPPING, *IGNORED, signal.SIGHUP, signal.SIGUSR1)


# -- registrations that are refused -----------------------------------------------------------


async def refusal(r: Rig, config: MoverConfig) -> KvdError:
    """What the start says; nothing may be left of it."""
    with pytest.raises(KvdError) as refused:
        await r.start(config)
    assert not r.sink.gone
    return refused.value


def over(r: Rig, fd: int, size: int = BLOCKS * PART_BYTES) -> MoverConfig:
    return replace(r.config(), regions=(Region(fd, 0, size),))


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@on_loop
async def test_mover_that_can_not_be_noted_ends_before_it_maps_anything() -> None:
    """Else the pool's next owner could not end it, and nobody would: control has no handle."""
    async with rig() as r:
        started: list[int] = []

        def full(mover: MoverId, pid: int, start_time: int) -> None:
            started.append(pid)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        r.sink.process_started = full  # type: ignore[method-assign]
        with pytest.raises(MoverStartError, match="No space left"):
            await r.start()
        [pid] = started
        assert not proc_text(pid, "stat")
        assert not r.sink.gone


@on_loop
async def test_memory_smaller_than_said_is_refused_with_its_figures() -> None:
    async with rig() as r:
        with closing(os.memfd_create("small")) as fd:
            os.ftruncate(fd, 4096)
            refused = await refusal(r, over(r, fd))
        assert isinstance(refused, InvalidArgument)
        assert refused.field == "memories[0].bytes"
        assert f"ends at byte {BLOCKS * PART_BYTES}, its file has 4096" in str(refused)


@on_loop
async def test_files_that_are_no_shared_memory_are_refused(tmp_path: Path) -> None:
    async with rig() as r:
        reading, writing = os.pipe()
        on_disk = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(on_disk, BLOCKS * PART_BYTES)
        in_memory = os.statvfs(tmp_path).f_fsid == os.statvfs("/dev/shm").f_fsid
        with closing(reading), closing(writing), closing(on_disk):
            refused = await refusal(r, over(r, reading))
            assert (refused.field, str(refused)) == (
                "memories[0]",
                "memories[0] is not shared memory",
            )
            if not in_memory:
                assert (await refusal(r, over(r, on_disk))).field == "memories[0]"


@on_loop
async def test_memory_that_cannot_be_written_is_refused() -> None:
    async with rig() as r:
        with closing(os.open(f"/proc/self/fd/{r.engine_fd}", os.O_RDONLY)) as fd:
            assert "reading and writing" in str(await refusal(r, over(r, fd)))


@on_loop
async def test_memory_of_a_gpu_is_refused_with_its_reason_where_there_is_no_cupy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cupy.py").write_text("raise ModuleNotFoundError(name='cupy')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with rig() as r:
        memory = CudaRegion(0, BLOCKS * PART_BYTES, handle=bytes(64))
        gpu = GpuConfig("GPU-01234567-89ab-cdef-0123-456789abcdef")
        refused = await refusal(r, replace(r.config(), regions=(memory,), gpu=gpu))
        assert refused.reason == registration_errors.TRANSPORT_UNSUPPORTED
        assert refused.field == "memories[0]"


@on_loop
async def test_fragments_that_dont_add_up_are_a_layout_mismatch() -> None:
    async with rig() as r:
        config = r.config()
        group = replace(config.groups[0], part_bytes=PART_BYTES - 8)
        refused = await refusal(r, replace(config, groups=(group,)))
        assert isinstance(refused, LayoutMismatch)
        assert refused.field == "groups[0].fragments"


@on_loop
async def test_a_block_beyond_its_memory_is_refused_by_name() -> None:
    async with rig() as r:
        config = r.config()
        group = replace(config.groups[0], num_blocks=BLOCKS + 1)
        refused = await refusal(r, replace(config, groups=(group,)))
        assert refused.field == "groups[0].fragments[3].base"


@on_loop
async def test_absurd_numbers_are_refused_before_anything_is_mapped() -> None:
    async with rig() as r:
        config = r.config()
        for group, field in (
            (GroupMap(0, 1, 8, config.groups[0].fragments), "groups[0].num_blocks"),
            (GroupMap(1 << 40, 1, 8, config.groups[0].fragments), "groups[0].num_blocks"),
            (GroupMap(4, 65, 8, config.groups[0].fragments), "groups[0].blocks_per_block"),
            (GroupMap(4, 1, 8, ()), "groups[0].fragments"),
        ):
            assert (await refusal(r, replace(config, groups=(group,)))).field == field


@on_loop
async def test_a_process_that_cannot_start_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig() as r:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(MoverStartError, match="exited with status 1"):
            await r.start()
        monkeypatch.setattr(sys, "executable", "/nonexistent")
        with pytest.raises(MoverStartError, match="can't be started"):
            await r.start()
        assert not r.sink.gone


# -- transfers that are refused ---------------------------------------------------------------


@on_loop
async def test_impossible_transfers_fail_and_the_mover_goes_on() -> None:
    async with rig() as r:
        mover = await r.start(rows=2)
        worker = WorkerEnd(mover)
        engine, pool = r.engine.copy(), [extent.copy() for extent in r.extents]
        beyond = LocatedPart(
            0,
            np.zeros(1, np.uint32),
            np.array([EXTENT_BYTES - 8], np.uint64),
            np.zeros((1, 1), np.uint32),
        )
        huge = replace(beyond, offsets=np.array([(1 << 64) - 8], np.uint64))
        bad = [
            one_part([(0, 0)], [BLOCKS]),  # no such engine block
            one_part([(2, 0)], [1]),  # a row that isn't mapped
            one_part([(0, SLOTS)], [1]),  # past the extent's end
            beyond,
            huge,
            replace(one_part([(0, 0)], [1]), group=1),
            replace(one_part([(0, 0)], [1]), engine_blocks=np.zeros((1, 2), np.uint32)),
        ]
        for number, part in enumerate(bad, start=1):
            kind = JobKind.LOAD if number % 2 else JobKind.STORE
            give(mover, number, kind, one_part([(0, 0)], [1]), part)
            worker.ring.mark_ready([number])
            assert await r.sink.outcome(number) is FAILED
            if kind is JobKind.LOAD:
                assert (await worker.record(number)).status == JobStatus.FAILED
        assert np.array_equal(r.engine, engine)
        assert all(np.array_equal(a, b) for a, b in zip(r.extents, pool, strict=True))
        give(mover, 50, JobKind.STORE, one_part([(0, 0)], [1]))
        worker.ring.mark_ready([50])
        assert await r.sink.outcome(50) is DONE


# -- a hostile worker -------------------------------------------------------------------------


@on_loop
async def test_garbage_in_the_ring_neither_stops_nor_grows_the_mover() -> None:
    async with rig() as r:
        mover = await r.start()
        noise = np.random.default_rng(3)
        with mmap.mmap(mover.ring_fd, layout.RING_BYTES) as ring:
            words = np.frombuffer(ring, dtype=np.uint64)
            before = _anonymous(mover.pid)
            tail = layout.RING_TAIL_OFFSET // 8
            leave = layout.RING_LEAVE_OFFSET // 8  # left alone: with it a worker ends its mover
            for round_ in range(300):
                garbage = noise.integers(0, 1 << 64, len(words), dtype=np.uint64)
                words[8:leave], words[leave + 1 :] = garbage[8:leave], garbage[leave + 1 :]
                words[tail] = round_ * 8000 if round_ % 2 else words[tail]
                os.eventfd_write(mover.event_fd, 1)
                await asyncio.sleep(0.001)
            give(mover, 1, JobKind.STORE, one_part([(0, 0)], [1]))
            words[8:] = 0
            del words
        mover.mark_ready(JobId(1))
        assert await r.sink.outcome(1) is DONE
        assert _anonymous(mover.pid) - before < 8 << 20
        assert r.extents[0][:PART_BYTES].tobytes() == r.block_bytes(1)


@on_loop
async def test_a_worker_that_drains_and_blocks_its_eventfd_cannot_hang_the_mover() -> None:
    async with rig() as r:
        mover = await r.start()
        os.set_blocking(mover.event_fd, True)
        for number in range(1, 30):
            os.eventfd_write(mover.event_fd, 1)
            os.eventfd_read(mover.event_fd)
            give(mover, number, JobKind.STORE, one_part([(0, 0)], [1]))
            mover.mark_ready(JobId(number))
            assert await r.sink.outcome(number) is DONE


@on_loop
async def test_thousands_of_jobs_said_ready_in_one_call_hold_others_up_for_little() -> None:
    async with rig() as r:
        mover = await r.start()
        jobs = [JobId(number) for number in range(1, MAX_IDS + 1)]
        for number in (1, MAX_IDS):
            give(mover, number, JobKind.STORE, one_part([(0, 0)], [1]))
        begun = time.perf_counter()
        mover.mark_ready(*jobs)
        together = time.perf_counter() - begun
        for number in (1, MAX_IDS):
            assert await r.sink.outcome(number) is DONE
        begun = time.perf_counter()
        for job in jobs:
            mover.mark_ready(job)
        assert together < (time.perf_counter() - begun) / 5


# -- the engine's memory and the mover's death ------------------------------------------------


@on_loop
async def test_truncated_engine_memory_ends_only_that_mover_and_says_why() -> None:
    async with rig() as r, rig() as other:
        mover = await r.start(replace(r.config(), mover=MoverId(1)))
        neighbour = await other.start(replace(other.config(), mover=MoverId(2)))
        worker = WorkerEnd(mover)
        os.truncate(f"/proc/self/fd/{r.engine_fd}", 4096)
        give(mover, 1, JobKind.STORE, one_part([(0, 0)], [1]))
        worker.ring.mark_ready([1])
        await r.sink.until(lambda: r.sink.gone)
        assert "SIGBUS: the engine's memory was truncated" in r.sink.gone[0][1]
        assert not r.sink.outcomes
        give(neighbour, 1, JobKind.STORE, one_part([(0, 0)], [1]))
        neighbour.mark_ready(JobId(1))
        assert await other.sink.outcome(1) is DONE


@on_loop
async def test_a_missing_extent_fails_its_transfers_only() -> None:
    async with rig() as r:
        mover = await r.start(rows=1)
        mover.map_row(RowId(9), 9)
        give(mover, 1, JobKind.STORE, one_part([(9, 0)], [1]))
        assert await r.sink.outcome(1) is FAILED
        give(mover, 2, JobKind.STORE, one_part([(0, 0)], [1]))
        mover.mark_ready(JobId(2))
        assert await r.sink.outcome(2) is DONE


@on_loop
async def test_a_killed_mover_is_gone_once_and_its_words_before_count() -> None:
    async with rig() as r:
        mover = await r.start()
        worker = WorkerEnd(mover)
        for number in range(1, 200):
            give(mover, number, JobKind.STORE, one_part([(0, 0)], [1]))
        worker.ring.mark_ready(list(range(1, 100)))
        assert await r.sink.outcome(99) is DONE
        give(mover, 300, JobKind.STORE, one_part([(0, 0)], [1]))
        os.kill(mover.pid, signal.SIGKILL)
        mover.kill()
        await r.sink.until(lambda: r.sink.gone)
        await asyncio.sleep(1.2)  # past every timer that could say it again
        assert len(r.sink.gone) == 1
        assert sorted(r.sink.outcomes) == list(range(1, 100))
        # Orders to a mover that is gone go nowhere, quietly.
        mover.revoke(TransferId(300))
        mover.unmap_row(RowId(0))
        mover.post(JobId(1), JobKind.STORE, JobStatus.DONE, 0, 0)
        mover.kill()
        await mover.stop()


@on_loop
async def test_a_stopped_process_is_killed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "STOP_S", 0.2)
    async with rig() as r:
        mover = await r.start()
        os.kill(mover.pid, signal.SIGSTOP)
        await mover.stop()
        assert len(r.sink.gone) == 1


@on_loop
async def test_a_process_that_was_killed_and_stays_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(parent, "STAYS_S", 0.0)
    async with rig() as r:
        mover = await r.start()
        with monkeypatch.context() as undying:  # as in the kernel, where no signal reaches it
            undying.setattr(mover._child, "kill", lambda: None)
            mover.kill()
            mover.kill()
            await asyncio.to_thread(wait_until, lambda: bool(caplog.messages), "a word of it")
        (said,) = caplog.messages
        assert f"the mover process {mover.pid} was killed and has not ended" in said
        mover.kill()
        await r.sink.until(lambda: r.sink.gone)
        mover._tell_that_it_stays()
        assert caplog.messages == [said]


@on_loop
async def test_signals_to_the_whole_group_leave_the_mover_alone() -> None:
    async with rig() as r:
        mover = await r.start()
        for number in SENT_TO_GROUPS:
            os.kill(mover.pid, number)
        give(mover, 1, JobKind.STORE, one_part([(0, 0)], [1]))
        mover.mark_ready(JobId(1))
        assert await r.sink.outcome(1) is DONE


@on_loop
async def test_a_mover_that_does_not_read_is_ended_before_control_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent, "MAX_BYTES_UNREAD", 1 << 20)
    async with rig() as r:
        mover = await r.start()
        os.kill(mover.pid, signal.SIGSTOP)
        for job in range(100_000):
            mover.mark_ready(JobId(job))
        await r.sink.until(lambda: r.sink.gone)
        assert "does not read" in r.sink.gone[0][1]


@on_loop
async def test_why_a_mover_refuses_is_cut_to_what_every_message_can_carry() -> None:
    async with rig() as r:
        mover = MoverProcess(r.config(), r.sink)
        long = "\ud800" + "x" * 2_000_000
        body = pack_refusal(Refusal("InvalidArgument", long, long, long))
        parent.Channel(mover).data_received(frame(FrameKind.REFUSED, body))
        with pytest.raises(KvdError) as refused:
            await mover._hello
        for said in (str(refused.value), refused.value.field):
            assert 2 <= len(said.encode()) <= 2 * MAX_TEXT_CHARS


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"7", b"[" * 100_000, b'{"no": 1}'])
def test_a_refusal_that_is_none_is_nonsense(body: bytes) -> None:
    for unpack in (unpack_refusal, tier_frames.unpack_refusal):
        with pytest.raises(BadFrame, match="no refusal"):
            unpack(body)


LIBRARY = native.library()
TRUE_FACTS = MoverFacts.of_host_memory(LIBRARY.level if LIBRARY else None, native.why_not())


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FrameKind.FACTS, b"{}"),
        (FrameKind.FACTS, MoverFacts(gpu=GpuFacts("GPU-of-others", "a GPU", "580")).pack()),
        (FrameKind.ROW_UNMAPPED, b""),
        (FrameKind.ROW_UNMAPPED, pack_number(0)),  # it is mapped, and shall be
        (FrameKind.ROW_WARM, pack_number(EXTENTS)),  # it was never mapped
    ],
)
@on_loop
async def test_a_mover_that_writes_nonsense_is_ended_with_that_as_the_reason(
    kind: FrameKind, body: bytes
) -> None:
    async with rig() as r:
        mover = await r.start()
        parent.Channel(mover).data_received(frame(kind, body))
        await r.sink.until(lambda: r.sink.gone)
        assert "wrote nonsense" in r.sink.gone[0][1]
        assert mover.facts in (MoverFacts(), TRUE_FACTS)  # not what came last


@on_loop
async def test_a_mover_that_tells_its_facts_again_and_again_is_ended() -> None:
    async with rig() as r:
        mover = await r.start()
        parent.Channel(mover).data_received(3 * frame(FrameKind.FACTS, TRUE_FACTS.pack()))
        await r.sink.until(lambda: r.sink.gone)
        assert r.sink.gone[0][1] == "wrote nonsense: FACTS at the wrong time"


@on_loop
async def test_a_mover_may_tell_its_facts_for_each_row_and_only_so_many_at_once() -> None:
    async with rig() as r:
        mover = await r.start(rows=0)
        for _ in range(2 * MAX_FACTS_DUE):
            mover.map_row(RowId(0), 0)
        assert await mover.warm(PATIENCE_S)
        last = replace(TRUE_FACTS, note="the last that may come")
        told = [TRUE_FACTS] * (MAX_FACTS_DUE - 1) + [last, TRUE_FACTS]
        frames = [frame(FrameKind.FACTS, facts.pack()) for facts in told]
        parent.Channel(mover).data_received(b"".join(frames))
        assert mover.facts == last
        await r.sink.until(lambda: r.sink.gone)
        assert r.sink.gone[0][1] == "wrote nonsense: FACTS at the wrong time"


_CONTROL = """
import asyncio, sys
from tests.control.mover_rig import Rig, give, one_part
from kvd.core.events import JobKind
from pathlib import Path

async def live() -> None:
    r = Rig(Path(sys.argv[1]))
    mover = await r.start()
    print(mover.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(live())
"""


def test_a_mover_dies_with_control(shared_directory: Path) -> None:
    (shared_directory / "extents").mkdir()
    control = subprocess.Popen(
        [sys.executable, "-c", _CONTROL, str(shared_directory)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert control.stdout is not None
    pid = int(control.stdout.readline())
    with closing(os.pidfd_open(pid)) as mover:
        control.kill()
        control.wait()
        control.stdout.close()
        ended, _, _ = select.select([mover], [], [], 2.0)
    assert ended, "the mover outlived control"


def _anonymous(pid: int) -> int:
    status = proc_text(pid, "status")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def _sums(*numbers: int) -> npt.NDArray[np.uint64]:
    return np.array(numbers, dtype=np.uint64)


LOAD, STORE = JobKind.LOAD, JobKind.STORE
GIVEN = TransferId(1)  # two slots, with their checksums
IMPOSSIBLE_ENDS = {
    "of another transfer": (LOAD, Finished(TransferId(2), DONE)),
    "more bytes than it has": (LOAD, Finished(GIVEN, DONE, bytes_copied=2 * PART_BYTES + 1)),
    "longer than it can have taken": (LOAD, Finished(GIVEN, DONE, duration_ns=1 << 63)),
    "a load's checksums": (LOAD, Finished(GIVEN, DONE, checksums=_sums(1, 2))),
    "a store without checksums": (STORE, Finished(GIVEN, DONE)),
    "one checksum for all": (STORE, Finished(GIVEN, DONE, checksums=_sums(1))),
    "checksums of a failed store": (STORE, Finished(GIVEN, FAILED, checksums=_sums(1, 2))),
    "damaged in a store": (STORE, Finished(GIVEN, FAILED, damaged=_sums(0))),
    "damaged and done": (LOAD, Finished(GIVEN, DONE, damaged=_sums(0))),
    "a slot that it has not": (LOAD, Finished(GIVEN, FAILED, damaged=_sums(2))),
    "the last slot, counted back": (LOAD, Finished(GIVEN, FAILED, damaged=_sums((1 << 64) - 1))),
    "a slot twice": (LOAD, Finished(GIVEN, FAILED, damaged=_sums(1, 1))),
}


@pytest.mark.parametrize("name", IMPOSSIBLE_ENDS)
@on_loop
async def test_a_mover_that_says_of_a_transfer_what_can_not_be_is_ended_for_nonsense(
    name: str,
) -> None:
    kind, said = IMPOSSIBLE_ENDS[name]
    async with rig() as r:
        mover = await r.start(replace(r.config(), checksums=True))
        part = one_part([(0, 0), (0, 1)], [1, 2])
        give(mover, GIVEN, kind, replace(part, checksums=_sums(3, 4) if kind is LOAD else None))
        parent.Channel(mover).data_received(frame(FrameKind.FINISHED, pack_finished(said)))
        await r.sink.until(lambda: r.sink.gone)
        assert "wrote nonsense" in r.sink.gone[0][1]
        assert not r.sink.finished


@on_loop
async def test_a_transfer_that_its_mover_says_has_ended_twice_ends_the_mover() -> None:
    async with rig() as r:
        mover = await r.start()
        give(mover, GIVEN, STORE, one_part([(0, 0)], [1]))
        said = frame(FrameKind.FINISHED, pack_finished(Finished(GIVEN, FAILED)))
        parent.Channel(mover).data_received(said + said)
        await r.sink.until(lambda: r.sink.gone)
        assert "wrote nonsense: the end of transfer 1" in r.sink.gone[0][1]
        assert list(r.sink.finished) == [GIVEN]


@on_loop
async def test_checksums_where_none_are_kept_end_the_mover() -> None:
    async with rig() as r:
        mover = await r.start()
        give(mover, GIVEN, STORE, one_part([(0, 0)], [1]))
        wrong = Finished(GIVEN, DONE, checksums=_sums(1))
        parent.Channel(mover).data_received(frame(FrameKind.FINISHED, pack_finished(wrong)))
        await r.sink.until(lambda: r.sink.gone)
        assert "wrote nonsense: 1 checksums" in r.sink.gone[0][1]
