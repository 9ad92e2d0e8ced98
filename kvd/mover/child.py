"""What runs in the mover process: one thread listens, two or four copy, one warms.

Nothing here ever times out or polls: the listening thread sleeps until control writes, the
worker rings or control goes away, which ends the process at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.ma  # np.unique would, at its first call: 10 ms amid a job

from kvd import native
from kvd.core.errors import InvalidArgument, KvdError
from kvd.core.events import JobKind, JobStatus, TransferOutcome
from kvd.core.keys import U64, RowId
from kvd.linux import calls
from kvd.mover import frames
from kvd.mover.checksums import GPU_PIECE_BYTES, PIECE_BYTES, differ, part_checksums
from kvd.mover.copy_engine import CopyEngine, CopyStopped, DeviceLost, KeepGoing, StillWanted
from kvd.mover.facts import MoverFacts
from kvd.mover.frames import Finished, FrameKind, TransferOrder
from kvd.mover.host_shm import HostSharedMemory
from kvd.mover.layout import LocatedPart, MoverConfig, flaw_of_part
from kvd.mover.registration_errors import TRANSPORT_UNSUPPORTED
from kvd.mover.rows import MappedRows
from kvd.mover.transfers import TransferProgress, TransferQueue
from kvd.processes import extras
from kvd.processes.child import EXIT_BROKEN, ChannelToControl, bind_life_to
from kvd.processes.complaints import log_limited, why_no_thread
from kvd.processes.framing import BadFrame, FrameReader, pack_number, unpack_number
from kvd_proto.board import BoardRecord, BoardWriter
from kvd_proto.layout import LANE_MOVER
from kvd_proto.ring import RingReader

# How long the start waits for the engine's memory to be mapped page by page; the rest goes on
# beside the first copies.
START_WARM_S = 1.0
_STOP_S = 1.0
# No request waits for a store. Where processors are scarce it leaves them to control and engines,
# whose small calls would wait for a tick of Linux behind it at each of their steps.
STORE_NICENESS = 5


@dataclass(slots=True)
class Copy:
    """How far a transfer's copy has come. Slots are counted over all its parts."""

    bytes: int = 0
    duration_ns: int = 0
    slots: int = 0  # of the parts that are through
    checksums: list[U64] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)

    def finished(self, order: TransferOrder, outcome: TransferOutcome) -> Finished:
        """The word to control."""
        done = outcome is TransferOutcome.DONE
        none = np.empty(0, dtype=np.uint64)
        return Finished(
            order.transfer,
            outcome,
            self.bytes,
            self.duration_ns,
            np.concatenate([none, *self.checksums]) if done else none,
            np.array(self.damaged, dtype=np.uint64),
        )


class FirstInLine:
    """The place of who takes the next transfer of a direction, and of nobody else until it leaves.

    It stays there until its last part is the engine's: parts of two transfers that took turns
    would make the first end as late as the second.
    """

    def __init__(self, line: threading.Lock) -> None:
        """Waits until the place is free."""
        self._line: threading.Lock | None = line
        line.acquire()

    def leave(self) -> None:
        """Make way, unless that is done."""
        if self._line is not None:
            self._line.release()
            self._line = None


