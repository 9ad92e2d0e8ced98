"""Structured logs: one line a record, for people or as JSON; the level changes at run time."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import select
import sys
import time
from typing import TextIO

from kvd.linux.standard_streams import PIECE_BYTES, goes_to_journal, own_way_to
from kvd.observability import floods
from kvd.observability.floods import COUNTED, Floods
from kvd.observability.printable import printable_lines

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

# Whom a line is about, as `extra` says: fields of their own in JSON.
ABOUT = ("user", "tenant", "engine", "session", "namespace", "rank", "mover", "request")
# What the journal calls a level, by the least level that it is for: syslog(3).
_PRIORITIES = (
    (logging.CRITICAL, 2),
    (logging.ERROR, 3),
    (logging.WARNING, 4),
    (logging.INFO, 6),
    (logging.NOTSET, 7),
)
LAST_WORDS_SECONDS = 1.0  # that a line which ends the daemon waits for room


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.123Z INFO kvd.cli.serve: message"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """The line; further ones stand in from the edge, so that none can be forged by a name."""
        return printable_lines(super().formatMessage(record)).replace("\n", "\n    ")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802 - logging's names
        """Time in UTC with milliseconds."""
        return timestamp(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, whom it is about, and a traceback where
    there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        fields: dict[str, object] = {
            "time": timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in ABOUT if hasattr(record, name)}
        audited = getattr(record, "audit", None)
        if audited is not None:
            fields["audit"] = audited
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)  # in ASCII: a name's characters move no terminal's cursor


class JournalFormatter(logging.Formatter):
    """Another's lines, each with its priority in front, as the journal takes them: sd-daemon(3)."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """The record, each of its lines with the same priority."""
        priority = next(number for least, number in _PRIORITIES if record.levelno >= least)
        lines = self._inner.format(record).split("\n")
        return "\n".join(f"<{priority}>{line}" for line in lines)


class PromptHandler(logging.StreamHandler[TextIO]):
    """Writes lines, and waits for nobody who does not read them.

    Else one pipe that is full would stop the daemon. A line for which there is no room, there or on
    a disk, is left out, and the next one that is written says how many. The last words of a daemon
    wait for a moment.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._left_out = 0
        self._is_cut = False  # the last line has no end
        self._room = select.poll()
        self._fd: int | None = None  # of the stream, or our own
        self._own: int | None = None
        try:
            self._own = own_way_to(stream.fileno())
            self._fd = stream.fileno() if self._own is None else self._own
            self._room.register(self._fd, select.POLLOUT)
        except (OSError, ValueError):  # it is no file
            return

    def fileno(self) -> int | None:
        """Where lines go; None: to no file."""
        return self._fd

    def close(self) -> None:
        """Give back what is open beside the stream, by which lines go from now on."""
        super().close()
        own, self._own, self._fd = self._own, None, None
        if own is not None:
            os.close(own)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's line where there is room for it."""
        if self._fd is None:
            super().emit(record)
            return
        try:
            lines = f"{self.format(record)}\n"
            if self._left_out:
                lines = f"{self.format(_left_out(self._left_out))}\n{lines}"
            if self._is_cut:
                lines = f"\n{lines}"
            wait_s = LAST_WORDS_SECONDS if record.levelno >= logging.CRITICAL else 0.0
            self._write(self._fd, lines.encode(errors="backslashreplace"), wait_s)
        except Exception:  # noqa: BLE001 - as logging's own do
            self.handleError(record)

    def _write(self, fd: int, lines: bytes, wait_s: float) -> None:
        written = 0
        while written < len(lines):
            some = 0
            if self._room.poll(wait_s * 1e3):
                with contextlib.suppress(OSError):  # a full disk, or others filled the pipe
                    some = os.write(fd, lines[written : written + PIECE_BYTES])
            if not some:
                self._left_out += 1
                self._is_cut = self._is_cut or written > 0
                return
            written += some
        self._left_out, self._is_cut = 0, False


def _left_out(lines: int) -> logging.LogRecord:
    message = f"{lines} lines were left out: nobody read the log, or its disk was full"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)


def timestamp(record: logging.LogRecord) -> str:
    """When the record was made: UTC with milliseconds."""
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


log = logging.getLogger(__name__)


def start(level: str, form: str, stream: TextIO | None = None) -> Floods:
    """Send log records to the stream (standard error), from this level on, unless too many come."""
    stream = stream or sys.stderr
    handler = PromptHandler(stream)
    limits = Floods()
    handler.addFilter(limits)
    formatter = JsonFormatter() if form == "json" else TextFormatter()
    handler.setFormatter(JournalFormatter(formatter) if goes_to_journal(stream) else formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        if isinstance(old, PromptHandler):
            old.close()
    root.addHandler(handler)
    set_level(level)
    return limits


def tell_of_faults() -> None:
    """From now on a fault of this process's memory says in the log, as Python does, in which line
    it was: SIGBUS where a file that is mapped was cut short. The process ends by it all the same.
    """
    handlers = logging.getLogger().handlers
    found = (handler.fileno() for handler in handlers if isinstance(handler, PromptHandler))
    if (fd := next(found, None)) is not None:
        faulthandler.enable(fd, all_threads=False)


async def tell_what_was_left_out(limits: Floods) -> None:
    """Of a flood that is over, too; until cancelled."""
    while True:
        await asyncio.sleep(floods.LINE_SECONDS)
        tell(limits)


def tell(limits: Floods) -> None:
    """Log what was left out."""
    for level, line in limits.tell():
        log.log(level, "left out: %s", line, extra=COUNTED)


def set_level(level: str) -> None:
    """Log from this level on."""
    logging.getLogger().setLevel(LEVELS[level])


def toggle_debug(usual: str) -> str:
    """Switch between debug and the usual level; returns the level now in force."""
    debugging = logging.getLogger().level == logging.DEBUG
    level = usual if debugging else "debug"
    set_level(level)
    return level
