"""A start that fails takes the directories away again that it made, where they are empty."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


class MadeDirectories:
    """Those of some paths that were not there when this was made."""

    def __init__(self, paths: Iterable[Path]) -> None:
        wanted = {each for path in paths for each in (path, *path.parents)}
        self._absent = [path for path in wanted if not _is_there(path)]

    def remove(self) -> None:
        """Take away those that are there now and empty, the innermost first."""
        for path in sorted(self._absent, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()


def _is_there(path: Path) -> bool:
    """Where that can't be told, it is not ours to take away."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True
