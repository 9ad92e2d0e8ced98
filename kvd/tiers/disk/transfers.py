"""Moves blocks between the pool and a slab, on a few threads, and proves what was read."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvd import native
from kvd.core.keys import NO_SUM, U64
from kvd.linux.proc import may_have_huge_pages
from kvd.native.file_moves import FileMover, FileRuns
from kvd.tiers.disk.files import MAX_PARTS_AT_ONCE, rounded_up
from kvd.tiers.disk.options import ALIGN
from kvd.tiers.disk.slab import BUFFER_BYTES, Slab
from kvd.tiers.sealing import seal_from, wipe
from kvd.tiers.store import TierBlock, TierReason
from kvd.tiers.sums import begun_sums, contradict, sums_of

MAX_RUN_BYTES = 1 << 20  # neighbours that go in one call; a larger block goes alone
LEAST_RUN_BYTES = 256 << 10  # likewise, where there are too few of them to keep every thread busy
_NOT_AS_IT_LIES = (errno.EINVAL, errno.EFAULT)
_NOT_AS_THEY_LIE = (errno.EINVAL, errno.EFAULT, errno.EBADMSG)


@dataclass(slots=True)
class BlockMove:
    """One block on its way. `reason` says why it failed; `why` in the kernel's words, if it did."""

    number: int  # in the caller's batch
    block: TierBlock
    lengths: bytes
    nbytes: int
    place: int = -1
    offset: int = -1
    seal: int = 0
    reason: TierReason | None = None
    why: str = ""
    is_plain: bool = False  # may go past the page cache as it lies
    addresses: tuple[int, ...] = ()  # of the parts

    def fail(self, error: OSError) -> None:
        """The kernel refused to move it, or it came too late."""
        self.reason = _reason_of(error)
        self.why = "" if self.reason is TierReason.TIMEOUT else str(error.strerror)


