"""Files of the operator's that are read whole: no pipe is waited for, and no size is believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

MAX_PEM_BYTES = 1 << 20  # a distribution's bundle of all authorities has a fifth


class NotPlainError(Exception):
    """It is none that is read; the message goes on after the file's name."""


def read_plain(path: Path, most_bytes: int) -> bytes:
    """All of a plain file. OSError where it can't be read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotPlainError("is no plain file")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise NotPlainError(f"has more than {most_bytes} bytes")
    return content
