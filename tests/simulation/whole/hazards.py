"""What the machine under the daemon does to it: power cut at any write, and calls that fail.

Writes to the pool's tables and registry pass through here. At a cut only a part of what was being
written stands, and nothing of what follows.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np

from kvd.linux.standing import Standing
from kvd.pool import extents, mapped_table, registry, sealed_json
from kvd.pool.ownership import MoverList
from kvd.runtime import clock, tiers, turns

SHORTAGES = ("disk", "descriptors")


class PowerCut(BaseException):
    """The daemon's process is gone at this write: no handler of its own sees this."""


class Hazards:
    """Of one world: when its power goes, and what there is none of at the moment."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.writes_left: int | None = None  # until the cut; None: there is none
        self.is_dead = False
        self.short: set[str] = set()
        self.zeroed: Callable[[int], None] = lambda _extent: None

    def spend(self) -> float | None:
        """Before a write: what share of it happens, where it is the last; None: all of it."""
        if self.is_dead:
            raise PowerCut
        if self.writes_left is None:
            return None
        self.writes_left -= 1
        if self.writes_left > 0:
            return None
        self.is_dead = True
        return self.random.random()

    def begin_again(self) -> None:
        """Another daemon starts, and has what it asks for."""
        self.writes_left = None
        self.is_dead = False
        self.short.clear()

    def refuse(self, what: str, error: int) -> None:
        """OSError where there is none of it, mostly."""
        if what in self.short and self.random.random() < 0.8:
            raise OSError(error, os.strerror(error))


_now: Hazards | None = None  # of the world that runs


class WatchedWords(np.ndarray):
    """A table's words: each store into them may be the last, and cut short."""

    def __setitem__(self, where: Any, value: Any) -> None:
        share = None if _now is None else _now.spend()
        if share is None:
            super().__setitem__(where, value)
            return
        torn = np.array(super().__getitem__(where))
        wanted = np.broadcast_to(value, torn.shape).reshape(-1)
        words = int(share * (torn.size + 1))
        torn.reshape(-1)[:words] = wanted[:words]
        super().__setitem__(where, torn)
        raise PowerCut


def _watched(mapped: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any) -> None:
        mapped(self, *args)
        self._words = self._words.view(WatchedWords)

    return init


def _closed(table: Any) -> None:
    """In the place of MappedTable.close: the frames of a cut write may still see the words."""
    del table._words
    os.close(table._fd)


def _appended(file: Any, content: bytes) -> None:
    """In the place of LineFile._append."""
    if _now is not None:
        share = _now.spend()
        if share is not None:
            os.pwrite(file._fd, content[: int(share * len(content))], file._size)
            raise PowerCut
        if "disk" in _now.short and _now.random.random() < 0.8:
            os.pwrite(file._fd, content[: len(content) // 2], file._size)
            file.cut(file._size)
            raise OSError(errno.ENOSPC, "No space left on device")
    os.pwrite(file._fd, content, file._size)


def _failing(call: Callable[..., Any], what: str, error: int) -> Callable[..., Any]:
    def called(*args: Any, **named: Any) -> Any:
        if _now is not None:
            if _now.is_dead:
                raise PowerCut
            _now.refuse(what, error)
        return call(*args, **named)

    return called


def _read_movers(_list: object) -> list[Any]:
    """In the place of MoverList.read_last_owner: simulated movers die with the daemon."""
    return []


def _zeroed(_files: object, some: Any) -> None:
    """In the place of Extents.zero."""
    if _now is not None:
        _now.refuse("descriptors", errno.EMFILE)
        for extent in some:
            _now.zeroed(extent)


def _made(files: extents.Extents, extent: int) -> None:
    """In the place of Extents._make: bytes are modelled, so a hole will do."""
    fd = os.open(files.files.path(extent), os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, files.extent_bytes)
    os.close(fd)
    if _now is not None:
        _now.zeroed(extent)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Within, it is not the daemon that calls the system. No time passes there."""
    global _now
    before, _now = _now, None
    try:
        yield
    finally:
        _now = before


@contextmanager
def in_force(hazards: Hazards, time_module: Any) -> Iterator[None]:
    """Within, the daemon's calls to the system are the simulation's."""
    global _now
    parallel: Any = lambda _f, work, some: [work(e) for e in some]  # noqa: E731
    stand_ins: list[tuple[Any, str, Any]] = [
        (mapped_table.MappedTable, "__init__", _watched(mapped_table.MappedTable.__init__)),
        (mapped_table.MappedTable, "close", _closed),
        (registry.LineFile, "_append", _appended),
        (MoverList, "read_last_owner", _read_movers),
        (extents.Extents, "_make", _made),
        (extents.Extents, "zero", _zeroed),
        (extents.Extents, "zero_all", _zeroed),
        (extents.Extents, "_in_parallel", parallel),
        (os, "memfd_create", _failing(os.memfd_create, "descriptors", errno.EMFILE)),
        (os, "posix_fallocate", _failing(os.posix_fallocate, "disk", errno.ENOSPC)),
        (os, "fsync", lambda _fd: None),
        (secrets, "randbits", hazards.random.getrandbits),
        (os, "sched_yield", lambda: None),
        (Standing, "missing", lambda _standing: None),
        (turns, "TURNS_BETWEEN_PIECES", 1),
        (MoverList, "add", _failing(MoverList.add, "disk", errno.ENOSPC)),
        (sealed_json, "replace_file", _failing(sealed_json.replace_file, "disk", errno.ENOSPC)),
        (os, "urandom", hazards.random.randbytes),
        (tiers, "time", time_module),
        (clock, "time", time_module),
    ]
    _now = hazards
    try:
        with replaced(stand_ins):
            yield
    finally:
        _now = None


@contextmanager
def replaced(stand_ins: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within, these names of these owners are something else."""
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for owner, name, was in before:
            setattr(owner, name, was)
