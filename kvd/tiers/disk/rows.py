"""Writes the index behind: rows of blocks whose bytes are written, a batch at a time.

A row that is lost costs a miss after a restart, and one that is left over leads to bytes whose
seal does not fit; so nobody waits for rows but who deletes.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvd.core.keys import U64
from kvd.tiers.disk.index_file import PLACE, Changes, IndexFile
from kvd.tiers.store import TierError, TierReason, TierTimeout

log = logging.getLogger(__name__)

MAX_ROWS_BEHIND = 65536  # not written yet; beyond it writes wait; where it fails, it is given up
_LOOK_S = 0.005  # between looks whether there is room
BEHIND_S = 0.1  # rows wait so long for others
GIVE_UP_S = 10.0  # of failures in a row
ANEW_S = 30.0  # then it is tried so often whether one can be written


class RowWriter:
    """A thread that writes the rows of one disk. Any thread may call."""

    def __init__(self, file: IndexFile, tell_all: Callable[[], Iterator[None]]) -> None:
        """`tell_all` tells an empty index all that the disk holds, in steps."""
        self._file = file
        self._tell_all = tell_all
        self._lock = threading.Lock()  # of what waits
        self._writing = threading.Lock()  # of the file, and taken first
        self._waiting = Changes()
        self._wake = threading.Event()
        self._closing = False
        self._failing_since: float | None = None
        self.is_lost = False  # nothing is written: the next start is cold, but for `_begin_anew`
        self._anew_at = 0.0
        self._is_stale = False  # and what is there could not be set aside
        self._thread = threading.Thread(target=self._run, name="kvd-rows", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether rows that could be done without may be put."""
        return len(self._waiting.rows) <= MAX_ROWS_BEHIND // 2

    def wait_for_room(self, deadline: float) -> bool:
        """Wait while too many rows are not written yet. False: the deadline passed."""
        while len(self._waiting.rows) > MAX_ROWS_BEHIND and not self.is_lost:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def put(self, rows: U64) -> None:
        """These blocks are in their places. Shape [n, ROW_WORDS]."""
        records = rows.tobytes()
        size = rows.shape[1] * 8
        places = rows[:, PLACE].tolist()
        with self._lock:
            if self.is_lost:
                return
            for number, place in enumerate(places):
                self._waiting.rows[place] = records[number * size : (number + 1) * size]
        self._look()

    def remove(self, places: Sequence[int]) -> None:
        """Nothing that can be found is in these places."""
        with self._lock:
            if self.is_lost:
                return
            self._waiting.rows.update(dict.fromkeys(places))
        self._look()

    def add_scope(self, number: int, scope: bytes) -> None:
        """A scope has this name; GONE takes away the one that it had."""
        with self._lock:
            self._waiting.scopes[number] = scope

    def remove_scope(self, number: int) -> None:
        """Rows of this scope that are left over lead nowhere any more."""
        with self._lock:
            self._waiting.scopes.pop(number, None)
            self._waiting.gone_scopes.add(number)

    def add_lengths(self, number: int, lengths: bytes) -> None:
        with self._lock:
            self._waiting.lengths[number] = lengths

    def remove_lengths(self, number: int) -> None:
        """No row is of these any more; the number may be given to others."""
        with self._lock:
            self._waiting.lengths[number] = None

    def write_now(self, deadline: float) -> None:
        """Return when all that was told is on the disk. TierError where it can't be."""
        if not self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TierTimeout("the index is being written")
        try:
            if not self.is_lost:
                try:
                    self._write(durable=True)
                except sqlite3.Error as error:
                    raise TierError(f"the index can't be written: {error}") from error
            elif self._is_stale:
                self._give_up("a deletion has to be kept")
                if self._is_stale:
                    raise TierError("the index can't be set aside", TierReason.INDEX_DAMAGED)
        finally:
            self._writing.release()

    def keep_findable(self) -> None:
        """Begin another index where somebody removed or replaced it: no write would fail. OSError.

        While the file is written, nothing: the next look comes soon.
        """
        if not self._writing.acquire(blocking=False):
            return
        try:
            lost = None if self.is_lost else self._file.missing()
            if lost is not None:
                self._give_up(f"{lost.path} {lost.how} while it ran")
                self._anew_at = 0.0
        finally:
            self._writing.release()

    def close(self) -> None:
        """Write what is left, as far as can be."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        with self._writing:
            if not self.is_lost:
                try:
                    self._write()
                except sqlite3.Error as error:
                    log.warning("%s: the last rows are lost: %s", self._file.path, error)
            self._file.close()

    def _look(self) -> None:
        if len(self._waiting.rows) > MAX_ROWS_BEHIND // 2:
            self._wake.set()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(BEHIND_S)
            self._wake.clear()
            with self._writing:
                if self.is_lost:
                    with self._lock:
                        self._waiting = Changes()
                    if time.monotonic() >= self._anew_at:
                        self._begin_anew()
                    continue
                try:
                    self._write()
                    self._failing_since = None
                except sqlite3.Error as error:
                    self._failed(error)
                    time.sleep(BEHIND_S)

    def _failed(self, error: sqlite3.Error) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            log.warning("%s can't be written, and is tried again: %s", self._file.path, error)
        with self._lock:
            behind = len(self._waiting.rows)
        if behind > MAX_ROWS_BEHIND or now - self._failing_since > GIVE_UP_S:
            self._give_up(str(error))

    def _begin_anew(self) -> None:
        """Where an index can be written again, write all that the disk holds."""
        self._anew_at = time.monotonic() + ANEW_S
        try:
            if self._is_stale:
                self._file.set_aside()
                self._is_stale = False
            self._file.begin_anew()
        except (OSError, sqlite3.Error, ValueError):
            return
        with self._lock:
            self._waiting = Changes()
            self.is_lost = False
        try:
            for _ in self._tell_all():
                self._write()
        except sqlite3.Error as error:
            self._give_up(str(error))
            return
        self._failing_since = None
        log.warning("%s is written again", self._file.path)

    def _give_up(self, why: str) -> None:
        self.is_lost = True
        self._anew_at = time.monotonic() + ANEW_S
        try:
            self._file.set_aside()
            self._is_stale = False
        except OSError as error:
            self._is_stale = True
            why = f"{why}; {error}"
        log.warning("%s is given up until it can be written again: %s", self._file.path, why)

    def _write(self, *, durable: bool = False) -> None:
        with self._lock:
            changes, self._waiting = self._waiting, Changes()
        if not changes and not durable:
            return
        try:
            self._file.commit(changes, durable=durable)
        except sqlite3.Error:
            with self._lock:
                self._waiting = changes.then(self._waiting)
            raise
