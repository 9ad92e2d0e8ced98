"""The reader's side of an index page: is this block likely to be readable?

A hint only. The daemon writes beside the reader; each word is stored at once and a block's word
never moves, so a block that is there throughout is always found. A false present costs a retry.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd_proto import layout
from kvd_proto.tags import U64, bucket_pair, bucket_pair_of, hash_words, tag_of, tags_of

Flags = npt.NDArray[np.bool_]

_HEADER = struct.Struct("<QQQ")
_WORDS = layout.PAGE_BUCKET_WORDS
_ROOM_WORD = layout.PAGE_ROOM_OFFSET // 8
_CLOSED_WORD = layout.PAGE_CLOSED_OFFSET // 8
_HEADER_WORDS = layout.HEADER_BYTES // 8
_NONE = np.array(0, dtype=np.uint64)


class PageReader:
    """Maps a page read-only. The descriptor may be closed afterwards."""

    def __init__(self, fd: int) -> None:
        """ValueError where the descriptor is no index page of this layout."""
        self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        magic, version, buckets = _HEADER.unpack_from(self._map)
        whole = layout.HEADER_BYTES + buckets * _WORDS * 8 == len(self._map)
        if magic != layout.PAGE_MAGIC or version != layout.LAYOUT_VERSION or not whole:
            self._map.close()
            raise ValueError(
                f"not an index page of layout {layout.LAYOUT_VERSION}: magic {magic:#x},"
                f" version {version}, {buckets} buckets"
            )
        self._buckets = buckets
        self._words = memoryview(self._map).cast("Q")
        array: U64 = np.frombuffer(self._map, dtype=np.uint64)[_HEADER_WORDS:]
        self._rows = array.reshape(buckets, _WORDS)

    @property
    def closed(self) -> bool:
        """The daemon no longer keeps the page: what it says is of the past."""
        return bool(self._words[_CLOSED_WORD])

    def room(self, group: int) -> int:
        """Blocks that a store of this group could get now; 0 means: ask later."""
        return self._words[_ROOM_WORD + group]

    def probe(self, tags: U64) -> Flags:
        """Which tags stand in the page, shape [n]."""
        first, second = bucket_pair(tags, self._buckets)
        # `take` fetches rows at a quarter of what an array as index costs, and operands of one
        # shape compare faster than a column beside rows.
        wanted = tags.repeat(_WORDS).reshape(-1, _WORDS)
        found = self._rows.take(first.view(np.int64), axis=0) == wanted
        found |= self._rows.take(second.view(np.int64), axis=0) == wanted
        # Eight booleans read as one word: far cheaper than any() over a short axis.
        present: Flags = found.view(np.uint64).reshape(-1) != _NONE
        return present

    def probe_hashes(self, hashes: Sequence[bytes], seed: int) -> Flags:
        """Which block hashes of one length are likely readable in the scope of this seed."""
        if not hashes:
            return np.zeros(0, dtype=np.bool_)
        words = hash_words(b"".join(hashes), len(hashes[0]))
        return self.probe(tags_of(words, seed))

    def probe_first(self, block_hash: bytes, seed: int) -> bool:
        """`probe_hashes` for a single hash: most lookups end with their first block."""
        tag = tag_of(block_hash, seed)
        for bucket in bucket_pair_of(tag, self._buckets):
            start = _HEADER_WORDS + bucket * _WORDS
            if tag in self._words[start : start + _WORDS].tolist():
                return True
        return False

    def close(self) -> None:
        """Unmap. The reader can't be used any more."""
        self._words.release()
        del self._rows
        self._map.close()
