"""Moves blocks between the pool and a slab, on a few threads, and proves what was read."""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from kvd.tiers.disk.files import MAX_PARTS_AT_ONCE, rounded_up
from kvd.tiers.disk.options import ALIGN
from kvd.tiers.disk.slab import BUFFER_BYTES, Slab
from kvd.tiers.sealing import seal_from, wipe
from kvd.tiers.store import TierBlock, TierReason
from kvd.tiers.sums import contradict, sums_of

MAX_RUN_BYTES = 1 << 20  # neighbours that go in one call; a larger block goes alone
LEAST_RUN_BYTES = 256 << 10  # likewise, where there are too few of them to keep every thread busy
_NOT_AS_IT_LIES = (errno.EINVAL, errno.EFAULT)


@dataclass(slots=True)
class BlockMove:
    """One block on its way. `reason` says why it failed."""

    number: int  # in the caller's batch
    block: TierBlock
    lengths: bytes
    nbytes: int
    place: int = -1
    offset: int = -1
    seal: int = 0
    reason: TierReason | None = None
    is_plain: bool = False  # may go past the page cache as it lies


class Transfers:
    """The threads of one disk, each with one buffer.

    So many calls to the kernel are under way at once; twice as many threads, since each block's
    bytes are also summed up, before they are written and after they are read.
    """

    def __init__(self, slab: Slab, threads: int) -> None:
        self._slab = slab
        self._threads = threads
        self._pool = ThreadPoolExecutor(2 * threads, thread_name_prefix="kvd-disk")
        self._turns = threading.Semaphore(threads)
        self._own = threading.local()

    def write(self, pieces: Sequence[BlockMove], deadline: float) -> list[Future[None]]:
        """Begin to write; each piece has its seal or its reason when all are done."""
        return self._begin(pieces, deadline, self._write_run)

    def read(self, pieces: Sequence[BlockMove], deadline: float) -> list[Future[None]]:
        """Begin to read; each piece has a reason when all are done, or its bytes have its seal."""
        return self._begin(pieces, deadline, self._read_run)

    def close(self) -> None:
        self._pool.shutdown()

    def _begin(
        self, pieces: Sequence[BlockMove], deadline: float, step: Callable[[list[BlockMove]], None]
    ) -> list[Future[None]]:
        def in_time(run: list[BlockMove]) -> None:
            self._own.deadline = deadline
            step(run)

        for piece in pieces:
            piece.is_plain = piece.nbytes % ALIGN == 0 and (
                not self._slab.is_direct or all(map(_is_aligned, piece.block.parts))
            )
        share = sum(piece.nbytes for piece in pieces) // self._threads
        most = min(MAX_RUN_BYTES, max(LEAST_RUN_BYTES, share))
        return [self._pool.submit(in_time, run) for run in _runs(pieces, most)]

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
                self._prove(piece)
            if piece.reason is not None:
                wipe(piece.block)

    def _prove(self, piece: BlockMove) -> None:
        sums = sums_of(piece.block.parts)
        if seal_from(piece.block, piece.lengths, sums) != piece.seal:
            piece.reason = TierReason.CHECKSUM_MISMATCH
        elif piece.block.sums is not None:
            piece.block.sums[:] = sums

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
                    run[0].reason = _reason_of(error)
                    return
        for piece in run:
            try:
                if len(run) > 1:
                    self._move([piece], move, copied)
                else:
                    copied(piece)
            except OSError as error:
                piece.reason = _reason_of(error)

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


def _is_aligned(part: memoryview) -> bool:
    address: int = np.frombuffer(part, dtype=np.uint8).__array_interface__["data"][0]
    return address % ALIGN == 0 and part.nbytes % ALIGN == 0


def _reason_of(error: OSError) -> TierReason:
    if isinstance(error, TimeoutError):
        return TierReason.TIMEOUT
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return TierReason.NO_SPACE if full else TierReason.IO_ERROR
