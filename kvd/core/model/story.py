"""The story: what lately became of slots and jobs, told when an invariant breaks.

A ring of the last events that changed slots or belong to a job, with the changes of each. It
costs a line of a list in normal work; nobody reads it before something is wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvd.core.keys import NO_SLOTS, JobId, SessionId, Slots

MAX_NOTES = 4096  # events
MAX_NOTED = 1 << 18  # slots in all their changes, 8 bytes each; a change counts for CHANGE_COST
CHANGE_COST = 32
MAX_SLOTS_NOTED = 256  # of one change
MAX_LINES = 100  # that are told

JobName = tuple[SessionId, JobId]


class BrokenSlots(AssertionError):
    """An invariant does not hold for these slots."""

    def __init__(self, message: str, slots: Slots) -> None:
        super().__init__(f"{message}: slots {slots[:8].tolist()}")
        self.slots = slots


@dataclass(slots=True, eq=False)
class Note:
    """One event: when it was, whose, and what it did to which slots."""

    now_ns: int
    event: str
    job: JobName | None
    changes: list[tuple[str, Slots]] = field(default_factory=list)
    is_kept: bool = False

    def lines(self, slots: Slots) -> Iterable[str]:
        """What it did to these slots."""
        head = f"{self.now_ns} {self.event}"
        if self.job is not None:
            head += f" of session {self.job[0]}, job {self.job[1]}"
        found = [(what, np.intersect1d(changed, slots)) for what, changed in self.changes]
        told = [f"{what} {some.tolist()}" for what, some in found if len(some)]
        yield f"{head}: {'; '.join(told) or 'none of these slots'}"


class Story:
    """The last notes, as many as the bounds allow."""

    def __init__(self) -> None:
        self._notes: deque[Note] = deque()
        self._noted = 0  # see MAX_NOTED
        self._now = Note(0, "", None)
        self.changes = 0  # of states of slots, ever

    def begin(self, now_ns: int, event: str, job: JobName | None) -> None:
        """What follows is of this event."""
        self._now = Note(now_ns, event, job)
        if job is not None:
            self._keep(self._now)

    def changed(self, what: str, slots: Slots) -> None:
        """The event did this to these slots."""
        self.changes += 1
        now = self._now
        if not now.is_kept:
            self._keep(now)
        now.changes.append((what, slots[:MAX_SLOTS_NOTED].copy()))
        self._noted += len(now.changes[-1][1]) + CHANGE_COST
        while self._noted > MAX_NOTED:
            self._forget_oldest()

    def _keep(self, note: Note) -> None:
        note.is_kept = True
        self._notes.append(note)
        if len(self._notes) > MAX_NOTES:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        oldest = self._notes.popleft()
        self._noted -= sum(len(slots) + CHANGE_COST for _, slots in oldest.changes)
        oldest.changes = []
        oldest.is_kept = False

    def touched_now(self) -> Slots:
        """Slots that the present event has changed so far."""
        return _joined(slots for _, slots in self._now.changes)

    def tell(self, slots: Slots) -> list[str]:
        """The notes of one of these slots, or of the present job; the last ones, in order."""
        job = self._now.job
        lines = [
            line
            for note in self._notes
            if (job is not None and note.job == job)
            or any(np.isin(changed, slots).any() for _, changed in note.changes)
            for line in note.lines(slots)
        ]
        return lines[-MAX_LINES:]


def _joined(several: Iterable[Slots]) -> Slots:
    found = list(several)
    return np.unique(np.concatenate(found)) if found else NO_SLOTS
