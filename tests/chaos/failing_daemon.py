"""kvd that dies at a named step of a commit: as kill -9 there, before it, after it, or half-way.

`KVD_TEST_FAILPOINT` is "STEP:COUNT:MANNER", say "slots.table:37:torn". A step is a write to one of
the pool's tables (by the file's name), or a call of the kernel's that its files are changed by.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvd.__main__ import main
from kvd.pool import extents, header, mapped_table, ownership, registry, reserve, sealed_json
from kvd.tiers import keeper, process

TABLES = ("slots.table", "rows.table", "checksums.table", "generations.table")
CALLS = ("write", "pwrite", "ftruncate", "posix_fallocate", "open")
PATHS = ("rename", "unlink")
STEPS = (*TABLES, *CALLS, *PATHS)
MANNERS = ("before", "torn", "after")
WHOSE = (extents, header, mapped_table, ownership, registry, reserve, sealed_json)
VARIABLE = "KVD_TEST_FAILPOINT"
POOLS_PARTS = ("pool", "extents")  # directories whose files count


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Failpoint:
    """Where and how this process dies."""

    def __init__(self, text: str) -> None:
        self.step, count, self.manner = text.split(":")
        self._left = int(count)

    def pass_by(self, step: str, whole: Callable[[], Any], half: Callable[[], Any]) -> Any:
        """Do the step, unless it is the one to die at."""
        if step != self.step:
            return whole()
        self._left -= 1
        if self._left:
            return whole()
        if self.manner == "torn":
            half()
        elif self.manner == "after":
            whole()
        return die()


class Words(np.ndarray):
    """The words of a mapped table. Each write to them is a step; one to a copy of them is none."""

    _point: Failpoint | None = None
    _step = ""
    _span = (0, 0)

    def __array_finalize__(self, source: Any) -> None:
        self._point = getattr(source, "_point", None)
        self._step = getattr(source, "_step", "")
        self._span = getattr(source, "_span", (0, 0))

    def __setitem__(self, where: Any, values: Any) -> None:
        first, last = self._span
        at = self.__array_interface__["data"][0]
        write = super().__setitem__
        if self._point is None or not first <= at < last:
            write(where, values)
            return

        def half() -> None:
            rows = where[0] if isinstance(where, tuple) else where
            if isinstance(rows, np.ndarray) and len(rows) > 1:
                few = rows[: len(rows) // 2]
                some = np.asarray(values)
                some = some[: len(few)] if some.ndim and len(some) == len(rows) else some
                write((few, *where[1:]) if isinstance(where, tuple) else few, some)

        self._point.pass_by(self._step, lambda: write(where, values), half)


def watched_tables(point: Failpoint) -> None:
    """Have every table that is mapped from now on count its writes."""
    init = mapped_table.MappedTable.__init__

    def watched(self: Any, path: Path, *rest: Any) -> None:
        init(self, path, *rest)
        words = self._words.view(Words)
        words._point, words._step = point, path.name
        at = words.__array_interface__["data"][0]
        words._span = (at, at + words.nbytes)
        self._words = words

    mapped_table.MappedTable.__init__ = watched  # type: ignore[method-assign, assignment]


class Calls:
    """`os` for the pool's modules: some of its calls are steps."""

    def __init__(self, point: Failpoint) -> None:
        self._point = point

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        if name not in CALLS:
            return call

        def stepped(*given: Any, **named: Any) -> Any:
            def half() -> None:
                if name in ("write", "pwrite"):
                    fd, content, *place = given
                    call(fd, content[: len(content) // 2], *place)

            return self._point.pass_by(name, lambda: call(*given, **named), half)

        return stepped


def watched_paths(point: Failpoint) -> None:
    """Have renames and removals of the pool's files be steps."""

    def watch(name: str) -> None:
        plain = getattr(Path, name)

        def stepped(self: Path, *given: Any, **named: Any) -> Any:
            if self.parent.name not in POOLS_PARTS:
                return plain(self, *given, **named)
            return point.pass_by(name, lambda: plain(self, *given, **named), lambda: None)

        setattr(Path, name, stepped)

    for name in PATHS:
        watch(name)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # where it stands, for who finds it hung
    keeper.FIRST_WAIT_S = 0.5
    keeper.LONGEST_WAIT_S = 1.0
    process.LATE_S = 1.0
    asked = os.environ.get(VARIABLE, "")
    if asked:
        chosen = Failpoint(asked)
        watched_tables(chosen)
        watched_paths(chosen)
        for module in WHOSE:
            vars(module)["os"] = Calls(chosen)
    sys.exit(main())
