"""Control's side of one mover: starts it by exec, talks to it, and knows when it is gone."""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvd.core import errors
from kvd.core.events import JobKind, JobStatus, TransferOutcome
from kvd.core.keys import JobId, MoverId, RowId, TransferId
from kvd.mover import frames, registration_errors
from kvd.mover.facts import MoverFacts
from kvd.mover.frames import Finished, FrameKind, TransferOrder
from kvd.mover.layout import (
    FragmentSpec,
    GpuConfig,
    GroupMap,
    LocatedPart,
    MoverConfig,
    Region,
)
from kvd.processes.framing import BadFrame, frame, pack_number, unpack_number
from kvd.processes.launch import Launched, how_it_ended, launch
from kvd.processes.parent import OwnedProcess, ProcessStartError
from kvd_proto.board import BoardRecord, BoardWriter, create_board, seal_board
from kvd_proto.layout import LANE_CONTROL
from kvd_proto.ring import create_ring

__all__ = [
    "Finished",
    "FragmentSpec",
    "GroupMap",
    "LocatedPart",
    "MoverConfig",
    "MoverProcess",
    "MoverSink",
    "MoverStartError",
    "Region",
]

# What one mover may have been given and not yet ended. Beyond it a transfer is refused.
MAX_TRANSFERS_QUEUED = 4096
MAX_ORDER_BYTES_QUEUED = 32 << 20
MAX_FACTS_DUE = 64  # that it may tell at once: more than it has threads
START_S = 30.0
START_GPU_S = 60.0  # CuPy's import, the driver's start, a context
# Copies past this size bypass the cache, so that two movers don't fight over it.
GLIBC_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x100000"


class MoverStartError(ProcessStartError):
    """The process could not be started, or ended or hung before it said hello."""


class MoverSink(Protocol):
    """Hears what movers say. Called on the event loop, never from within a call to the mover,
    but for `process_started`."""

    def process_started(self, mover: MoverId, pid: int, start_time: int) -> None:
        """There is a process, which maps nothing before this returns. OSError ends the start."""

    def process_ended(self, mover: MoverId, pid: int) -> None:
        """The process is gone, whether or not it ever served. Once for each that started."""

    def transfer_finished(self, mover: MoverId, finished: Finished) -> None:
        """A copy has ended, or never will start."""

    def row_unmapped(self, mover: MoverId, row: RowId) -> None:
        """The mover has unmapped a row."""

    def mover_gone(self, mover: MoverId, reason: str) -> None:
        """One that served has ended: no copy of it can land any more. Exactly once, last."""


@dataclass(frozen=True, slots=True)
class _GivenTransfer:
    """A transfer that the mover has: what can be true of its end.

    size: bytes of the order's arrays. sums: checksums that come with it once it is done.
    compared: slots of which checksums were given. given_ns: of time.monotonic_ns().
    """

    size: int
    copied_bytes: int
    sums: int
    compared: int
    slots: int
    given_ns: int

    def require_possible(self, finished: Finished) -> None:
        """BadFrame where the transfer can't have ended so."""
        spent = time.monotonic_ns() - self.given_ns
        if finished.bytes_copied > self.copied_bytes or finished.duration_ns > spent:
            raise BadFrame(
                f"{finished.bytes_copied} bytes in {finished.duration_ns} ns, of a transfer of"
                f" {self.copied_bytes} bytes that was given {spent} ns ago"
            )
        due = self.sums if finished.outcome is TransferOutcome.DONE else 0
        if len(finished.checksums) != due:
            raise BadFrame(f"{len(finished.checksums)} checksums of a transfer that has {due}")
        damaged = finished.damaged
        if not len(damaged):
            return
        if finished.outcome is not TransferOutcome.FAILED or len(damaged) > self.compared:
            ended = finished.outcome.name.lower()
            raise BadFrame(
                f"{len(damaged)} damaged slots of a transfer that is {ended} and compares"
                f" {self.compared}"
            )
        if int(damaged[-1]) >= self.slots or bool((damaged[1:] <= damaged[:-1]).any()):
            raise BadFrame(f"damaged slots out of order, or not of the {self.slots} that it has")


