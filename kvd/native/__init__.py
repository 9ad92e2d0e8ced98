"""Copies, lists of copies, checksums and tables of keys in C, where `copies.c` was built.

Nothing needs it: without it, and where KVD_NATIVE says "off", numpy does the same, more slowly.
`hatch_build.py` builds it when the package is installed or put into a wheel.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

VARIABLE = "KVD_NATIVE"  # auto, off, or a level's name: no faster one
SOURCE = Path(__file__).with_name("copies.c")
LIBRARY = Path(__file__).with_name("copies.so")
LEVELS = ("plain", "avx2", "avx512")  # by their numbers in copies.c
SHAPES = ("near", "far")  # of the copying loop, likewise; a processor's maker tells which is faster
_FAR = 16
_FLAWS = (
    "",
    "this processor lacks the instructions",
    "a stretch of no bytes, of too many, or not of whole words",
    "a block outside its extent",
    "a sum that is not there, or a part longer than the keys",
    "a stretch outside the engine's memory",
)
_STOPPED = len(_FLAWS)
BUCKET_WORDS = 8
CACHE_LINE = 64
# A function that keeps the interpreter's lock: words of a table and what tells a tag's bucket (the
# buckets less one, or a shift), tags, how many, and where their buckets or numbers go.
_ON_TABLE = ctypes.PYFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
)
# The same, of an index: all keys and their width; words, how many, seed and scope of those sought;
# where tags and slots go.
_FIND_KEYS = ctypes.PYFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
# Slots, how many, and where those without a place go; how many these are.
_INSERT_KEYS = ctypes.PYFUNCTYPE(
    ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p
)
# The same, of ghosts: the table and its shift, tags, how many, where their numbers go, and
# room for a word of each.
_PLACE_GHOSTS = ctypes.PYFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_void_p,
)

# Rows of these are what copies.c calls struct row and struct block.
ROW_FIELDS = ("memory", "room", "stride", "bytes", "at")
BLOCK_FIELDS = ("extent", "room", "offset", "engine", "place", "sum")


class Kind(enum.IntEnum):
    """What is done, by its number in copies.c."""

    LOAD = 0  # slots to engine
    STORE = 1  # engine to slots
    SUM = 2  # slots, which are only read


class BadStretch(ValueError):
    """The library refused: a bound is wrong. No byte was touched."""


class Keys:
    """What words and lines are multiplied by: keys of the words of a line, of a part's lines.

    The words' should be `on_cache_lines`: every 64 bytes that are summed up read 64 of theirs.
    """

    def __init__(self, word_keys: U64, line_keys: U64) -> None:
        self._kept = word_keys, line_keys
        self.words_at, self.lines_at = address_of(word_keys), address_of(line_keys)
        self.lines = len(line_keys)


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums that the library adds to, and the keys that it multiplies by."""

    sums: U64
    keys: Keys

    def tell(self, work: _Work) -> None:
        """Have the library add to them. They must outlive the call."""
        work.sums, work.sum_count = address_of(self.sums), len(self.sums)
        work.word_keys, work.line_keys = self.keys.words_at, self.keys.lines_at
        work.line_count = self.keys.lines


class _Work(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("row_count", ctypes.c_uint64),
        ("block_count", ctypes.c_uint64),
        ("kind", ctypes.c_uint64),
        ("sums", ctypes.c_void_p),
        ("word_keys", ctypes.c_void_p),
        ("line_keys", ctypes.c_void_p),
        ("sum_count", ctypes.c_uint64),
        ("line_count", ctypes.c_uint64),
        ("watches", ctypes.c_void_p),
        ("watch_count", ctypes.c_uint64),
    )


class Watches:
    """Words in memory that others write and that may say stop; see struct watch in copies.c.

    words: address of each, and what it says stop from, shape [n, 2].
    """

    def __init__(self, words: Sequence[tuple[int, int]]) -> None:
        self._kept = np.array(words, dtype=np.uint64).reshape(-1, 2)
        self.count, self.at = len(self._kept), address_of(self._kept)