class Transfers:
    """The threads of one disk, each with one buffer.

    So many calls to the kernel are under way at once; twice as many threads, since each block's
    bytes are also summed up, before they are written and after they are read. Where it can, the
    native library does it on threads of its own, and those here do what is left.
    """

    def __init__(self, slab: Slab, threads: int) -> None:
        self._slab = slab
        self._threads = threads
        self._pool = ThreadPoolExecutor(2 * threads, thread_name_prefix="kvd-disk")
        self._turns = threading.Semaphore(threads)
        self._own = threading.local()
        self._mover = _mover_of(slab, threads)
        self._knows_memory = False

    def write(self, pieces: Sequence[BlockMove], deadline: float) -> list[Future[None]]:
        """Begin to write; each piece has its seal or its reason when all are done."""
        return self._begin(pieces, deadline, writes=True)

    def read(self, pieces: Sequence[BlockMove], deadline: float) -> list[Future[None]]:
        """Begin to read; each piece has a reason when all are done, or its bytes have its seal."""
        return self._begin(pieces, deadline, writes=False)

    def close(self) -> None:
        self._pool.shutdown()
        if self._mover is not None:
            self._mover.close()
            self._mover = None

    def _begin(
        self, pieces: Sequence[BlockMove], deadline: float, *, writes: bool
    ) -> list[Future[None]]:
        step = self._write_run if writes else self._read_run

        # Who waits may go on before the pool lets go of what it was given: that is emptied first.
        def in_time(run: list[BlockMove]) -> None:
            self._own.deadline = deadline
            step(run)
            run.clear()

        def natively(mover: FileMover, runs: list[list[BlockMove]]) -> None:
            self._own.deadline = deadline
            for run in self._move_natively(mover, runs, writes=writes):
                step(run)
            runs.clear()

        for piece in pieces:
            piece.addresses = tuple(map(_address, piece.block.parts))
            piece.is_plain = piece.nbytes % ALIGN == 0 and (
                not self._slab.is_direct or _are_aligned(piece)
            )
        share = sum(piece.nbytes for piece in pieces) // self._threads
        most = min(MAX_RUN_BYTES, max(LEAST_RUN_BYTES, share))
        runs = list(_runs(pieces, most))
        begun: list[Future[None]] = []
        if self._mover is not None:
            plain = [run for run in runs if run[0].is_plain]
            runs = [run for run in runs if not run[0].is_plain]
            if plain:
                begun.append(self._pool.submit(natively, self._mover, plain))
        return begun + [self._pool.submit(in_time, run) for run in runs]

    def _move_natively(
        self, mover: FileMover, runs: list[list[BlockMove]], *, writes: bool
    ) -> list[list[BlockMove]]:
        """Those that are to be tried again, in another way; the others are done, or failed."""
        moves = _moves_of(runs, writes=writes)
        if not self._knows_memory:  # all blocks lie in files of one directory
            self._knows_memory = True
            mover.writes_as_it_lies = may_have_huge_pages(runs[0][0].addresses[0])
        flaws = mover.move(moves, self._threads, self._own.deadline, writes=writes)
        again: list[list[BlockMove]] = []
        at = 0
        for run, flaw in zip(runs, flaws, strict=True):
            is_over = not flaw or (len(run) == 1 and flaw not in _NOT_AS_THEY_LIE)
            if not is_over:
                again.append(run)
            for piece in run:
                sums = moves.sums.sums[at : at + len(piece.addresses)]
                at += len(piece.addresses)
                if flaw and is_over:
                    piece.fail(OSError(flaw, os.strerror(flaw)))
                elif flaw:
                    piece.reason = None
                elif writes:
                    piece.seal = seal_from(piece.block, piece.lengths, sums)
                else:
                    _prove(piece, sums)
                if piece.reason is not None and not writes:
                    wipe(piece.block)
        return again

    def _read(self, buffers: list[memoryview], offset: int) -> None:
        with self._turns:
            self._require_time()
            self._slab.read(buffers, offset)

    def _write(self, buffers: list[memoryview], offset: int) -> None:
        with self._turns:
            self._require_time()
            self._slab.write(buffers, offset)

    def _require_time(self) -> None:
        if time.monotonic() >= self._own.deadline:
            raise TimeoutError(errno.ETIMEDOUT, "the deadline passed")

    def _write_run(self, run: list[BlockMove]) -> None:
        for piece in run:
            sums = sums_of(piece.block.parts)
            piece.seal = seal_from(piece.block, piece.lengths, sums)
            if contradict(piece.block, sums):
                piece.reason = TierReason.CHECKSUM_MISMATCH
        sound = [piece for piece in run if piece.reason is None]
        for some in [run] if len(sound) == len(run) else [[piece] for piece in sound]:
            self._move(some, self._write, self._write_copied)

    def _read_run(self, run: list[BlockMove]) -> None:
        self._move(run, self._read, self._read_copied)
        for piece in run:
            if piece.reason is None:
                _prove(piece, sums_of(piece.block.parts))
            if piece.reason is not None:
                wipe(piece.block)

    def _move(
        self,
        run: list[BlockMove],
        move: Callable[[list[memoryview], int], None],
        copied: Callable[[BlockMove], None],
    ) -> None:
        """All at once where they may go so, and else, or where that fails, each by itself."""
        if run[0].is_plain:
            try:
                move([part for piece in run for part in piece.block.parts], run[0].offset)
                return
            except OSError as error:
                if len(run) == 1 and error.errno not in _NOT_AS_IT_LIES:
                    run[0].fail(error)
                    return
        for piece in run:
            try:
                if len(run) > 1:
                    self._move([piece], move, copied)
                else:
                    copied(piece)
            except OSError as error:
                piece.fail(error)

    def _write_copied(self, piece: BlockMove) -> None:
        view, filled, at = self._buffer(), 0, piece.offset
        for part in piece.block.parts:
            left = part
            while left.nbytes:
                step = min(left.nbytes, BUFFER_BYTES - filled)
                view[filled : filled + step] = left[:step]
                filled, left = filled + step, left[step:]
                if filled == BUFFER_BYTES:
                    self._write([view], at)
                    at, filled = at + BUFFER_BYTES, 0
        if filled:
            size = rounded_up(filled)
            view[filled:size] = bytes(size - filled)
            self._write([view[:size]], at)

    def _read_copied(self, piece: BlockMove) -> None:
        view, at = self._buffer(), piece.offset
        left = rounded_up(piece.nbytes)
        used = have = 0
        for part in piece.block.parts:
            missing = part
            while missing.nbytes:
                if used == have:
                    used, have = 0, min(left, BUFFER_BYTES)
                    self._read([view[:have]], at)
                    at, left = at + have, left - have
                step = min(missing.nbytes, have - used)
                missing[:step] = view[used : used + step]
                used, missing = used + step, missing[step:]

    def _buffer(self) -> memoryview:
        """This thread's; begins at a page."""
        if not hasattr(self._own, "view"):
            self._own.view = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        view: memoryview = self._own.view
        return view


