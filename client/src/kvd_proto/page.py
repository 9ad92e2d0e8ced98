"""The reader's side of an index page: is this block likely to be readable?

A hint only. The daemon writes beside the reader; each word is stored at once and a block's word
never moves within a table, so a block that is there throughout is always found. Where the daemon
changes to another table meanwhile, which the table word tells, the reader looks again. A false
present costs a retry.
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd_proto import layout
from kvd_proto.tags import (
    U64,
    bucket_mask,
    bucket_pair,
    bucket_pair_of,
    tag_of,
)

Flags = npt.NDArray[np.bool_]

TRIES = 8  # at a probe; after as many changes of the table it says present, which a call settles
_TRIES = range(TRIES)
_HEADER = struct.Struct("<QQQQQ")
_WORDS = layout.PAGE_BUCKET_WORDS
_ROOM_WORD = layout.PAGE_ROOM_OFFSET // 8
_CLOSED_WORD = layout.PAGE_CLOSED_OFFSET // 8
_BELOW_WORD = layout.PAGE_BELOW_OFFSET // 8
_TABLE_WORD = layout.PAGE_TABLE_OFFSET // 8
_LEVEL_MASK = (1 << layout.PAGE_LEVEL_BITS) - 1
_NONE = np.array(0, dtype=np.uint64)


class _Table(NamedTuple):
    """The table that counts while the table word is this."""

    word: int
    buckets: int
    mask: U64
    first: int  # number of its first word
    rows: U64


class PageReader:
    """An index page, mapped read-only. The descriptor may be closed afterwards."""

    def __init__(self, fd: int) -> None:
        """ValueError where the descriptor is no index page of this layout."""
        self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        if len(self._map) < _HEADER.size:
            self._map.close()
            raise ValueError("not an index page: it is too short for a header")
        magic, version, table, _closed, top = _HEADER.unpack_from(self._map)
        reason = _why_not(magic, version, top, len(self._map))
        if reason:
            self._map.close()
            raise ValueError(reason)
        self._top = top
        self._words = memoryview(self._map).cast("Q")
        self._array: U64 = np.frombuffer(self._map, dtype=np.uint64)
        self._table = self._table_of(table)

    @property
    def closed(self) -> bool:
        """The daemon no longer keeps the page: what it says is of the past."""
        return bool(self._words[_CLOSED_WORD])

    @property
    def hides_some(self) -> bool:
        """A tier may hold blocks that the page doesn't show: only a call tells."""
        return bool(self._words[_BELOW_WORD])

    def room(self, group: int) -> int:
        """Blocks that a store of this group could get now; 0 means: ask later."""
        return self._words[_ROOM_WORD + group]

    def probe(self, tags: U64) -> Flags:
        """Which tags stand in the page, shape [n]."""
        # `take` fetches rows at a quarter of what an array as index costs, and operands of one
        # shape compare faster than a column beside rows.
        wanted = tags.repeat(_WORDS).reshape(-1, _WORDS)
        for _ in _TRIES:
            table = self._table
            if self._words[_TABLE_WORD] != table.word:
                table = self._look_again()
            first, second = bucket_pair(tags, table.mask)
            found = table.rows.take(first.view(np.int64), axis=0) == wanted
            found |= table.rows.take(second.view(np.int64), axis=0) == wanted
            if self._words[_TABLE_WORD] == table.word:
                # Eight booleans read as one word: far cheaper than any() over a short axis.
                present: Flags = found.view(np.uint64).reshape(-1) != _NONE
                return present
        return np.ones(len(tags), dtype=np.bool_)

    def probe_first(self, block_hash: bytes, seed: int) -> bool:
        """`probe` for one hash in the scope of this seed: most lookups end with their first."""
        tag = tag_of(block_hash, seed)
        words = self._words
        for _ in _TRIES:
            # Unpacked: of a few microseconds, names of fields would take a tenth.
            word, buckets, _mask, first, _rows = self._table
            if words[_TABLE_WORD] != word:
                word, buckets, _mask, first, _rows = self._look_again()
            for bucket in bucket_pair_of(tag, buckets):
                start = first + bucket * _WORDS
                if tag in words[start : start + _WORDS].tolist():
                    return True
            if words[_TABLE_WORD] == word:
                return False
        return True

    def _look_again(self) -> _Table:
        """The table that counts now."""
        # One store: another thread that probes has the one or the other.
        table = self._table = self._table_of(self._words[_TABLE_WORD])
        return table

    def _table_of(self, word: int) -> _Table:
        """What a table word says; the largest table for one that no daemon of ours wrote."""
        level = min(max(word & _LEVEL_MASK, layout.PAGE_SMALLEST_LEVEL), self._top)
        offset, size = layout.page_table_span(level)
        rows = self._array[offset // 8 : (offset + size) // 8].reshape(-1, _WORDS)
        return _Table(word, 1 << level, bucket_mask(1 << level), offset // 8, rows)

    def close(self) -> None:
        """Unmap. The reader can't be used any more."""
        self._words.release()
        del self._array, self._table
        self._map.close()


def _why_not(magic: int, version: int, top: int, size: int) -> str:
    """Why it is no page that this reader can read; empty where it is."""
    ours = (layout.PAGE_MAGIC, layout.PAGE_VERSION)
    reason = layout.why_other_header("an index page", (magic, version), ours)
    if reason:
        return reason
    levels = range(layout.PAGE_SMALLEST_LEVEL, layout.PAGE_LARGEST_LEVEL + 1)
    if top not in levels or layout.page_bytes(top) != size:
        return f"not an index page: {size} bytes for tables up to level {top}"
    return ""
