"""The index page of one namespace: tags of readable blocks, for clients to probe.

The file is as large as the namespace may ever want it, and mostly hole. A table of tags lies in it
at one of several levels, each twice as large as the one before and at a place of its own, and
memory is behind that level only: the page follows the tags that stand in it. To grow or shrink,
memory is had for the table of another level, the tags are copied there a few at a time, one word
is stored that says which table counts, and what lay behind the old one is given back, on a thread
(`holes.py`): until then no table lies there. Clients look at that word before and after a probe
(decision 0020). Without memory for a larger table the present one serves on: a tag that finds no
place is spilled, which costs a recompute and no more, and is inserted later, by whoever knows which
blocks there are (kvd/runtime/page_mending.py).

While tags are copied, the next table holds what stands in the buckets below `copied`, and what
found no place in the present one.
"""

from __future__ import annotations

import enum
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64
from kvd.linux.calls import address_of, advise, write_zeros
from kvd.linux.proc import open_again
from kvd.pool.holes import Run, at_once
from kvd.pool.tag_table import NOWHERE, WORDS, TagTable
from kvd_proto import layout

log = logging.getLogger(__name__)

_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 0x1, 0x2, 0x4

_PAGE = mmap.PAGESIZE
_TABLE, _CLOSED, _TOP = (
    offset // 8
    for offset in (
        layout.PAGE_TABLE_OFFSET,
        layout.PAGE_CLOSED_OFFSET,
        layout.PAGE_TOP_OFFSET,
    )
)

# Of a table's words: from here on it begins to grow, and ends before it is half full.
GROW_ABOVE = 5 / 16
SHRINK_BELOW = 1 / 8
FRESH_LOAD = 1 / 4  # at most, in the table of the level that is chosen
# Work for each tag that is inserted while the table changes, so that all is done when it is half
# full. A call with as many tags as a WORDS_A_TAG_AT_ONCE-th of a table's words changes it whole.
RESERVED_BYTES_A_TAG = 512
COPIED_BUCKETS_A_TAG = 1
WORDS_A_TAG_AT_ONCE = 64
# Units of upkeep, each up to a microsecond: a page of memory had, a kilobyte read, a
# tag copied.
UNITS_OF_A_CALL = 64
TAGS_A_UNIT = 1
BUCKETS_A_UNIT = 16
RETRY_CALLS = 20  # of upkeep, after there was no memory
STRAY_BYTES = 256 << 10  # that readers may have touched where no table lies
STRAY_PIECE_BYTES = 16 << 20  # looked at for them at a time
# A piece of memory that is given back takes the thread about so long, however many map it.
PIECE_NS = 1_000_000
MOST_PIECE_BYTES = 1 << 20


class _Phase(enum.Enum):
    SETTLED = enum.auto()
    RESERVING = enum.auto()  # memory for the next table
    COPYING = enum.auto()