class Stretches:
    """Stretches to copy or to sum up: every row of every block. See copies.c for what they are.

    Memory that rows and blocks name must stay mapped as long as `run` is called.
    """

    def __init__(
        self, library: Library, kind: Kind, rows: U64, blocks: U64, sums: Sums | None = None
    ) -> None:
        self._rows, self._blocks = _table(rows, ROW_FIELDS), _table(blocks, BLOCK_FIELDS)
        self._library = library
        self._sums = sums
        self._at, self._row_at = address_of(self._blocks), address_of(self._rows)
        self._work = _Work(rows=self._row_at, row_count=len(rows), kind=kind)
        if sums is not None:
            sums.tell(self._work)
        self._reference = ctypes.byref(self._work)

    def watch(self, watches: Watches) -> None:
        """Have every run look at these words every few microseconds. They must outlive it."""
        self._watches = watches
        self._work.watches, self._work.watch_count = watches.at, watches.count

    def run(self, start: int, stop: int, rows: slice = slice(None)) -> bool:
        """Carry out blocks [start, stop), of some rows, with the interpreter's lock released.

        False: a watched word said stop, and some bytes were copied. Raises BadStretch, and then
        none were.
        """
        assert 0 <= start <= stop <= len(self._blocks)
        first, end, _ = rows.indices(len(self._rows))
        self._work.blocks = self._at + start * 8 * len(BLOCK_FIELDS)
        self._work.block_count = stop - start
        self._work.rows = self._row_at + first * 8 * len(ROW_FIELDS)
        self._work.row_count = max(0, end - first)
        flaw = self._library.call(self._reference)
        if flaw and flaw != _STOPPED:
            raise BadStretch(_FLAWS[flaw])
        return not flaw


class Library:
    """The library, loaded, at one level of its instructions. `shape`: "" for this processor's."""

    def __init__(self, loaded: ctypes.CDLL, level: str, shape: str = "") -> None:
        self.level = level
        self.shape = shape or SHAPES[int(loaded.kvd_far())]
        self._loaded = loaded
        self._insert_tags = _ON_TABLE(("kvd_tags_insert", loaded))
        self._remove_tags = _ON_TABLE(("kvd_tags_remove", loaded))
        self.find_keys = _FIND_KEYS(("kvd_index_find", loaded))  # see kvd/native/key_index.py
        self.insert_keys = _INSERT_KEYS(("kvd_index_insert", loaded))
        self.find_ghosts = _ON_TABLE(("kvd_ghosts_find", loaded))  # kvd/native/ghost_table.py
        self.place_ghosts = _PLACE_GHOSTS(("kvd_ghosts_place", loaded))
        # See kvd/mover/cuda/native_lists.py.
        self.plan_copies, self.submit_copies = loaded.kvd_gpu_plan, loaded.kvd_gpu_submit
        self._run, self._sum = loaded.kvd_run, loaded.kvd_sum
        self._move = loaded.kvd_move
        self._close = loaded.kvd_close
        self._number = LEVELS.index(level) + _FAR * SHAPES.index(self.shape)

    def call(self, work: object) -> int:
        """Do it; what is wrong with it, 0 for nothing."""
        return int(self._run(work, self._number))

    def sum_up(self, starts: U64, size: int, sums: Sums) -> None:
        """Add to each sum the words of a part that begins at this address and has so many bytes.

        Raises BadStretch; what is added up by then is not said.
        """
        work = _Work()
        sums.tell(work)
        flaw = self._sum(ctypes.byref(work), address_of(starts), len(starts), size, self._number)
        if flaw:
            raise BadStretch(_FLAWS[flaw])

    def begin_turns(self, count: int) -> int:
        """The address of so many turns, to be ended; 0: there is no memory."""
        return int(self._loaded.kvd_turns_begin(count) or 0)

    def end_turns(self, turns: int) -> None:
        """Nobody uses them any more."""
        self._loaded.kvd_turns_end(turns)

    def move(self, work: object) -> None:
        """Do what kvd/native/file_moves.py asks."""
        self._move(work, self._number)

    def close(self, fds: Sequence[int]) -> bool:
        """Close these by the end of a thread, and so without waiting for anybody.

        False: it can't be, as on a kernel before 5.9, and they are open.
        """
        rising = sorted(fds)
        return not rising or self._close((ctypes.c_int * len(rising))(*rising), len(rising)) == 0

    def at(self, level: str, shape: str = "") -> Library:
        """The same at another level or shape. It refuses all where the processor lacks it."""
        return Library(self._loaded, level, shape)

    def insert_tags(self, words: U64, tags: U64) -> I64:
        """Put tags into a table of buckets of eight words; the bucket of each, -1: both are full.

        Holds the interpreter's lock: it takes some microseconds.
        """
        return self._on_table(self._insert_tags, words, tags)

    def remove_tags(self, words: U64, tags: U64) -> I64:
        """Take tags out of such a table; the bucket in which each stood, -1: in none."""
        return self._on_table(self._remove_tags, words, tags)

    def _on_table(self, call: Callable[..., None], words: U64, tags: U64) -> I64:
        buckets = len(words) // BUCKET_WORDS
        assert buckets * BUCKET_WORDS == len(words)
        assert buckets & (buckets - 1) == 0 < buckets
        assert words.dtype == tags.dtype == np.uint64
        assert words.flags.c_contiguous
        tags = np.ascontiguousarray(tags)
        went = np.empty(len(tags), dtype=np.int64)
        if len(tags):
            call(address_of(words), buckets - 1, start_of(tags), len(tags), address_of(went))
        return went

    def levels(self) -> tuple[str, ...]:
        """Those that this processor has."""
        return LEVELS[: int(self._loaded.kvd_level()) + 1]