def _runs(pieces: Sequence[BlockMove], most_bytes: int) -> Iterator[list[BlockMove]]:
    """Neighbours that may go together."""
    run: list[BlockMove] = []
    size = parts = end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        joins = (
            run
            and piece.is_plain
            and run[0].is_plain
            and piece.offset == end
            and size + piece.nbytes <= most_bytes
            and parts + len(piece.block.parts) <= MAX_PARTS_AT_ONCE
        )
        if not joins:
            if run:
                yield run
            run, size, parts = [], 0, 0
        run.append(piece)
        size, parts = size + piece.nbytes, parts + len(piece.block.parts)
        end = piece.offset + piece.nbytes
    if run:
        yield run


def _mover_of(slab: Slab, threads: int) -> FileMover | None:
    """The native library's, where it may call the kernel for this slab."""
    library, fd = native.library(), slab.kernel_fd
    return None if library is None or fd is None else FileMover(library, fd, threads)


def _moves_of(runs: list[list[BlockMove]], *, writes: bool) -> FileRuns:
    pieces = [piece for run in runs for piece in run]
    counts = [sum(len(piece.addresses) for piece in run) for run in runs]
    table = np.zeros((len(runs), 4), dtype=np.uint64)
    table[1:, 0], table[:, 1] = np.cumsum(counts[:-1]), counts
    table[:, 2] = [run[0].offset for run in runs]
    parts = [
        (address, part.nbytes)
        for piece in pieces
        for address, part in zip(piece.addresses, piece.block.parts, strict=True)
    ]
    wanted: U64 | None = None
    if writes and any(piece.block.sums is not None for piece in pieces):
        known = [
            [NO_SUM] * len(piece.addresses) if piece.block.sums is None else piece.block.sums
            for piece in pieces
        ]
        wanted = np.concatenate(known).astype(np.uint64)
    sums = begun_sums(piece.block for piece in pieces)
    return FileRuns(np.array(parts, dtype=np.uint64), sums, wanted, table)


def _prove(piece: BlockMove, sums: U64) -> None:
    if seal_from(piece.block, piece.lengths, sums) != piece.seal:
        piece.reason = TierReason.CHECKSUM_MISMATCH
    elif piece.block.sums is not None:
        piece.block.sums[:] = sums


def _address(part: memoryview) -> int:
    address: int = np.frombuffer(part, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _are_aligned(piece: BlockMove) -> bool:
    return all(
        address % ALIGN == 0 and part.nbytes % ALIGN == 0
        for address, part in zip(piece.addresses, piece.block.parts, strict=True)
    )


def _reason_of(error: OSError) -> TierReason:
    if isinstance(error, TimeoutError):
        return TierReason.TIMEOUT
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return TierReason.NO_SPACE if full else TierReason.IO_ERROR
