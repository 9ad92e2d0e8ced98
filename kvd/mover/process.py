"""Control's side of one mover: starts it by exec, talks to it, and knows when it is gone."""

from __future__ import annotations

import asyncio
import enum
import os
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from kvd.core import errors
from kvd.core.events import JobKind, JobStatus
from kvd.core.keys import JobId, MoverId, RowId, TransferId
from kvd.core.lifecycle import step
from kvd.mover import frames, registration_errors
from kvd.mover.facts import MoverFacts
from kvd.mover.frames import Finished, FrameKind, TransferOrder
from kvd.mover.launch import Launched, how_it_ended, launch
from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart, MoverConfig, Region
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
MAX_BYTES_UNREAD = 64 << 20  # a mover that lets this much lie hangs, and is ended
START_S = 30.0
START_GPU_S = 60.0  # CuPy's import, the driver's start, a context, a calibration
STOP_S = 3.0
_LAST_WORDS_S = 1.0  # for what a dead mover wrote to be read


class StartStage(enum.Enum):
    """How far a mover's start came: who has to hear of its end."""

    STARTING = "nobody knows of it"
    NOTED = "the pool's next owner would find it"
    SERVING = "it said hello, and is the sink's"


START_STEPS: frozenset[tuple[StartStage, StartStage]] = frozenset(
    {(StartStage.STARTING, StartStage.NOTED), (StartStage.NOTED, StartStage.SERVING)}
)


class EndSigns(enum.Enum):
    """How much of a mover's end was seen. Two signs say it, and either may come first."""

    RUNNING = "no sign"
    CLOSED = "its end of the channel is closed, so all that it said was read"
    REAPED = "its process has ended, so no copy of it runs"
    GONE = "both"


END_STEPS: frozenset[tuple[EndSigns, EndSigns]] = frozenset(
    {
        (EndSigns.RUNNING, EndSigns.CLOSED),
        (EndSigns.RUNNING, EndSigns.REAPED),
        (EndSigns.CLOSED, EndSigns.GONE),
        (EndSigns.REAPED, EndSigns.GONE),
    }
)


class MoverStartError(Exception):
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


class _Channel(asyncio.Protocol):
    """Control's end of the socket pair."""

    def __init__(self, owner: MoverProcess) -> None:
        self._owner = owner
        self._reader = frames.FrameReader()

    def data_received(self, data: bytes) -> None:
        try:
            for kind, body in self._reader.feed(data):
                self._owner.hear(kind, body)
        except (frames.BadFrame, TypeError, ValueError, RecursionError, struct.error) as error:
            self._owner.end_because(f"wrote nonsense: {error}")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        self._owner.channel_closed()


