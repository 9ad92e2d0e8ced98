"""The ready ring: the worker says which jobs its half is there for, the mover hears it.

One worker process writes, its mover reads. The mover trusts nothing in it: the ring lies in
memory that the engine may scribble over, so the reader keeps its own place and takes at most
one ring full of ids whatever the words say.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd_proto import layout

_U64 = np.dtype("<u8")
_HEADER = (layout.RING_MAGIC, layout.LAYOUT_VERSION, layout.RING_ENTRIES)
_WRAP = 1 << 64
_TAIL = layout.RING_TAIL_OFFSET // 8
_HEAD = layout.RING_HEAD_OFFSET // 8
_LEAVE = layout.RING_LEAVE_OFFSET // 8
_IDS = layout.HEADER_BYTES // 8
_ENTRIES = layout.RING_ENTRIES
_ABANDONED = _IDS + _ENTRIES
_NEVER_A_JOB_HERE = _WRAP - 1  # as the first abandon word: job 0 would match a zero


def create_ring() -> int:
    """Make an empty ring in a memfd that can neither shrink nor grow; its descriptor."""
    fd = os.memfd_create("kvd-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, layout.RING_BYTES)
    words = np.zeros(layout.RING_BYTES // 8, dtype=_U64)
    words[: len(_HEADER)] = _HEADER
    words[_ABANDONED] = _NEVER_A_JOB_HERE
    os.pwrite(fd, words.tobytes(), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class RingWriter:
    """The worker's end of a ring. Any thread may call it; descriptors stay the caller's."""

    def __init__(self, ring_fd: int, event_fd: int) -> None:
        layout.require_ordered_stores()
        self._map, self._words = _map_ring(ring_fd)
        self._event_fd = event_fd
        self._tail = int(self._words[_TAIL])
        self._lock = threading.Lock()

    def mark_ready(self, job_ids: Sequence[int]) -> bool:
        """Tell the mover that this rank's half of the jobs is there; wakes it once.

        False means that the ring has no room and nothing was written: use the RPC.
        """
        if not job_ids:
            return True
        with self._lock:
            queued = (self._tail - int(self._words[_HEAD])) % _WRAP
            if queued + len(job_ids) > layout.RING_ENTRIES:
                return False
            for place, job_id in enumerate(job_ids, start=self._tail):
                self._words[_IDS + place % layout.RING_ENTRIES] = job_id
            self._tail = (self._tail + len(job_ids)) % _WRAP
            self._words[_TAIL] = self._tail
        os.eventfd_write(self._event_fd, 1)
        return True

    def abandon(self, job_id: int) -> None:
        """Give a store up: its engine blocks may change from now on, so it must not be READY."""
        place = _ABANDONED + job_id % layout.RING_ENTRIES
        with self._lock:
            word = int(self._words[place])
            if word == _NEVER_A_JOB_HERE or word < job_id:
                self._words[place] = job_id

    def ask_to_leave(self) -> None:
        """Ask the mover to end itself, whatever it is doing: no word of control's is needed.

        The worker's user may not be allowed to signal the mover's process, nor see its namespace.
        """
        with self._lock:
            self._words[_LEAVE] = 1
        os.eventfd_write(self._event_fd, 1)

    def close(self) -> None:
        """Unmap. Nothing may be called afterwards."""
        del self._words
        self._map.close()


class RingReader:
    """The mover's end of a ring. One thread takes; `abandoned` may be asked from any."""

    def __init__(self, ring_fd: int) -> None:
        layout.require_ordered_stores()
        self._map, self._words = _map_ring(ring_fd)
        # The same words: `abandoned` is asked between all ranges of a copy, and by numpy's
        # scalars it would take twice as long.
        self._abandoned = memoryview(self._map).cast("Q")[_ABANDONED:]
        self._head = 0

    def take(self) -> list[int]:
        """Job ids since the last call, oldest first, at most one ring full.

        A tail that is further ahead than the ring is long can't be a worker's: what it would
        stand for is dropped, and the jobs expire.
        """
        tail = int(self._words[_TAIL])
        count = (tail - self._head) % _WRAP
        if count == 0:
            return []
        if count > layout.RING_ENTRIES:
            self._head = tail
            self._words[_HEAD] = tail
            return []
        start = self._head % layout.RING_ENTRIES
        first = min(count, layout.RING_ENTRIES - start)
        job_ids: list[int] = self._words[_IDS + start : _IDS + start + first].tolist()
        job_ids += self._words[_IDS : _IDS + count - first].tolist()
        self._head = tail
        self._words[_HEAD] = tail
        return job_ids

    def abandoned(self, job_id: int) -> bool:
        """Whether the worker gave this store up. Ask after the last byte was read.

        A younger job's number in its word says so too: it may have taken this one's place.
        """
        word = self._abandoned[job_id % _ENTRIES]
        return word != _NEVER_A_JOB_HERE and word >= job_id

    def abandon_word(self, job_id: int) -> int:
        """Address of the word that says so: at least the job's id, but not all ones."""
        return self._words.ctypes.data + 8 * (_ABANDONED + job_id % _ENTRIES)

    @property
    def leave_asked(self) -> bool:
        """Whether the worker wants this mover gone: it trusts no copy of it any more."""
        return bool(self._words[_LEAVE])

    def close(self) -> None:
        """Unmap. Nothing may be called afterwards."""
        self._abandoned.release()
        del self._words
        self._map.close()


def _map_ring(ring_fd: int) -> tuple[mmap.mmap, npt.NDArray[np.uint64]]:
    # Read before it is mapped: one of another layout may be shorter.
    found = tuple(np.frombuffer(os.pread(ring_fd, 8 * len(_HEADER), 0), dtype=_U64).tolist())
    reason = layout.why_other_header("a ready ring", found, _HEADER)
    if reason:
        raise ValueError(reason)
    mapped = mmap.mmap(ring_fd, layout.RING_BYTES)
    return mapped, np.frombuffer(mapped, dtype=_U64)
