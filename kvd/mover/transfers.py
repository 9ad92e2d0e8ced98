"""Transfers of one mover from control's word to their end.

A transfer is queued once both halves are there, control's order and the worker's `ready` for all
its jobs, in either order. Two queues, one per direction, so that a load never waits behind a store.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvd.core.events import JobKind
from kvd.core.lifecycle import step
from kvd.mover.frames import TransferOrder
from kvd_proto.layout import RING_ENTRIES

# The last jobs that the worker said ready for, whether orders of them still come or not: nobody
# tells a mover that a store has had its last piece. A store of which a further piece comes after
# twice as many other jobs expires, and may from this many on.
MAX_READY_JOBS = RING_ENTRIES
_WORD_BITS = 256


class TransferState(enum.Enum):
    """How far a transfer has come in this mover."""

    WAITING = "waiting"  # for the worker's half
    QUEUED = "queued"
    TAKEN = "taken"  # by a copying thread, which has touched no byte yet
    RUNNING = "running"
    ENDED = "ended"


PROGRESS_STEPS: frozenset[tuple[TransferState, TransferState]] = frozenset(
    {
        (TransferState.WAITING, TransferState.QUEUED),
        (TransferState.WAITING, TransferState.ENDED),
        (TransferState.QUEUED, TransferState.TAKEN),
        (TransferState.QUEUED, TransferState.ENDED),
        (TransferState.TAKEN, TransferState.RUNNING),
        (TransferState.TAKEN, TransferState.ENDED),
        (TransferState.RUNNING, TransferState.ENDED),
    }
)


@dataclass(slots=True, eq=False)
class TransferProgress:
    """One order and how far it has come. `extents`: what it keeps mapped."""

    order: TransferOrder
    extents: frozenset[int]
    awaited: set[int] = field(default_factory=set)  # jobs of which the worker's half is not there
    state: TransferState = TransferState.WAITING

    def move(self, new: TransferState) -> None:
        """Take a step of the table."""
        self.state = step(PROGRESS_STEPS, self.state, new)


class ReadyJobs:
    """The last MAX_READY_JOBS jobs that the worker said ready for, and at most as many before them.

    In two tables, and the older is dropped as a whole. From one, which loses its oldest job to
    each new one, nothing is freed: it is built anew every some thousand jobs, twice as large once.
    A table has a bit for each job, in words by their numbers' upper bits: engines number their
    jobs one by one, and a number for each would take a megabyte.
    """

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._added = 0  # to the young

    def add(self, job: int) -> None:
        if self._added == MAX_READY_JOBS:
            self._old, self._young, self._added = self._young, {}, 0
        word, bit = _place_of(job)
        self._young[word] = self._young.get(word, 0) | bit
        self._added += 1

    def discard(self, job: int) -> None:
        word, bit = _place_of(job)
        for table in (self._young, self._old):
            if (said := table.get(word, 0)) & bit:
                if said == bit:
                    del table[word]
                else:
                    table[word] = said - bit

    def __contains__(self, job: int) -> bool:
        word, bit = _place_of(job)
        return bool((self._young.get(word, 0) | self._old.get(word, 0)) & bit)


def _place_of(job: int) -> tuple[int, int]:
    """The word of a table that has its bit, and the bit."""
    return job // _WORD_BITS, 1 << job % _WORD_BITS


class TransferQueue:
    """Joins the halves of each transfer and hands it to the copying threads. For any thread.

    The sender of orders bounds how many there are; readies are bounded here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._transfers: dict[int, TransferProgress] = {}
        self._waiting: dict[int, list[TransferProgress]] = {}
        self._ready = ReadyJobs()
        self._queues: dict[JobKind, queue.SimpleQueue[TransferProgress | None]] = {
            kind: queue.SimpleQueue() for kind in JobKind
        }

    def submit(self, transfer: TransferProgress) -> None:
        """Control's half is there."""
        with self._lock:
            assert transfer.order.transfer not in self._transfers, "a transfer came twice"
            self._transfers[transfer.order.transfer] = transfer
            transfer.awaited = {job for job in transfer.order.jobs if job not in self._ready}
            for job in transfer.awaited:
                self._waiting.setdefault(job, []).append(transfer)
            if not transfer.awaited:
                self._enqueue(transfer)

    def mark_ready(self, jobs: Iterable[int]) -> None:
        """The worker's half of these jobs is there, also for orders still to come."""
        with self._lock:
            for job in jobs:
                self._ready.add(job)
                for transfer in self._waiting.pop(job, ()):
                    transfer.awaited.remove(job)
                    if not transfer.awaited:
                        self._enqueue(transfer)

    def revoke(self, number: int) -> TransferProgress | None:
        """End a transfer that has not started, and return it; None when it's too late."""
        with self._lock:
            transfer = self._transfers.get(number)
            if transfer is None or transfer.state is TransferState.RUNNING:
                return None
            if transfer.state is TransferState.WAITING:
                self._await_no_more(transfer)
            transfer.move(TransferState.ENDED)
            del self._transfers[number]
            return transfer

    def take(self, kind: JobKind) -> TransferProgress | None:
        """Wait for the next transfer of a direction, to `begin`. None: the queue is closed."""
        while True:
            transfer = self._queues[kind].get()
            if transfer is None or self._closed:
                self._queues[kind].put(None)  # for the next thread of that direction
                return None
            with self._lock:
                if transfer.state is TransferState.QUEUED:  # else it was revoked meanwhile
                    transfer.move(TransferState.TAKEN)
                    return transfer

    def begin(self, transfer: TransferProgress) -> bool:
        """Whether one that was taken may be copied: it is running from now on, or has been.

        False: it was revoked meanwhile, and who did that lets go of what it used.
        """
        with self._lock:
            if transfer.state is TransferState.TAKEN:
                transfer.move(TransferState.RUNNING)
            return transfer.state is TransferState.RUNNING

    def end(self, transfer: TransferProgress) -> None:
        """A running transfer has ended. A load's ready is used up, a store may have more pieces."""
        with self._lock:
            transfer.move(TransferState.ENDED)
            del self._transfers[transfer.order.transfer]
            if transfer.order.kind is JobKind.LOAD:
                for job in transfer.order.jobs:
                    self._ready.discard(job)

    def close(self) -> None:
        """Send the copying threads home; what is queued is dropped."""
        self._closed = True
        for waiting in self._queues.values():
            waiting.put(None)

    def _await_no_more(self, transfer: TransferProgress) -> None:
        for job in transfer.awaited:
            siblings = self._waiting[job]
            siblings.remove(transfer)
            if not siblings:
                del self._waiting[job]

    def _enqueue(self, transfer: TransferProgress) -> None:
        transfer.move(TransferState.QUEUED)
        self._queues[transfer.order.kind].put(transfer)
