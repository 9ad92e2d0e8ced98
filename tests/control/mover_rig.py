"""A real mover process over real shared memory, with models of every byte on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from kvd.core.events import JobKind, TransferOutcome
from kvd.core.keys import JobId, MoverId, RowId, TransferId
from kvd.mover.process import (
    Finished,
    FragmentSpec,
    GroupMap,
    LocatedPart,
    MoverConfig,
    MoverProcess,
    Region,
)
from kvd.processes.mappings import ExtentFiles
from kvd_proto.board import BoardReader, BoardRecord
from kvd_proto.ring import RingWriter

BLOCKS = 32
FRAGMENTS = 4
FRAGMENT_BYTES = 16 << 10
PART_BYTES = FRAGMENTS * FRAGMENT_BYTES
EXTENT_BYTES = 1 << 20
EXTENTS = 3
SLOTS = EXTENT_BYTES // PART_BYTES
PATIENCE_S = 10.0


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test's coroutine on uvloop, as the daemon does."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        uvloop.run(asyncio.wait_for(_awaited(test(*args, **kwargs)), 60))

    return run


async def _awaited(result: Awaitable[None]) -> None:
    await result


class HeardBySink:
    """A MoverSink that remembers, and wakes whoever waits."""

    def __init__(self) -> None:
        self.outcomes: dict[int, TransferOutcome] = {}
        self.order: list[int] = []
        self.bytes: dict[int, int] = {}
        self.finished: dict[int, Finished] = {}
        self.unmapped: list[int] = []
        self.gone: list[tuple[int, str]] = []
        self.living: set[int] = set()  # pids
        self._changed = asyncio.Event()

    def process_started(self, mover: MoverId, pid: int, start_time: int) -> None:
        self.living.add(pid)

    def process_ended(self, mover: MoverId, pid: int) -> None:
        self.living.remove(pid)

    def transfer_finished(self, mover: MoverId, finished: Finished) -> None:
        transfer = finished.transfer
        assert transfer not in self.outcomes, "a transfer ended twice"
        assert not self.gone, "a word after the mover was gone"
        self.outcomes[transfer] = finished.outcome
        self.order.append(transfer)
        self.bytes[transfer] = finished.bytes_copied
        self.finished[transfer] = finished
        self._changed.set()

    def row_unmapped(self, mover: MoverId, row: RowId) -> None:
        self.unmapped.append(row)
        self._changed.set()

    def mover_gone(self, mover: MoverId, reason: str) -> None:
        self.gone.append((mover, reason))
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what was heard fulfils the condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def outcome(self, transfer: int) -> TransferOutcome:
        await self.until(lambda: transfer in self.outcomes)
        return self.outcomes[transfer]


class Rig:
    """One engine's memory, one pool directory, and the movers between them."""

    def __init__(self, directory: Path) -> None:
        self.sink = HeardBySink()
        self.engine_fd = os.memfd_create("engine", os.MFD_CLOEXEC)
        # 4 KiB before and after the blocks belong to nobody.
        os.ftruncate(self.engine_fd, BLOCKS * PART_BYTES + 8192)
        self.engine = _noise(f"/proc/self/fd/{self.engine_fd}", 1)
        self.extents: list[npt.NDArray[np.uint8]] = []
        self.extent_files = ExtentFiles(directory / "extents", 0, EXTENT_BYTES)
        for number in range(EXTENTS):
            path = self.extent_files.path(number)
            path.touch()
            os.truncate(path, EXTENT_BYTES)
            self.extents.append(_noise(str(path), 100 + number))
        self.movers: list[MoverProcess] = []

    def config(self, mover: int = 1) -> MoverConfig:
        size = BLOCKS * FRAGMENT_BYTES
        fragments = tuple(
            FragmentSpec(0, f * size, FRAGMENT_BYTES, FRAGMENT_BYTES) for f in range(FRAGMENTS)
        )
        region = Region(self.engine_fd, 4096, BLOCKS * PART_BYTES)
        group = GroupMap(BLOCKS, 1, PART_BYTES, fragments)
        return MoverConfig(MoverId(mover), (region,), (group,), self.extent_files)

    async def start(self, config: MoverConfig | None = None, rows: int = EXTENTS) -> MoverProcess:
        mover = await MoverProcess.start(config or self.config(), self.sink)
        self.movers.append(mover)
        for row in range(rows):
            mover.map_row(RowId(row), row)
        return mover

    def block(self, number: int) -> list[slice]:
        """Where the fragments of an engine block lie in the engine's file."""
        size = BLOCKS * FRAGMENT_BYTES
        starts = (4096 + f * size + number * FRAGMENT_BYTES for f in range(FRAGMENTS))
        return [slice(start, start + FRAGMENT_BYTES) for start in starts]

    def block_bytes(self, number: int) -> bytes:
        return b"".join(self.engine[piece].tobytes() for piece in self.block(number))


def _noise(path: str, seed: int) -> npt.NDArray[np.uint8]:
    view = np.memmap(path, dtype=np.uint8, mode="r+")
    view[:] = np.random.default_rng(seed).integers(0, 256, len(view), dtype=np.uint8)
    return view


@contextlib.asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    """A rig whose movers and files are gone afterwards; tests/conftest.py checks descriptors."""
    directory = Path(tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir="/dev/shm"))
    (directory / "extents").mkdir()
    made = Rig(directory)
    try:
        yield made
    finally:
        for mover in made.movers:
            if not any(number == mover.mover for number, _ in made.sink.gone):
                await mover.stop()
        os.close(made.engine_fd)
        shutil.rmtree(directory)
    for mover in made.movers:
        assert not proc_text(mover.pid, "stat"), "a mover process is left"
        assert [number for number, _ in made.sink.gone].count(mover.mover) == 1
    assert not made.sink.living, "the end of a process was not told"


def proc_text(pid: int, name: str) -> str:
    """A file of /proc/<pid>, or "" when the process is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class WorkerEnd:
    """What the rank's worker holds."""

    def __init__(self, mover: MoverProcess) -> None:
        self.ring = RingWriter(mover.ring_fd, mover.event_fd)
        self.board = BoardReader(mover.board_fd)
        self.records: list[BoardRecord] = []

    async def record(self, job: int) -> BoardRecord:
        """The board's word on a job."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.records += self.board.poll()
            for record in self.records:
                if record.job_id == job:
                    return record
            await asyncio.sleep(0.001)
        raise TimeoutError(f"the board says nothing of job {job}")


def one_part(slots: list[tuple[int, int]], blocks: list[int]) -> LocatedPart:
    """Slots as (extent, ordinal), one engine block each."""
    return LocatedPart(
        0,
        np.array([extent for extent, _ in slots], dtype=np.uint32),
        np.array([ordinal * PART_BYTES for _, ordinal in slots], dtype=np.uint64),
        np.array(blocks, dtype=np.uint32).reshape(-1, 1),
    )


def give(mover: MoverProcess, number: int, kind: JobKind, *parts: LocatedPart) -> bool:
    """Start a transfer whose job has the same number."""
    return mover.start_transfer(TransferId(number), (JobId(number),), kind, parts)
