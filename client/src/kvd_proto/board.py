"""The board: where a rank's worker reads which of its jobs have ended, without a call.

Two writers, one lane each, and one reader. There is no word for how far the reader has come:
it must look at least once every BOARD_RECORDS records, which it does as long as it keeps to
MAX_JOBS_IN_FLIGHT.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from typing import NamedTuple

import numpy as np

from kvd_proto import layout

_U64 = np.dtype("<u8")
_HEADER = (layout.BOARD_MAGIC, layout.LAYOUT_VERSION, layout.BOARD_RECORDS)
_WRAP = 1 << 64
_TAILS = tuple(offset // 8 for offset in layout.BOARD_TAIL_OFFSETS)
# As layout.BOARD_RECORD, field by field: for a few records numpy takes several times as long.
_RECORD = struct.Struct("<QIIQQ")
_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python 3.11 has no name for it


class BoardRecord(NamedTuple):
    """What the board says of one job: it has ended for this rank."""

    job_id: int
    kind: int  # JobKind of kvd.v1
    status: int  # JobStatus of kvd.v1
    bytes_copied: int
    duration_ns: int


class BoardOverrun(Exception):
    """The reader came too late and records are lost: the rank must register again."""


def create_board() -> int:
    """Make an empty board in a memfd; its descriptor. Seal it once all writers have mapped it."""
    fd = os.memfd_create("kvd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.BOARD_BYTES)
    os.pwrite(fd, np.array(_HEADER, dtype=_U64).tobytes(), 0)
    return fd


def seal_board(fd: int) -> None:
    """From now on nobody can map the board for writing or resize it; old mappings go on."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE)


class BoardWriter:
    """Writes one lane of a board, alone. Any thread of its process may post."""

    def __init__(self, board_fd: int, lane: int) -> None:
        layout.require_ordered_stores()
        _check_header(board_fd)
        self._map = mmap.mmap(board_fd, layout.BOARD_BYTES)
        self._words = np.frombuffer(self._map, dtype=_U64)
        self._records = _lane_records(self._map, lane)
        self._tail_word = _TAILS[lane]
        self._tail = int(self._words[self._tail_word])
        self._lock = threading.Lock()

    def post(self, record: BoardRecord) -> None:
        """Write one record, visible to the reader's next poll."""
        with self._lock:
            self._records[self._tail % layout.BOARD_RECORDS] = record
            self._tail = (self._tail + 1) % _WRAP
            self._words[self._tail_word] = self._tail

    def close(self) -> None:
        """Unmap. Nothing may be called afterwards."""
        del self._words, self._records
        self._map.close()


class BoardReader:
    """The worker's end of a board. One thread polls; the descriptor stays the caller's."""

    def __init__(self, board_fd: int) -> None:
        layout.require_ordered_stores()
        _check_header(board_fd)
        self._map = mmap.mmap(board_fd, layout.BOARD_BYTES, prot=mmap.PROT_READ)
        self._words = np.frombuffer(self._map, dtype=_U64)
        self._seen = [0] * layout.BOARD_LANES
        self._looked = list(self._seen)  # how far the last look came

    def poll(self) -> list[BoardRecord]:
        """Records posted since the last poll, in order within a lane. Empty costs two loads.

        Raises BoardOverrun when a lane has gone round since: records are lost for good.
        """
        found = self.look()
        if found:
            self.pass_by()
        return found

    def look(self) -> list[BoardRecord]:
        """As `poll`; the next look finds them again until `pass_by` says that they are taken."""
        found: list[BoardRecord] = []
        for lane, seen in enumerate(self._seen):
            tail = int(self._words[_TAILS[lane]])
            if tail != seen:
                found += self._read(lane, seen, tail)
            self._looked[lane] = tail
        return found

    def pass_by(self) -> None:
        """What the last look found is taken."""
        self._seen[:] = self._looked

    def close(self) -> None:
        """Unmap. Nothing may be called afterwards."""
        del self._words
        self._map.close()

    def _read(self, lane: int, seen: int, tail: int) -> list[BoardRecord]:
        count = min((tail - seen) % _WRAP, layout.BOARD_RECORDS)
        first, begin = seen % layout.BOARD_RECORDS, _lane_offset(lane)
        size, whole = _RECORD.size, layout.BOARD_RECORDS
        rows = self._map[begin + first * size : begin + min(first + count, whole) * size]
        rows += self._map[begin : begin + max(0, first + count - whole) * size]
        # Asked only after the copy: a writer may have lapped us while we read.
        written = (int(self._words[_TAILS[lane]]) - seen) % _WRAP
        if written > layout.BOARD_RECORDS:
            raise BoardOverrun(f"lane {lane}: {written} records since the last poll")
        return [BoardRecord._make(row) for row in _RECORD.iter_unpack(rows)]


def _lane_offset(lane: int) -> int:
    return layout.HEADER_BYTES + lane * layout.BOARD_RECORDS * layout.BOARD_RECORD.itemsize


def _lane_records(mapped: mmap.mmap, lane: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    return np.frombuffer(
        mapped,
        dtype=layout.BOARD_RECORD,
        count=layout.BOARD_RECORDS,
        offset=_lane_offset(lane),
    )


def _check_header(board_fd: int) -> None:
    """Before it is mapped: one of another layout may be shorter."""
    found = tuple(np.frombuffer(os.pread(board_fd, 8 * len(_HEADER), 0), dtype=_U64).tolist())
    reason = layout.why_other_header("a board", found, _HEADER)
    if reason:
        raise ValueError(reason)