class MoverProcess(OwnedProcess):
    """One mover process. Lives on the event loop; nothing here blocks.

    `ring_fd`, `board_fd`, `event_fd` and `pidfd` are for the rank's worker; they stay open
    until the process is gone, and are -1 then. `facts` is what it last said of its copies.
    """

    title = "mover"
    kinds = FrameKind
    start_error = MoverStartError

    def __init__(self, config: MoverConfig, sink: MoverSink) -> None:
        super().__init__()
        self.mover = config.mover
        self.engine_blocks = tuple(group.num_blocks for group in config.groups)
        self._sink = sink
        self._gpu_uuid = "" if config.gpu is None else config.gpu.uuid
        self.ring_fd = self.board_fd = self.event_fd = -1
        self._part_bytes = {n: group.part_bytes for n, group in enumerate(config.groups)}
        self._checksums = config.checksums
        self._given: dict[TransferId, _GivenTransfer] = {}
        self._queued_bytes = 0
        self.facts = MoverFacts()
        self._facts_due = 2  # at most: as it starts, and before its first row is warm
        self._cold: Counter[RowId] = Counter()
        self._unmapping: Counter[RowId] = Counter()
        self._warm = asyncio.Event()
        self._warm.set()
        self._board: BoardWriter | None = None

    @classmethod
    async def start(cls, config: MoverConfig, sink: MoverSink) -> MoverProcess:
        """Start the process and return once it has mapped the rank's memory.

        Raises InvalidArgument or LayoutMismatch with the field that it refuses, or
        MoverStartError; nothing is left then, and the sink hears of no mover that is gone.
        """
        mover = cls(config, sink)

        def configuration() -> bytes:
            fds = (mover.ring_fd, mover.board_fd, mover.event_fd)
            return frame(FrameKind.CONFIGURE, frames.pack_config(config, *fds))

        within_s = START_S if config.gpu is None else START_GPU_S
        await mover._start(lambda: mover._launch(config), configuration, within_s)
        return mover

    # -- orders -----------------------------------------------------------------------------

    def map_row(self, row: RowId, extent: int) -> None:
        """Have the extent mapped, and made fast in the background. Transfers may follow at once."""
        self._cold[row] += 1
        self._warm.clear()
        self._write(FrameKind.MAP_ROW, frames.pack_row(row, extent))

    async def warm(self, within_s: float) -> bool:
        """Wait until the first copies into all rows mapped so far would be as fast as later ones.

        False: it takes longer, goes on in the background, and transfers may start all the same.
        """
        try:
            await asyncio.wait_for(self._warm.wait(), within_s)
        except TimeoutError:
            return False
        return True

    def unmap_row(self, row: RowId) -> None:
        """Have the row unmapped once no transfer uses it; answered by row_unmapped."""
        self._unmapping[row] += 1
        self._write(FrameKind.UNMAP_ROW, pack_number(row))

    def start_transfer(
        self,
        transfer: TransferId,
        jobs: tuple[JobId, ...],
        kind: JobKind,
        parts: Sequence[LocatedPart],
    ) -> bool:
        """Give the mover its part of a piece; it starts once the worker is ready for all its jobs.

        Ends in transfer_finished or mover_gone. False: as much is queued as may be, and
        this was not; the board says nothing of it.
        """
        order = TransferOrder(transfer, jobs, kind, tuple(parts))
        size = sum(part.nbytes for part in parts)
        full = (
            len(self._given) >= MAX_TRANSFERS_QUEUED
            or self._queued_bytes + size > MAX_ORDER_BYTES_QUEUED
        )
        if full:
            return False
        self._given[transfer] = self._given_now(order, size)
        self._queued_bytes += size
        self._write(FrameKind.TRANSFER, frames.pack_transfer(order))
        return True

    def _given_now(self, order: TransferOrder, size: int) -> _GivenTransfer:
        slots = sum(len(part.extents) for part in order.parts)
        # A part of a group that there is not is refused by the mover, and nothing is copied.
        copied = sum(len(p.extents) * self._part_bytes.get(p.group, 0) for p in order.parts)
        sums = slots if self._checksums and order.kind is JobKind.STORE else 0
        compared = sum(len(part.extents) for part in order.parts if part.checksums is not None)
        return _GivenTransfer(size, copied, sums, compared, slots, time.monotonic_ns())

    def revoke(self, transfer: TransferId) -> None:
        """Give up a transfer that has not started; answered by transfer_finished either way."""
        self._write(FrameKind.REVOKE, pack_number(transfer))

    def mark_ready(self, *jobs: JobId) -> None:
        """The worker's half of these is there: what the ready ring says, by another way.

        In one frame: each is written apart, and thousands would hold others up.
        """
        self._write(FrameKind.READY, frames.pack_jobs(jobs))

    def post(
        self, job: JobId, kind: JobKind, status: JobStatus, bytes_copied: int, duration_ns: int
    ) -> None:
        """Write control's lane of the board: this job has ended for the rank."""
        self._post(BoardRecord(job, kind, status, bytes_copied, duration_ns))

    # -- what the process says --------------------------------------------------------------

    def hear(self, kind: enum.IntEnum, body: bytes) -> None:
        """One frame of the process."""
        match kind:
            case FrameKind.HELLO if not self._hello.done():
                seal_board(self.board_fd)
                self._hello.set_result(None)
            case FrameKind.REFUSED if not self._hello.done():
                refusal = frames.unpack_refusal(body)
                self._hello.set_exception(_as_error(refusal))
            case FrameKind.FINISHED:
                self._hear_finished(frames.unpack_finished(body))
            case FrameKind.FACTS if self._facts_due:
                self._facts_due -= 1
                self.facts = self._checked(MoverFacts.unpack(body))
            case FrameKind.ROW_WARM:
                _take_one(self._cold, body)
                self._expect_facts()
                if not self._cold:
                    self._warm.set()
            case FrameKind.ROW_UNMAPPED:
                self._sink.row_unmapped(self.mover, _take_one(self._unmapping, body))
            case _:
                raise BadFrame(f"{kind.name} at the wrong time")

    def _hear_finished(self, finished: Finished) -> None:
        given = self._given.pop(finished.transfer, None)
        if given is None:
            raise BadFrame(f"the end of transfer {finished.transfer}, which it does not have")
        self._queued_bytes -= given.size
        given.require_possible(finished)
        self._expect_facts()
        self._sink.transfer_finished(self.mover, finished)

    def _expect_facts(self) -> None:
        """A thread of the mover's has done something, and may tell once what has changed."""
        self._facts_due = min(MAX_FACTS_DUE, self._facts_due + 1)

    def _checked(self, facts: MoverFacts) -> MoverFacts:
        uuid = "" if facts.gpu is None else facts.gpu.uuid
        if uuid != self._gpu_uuid:
            raise BadFrame(f"facts of {uuid or 'no GPU'}, not of {self._gpu_uuid or 'none'}")
        return facts

    # -- life -------------------------------------------------------------------------------

    def _launch(self, config: MoverConfig) -> Launched:
        self.ring_fd = create_ring()
        self.board_fd = create_board()
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._board = BoardWriter(self.board_fd, LANE_CONTROL)
        channel = (self.ring_fd, self.board_fd, self.event_fd)
        memories = [region.fd for region in config.regions if region.fd >= 0]
        return launch("kvd.mover", [*channel, *memories], _environment(config.gpu))

    def _note_start(self) -> None:
        self._sink.process_started(self.mover, self.pid, self.start_time)

    def _note_end(self) -> None:
        self._sink.process_ended(self.mover, self.pid)

    def _tell_gone(self, reason: str) -> None:
        self._sink.mover_gone(self.mover, reason)

    def _ask_to_stop(self) -> None:
        self._write(FrameKind.STOP)

    def _how_it_ended(self, status: int) -> str:
        reason = how_it_ended(status)
        if -status == signal.SIGBUS:
            reason += ": the engine's memory was truncated or could not be had"
        return reason

    def _let_go(self) -> None:
        self._warm.set()
        if self._board is not None:
            self._board.close()
            self._board = None
        for fd in (self.ring_fd, self.board_fd, self.event_fd):
            if fd >= 0:
                os.close(fd)
        self.ring_fd = self.board_fd = self.event_fd = -1

    def _post(self, record: BoardRecord) -> None:
        if self._board is not None:
            self._board.post(record)


def _take_one(asked: Counter[RowId], body: bytes) -> RowId:
    """The row that an answer names, which is asked for once less. BadFrame where it was not."""
    row = RowId(unpack_number(body))
    if not asked[row]:
        raise BadFrame(f"an answer about row {row}, of which nothing was asked")
    asked[row] -= 1
    if not asked[row]:
        del asked[row]
    return row


def _environment(gpu: GpuConfig | None) -> dict[str, str]:
    """What a mover's differs by from ours: libc is set up for copying, and it sees one GPU."""
    return {
        "GLIBC_TUNABLES": GLIBC_TUNABLES,
        # By UUID: numbers of GPUs mean another one in every process that was given a choice.
        "CUDA_VISIBLE_DEVICES": "" if gpu is None else gpu.uuid,
    }


def _as_error(refusal: frames.Refusal) -> Exception:
    if refusal.error == frames.NOT_STARTED:
        return MoverStartError(refusal.message)
    if refusal.reason in registration_errors.REASONS:
        return errors.InvalidArgument(refusal.message, refusal.field, refusal.reason)
    known = {error.__name__: error for error in (errors.InvalidArgument, errors.LayoutMismatch)}
    return known.get(refusal.error, errors.InvalidArgument)(refusal.message, refusal.field)
