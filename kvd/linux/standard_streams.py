"""The standard streams of a process that was started without some of them (`kvd status >&-`)."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from pathlib import Path
from typing import TextIO

LAST = 2  # of their descriptors: standard error's
PIECE_BYTES = 4096  # a pipe that has room at all has room for so much


def fill() -> None:
    """Have those that are closed lead to /dev/null.

    A socket would get the descriptor, whatever is printed would go to its peer, and libuv aborts
    the process where it closes one of these.
    """
    while (made := os.open(os.devnull, os.O_RDWR)) <= LAST:
        os.set_inheritable(made, True)
    os.close(made)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - for good


class PromptErrors(io.TextIOBase):
    """Standard error of a process that waits for nobody who reads it, and that no full disk ends.

    What there is no room for is left out. Any thread may write.
    """

    def __init__(self) -> None:
        own = own_way_to(LAST)
        self._fd = LAST if own is None else own  # for as long as the process lives

    def fileno(self) -> int:
        """Where it goes."""
        return self._fd

    def write(self, text: str) -> int:
        """Write as much as there is room for; what was left out counts as written."""
        left = text.encode(errors="backslashreplace")
        room = select.poll()  # of this call's own: two threads can't ask one at once
        room.register(self._fd, select.POLLOUT)
        while left:
            try:
                done = os.write(self._fd, left[:PIECE_BYTES]) if room.poll(0) else 0
            except OSError:  # a full disk, nobody reads any more, or others filled the pipe
                done = 0
            if not done:
                break
            left = left[done:]
        return len(text)


def goes_to_journal(stream: TextIO) -> bool:
    """Whether the journal reads what is written there: systemd says so, by device and inode."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # it is no file
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def own_way_to(fd: int) -> int | None:
    """Another descriptor of a terminal or a pipe, by which no write waits.

    A terminal that has room may have less than a line takes, and a pipe may be full once others
    have written. To change the descriptor itself would change theirs. None: it is neither, or
    may not be opened.
    """
    if not (stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd)):
        return None
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