class IndexPage:
    """The daemon's side of an index page, which alone writes it.

    `spilled` counts resident tags that found no place.
    """

    def __init__(self, name: str, blocks: int, run: Run = at_once) -> None:
        """Make a page for at most `blocks` tags, which nobody can shorten.

        What may take long because clients map it, `run` does.
        OSError, and nothing is left, where there is no memory or no descriptor for it.
        """
        self.blocks = blocks
        self._top = layout.page_level(-(-2 * blocks // WORDS))
        self.page_bytes = layout.page_bytes(self._top)
        self.spilled = 0
        self.tags = 0  # that stand in the table
        self._level = layout.PAGE_SMALLEST_LEVEL
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Other users can't open it for writing, whoever hands them a descriptor. Its own may:
            # a seal against that would keep memory from being given back.
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, self.page_bytes)
            # The first touch must not be what finds that there is no memory.
            os.posix_fallocate(fd, 0, sum(layout.page_table_span(self._level)))
            self._map = mmap.mmap(fd, self.page_bytes)
            try:
                fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
                self.read_only_fd = open_again(fd, os.O_RDONLY)
            except OSError:
                self._map.close()
                raise
        finally:
            os.close(fd)
        self._run = run
        with address_of(self._map) as self._address:
            pass  # it stays there until it is closed
        self._closed = False
        self._emptied: set[tuple[int, int]] = set()  # from and to: memory that `run` gives back
        self._piece_bytes = _PAGE
        # Of who takes memory or gives some back: in the kernel the second would wait.
        self._busy = threading.RLock()
        self._words: U64 = np.frombuffer(self._map, dtype=np.uint64)
        self._table = self._table_of(self._level)
        self._phase = _Phase.SETTLED
        self._next: TagTable | None = None
        self._next_level = 0
        self._reserved = 0  # bytes of the next table that there is memory for
        self._copied = 0  # buckets
        self._lost = 0  # resident tags that the next table hasn't, and won't have
        self._retry_in = 0
        self._said = False  # that there was no memory
        self._strays_from = 0
        self._changes = 0
        self._words[_TOP] = self._top
        self._words[_TABLE] = self._level
        self._words[1] = layout.PAGE_VERSION
        self._words[0] = layout.PAGE_MAGIC

    @property
    def buckets(self) -> int:
        """Of the table that counts."""
        return self._table.buckets

    @property
    def words(self) -> int:
        """Of the table that counts."""
        return self._table.buckets * WORDS

    def count(self) -> int:
        """Tags that stand in the table that counts; reads all of it."""
        first, size = layout.page_table_span(self._level)
        return int(np.count_nonzero(self._words[first // 8 : (first + size) // 8]))

    def shows(self, tags: U64) -> npt.NDArray[np.bool_]:
        """Which of these tags stand in the table that counts."""
        return self._table.has(tags)

    def problems(self) -> list[str]:
        """What of the header is not as it was written."""
        words = self._words
        return [
            f"its {name} is {int(words[at])}, and not {due}"
            for name, at, due in (
                ("magic", 0, layout.PAGE_MAGIC),
                ("version", 1, layout.PAGE_VERSION),
                ("table word", _TABLE, self._changes << layout.PAGE_LEVEL_BITS | self._level),
                ("closed word", _CLOSED, 0),
                ("top level", _TOP, self._top),
            )
            if int(words[at]) != due
        ]

    @property
    def taken(self) -> int:
        """Bytes of memory behind it."""
        return os.fstat(self.read_only_fd).st_blocks * 512

    def insert(self, tags: U64) -> int:
        """Make tags visible; returns how many of them were spilled."""
        self.make_room(len(tags))
        went = self._table.insert(tags)
        missing = went == NOWHERE
        spilled = int(np.count_nonzero(missing))
        self.tags += len(tags) - spilled
        self.spilled += spilled
        if self._phase is _Phase.COPYING:
            self._add_to_next(tags[went < self._copied])
        return spilled

    @property
    def has_room_again(self) -> bool:
        """Whether tags were spilled and there is room for them now."""
        settled = self._phase is _Phase.SETTLED
        return self.spilled > 0 and settled and self._wanted_level() == self._level

    def mend(self, tags: U64) -> int:
        """Make those of these resident tags visible that are not; how many are now.

        Only while it `has_room_again`. A tag of two blocks that is there once stays there once.
        """
        assert self.has_room_again, "a page without room for what it spilled was mended"
        missing = tags[~self._table.has(tags)][: self.spilled]
        placed = int(np.count_nonzero(self._table.insert(missing) != NOWHERE))
        self.tags += placed
        self.spilled -= placed
        return placed

    def make_room(self, more: int) -> None:
        """Before so many more tags are inserted, in one call or in many: see that the table grows
        in time. For many beside what there is, all of it now.
        """
        if self._phase in (_Phase.RESERVING, _Phase.COPYING) and not self._next_holds(more):
            self._abandon()
        if self._phase is _Phase.SETTLED:
            if self._retry_in or self._wanted_level(more) <= self._level:
                return
            if not self._begin(self._wanted_level(more)):
                return
        whole = self._table.buckets * WORDS <= WORDS_A_TAG_AT_ONCE * more
        if self._phase is _Phase.RESERVING:
            self._reserve(self.page_bytes if whole else RESERVED_BYTES_A_TAG * more)
        if self._phase is _Phase.COPYING:
            most = self._table.buckets if whole else COPIED_BUCKETS_A_TAG * more
            self._copy(most, most * WORDS)
        if whole and self._phase is _Phase.SETTLED and self._wanted_level(more) > self._level:
            self.make_room(more)

    def remove(self, tags: U64) -> None:
        """Take tags out, each as often as it is named. A tag that isn't there was spilled."""
        stood = self._table.remove(tags)
        missing = stood == NOWHERE
        spilled = int(np.count_nonzero(missing))
        self.tags = max(0, self.tags - (len(tags) - spilled))
        self.spilled = max(0, self.spilled - spilled)
        if self._phase is _Phase.COPYING:
            assert self._next is not None, "nothing is being copied to"
            also = self._next.remove(tags[stood < self._copied])
            self._lost = max(0, self._lost - int(np.count_nonzero(also == NOWHERE)))

    def set_below(self, *, holds_some: bool) -> None:
        """Say whether a tier may hold blocks that the page doesn't show."""
        self._words[layout.PAGE_BELOW_OFFSET // 8] = int(holds_some)

    def set_room(self, rooms: Sequence[int]) -> None:
        """Say for each group how many blocks a store could get now."""
        first = layout.PAGE_ROOM_OFFSET // 8
        self._words[first : first + len(rooms)] = rooms

    def close(self) -> None:
        """Tell readers that nobody keeps the page any more, and let go of it."""
        self._words[_CLOSED] = 1
        self._next = None
        self._closed = True
        del self._words, self._table
        self._run(self._let_go)

    def _let_go(self) -> bool:
        self._map.close()
        os.close(self.read_only_fd)
        return False

    # -- its size -----------------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        """Whether `upkeep` has something to do."""
        return self._phase is not _Phase.SETTLED or self._wanted_level() != self._level

    def upkeep(self, units: int) -> int:
        """Do so much of what is left to do; the units that are left."""
        if self._retry_in:
            self._retry_in -= 1
            units -= 1
        elif self._phase is _Phase.SETTLED:
            self._begin(self._wanted_level())
        while units > 0 and self._phase is not _Phase.SETTLED:
            if self._phase is _Phase.COPYING:
                units -= self._copy(units * BUCKETS_A_UNIT, units * TAGS_A_UNIT)
            else:
                units -= self._reserve(units * _PAGE)
            units -= UNITS_OF_A_CALL
        return units

    def take_strays(self) -> None:
        """Give memory back that readers touched where no table lies: read holes become memory.

        Of a part of the page, and the next time of the next part.
        """
        if self._phase is not _Phase.SETTLED or self._emptied:
            return
        first, size = layout.page_table_span(self._level)
        if self.taken <= layout.HEADER_BYTES + size + STRAY_BYTES:
            return
        start = self._strays_from
        if not layout.HEADER_BYTES <= start < self.page_bytes:
            start = layout.HEADER_BYTES
        end = self._strays_from = min(start + STRAY_PIECE_BYTES, self.page_bytes)
        self._punch(start, min(end, first))
        self._punch(max(start, first + size), end)

    def _wanted_level(self, more: int = 0) -> int:
        """The level for the tags that there are, and so many more: the present one if it does."""
        words = self._table.buckets * WORDS
        resident = self.tags + self.spilled + more
        if SHRINK_BELOW * words <= resident <= GROW_ABOVE * words:
            return self._level
        fitting = layout.page_level(int(resident / (FRESH_LOAD * WORDS)) + 1)
        if resident < SHRINK_BELOW * words:
            return min(fitting, self._level)
        return max(self._level, min(fitting, self._top))

    def _begin(self, level: int) -> bool:
        """Begin to change to a table of this level, unless it is the present one, or memory where
        it would lie is still being given back. Whether that has begun."""
        first, size = layout.page_table_span(level)
        is_free = all(end <= first or first + size <= at for at, end in tuple(self._emptied))
        if level == self._level or not is_free:
            return False
        self._next_level, self._reserved = level, 0
        self._phase = _Phase.RESERVING
        return True

    def _next_holds(self, more: int) -> bool:
        """Whether the next table is large enough for the tags that there are, and so many more."""
        words = layout.page_table_span(self._next_level)[1] // 8
        resident = self.tags + self.spilled + more
        return resident <= GROW_ABOVE * words or self._next_level >= self._top

    def _abandon(self) -> None:
        """The present table goes on to count; what was had for the next one is given back."""
        first, _size = layout.page_table_span(self._next_level)
        self._next = None
        self._phase = _Phase.SETTLED
        self._punch(first, first + self._reserved)

    def _reserve(self, most: int) -> int:
        """Have memory for some of the next table, or abandon it; units of work."""
        first, size = layout.page_table_span(self._next_level)
        length = min(max(most, _PAGE) // _PAGE * _PAGE, size - self._reserved)
        if not self._busy.acquire(blocking=False):
            return 1
        try:
            self._allocate(first + self._reserved, length)
        except OSError as error:
            if not self._said:
                log.warning(
                    "an index page stays as small as it is, so that some blocks will not be found:"
                    " %s; give the daemon more memory and file descriptors",
                    error.strerror,
                )
            self._said = True
            self._reserved += length  # some of it may be there
            self._abandon()
            self._retry_in = RETRY_CALLS
            return length // _PAGE
        finally:
            self._busy.release()
        self._reserved += length
        if self._reserved == size:
            self._said = False
            self._next = self._table_of(self._next_level)
            self._copied, self._lost = 0, self.spilled
            self._phase = _Phase.COPYING
        return length // _PAGE

    def _copy(self, most_buckets: int, most_tags: int) -> int:
        """Copy the tags of some buckets; after the last one the next table counts. Units of work.

        At least of one bucket.
        """
        first = self._copied
        tags, self._copied = self._table.some(first, max(1, most_buckets), most_tags)
        self._add_to_next(tags)
        units = (self._copied - first) // BUCKETS_A_UNIT + len(tags) // TAGS_A_UNIT
        if self._copied == self._table.buckets:
            self._change()
        return units

    def _add_to_next(self, tags: U64) -> None:
        assert self._next is not None, "nothing is being copied to"
        if len(tags):
            self._lost += int(np.count_nonzero(self._next.insert(tags) == NOWHERE))

    def _change(self) -> None:
        """From now on the next table counts."""
        assert self._next is not None, "there is no next table"
        resident = self.tags + self.spilled
        first, size = layout.page_table_span(self._level)
        self._table, self._next, self._level = self._next, None, self._next_level
        self.spilled = min(resident, self._lost)
        self.tags = resident - self.spilled
        # A number of its own for each change: a reader must not take a level that went and came
        # back for one that stayed.
        self._changes += 1
        self._words[_TABLE] = self._changes << layout.PAGE_LEVEL_BITS | self._level
        self._phase = _Phase.SETTLED
        self._punch(first, first + size)

    def _table_of(self, level: int) -> TagTable:
        first, size = layout.page_table_span(level)
        return TagTable(self._words[first // 8 : (first + size) // 8])

    def _allocate(self, first: int, size: int) -> None:
        # Opened anew each time: the mapping's own descriptor can't be had, a second would have to
        # be kept for each namespace.
        fd = open_again(self.read_only_fd, os.O_RDWR)
        try:
            os.posix_fallocate(fd, first, size)
        finally:
            os.close(fd)

    def _punch(self, first: int, end: int) -> None:
        """Give the memory of whole pages back; they read as zeros, once that is done."""
        if end <= first:
            return
        hole, done = (first, end), 0
        self._emptied.add(hole)

        def empty_some() -> bool:
            nonlocal done
            if self._closed:
                return False
            done += self._empty(first + done, min(self._piece_bytes, end - first - done))
            if first + done == end:
                self._emptied.discard(hole)
            return first + done < end

        self._run(empty_some)

    def _empty(self, first: int, size: int) -> int:
        """Give so much back; the next piece is as large as takes about PIECE_NS. Bytes."""
        began = time.thread_time_ns()
        with self._busy:
            try:
                advise(self._address + first, size, mmap.MADV_REMOVE)
            except OSError:  # what a table will need as zeros must be zeros, memory or not
                log.exception("an index page keeps memory that it doesn't need")
                write_zeros(self._address + first, size)
        if time.thread_time_ns() - began > PIECE_NS:
            self._piece_bytes = max(_PAGE, self._piece_bytes // 2)
        else:
            self._piece_bytes = min(MOST_PIECE_BYTES, self._piece_bytes * 2)
        return size
