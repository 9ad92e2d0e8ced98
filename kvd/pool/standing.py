"""Whether the pool's files are still where its next owner, and every new mover, will look for them.

Somebody may remove them under a daemon that runs: an operator, a cleaner of temporary files,
systemd-logind at a logout (RemoveIPC). What is mapped stays, so nothing fails at once; but every
row that is mapped later is missing, and another daemon may make a pool in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class Standing:
    """Tells whether files and directories are still what they were when this was made."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._inodes = {path: _inode(path) for path in paths}

    def missing(self) -> Path | None:
        """One that has gone, or has given its name to another."""
        for path, inode in self._inodes.items():
            if _inode(path) != inode:
                return path
        return None


def _inode(path: Path) -> tuple[int, int]:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return 0, 0
    return found.st_dev, found.st_ino
