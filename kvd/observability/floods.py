"""Nobody fills the log: of lines of one kind, for one user, some pass at once and then a few.

A kind is a place in the code that logs. A line for a user says whose by `extra={"user": uid}`, so
that what one user makes the daemon say takes nothing from what it says of another. What was left
out is counted, and told with the next line that passes, or by `tell` once it is quiet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

LINES_AT_ONCE = 64  # as many as a user may have movers: engines that start at once are all seen
LINE_SECONDS = 10.0  # between the lines that pass after those
MAX_KINDS = 256  # of lines and users; the users beyond them share one a kind of line
MAX_LINE_CHARACTERS = 4096

# `extra` of a line that says how many were left out, or what came of an operator's act.
COUNTED = {"counted": True}
Kind = tuple[str, int, int | None]


@dataclass(slots=True)
class _Told:
    """How much of a kind has passed."""

    lines: float  # that may pass now
    at_s: float  # when that was counted
    left_out: int = 0
    like: str = ""  # the first line that was left out
    level: int = logging.INFO

    def count_up(self, now_s: float) -> None:
        self.lines = min(LINES_AT_ONCE, self.lines + (now_s - self.at_s) / LINE_SECONDS)
        self.at_s = now_s


class Floods(logging.Filter):
    """A filter that keeps any user from filling the log; safe on any thread.

    What ends the daemon always passes, and so does what is for debugging.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._kinds: dict[Kind, _Told] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kinds)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line passes, cut to its length, and with the number of those left out."""
        if record.levelno <= logging.DEBUG or record.levelno >= logging.CRITICAL:
            return True
        if hasattr(record, "counted"):
            return True
        with self._lock:
            told = self._of(record)
            told.count_up(self._now_s())
            if told.lines < 1:
                if not told.left_out:
                    told.like, told.level = _shortened(record.getMessage(), 200), record.levelno
                told.left_out += 1
                return False
            told.lines -= 1
            left_out, told.left_out = told.left_out, 0
        message = _shortened(record.getMessage(), MAX_LINE_CHARACTERS)
        if left_out:
            message += f" ({left_out} more like it were left out)"
        record.msg, record.args = message, ()
        return True

    def tell(self) -> list[tuple[int, str]]:
        """What was left out, where its next line may pass: level and line of each kind.

        Forgets the kinds of which all may pass again.
        """
        lines = []
        with self._lock:
            for kind, told in list(self._kinds.items()):
                told.count_up(self._now_s())
                if told.left_out and told.lines >= 1:
                    told.lines -= 1
                    lines.append((told.level, f"{told.left_out} more like {told.like!r}"))
                    told.left_out = 0
                if told.lines >= LINES_AT_ONCE:
                    del self._kinds[kind]
        return lines

    def _of(self, record: logging.LogRecord) -> _Told:
        kind = (record.name, record.lineno, getattr(record, "user", None))
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = (record.name, record.lineno, None)  # as many as there are places, at most
        told = self._kinds.get(kind)
        if told is None:
            told = self._kinds[kind] = _Told(LINES_AT_ONCE, self._now_s())
        return told


def _shortened(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[:most]}..."