class MoverProcess:
    """One mover process. Lives on the event loop; nothing here blocks.

    `ring_fd`, `board_fd`, `event_fd` and `pidfd` are for the rank's worker; they stay open
    until the process is gone, and are -1 then. `facts` is what it last said of its copies.
    """

    def __init__(self, config: MoverConfig, sink: MoverSink) -> None:
        self.mover = config.mover
        self.engine_blocks = tuple(group.num_blocks for group in config.groups)
        self._sink = sink
        self._gpu_uuid = "" if config.gpu is None else config.gpu.uuid
        self._loop = asyncio.get_running_loop()
        self.pid = self.start_time = 0
        self.ring_fd = self.board_fd = self.event_fd = self.pidfd = -1
        self._queued: dict[TransferId, int] = {}  # bytes of each order
        self._queued_bytes = 0
        self.facts = MoverFacts()
        self._cold: Counter[RowId] = Counter()
        self._warm = asyncio.Event()
        self._warm.set()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._board: BoardWriter | None = None
        self._reason = ""  # of its end
        self._start_stage = StartStage.STARTING
        self._end_signs = EndSigns.RUNNING

    @classmethod
    async def start(cls, config: MoverConfig, sink: MoverSink) -> MoverProcess:
        """Start the process and return once it has mapped the rank's memory.

        Raises InvalidArgument or LayoutMismatch with the field that it refuses, or
        MoverStartError; nothing is left then, and the sink hears of no mover that is gone.
        """
        mover = cls(config, sink)
        try:
            launched = mover._launch(config)
        except OSError as error:
            mover._close_channel()
            raise MoverStartError(f"the mover process can't be started: {error}") from error
        try:
            await mover._begin(config, launched.end)
            if mover._gone.done():
                raise MoverStartError(f"the mover process ended at once: {mover._reason}")
        except BaseException:
            mover._hello.cancel()
            mover.kill()
            await asyncio.shield(mover._gone)
            raise
        mover._start_stage = step(START_STEPS, mover._start_stage, StartStage.SERVING)
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
        self._write(FrameKind.UNMAP_ROW, frames.pack_number(row))

    def start_transfer(
        self, transfer: TransferId, job: JobId, kind: JobKind, parts: Sequence[LocatedPart]
    ) -> bool:
        """Give the mover its part of a job; it starts once the worker is ready.

        Ends in transfer_finished or mover_gone. False: as much is queued as may be, and
        this was not; the board says nothing of it.
        """
        order = TransferOrder(transfer, job, kind, tuple(parts))
        size = sum(part.nbytes for part in parts)
        full = (
            len(self._queued) >= MAX_TRANSFERS_QUEUED
            or self._queued_bytes + size > MAX_ORDER_BYTES_QUEUED
        )
        if full:
            return False
        self._write(FrameKind.TRANSFER, frames.pack_transfer(order))
        self._queued[transfer] = size
        self._queued_bytes += size
        return True

    def revoke(self, transfer: TransferId) -> None:
        """Give up a transfer that has not started; answered by transfer_finished either way."""
        self._write(FrameKind.REVOKE, frames.pack_number(transfer))

    def mark_ready(self, job: JobId) -> None:
        """The worker's half is there: what the ready ring says, by another way."""
        self._write(FrameKind.READY, frames.pack_jobs((job,)))

    def post(
        self, job: JobId, kind: JobKind, status: JobStatus, bytes_copied: int, duration_ns: int
    ) -> None:
        """Write control's lane of the board: this job has ended for the rank."""
        self._post(BoardRecord(job, kind, status, bytes_copied, duration_ns))

    def kill(self) -> None:
        """End the process now; answered by mover_gone."""
        self.end_because("killed by control")

    async def stop(self) -> None:
        """Have the process drop its queue and exit; returns when it is gone."""
        self._reason = self._reason or "stopped"
        self._write(FrameKind.STOP)
        try:
            await asyncio.wait_for(asyncio.shield(self._gone), STOP_S)
        except TimeoutError:
            self.kill()
            await asyncio.shield(self._gone)

    # -- what the process says --------------------------------------------------------------

    def hear(self, kind: FrameKind, body: bytes) -> None:
        """One frame of the process."""
        match kind:
            case FrameKind.HELLO if not self._hello.done():
                seal_board(self.board_fd)
                self._hello.set_result(None)
            case FrameKind.REFUSED if not self._hello.done():
                refusal = frames.unpack_refusal(body)
                self._hello.set_exception(_as_error(refusal))
            case FrameKind.FINISHED:
                finished = frames.unpack_finished(body)
                self._queued_bytes -= self._queued.pop(finished.transfer, 0)
                self._sink.transfer_finished(self.mover, finished)
            case FrameKind.FACTS:
                self.facts = self._checked(MoverFacts.unpack(body))
            case FrameKind.ROW_WARM:
                row = RowId(frames.unpack_number(body))
                self._cold[row] -= 1
                if self._cold[row] <= 0:
                    del self._cold[row]
                if not self._cold:
                    self._warm.set()
            case FrameKind.ROW_UNMAPPED:
                self._sink.row_unmapped(self.mover, RowId(frames.unpack_number(body)))
            case _:
                raise frames.BadFrame(f"{kind.name} at the wrong time")

    def _checked(self, facts: MoverFacts) -> MoverFacts:
        uuid = "" if facts.gpu is None else facts.gpu.uuid
        if uuid != self._gpu_uuid:
            raise frames.BadFrame(f"facts of {uuid or 'no GPU'}, not of {self._gpu_uuid or 'none'}")
        return facts

    def end_because(self, reason: str) -> None:
        """Kill the process and remember why."""
        if self._end_signs in {EndSigns.RUNNING, EndSigns.CLOSED}:
            self._reason = self._reason or reason
            self._child.kill()

    def channel_closed(self) -> None:
        """The process has closed its end, which it does only by ending."""
        if self._end_signs is EndSigns.RUNNING:
            self._end_signs = step(END_STEPS, self._end_signs, EndSigns.CLOSED)
            self._child.kill()  # if it is dying already, its own reason stands
        elif self._end_signs is EndSigns.REAPED:
            self._end()

    # -- life -------------------------------------------------------------------------------

    def _launch(self, config: MoverConfig) -> Launched:
        self.ring_fd = create_ring()
        self.board_fd = create_board()
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._board = BoardWriter(self.board_fd, LANE_CONTROL)
        channel = (self.ring_fd, self.board_fd, self.event_fd)
        memories = [region.fd for region in config.regions if region.fd >= 0]
        launched = launch([*channel, *memories], config.gpu)
        self._child = launched.child
        self.pid, self.pidfd = launched.child.pid, launched.pidfd
        self.start_time = launched.start_time
        try:
            self._loop.add_reader(self.pidfd, self._reap)
        except OSError:
            launched.discard()
            raise
        return launched

    async def _begin(self, config: MoverConfig, end: socket.socket) -> None:
        """From a process that waits to one that serves."""
        try:
            self._sink.process_started(self.mover, self.pid, self.start_time)
            self._start_stage = step(START_STEPS, self._start_stage, StartStage.NOTED)
            await self._greet(config, end)
        except OSError as error:
            raise MoverStartError(f"the mover process can't be used: {error}") from error
        finally:
            if self._transport is None:
                end.close()

    async def _greet(self, config: MoverConfig, end: socket.socket) -> None:
        transport, _ = await self._loop.create_unix_connection(lambda: _Channel(self), sock=end)
        self._transport = transport
        body = frames.pack_config(config, self.ring_fd, self.board_fd, self.event_fd)
        self._write(FrameKind.CONFIGURE, body)
        within_s = START_S if config.gpu is None else START_GPU_S
        try:
            await asyncio.wait_for(asyncio.shield(self._hello), within_s)
        except TimeoutError:
            raise MoverStartError(f"no word from the mover process in {within_s} s") from None

    def _reap(self) -> None:
        """The pidfd is readable: the process has ended."""
        self._loop.remove_reader(self.pidfd)
        status = self._child.wait()
        self._reason = self._reason or how_it_ended(status)
        if self._end_signs is EndSigns.CLOSED:
            self._end()
        else:
            self._end_signs = step(END_STEPS, self._end_signs, EndSigns.REAPED)
            self._loop.call_later(_LAST_WORDS_S, self.channel_closed)

    def _end(self) -> None:
        """Both signs are there, so every frame was read."""
        self._end_signs = step(END_STEPS, self._end_signs, EndSigns.GONE)
        self._gone.set_result(None)
        self._warm.set()
        if not self._hello.done():
            self._hello.set_exception(
                MoverStartError(f"the mover process ended at its start: {self._reason}")
            )
        self._close_channel()
        if self._start_stage is not StartStage.STARTING:
            self._sink.process_ended(self.mover, self.pid)
        if self._start_stage is StartStage.SERVING:
            self._sink.mover_gone(self.mover, self._reason)

    def _close_channel(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._board is not None:
            self._board.close()
            self._board = None
        for fd in (self.ring_fd, self.board_fd, self.event_fd, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.ring_fd = self.board_fd = self.event_fd = self.pidfd = -1

    def _post(self, record: BoardRecord) -> None:
        if self._board is not None:
            self._board.post(record)

    def _write(self, kind: FrameKind, body: bytes = b"") -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.frame(kind, body))
            if self._transport.get_write_buffer_size() > MAX_BYTES_UNREAD:
                self.end_because("does not read what control writes")


def _as_error(refusal: frames.Refusal) -> errors.KvdError:
    if refusal.reason in registration_errors.REASONS:
        return errors.InvalidArgument(refusal.message, refusal.field, refusal.reason)
    known = {error.__name__: error for error in (errors.InvalidArgument, errors.LayoutMismatch)}
    return known.get(refusal.error, errors.InvalidArgument)(refusal.message, refusal.field)
