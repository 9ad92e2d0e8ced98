"""A mover that lives in the simulation: copies real bytes, late, partly, or never."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt

from kvd.core.events import JobKind, JobStatus, TransferOutcome
from kvd.core.keys import JobId, MoverId, RowId, TransferId
from kvd.mover.checksums import part_checksums
from kvd.mover.facts import MoverFacts
from kvd.mover.process import Finished, LocatedPart, MoverSink
from kvd.pool.pool import Pool
from kvd_proto.layout import NULL_ENGINE_BLOCK

Bytes = npt.NDArray[np.uint8]


@dataclass
class Faults:
    """How badly movers behave: chances, each 0..1."""

    fail: float = 0.0  # a copy ends after some of its blocks
    hang: float = 0.0  # a copy starts and never ends
    slow: float = 0.0  # a copy takes up to 5 s


@dataclass
class SimTransfer:
    transfer: TransferId
    jobs: tuple[JobId, ...]
    kind: JobKind
    parts: list[LocatedPart]
    started: bool = False


@dataclass
class SimMover:
    """Stands in for MoverProcess; `memory` is the rank's engine memory, one array a group."""

    mover: MoverId
    pool: Pool
    sink: MoverSink
    memory: list[Bytes]  # [num_blocks, engine block bytes]
    random: Random
    faults: Faults
    checksums: bool = False
    pid: int = 4_194_304  # above the largest that Linux gives: never a real process
    start_time: int = 1
    facts: MoverFacts = field(default_factory=MoverFacts)
    engine_blocks: tuple[int, ...] = ()  # not known
    board: deque[tuple[JobId, JobKind, JobStatus]] = field(default_factory=deque)
    alive: bool = True
    ready: set[JobId] = field(default_factory=set)
    waiting: dict[TransferId, SimTransfer] = field(default_factory=dict)
    rows: dict[RowId, Bytes] = field(default_factory=dict)
    extents: dict[int, Bytes] = field(default_factory=dict)

    # -- what the daemon orders ---------------------------------------------------------------

    def map_row(self, row: RowId, extent: int) -> None:
        self.rows[row] = self.extents[extent] = np.memmap(
            self.pool.extent_files.path(extent), dtype=np.uint8, mode="r+"
        )

    def unmap_row(self, row: RowId) -> None:
        def unmapped() -> None:
            if self.alive:
                self.rows.pop(row, None)
                self.sink.row_unmapped(self.mover, row)

        self._later(unmapped)

    def start_transfer(
        self,
        transfer: TransferId,
        jobs: tuple[JobId, ...],
        kind: JobKind,
        parts: Sequence[LocatedPart],
    ) -> bool:
        if self.random.random() < 0.02:
            return False  # the queue is full
        self.waiting[transfer] = SimTransfer(transfer, jobs, kind, list(parts))
        self._match()
        return True

    def revoke(self, transfer: TransferId) -> None:
        waiting = self.waiting.get(transfer)
        if waiting is not None and not waiting.started:
            del self.waiting[transfer]
            revoked = Finished(transfer, TransferOutcome.REVOKED)
            self._later(lambda: self._report(waiting, revoked))

    def mark_ready(self, job: JobId) -> None:
        self.ready.add(job)
        self._match()

    def post(
        self, job: JobId, kind: JobKind, status: JobStatus, bytes_copied: int, duration_ns: int
    ) -> None:
        self.board.append((job, kind, status))

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            asyncio.get_running_loop().call_later(
                self.random.random() * 0.05, self.sink.mover_gone, self.mover, "killed"
            )

    # -- what it does ---------------------------------------------------------------------------

    def _later(self, act: object) -> None:
        delay = self.random.random() * (5.0 if self.random.random() < self.faults.slow else 0.01)
        asyncio.get_running_loop().call_later(delay, act)  # type: ignore[arg-type]

    def _match(self) -> None:
        for waiting in list(self.waiting.values()):
            if self.ready.issuperset(waiting.jobs) and not waiting.started:
                waiting.started = True
                self._later(lambda w=waiting: self._copy(w))

    def _copy(self, waiting: SimTransfer) -> None:
        if not self.alive:
            return
        if self.random.random() < self.faults.hang:
            return  # until somebody kills this mover
        damaged = self._damaged(waiting)
        fails = bool(len(damaged)) or self.random.random() < self.faults.fail
        copied = 0
        for part in waiting.parts if not len(damaged) else ():
            for row in range(len(part.extents)):
                if fails and self.random.random() < 0.5:
                    break
                copied += self._copy_block(waiting.kind, part, row)
        outcome = TransferOutcome.FAILED if fails else TransferOutcome.DONE
        del self.waiting[waiting.transfer]
        if waiting.kind is JobKind.LOAD:
            status = JobStatus.FAILED if fails else JobStatus.DONE
            self.board.append((waiting.jobs[0], JobKind.LOAD, status))
        sums = np.empty(0, dtype=np.uint64)
        if self.checksums and waiting.kind is JobKind.STORE and not fails:
            sums = np.concatenate([self._sums(part) for part in waiting.parts])
        self._report(waiting, Finished(waiting.transfer, outcome, copied, 1000, sums, damaged))

    def _damaged(self, waiting: SimTransfer) -> npt.NDArray[np.uint64]:
        """Numbers of a load's slots whose bytes are not those that were stored."""
        if not self.checksums or waiting.kind is JobKind.STORE:
            return np.empty(0, dtype=np.uint64)
        wrong = []
        for part in waiting.parts:
            assert part.checksums is not None, "a load without what its slots must have"
            wrong.append(self._sums(part) != part.checksums)
        return np.flatnonzero(np.concatenate(wrong)).astype(np.uint64)

    def _sums(self, part: LocatedPart) -> npt.NDArray[np.uint64]:
        part_bytes = self.memory[part.group].shape[1] * part.engine_blocks.shape[1]
        return part_checksums(part, part_bytes, self.extents.__getitem__, lambda: True)

    def _copy_block(self, kind: JobKind, part: LocatedPart, row: int) -> int:
        extent = self.extents[int(part.extents[row])]
        memory = self.memory[part.group]
        width = memory.shape[1]
        offset = int(part.offsets[row])
        for place, block in enumerate(part.engine_blocks[row]):
            slot = extent[offset + place * width : offset + (place + 1) * width]
            if block == NULL_ENGINE_BLOCK:
                if kind is JobKind.STORE:
                    slot[:] = 0
            elif kind is JobKind.STORE:
                slot[:] = memory[block]
            else:
                memory[block] = slot
        return int(width) * int(part.engine_blocks.shape[1])

    def _report(self, waiting: SimTransfer, finished: Finished) -> None:
        if self.alive:
            if waiting.kind is JobKind.LOAD and finished.outcome is TransferOutcome.REVOKED:
                self.board.append((waiting.jobs[0], JobKind.LOAD, JobStatus.FAILED))
            self.sink.transfer_finished(self.mover, finished)