def library() -> Library | None:
    """The library at the level to use; None where numpy is to do it, and `why_not` says why."""
    return _found()[0]


def why_not() -> str:
    """Why there is no library, or ""."""
    return _found()[1]


def source_hash() -> str:
    """What a library must have been built from to be loaded."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


@functools.cache
def _found() -> tuple[Library | None, str]:
    return find()


def find() -> tuple[Library | None, str]:
    """Look for the library anew: it at the level to use, or why not."""
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted == "off":
        return None, f"{VARIABLE} is off"
    if wanted not in ("auto", *LEVELS):
        return None, f"{VARIABLE} is {wanted!r:.40}, and not auto, off, {', '.join(LEVELS)}"
    try:
        loaded = load(LIBRARY)
    except OSError as error:
        return None, str(error)
    most = int(loaded.kvd_level())
    level = most if wanted == "auto" else min(most, LEVELS.index(wanted))
    return Library(loaded, LEVELS[level]), ""


def load(path: Path) -> ctypes.CDLL:
    """The library, if it was built from the source that lies here; OSError says why not."""
    if not path.exists():
        raise OSError("it was not built: no C compiler when kvd was installed")
    loaded = ctypes.CDLL(str(path))
    another = OSError("it was built from another copies.c: install kvd again")
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    try:
        loaded.kvd_source.restype = ctypes.c_char_p
        if loaded.kvd_source() != source_hash().encode():
            raise another
        loaded.kvd_run.argtypes = (pointer, ctypes.c_int)
        loaded.kvd_sum.argtypes = (pointer, pointer, number, number, ctypes.c_int)
        loaded.kvd_gpu_plan.argtypes = (pointer,)
        loaded.kvd_gpu_plan.restype = number
        loaded.kvd_gpu_submit.argtypes = (pointer, number)
        loaded.kvd_move.argtypes = (pointer, ctypes.c_int)
        loaded.kvd_move.restype = None
        loaded.kvd_close.argtypes = (pointer, number)
        loaded.kvd_turns_begin.argtypes = (ctypes.c_uint,)
        loaded.kvd_turns_begin.restype = pointer
        loaded.kvd_turns_end.argtypes = (pointer,)
        loaded.kvd_turns_end.restype = None
        Library(loaded, LEVELS[0])
    except AttributeError:  # it lacks a function
        raise another from None
    return loaded


def _table(rows: U64, fields: tuple[str, ...]) -> U64:
    assert rows.dtype == np.uint64
    assert rows.flags.c_contiguous
    assert rows.shape[1:] == (len(fields),)
    return rows


def address_of(buffer: Any) -> int:
    """Where an array or memoryview begins, which is contiguous and may be written to."""
    # The quickest of several ways: small parts are summed up one by one.
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


def on_cache_lines(words: U64) -> U64:
    """The same words, beginning where a cache line does: no load of 64 bytes takes two of them."""
    room = np.empty(len(words) + CACHE_LINE // 8, dtype=np.uint64)
    skipped = -start_of(room) % CACHE_LINE // 8
    placed = room[skipped : skipped + len(words)]
    placed[:] = words
    return placed


def start_of(array: npt.NDArray[Any]) -> int:
    """Where a contiguous array begins, which may be read-only."""
    return int(array.__array_interface__["data"][0])
