"""Which blocks a slab holds, as a SQLite file beside it: read at the start, written behind.

Nothing in it is believed: a row is checked by its last word, and what it leads to by the block's
seal. What can't be read is set aside, and the disk begins cold.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from kvd.core.keys import U64
from kvd.linux.standing import Lost, Standing
from kvd.mover.checksums import checksums
from kvd.tiers.store import TierUnusable

log = logging.getLogger(__name__)

# Words of a row: the digest's two, the seal, the place, scope and lengths, the stamp, the check.
ROW_WORDS = 7
DIGEST, SEAL, PLACE, NUMBERS, STAMP, CHECK = slice(0, 2), 2, 3, 4, 5, 6
_NUMBERS = 1 << 32  # of scopes and of lengths there are fewer: a row has half a word for each
_ROWS_A_TIME = 8192
REFUSED_S = 10.0  # for so long a start may find disks that refuse to read their index
AGAIN_S = 0.5  # between two tries
GONE = b""  # in place of a scope's name: it is deleted, and what it has is to be wiped
_LOGS = ("-wal", "-shm", "-journal")
_MORE_FILES = "see that its file system takes more files (df -i), and this process may open more"
_REMOVE = "remove it, and what begins with its name"
_TABLES = """
CREATE TABLE IF NOT EXISTS slab (identity BLOB);
CREATE TABLE IF NOT EXISTS scopes (id INTEGER PRIMARY KEY AUTOINCREMENT, scope BLOB);
CREATE TABLE IF NOT EXISTS lengths (id INTEGER PRIMARY KEY, lengths BLOB);
CREATE TABLE IF NOT EXISTS blocks (place INTEGER PRIMARY KEY, record BLOB);
"""


@dataclass(slots=True)
class Changes:
    """What is to be written: rows by place, lengths by number, None where none are left."""

    rows: dict[int, bytes | None] = field(default_factory=dict)
    scopes: dict[int, bytes] = field(default_factory=dict)
    gone_scopes: set[int] = field(default_factory=set)
    lengths: dict[int, bytes | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.scopes or self.gone_scopes or self.lengths)

    def then(self, later: Changes) -> Changes:
        """Both, the later ones winning."""
        scopes = {**self.scopes, **later.scopes}
        gone = self.gone_scopes | later.gone_scopes
        kept = {number: scope for number, scope in scopes.items() if number not in gone}
        return Changes({**self.rows, **later.rows}, kept, gone, {**self.lengths, **later.lengths})


@dataclass(frozen=True, slots=True)
class Known:
    """What an index file said at the start. `rows` has shape [n, ROW_WORDS]; the check fits."""

    rows: U64
    scopes: dict[int, bytes]
    lengths: dict[int, bytes]
    next_scope: int
    damaged_rows: int
    was_lost: bool  # there was an index, and nothing of it could be used


def check_of(rows: U64, identity: bytes) -> U64:
    """The last word of rows of this slab, whose shape is [n, at least CHECK]."""
    seed = np.frombuffer(identity[:8], dtype=np.uint64)[0]
    check: U64 = checksums(np.ascontiguousarray(rows[:, :CHECK])) ^ seed
    return check


class IndexFile:
    """The file of one slab. One thread at a time."""

    def __init__(self, path: Path, identity: bytes) -> None:
        self.path, self._identity = path, identity
        self._db: sqlite3.Connection | None = None
        self._standing = Standing(())

    def missing(self) -> Lost | None:
        """Whether the next start would not find what is written here. OSError."""
        return self._standing.missing()

    def open(self, until: float = 0.0) -> Known:
        """Read it, or begin an empty one. TierUnusable where there can be none.

        Where the disk refuses, it is tried again until then: all is lost with an index.
        """
        was_there = self.path.exists()
        try:
            return self._read_patiently(until)
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            if self.path.is_file() and not self._in_the_way() and _is_no_file_to_be_had(error):
                self.close()
                raise TierUnusable(
                    f"{self.path} can't be opened ({error}): {_MORE_FILES}"
                ) from error
            try:
                self.set_aside()
                log.warning("%s is set aside, and its blocks are lost: %s", self.path, error)
                known = self._read()
            except (OSError, sqlite3.Error) as again:
                self.close()
                lacks_room = _is_no_file_to_be_had(again) and not self._in_the_way()
                what = _MORE_FILES if lacks_room else _REMOVE
                raise TierUnusable(
                    f"directories: {self.path} can't be made ({again}): {what}"
                ) from again
            return replace(known, was_lost=was_there)
        except OSError as error:
            self.close()
            raise TierUnusable(f"{self.path} can't be opened: {error.strerror}") from error

    def commit(self, changes: Changes, *, durable: bool = False) -> None:
        """Write all or nothing. Durable: it is on the disk then. sqlite3.Error."""
        db = self._db
        assert db is not None
        if durable:
            db.execute("PRAGMA synchronous=FULL")
        try:
            with _transaction(db):
                gone = [(number,) for number in changes.gone_scopes]
                db.executemany("DELETE FROM scopes WHERE id=?", gone)
                db.executemany("REPLACE INTO scopes VALUES (?, ?)", changes.scopes.items())
                unused = [(n,) for n, lengths in changes.lengths.items() if lengths is None]
                used = [kind for kind in changes.lengths.items() if kind[1] is not None]
                db.executemany("DELETE FROM lengths WHERE id=?", unused)
                db.executemany("REPLACE INTO lengths VALUES (?, ?)", used)
                kept = [row for row in changes.rows.items() if row[1] is not None]
                left = [(place,) for place, record in changes.rows.items() if record is None]
                db.executemany("DELETE FROM blocks WHERE place=?", left)
                db.executemany("REPLACE INTO blocks VALUES (?, ?)", kept)
                if durable:  # a commit that changed nothing would sync nothing
                    db.execute("UPDATE slab SET identity=?", (self._identity,))
        finally:
            if durable:
                db.execute("PRAGMA synchronous=NORMAL")

    def begin_anew(self) -> None:
        """Make an empty one, where there is none. sqlite3.Error, OSError: it can't be written."""
        try:
            self._read()
            self.commit(Changes(), durable=True)
        except BaseException:
            self.close()
            self._remove_logs()
            self.path.unlink(missing_ok=True)
            raise

    def _in_the_way(self) -> bool:
        """Whether something that is no file has the name of one of SQLite's."""
        files = [self.path.with_name(self.path.name + suffix) for suffix in ("", *_LOGS)]
        return any(each.exists() and not each.is_file() for each in files)

    def _remove_logs(self) -> None:
        for suffix in _LOGS:
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def set_aside(self) -> None:
        """No later start finds these rows. OSError.

        Somebody may have put a link or a pipe in the file's place. No start bears those, whatever
        their name (`require_own`), and no row is in them: they are removed.
        """
        self.close()
        self._remove_logs()
        with contextlib.suppress(FileNotFoundError):
            kind = self.path.lstat().st_mode
            if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
                self.path.rename(self.path.with_name(self.path.name + ".set-aside"))
            else:
                self.path.unlink()

    def close(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _read_patiently(self, until: float) -> Known:
        while True:
            try:
                return self._read()
            except sqlite3.OperationalError as error:
                is_refused = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_IOERR
                if not is_refused or time.monotonic() >= until:
                    raise
            self.close()
            time.sleep(AGAIN_S)

    def _read(self) -> Known:
        db = self._db = sqlite3.connect(
            self.path, timeout=0, isolation_level=None, check_same_thread=False
        )
        self.path.chmod(0o600)
        self._standing = Standing((self.path,))  # it may grow, and is never cut short
        db.execute("PRAGMA locking_mode=EXCLUSIVE")  # no memory shared with anybody
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_TABLES)
        found = db.execute("SELECT identity FROM slab").fetchall()
        if found != [(self._identity,)]:
            if found or db.execute("SELECT 1 FROM blocks LIMIT 1").fetchone():
                raise ValueError("it is another slab's")
            db.execute("INSERT INTO slab VALUES (?)", (self._identity,))
        size, there, whole = ROW_WORDS * 8, 0, bytearray()
        cursor = db.execute("SELECT record FROM blocks")
        while found := cursor.fetchmany(_ROWS_A_TIME):
            there += len(found)
            records = map(itemgetter(0), found)
            whole += b"".join([r for r in records if isinstance(r, bytes) and len(r) == size])
        rows = np.frombuffer(whole, dtype=np.uint64).reshape(-1, ROW_WORDS)
        right = rows[check_of(rows, self._identity) == rows[:, CHECK]]
        scopes = _numbered(db.execute("SELECT id, scope FROM scopes"))
        lengths = _numbered(db.execute("SELECT id, lengths FROM lengths"))
        drawn = db.execute("SELECT seq FROM sqlite_sequence WHERE name='scopes'").fetchone()
        highest = max([int(drawn[0]) if drawn else 0, *scopes])
        if highest >= _NUMBERS:
            raise ValueError(f"it says that {highest} scopes were numbered")
        return Known(right, scopes, lengths, highest + 1, there - len(right), False)


def _is_no_file_to_be_had(error: Exception) -> bool:
    """Whether SQLite could not open or make a file: that says nothing of what is in the index."""
    if not isinstance(error, sqlite3.OperationalError):
        return False
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CANTOPEN


def _numbered(found: Iterable[tuple[int, object]]) -> dict[int, bytes]:
    """Names by their number, without those that nobody here wrote: blocks of these are lost.

    A damaged name may be a number, of which bytes() would make as many zeros.
    """
    return {n: name for n, name in found if isinstance(name, bytes) and 0 < n < _NUMBERS}


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
