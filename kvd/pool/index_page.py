"""The index page of one namespace: tags of readable blocks, for clients to probe.

A bucketed hash: each tag may stand in one of two buckets of eight words and goes to the emptier.
A word never moves while its block is readable, so a reader that runs beside the writer never
misses a block that is there throughout. Sized for a load of one half, where a tag that finds both
buckets full is a rarity: it is spilled (left out), which costs a recompute and no more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64
from kvd_proto import layout
from kvd_proto.tags import bucket_pair

_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10

_WORDS = layout.PAGE_BUCKET_WORDS
_SMALLEST_BUCKETS = 8
# Eight one-byte booleans are one word. Times this, byte i holds the sum of bytes 0..i.
_ONES = np.uint64(0x0101010101010101)
_TOP_BYTE = np.uint64(56)
_ONE = np.uint64(1)
# Tags inserted together choose by the same counts; small batches keep the buckets level.
_SMALLEST_BATCH = 64
_BATCH_SHARE = 8

Flags = npt.NDArray[np.bool_]


class IndexPage:
    """The writer's side. `spilled` counts resident tags that found no place."""

    def __init__(self, name: str, blocks: int) -> None:
        """Make a page for at most `blocks` tags and seal it against every other writer.

        OSError, and nothing is left, where there is no memory or no descriptor for it.
        """
        wanted = max(_SMALLEST_BUCKETS, -(-2 * blocks // _WORDS))
        self.buckets = 1 << (wanted - 1).bit_length()
        self.page_bytes = layout.HEADER_BYTES + self.buckets * _WORDS * 8
        self.spilled = 0
        self.blocks = blocks
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, self.page_bytes)
            # The first touch of the header must not be what finds that there is no memory.
            os.posix_fallocate(fd, 0, layout.HEADER_BYTES)
            self._map = mmap.mmap(fd, self.page_bytes)
            try:
                # This mapping stays writable; whoever gets the descriptor can make no other.
                seals = _F_SEAL_FUTURE_WRITE | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL
                fcntl.fcntl(fd, _F_ADD_SEALS, seals)
                flags = os.O_RDONLY | os.O_CLOEXEC
                self.read_only_fd = os.open(f"/proc/self/fd/{fd}", flags)
            except OSError:
                self._map.close()
                raise
        finally:
            os.close(fd)
        all_words: U64 = np.frombuffer(self._map, dtype=np.uint64)
        self._header = all_words[: layout.HEADER_BYTES // 8]
        self._words = all_words[layout.HEADER_BYTES // 8 :]
        self._rows = self._words.reshape(self.buckets, _WORDS)
        self._header[2] = self.buckets
        self._header[1] = layout.LAYOUT_VERSION
        self._header[0] = layout.PAGE_MAGIC

    def insert(self, tags: U64) -> int:
        """Make tags visible; returns how many of them were spilled."""
        step = max(_SMALLEST_BATCH, self.buckets // _BATCH_SHARE)
        spilled = 0
        for start in range(0, len(tags), step):
            spilled += self._insert_batch(tags[start : start + step])
        self.spilled += spilled
        return spilled

    def remove(self, tags: U64) -> None:
        """Take tags out, each as often as it is named. A tag that isn't there was spilled."""
        if len(once := np.unique(tags)) < len(tags):
            # Blocks of a name that was cleared and stored again have one tag.
            order = np.sort(tags)
            self.remove(order[1:][order[1:] == order[:-1]])
            tags = once
        first, second = bucket_pair(tags, self.buckets)
        left = self._clear(tags, first)
        if left.any():
            left[left] = self._clear(tags[left], second[left])
            self.spilled = max(0, self.spilled - int(left.sum()))

    def set_room(self, rooms: Sequence[int]) -> None:
        """Say for each group how many blocks a store could get now."""
        first = layout.PAGE_ROOM_OFFSET // 8
        self._header[first : first + len(rooms)] = rooms

    def close(self) -> None:
        """Tell readers that nobody keeps the page any more, and let go of it."""
        self._header[layout.PAGE_CLOSED_OFFSET // 8] = 1
        del self._header, self._words, self._rows
        self._map.close()
        os.close(self.read_only_fd)

    def _clear(self, tags: U64, buckets: U64) -> Flags:
        """Clear the first word of its bucket that holds each tag; True where none does."""
        found = _as_words(self._rows[buckets] == tags[:, None])
        lowest = found & (~found + _ONE)
        place = ((lowest - _ONE) & _ONES) * _ONES >> _TOP_BYTE
        missing: Flags = found == 0
        hit = ~missing
        self._words[(buckets * np.uint64(_WORDS) + place)[hit]] = 0
        return missing

    def _insert_batch(self, tags: U64) -> int:
        """Rounds: each places what found a free word of its own, the rest chooses again."""
        while len(tags):
            first, second = bucket_pair(tags, self.buckets)
            free_first = _as_words(self._rows[first] == 0) * _ONES
            free_second = _as_words(self._rows[second] == 0) * _ONES
            take_first = free_first >> _TOP_BYTE >= free_second >> _TOP_BYTE
            buckets = np.where(take_first, first, second)
            running = np.where(take_first, free_first, free_second)
            count = running >> _TOP_BYTE
            rank = _rank_within(buckets)
            # The free word with `rank` free ones before it: as many as have a sum <= rank.
            sums = running.view(np.uint8).reshape(-1, _WORDS)
            place = _as_words(sums <= rank[:, None]) * _ONES >> _TOP_BYTE
            placed = rank < count
            flat = buckets * np.uint64(_WORDS) + place
            self._words[flat[placed]] = tags[placed]
            hopeless = count == 0  # the emptier of the two is full
            if (placed | hopeless).all():
                return int(hopeless.sum())
            tags = tags[~placed]
        return 0


def _as_words(flags: Flags) -> U64:
    """Rows of eight booleans as one word each."""
    return flags.view(np.uint64).reshape(-1)


def _rank_within(buckets: U64) -> U64:
    """How many earlier tags of the batch chose the same bucket; shape of the input."""
    order = np.argsort(buckets, kind="stable")
    ordered = buckets[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    lengths = np.diff(np.append(starts, len(buckets)))
    rank = np.empty(len(buckets), dtype=np.uint64)
    rank[order] = np.arange(len(buckets)) - np.repeat(starts, lengths)
    return rank
