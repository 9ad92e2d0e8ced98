"""Stores that a rank gave up, and how long none are sent after that.

Before an engine block is used again, a step waits for the store that reads it, and gives it up in
the end. While the daemon or a mover hangs, no store ends: without a pause each step would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvd_client.scheduler.plan import WorkerReport

FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 32.0


class StorePause:
    """Says whether stores are held back: after each one given up for twice as long, until one ends
    well."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s = float("-inf")
        self._next_s = FIRST_PAUSE_S

    @property
    def is_on(self) -> bool:
        return self._clock() < self._until_s

    def take(self, reports: Iterable[WorkerReport]) -> None:
        """What the ranks say of one step."""
        ended = [job for report in reports for job in report.ended]
        self.note(gave_up=any(job.given_up for job in ended), done=any(job.done for job in ended))

    def note(self, *, gave_up: bool, done: bool) -> None:
        """Of one step's jobs some were given up; some ended well."""
        if done:
            self._next_s = FIRST_PAUSE_S
        if gave_up and not self.is_on:
            self._until_s = self._clock() + self._next_s
            self._next_s = min(2 * self._next_s, MAX_PAUSE_S)

    def end(self) -> None:
        """There is another daemon or session."""
        self._until_s, self._next_s = float("-inf"), FIRST_PAUSE_S