class MoverLoop:
    """The mover's rooms wired together. `run` returns when control says stop."""

    def __init__(
        self,
        config: MoverConfig,
        engine: CopyEngine,
        control: ChannelToControl,
        ring: RingReader,
        board: BoardWriter,
    ) -> None:
        self._config = config
        self._engine = engine
        self._control = control
        self._ring = ring
        self._board = board
        self._queue = TransferQueue()
        self._rows = MappedRows(engine, self._report_unmapped)
        self._cold: queue.SimpleQueue[tuple[RowId, int]] = queue.SimpleQueue()
        self._stopping = False
        self._stop_word = np.zeros(1, dtype=np.uint64)  # the same, for the native library
        self._until_stop = (native.address_of(self._stop_word), 1)
        self._memory_warm = threading.Event()
        self._copiers: list[threading.Thread] = []
        # To sum up takes longer than to copy: where that is done others' copies fit between.
        self._take_turns = engine.copies_at_once > 1 and not config.checksums
        self._lines = {kind: threading.Lock() for kind in JobKind}
        self._ends = dict.fromkeys(JobKind, 0)  # when the last copy of a direction ended
        self._ends_lock = threading.Lock()
        self._facts_told: MoverFacts | None = None
        self._facts_lock = threading.Lock()
        self._piece_bytes = PIECE_BYTES if config.gpu is None else GPU_PIECE_BYTES

    # -- the listening thread ---------------------------------------------------------------

    def start(self) -> None:
        """Start the threads; returns when the engine's memory is warm, or after a while."""
        threading.Thread(target=self._warm, name="warm", daemon=True).start()
        for kind in tuple(JobKind) * self._engine.copies_at_once:
            copier = threading.Thread(
                target=self._copy_all, args=(kind,), name=kind.name.lower(), daemon=True
            )
            copier.start()
            self._copiers.append(copier)
        self._memory_warm.wait(START_WARM_S)

    def run(self, event_fd: int) -> None:
        """Listen until control says stop or is gone."""
        reader = FrameReader(FrameKind)
        end = self._control.socket
        with select.epoll() as poll:
            poll.register(end.fileno(), select.EPOLLIN)
            # Edge-triggered, so that it never has to be read: the worker shares the open file
            # and could make a read of it block.
            poll.register(event_fd, select.EPOLLIN | select.EPOLLET)
            while not self._stopping:
                ready = poll.poll()
                if self._ring.leave_asked:
                    log_limited("the rank has waited too long for a load: this mover ends")
                    os._exit(0)  # its end is what proves that no copy can land any more
                self._queue.mark_ready(self._ring.take())
                if any(fd == end.fileno() for fd, _ in ready):
                    for kind, body in reader.feed(self._control.receive()):
                        self._obey(kind, body)
        self._queue.close()
        # A copier may wait in a call of the GPU's driver that never returns: the process ends all
        # the same, and that copy with it.
        end_s = time.monotonic() + _STOP_S
        for copier in self._copiers:
            copier.join(max(0.0, end_s - time.monotonic()))

    def _obey(self, kind: FrameKind, body: bytes) -> None:
        match kind:
            case FrameKind.TRANSFER:
                self._accept(frames.unpack_transfer(body))
            case FrameKind.READY:
                self._queue.mark_ready(frames.unpack_jobs(body))
            case FrameKind.REVOKE:
                revoked = self._queue.revoke(unpack_number(body))
                if revoked is not None:
                    self._report(revoked.order, TransferOutcome.REVOKED)
                    self._rows.release(revoked.extents)
            case FrameKind.MAP_ROW:
                self._map_row(*frames.unpack_row(body))
            case FrameKind.UNMAP_ROW:
                self._rows.retire(RowId(unpack_number(body)))
            case FrameKind.STOP:
                self._stopping = True
                self._stop_word[0] = 1
            case _:
                raise BadFrame(f"{kind.name} is not for a mover")

    def _map_row(self, row: RowId, extent: int) -> None:
        try:
            self._rows.map(row, extent)
        except OSError as error:
            # Transfers of the row fail; control sees them fail and keeps its cache.
            log_limited(f"row {row} can't be mapped: {error}")
        self._cold.put((row, extent))

    def _accept(self, order: TransferOrder) -> None:
        flaw = next(filter(None, (flaw_of_part(p, self._config) for p in order.parts)), "")
        extents = frozenset(extent for part in order.parts for extent in set(part.extents.tolist()))
        if not flaw and not self._rows.use(extents):
            flaw = "a row that is not mapped"
        if flaw:
            log_limited(f"{_named(order)} is refused: {flaw}")
            self._report(order, TransferOutcome.FAILED)
            return
        self._queue.submit(TransferProgress(order, extents))

    # -- the copying threads ----------------------------------------------------------------

    def _copy_all(self, kind: JobKind) -> None:
        if kind is JobKind.STORE:
            with contextlib.suppress(PermissionError):  # a sandbox: it copies all the same
                os.nice(STORE_NICENESS)  # on Linux of this thread alone
        while True:
            place = FirstInLine(self._lines[kind])
            transfer = self._queue.take(kind)
            if transfer is None:
                place.leave()
                return
            copy = Copy()
            started = time.monotonic_ns()
            outcome = self._copy(transfer, copy, place)
            place.leave()
            if not self._queue.begin(transfer):
                continue  # revoked while it waited for its turn, which was told then
            copy.duration_ns = self._own_time(kind, started)
            self._queue.end(transfer)
            self._report(transfer.order, outcome, copy)
            self._rows.release(transfer.extents)
            self.report_facts()

    def _own_time(self, kind: JobKind, started_ns: int) -> int:
        """Nanoseconds since a copy began, without those that its direction's last one counted."""
        with self._ends_lock:
            now = time.monotonic_ns()
            counted, self._ends[kind] = self._ends[kind], now
        return now - max(started_ns, counted)

    def _copy(self, transfer: TransferProgress, copy: Copy, place: FirstInLine) -> TransferOutcome:
        order = transfer.order
        try:
            if not self._take_turns:
                place.leave()
                if not self._queue.begin(transfer):
                    raise CopyStopped
            for part in order.parts:
                if self._config.checksums:
                    self._copy_checked(order, part, copy)
                else:
                    looks = self._looks(transfer, place if part is order.parts[-1] else None)
                    copy.bytes += self._engine.copy(order.kind, part, looks)
        except CopyStopped:
            return TransferOutcome.ABANDONED if self._is_given_up(order) else TransferOutcome.FAILED
        except DeviceLost as error:
            # Its end is what proves to control that no copy can land any more.
            log_limited(f"{_named(order)} lost the GPU: {error}")
            os._exit(EXIT_BROKEN)
        except Exception as error:  # noqa: BLE001 - whatever broke, control must hear of it
            log_limited(f"{_named(order)} failed: {error!r}")
            return TransferOutcome.FAILED
        if self._is_given_up(order):
            return TransferOutcome.ABANDONED
        return TransferOutcome.FAILED if copy.damaged else TransferOutcome.DONE

    def _is_given_up(self, order: TransferOrder) -> bool:
        """Whether it is a store that its engine gave up."""
        return order.kind is JobKind.STORE and self._is_abandoned(order)

    def _copy_checked(self, order: TransferOrder, part: LocatedPart, copy: Copy) -> None:
        """Copy the part with the checksums of what lies in the slots.

        Once a slot of a load is known to be damaged, the rest is only compared.
        """
        engine = self._engine
        if isinstance(engine, HostSharedMemory) and engine.sums_up and not copy.damaged:
            self._copy_and_sum(engine, order, part, copy)
        else:
            self._sum_beside(order.kind, part, copy)
        copy.slots += len(part.extents)

    def _copy_and_sum(
        self, engine: HostSharedMemory, order: TransferOrder, part: LocatedPart, copy: Copy
    ) -> None:
        """In one pass. A load compares afterwards, and leaves no byte of a damaged slot."""
        if order.kind is JobKind.LOAD and part.checksums is None:
            copy.bytes += engine.copy(order.kind, part, self._wanted(order))
            return
        copied, found = engine.copy_and_sum(order.kind, part, self._wanted(order))
        copy.bytes += copied
        if part.checksums is None:
            copy.checksums.append(found)
            return
        wrong = np.flatnonzero(differ(found, part.checksums))
        copy.damaged += (copy.slots + wrong).tolist()
        for row in wrong.tolist():
            engine.wipe(part.rows(slice(row, row + 1)))

    def _sum_beside(self, kind: JobKind, part: LocatedPart, copy: Copy) -> None:
        """Piece by piece, so that bytes are still in the cache. A load compares first."""
        part_bytes = self._config.groups[part.group].part_bytes
        for start, piece in part.pieces(self._piece_bytes // part_bytes):
            if kind is JobKind.LOAD and piece.checksums is not None:
                found = self._checksums(piece, part_bytes)
                wrong = np.flatnonzero(differ(found, piece.checksums))
                copy.damaged += (copy.slots + start + wrong).tolist()
            if not copy.damaged:
                copy.bytes += self._engine.copy(kind, piece, self._keep_going)
            if kind is JobKind.STORE:
                copy.checksums.append(self._checksums(piece, part_bytes))

    def _checksums(self, part: LocatedPart, part_bytes: int) -> U64:
        return part_checksums(part, part_bytes, self._rows.bytes_of, self._keep_going)

    def _keep_going(self) -> bool:
        return not self._stopping

    def _looks(self, transfer: TransferProgress, place: FirstInLine | None) -> KeepGoing:
        """As `_wanted`. Where copies take turns the transfer runs from the first look on.

        One that waits for its turn can still be revoked, and is, before its deadline ends a mover
        that others use. The place is left then, too: the next one comes to wait for the turn.
        """
        wanted = self._wanted(transfer.order)
        if not self._take_turns:
            return wanted

        def looks() -> bool:
            if place is not None:
                place.leave()
            return wanted() and self._queue.begin(transfer)

        return looks

    def _wanted(self, order: TransferOrder) -> KeepGoing:
        """Whether the rest of a copy is worth making: nobody waits for a store given up."""
        if order.kind is JobKind.LOAD:
            return StillWanted(self._keep_going, native.Watches([self._until_stop]))
        words = [(self._ring.abandon_word(job), job) for job in order.jobs]
        watches = native.Watches([self._until_stop, *words])
        return StillWanted(lambda: not self._stopping and not self._is_abandoned(order), watches)

    def _is_abandoned(self, order: TransferOrder) -> bool:
        """Whether some of its bytes may be another's by now."""
        return any(map(self._ring.abandoned, order.jobs))

    def _report(
        self, order: TransferOrder, outcome: TransferOutcome, copy: Copy | None = None
    ) -> None:
        copy = copy or Copy()
        if order.kind is JobKind.LOAD:
            status = JobStatus.DONE if outcome is TransferOutcome.DONE else JobStatus.FAILED
            (job,) = order.jobs
            self._board.post(BoardRecord(job, order.kind, status, copy.bytes, copy.duration_ns))
        finished = copy.finished(order, outcome)
        self._control.send(FrameKind.FINISHED, frames.pack_finished(finished))

    def _report_unmapped(self, row: RowId) -> None:
        self._control.send(FrameKind.ROW_UNMAPPED, pack_number(row))

    # -- the warming thread -----------------------------------------------------------------

    def _warm(self) -> None:
        self._engine.warm_memory(self._keep_going)
        self._memory_warm.set()
        while True:
            row, extent = self._cold.get()
            if self._rows.use((extent,)):
                self._engine.warm_extent(extent, self._keeps(extent))
                self._rows.release((extent,))
            self.report_facts()
            self._control.send(FrameKind.ROW_WARM, pack_number(row))

    def report_facts(self) -> None:
        """Tell control how copies are made, unless it knows. Any thread."""
        with self._facts_lock:
            facts = self._engine.facts
            if facts != self._facts_told:
                self._facts_told = facts
                self._control.send(FrameKind.FACTS, facts.pack())

    def _keeps(self, extent: int) -> Callable[[], bool]:
        return lambda: not self._stopping and not self._rows.retiring(extent)


def _named(order: TransferOrder) -> str:
    others = f" and {len(order.jobs) - 1} more" if len(order.jobs) > 1 else ""
    return f"transfer {order.transfer} of job {order.jobs[0]}{others}"


def serve(control_fd: int, parent: int) -> None:
    """Be the mover of the parent that sits behind this descriptor, until it is gone."""
    bind_life_to(parent)
    calls.share_one_heap()
    control = ChannelToControl(socket.socket(fileno=control_fd))
    config, channel = frames.unpack_config(control.receive_first(FrameKind.CONFIGURE))
    ring_fd, board_fd, event_fd = channel
    calls.name_process(f"kvd-mover-{config.mover}")
    try:
        engine = open_engine(config)
    except KvdError as error:
        refusal = frames.Refusal(type(error).__name__, str(error), error.field, error.reason)
        control.send(FrameKind.REFUSED, frames.pack_refusal(refusal))
        return
    _close(region.fd for region in config.regions if region.fd >= 0)
    board = BoardWriter(board_fd, LANE_MOVER)
    ring = RingReader(ring_fd)
    _close((ring_fd, board_fd))
    mover = MoverLoop(config, engine, control, ring, board)
    try:
        mover.start()
    except RuntimeError:
        why = f"the mover has no threads: {why_no_thread()}"
        refusal = frames.Refusal(frames.NOT_STARTED, why, "")
        control.send(FrameKind.REFUSED, frames.pack_refusal(refusal))
        os._exit(EXIT_BROKEN)  # beside the threads that there are
    gc.freeze()
    sys.setswitchinterval(0.0005)
    mover.report_facts()
    control.send(FrameKind.HELLO)
    try:
        mover.run(event_fd)
    except DeviceLost as error:  # no way out in order: that asks the driver once more
        log_limited(f"lost the GPU: {error}")
        os._exit(EXIT_BROKEN)


def open_engine(config: MoverConfig) -> CopyEngine:
    """The copy engine for where the rank's memory lies. Raises what refuses the registration."""
    if config.gpu is None:
        return HostSharedMemory(config, native.library())
    try:
        from kvd.mover.cuda.engine import CudaCopyEngine  # noqa: PLC0415 - only where it is used
    except ImportError as error:
        raise InvalidArgument(
            f"the daemon can't use GPUs, for it has no CuPy ({error}): install kvd with its extra "
            f"cuda12 or cuda13, whichever the driver supports: {extras.install('cuda12')}",
            "memories[0]",
            TRANSPORT_UNSUPPORTED,
        ) from error
    return CudaCopyEngine(config)


def _close(descriptors: Iterable[int]) -> None:
    for fd in set(descriptors):
        os.close(fd)
