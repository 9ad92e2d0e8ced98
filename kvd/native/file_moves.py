"""Blocks between memory and a file, moved and summed up by the native library: a call a batch.

Its own threads do it, without the interpreter, which would have to be waited for between any two
calls to the kernel.
"""

from __future__ import annotations

import ctypes
import errno
from dataclasses import dataclass

import numpy as np

from kvd.native import U64, Library, Sums, address_of

RUN_FIELDS = ("first", "count", "offset", "flaw")  # of what copies.c calls struct run
PART_FIELDS = ("address", "bytes")
_FOR_EVER = 1 << 62


class _Move(ctypes.Structure):
    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("runs", ctypes.c_void_p),
        ("run_count", ctypes.c_uint64),
        ("movers", ctypes.c_uint64),
        ("writes", ctypes.c_uint64),
        ("staged", ctypes.c_uint64),
        ("fd", ctypes.c_int64),
        ("deadline_ns", ctypes.c_int64),
        ("turns", ctypes.c_void_p),
        ("word_keys", ctypes.c_void_p),
        ("line_keys", ctypes.c_void_p),
        ("line_count", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class FileRuns:
    """Runs of parts that lie one after the other in a file, each moved by one thread.

    parts: PART_FIELDS of each, of whole words, which must stay where they are; sums: to add each
    part's to; wanted: what a written part's must be, 0 where nothing is known; runs: RUN_FIELDS.
    """

    parts: U64
    sums: Sums
    wanted: U64 | None
    runs: U64


class FileMover:
    """Moves to and from one file; so many calls to the kernel at once, of all that it is asked."""

    def __init__(self, library: Library, fd: int, calls_at_once: int) -> None:
        """OSError: there is no memory."""
        self._library, self._fd = library, fd
        self.writes_as_it_lies = False  # worth it from huge pages only
        self._turns = library.begin_turns(calls_at_once)
        if not self._turns:
            raise OSError(errno.ENOMEM, "no memory for a semaphore")

    def move(self, moves: FileRuns, movers: int, deadline: float, *, writes: bool) -> list[int]:
        """Move all, on so many threads; 0 or the errno of each run.

        EBADMSG: a part is not as is wanted, and what lies there may be anything.

        A read's parts are summed up once they have come, a write's before they go. After the
        deadline, of time.monotonic(), no call to the kernel is begun. The interpreter's lock is
        released.
        """
        work = _Move(
            parts=address_of(moves.parts),
            sums=address_of(moves.sums.sums),
            wanted=None if moves.wanted is None else address_of(moves.wanted),
            runs=address_of(moves.runs),
            run_count=len(moves.runs),
            movers=movers,
            writes=writes,
            staged=not writes or not self.writes_as_it_lies,
            fd=self._fd,
            deadline_ns=max(0, int(min(deadline * 1e9, _FOR_EVER))),
            turns=self._turns,
            word_keys=moves.sums.keys.words_at,
            line_keys=moves.sums.keys.lines_at,
            line_count=moves.sums.keys.lines,
        )
        for table, fields in ((moves.parts, PART_FIELDS), (moves.runs, RUN_FIELDS)):
            assert table.dtype == np.uint64
            assert table.flags.c_contiguous
            assert table.shape[1:] == (len(fields),)
        parts = len(moves.parts)
        assert len(moves.sums.sums) == parts
        assert moves.wanted is None or len(moves.wanted) == parts
        assert not len(moves.runs) or int(moves.runs[:, :2].sum(axis=1).max()) <= parts
        self._library.move(ctypes.byref(work))
        flaws: list[int] = moves.runs[:, RUN_FIELDS.index("flaw")].tolist()
        return flaws

    def close(self) -> None:
        """Nothing may be under way."""
        self._library.end_turns(self._turns)
        self._turns = 0
