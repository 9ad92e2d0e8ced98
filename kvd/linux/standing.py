"""Whether files are still where their next owner, and every new mover, will look for them.

They are the pool's, or a disk tier's. Somebody may remove them under a daemon that runs: an
operator, a cleaner of temporary files, systemd-logind at a logout (RemoveIPC). What is mapped or
open stays, so nothing fails at once; but every row that is mapped later is missing, the space is
not free, and another daemon may begin in the same place. A file that was cut short ends whoever
has it mapped and reads beyond its end.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Lost(NamedTuple):
    """A file or directory that is not what it was."""

    path: Path
    how: str


class Kept(NamedTuple):
    """What a file or directory was."""

    device: int
    inode: int
    size: int  # of a directory 0


class Standing:
    """Tells whether files, none of which changes its size, and directories are still what they were
    when this was made."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._kept = {path: _kept(path) for path in paths}

    def missing(self) -> Lost | None:
        """One that has gone, has given its name to another, or was cut short."""
        found = (lost(path, before) for path, before in self._kept.items())
        return next(filter(None, found), None)


def lost(path: Path, before: Kept | None) -> Lost | None:
    """What is there now, where that has gone, has given its name to another, or was cut short."""
    now = _kept(path)
    if now is None or before is None:
        return Lost(path, "was removed")
    if now[:2] != before[:2]:
        return Lost(path, "was replaced")  # renamed, or hidden by what was mounted there
    return Lost(path, "was cut short") if now.size < before.size else None


def _kept(path: Path) -> Kept | None:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    return Kept(found.st_dev, found.st_ino, size)
