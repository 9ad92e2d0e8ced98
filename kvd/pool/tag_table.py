"""A table of tags: buckets of eight words, two candidate buckets for each tag.

A tag goes to the emptier of its two buckets and never moves while it stands there, so a reader that
runs beside the writer never misses a tag that is there throughout. The native library does it tag
by tag, numpy a batch at a time. At a load of one half a tag that
finds both buckets full is a rarity: it is spilled (left out), which costs a recompute and no more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd import native
from kvd.core.keys import U64
from kvd_proto import layout
from kvd_proto.tags import bucket_mask, bucket_pair

Flags = npt.NDArray[np.bool_]
Buckets = npt.NDArray[np.int64]

WORDS = layout.PAGE_BUCKET_WORDS
NOWHERE = -1
_PLACES_OF_A_TAG = 2 * WORDS  # in both of its buckets
# Eight one-byte booleans are one word. Times this, byte i holds the sum of bytes 0..i.
_ONES = np.uint64(0x0101010101010101)
_TOP_BYTE = np.uint64(56)
_ONE = np.uint64(1)
# Tags inserted together choose by the same counts; small batches keep the buckets level.
_SMALLEST_BATCH = 16
_BATCH_SHARE = 8


class TagTable:
    """Writes tags into a table that is in words of somebody else's."""

    def __init__(self, words: U64) -> None:
        """The words of a power of two of buckets; they hold a table, or zeros."""
        self.buckets = len(words) // WORDS
        self._mask = bucket_mask(self.buckets)
        self._words = words
        self._rows = words.reshape(self.buckets, WORDS)

    def insert(self, tags: U64) -> Buckets:
        """Make tags visible. The bucket of each, NOWHERE for one that was spilled."""
        library = native.library()
        if library is not None:
            return library.insert_tags(self._words, tags)
        step = max(_SMALLEST_BATCH, self.buckets // _BATCH_SHARE)
        if len(tags) <= step:
            return self._insert_batch(tags)
        starts = range(0, len(tags), step)
        return np.concatenate([self._insert_batch(tags[start : start + step]) for start in starts])

    def remove(self, tags: U64) -> Buckets:
        """Take tags out, each as often as it is named: blocks of a name that was cleared and stored
        again have one tag. The bucket in which each stood, NOWHERE for one that didn't.
        """
        library = native.library()
        if library is not None:
            return library.remove_tags(self._words, tags)
        ordered = np.sort(tags)
        if (ordered[1:] != ordered[:-1]).all():
            return self._remove_distinct(tags)
        stood = np.full(len(tags), NOWHERE, dtype=np.int64)
        left = np.arange(len(tags))
        for _ in range(_PLACES_OF_A_TAG):
            firsts = np.unique(tags[left], return_index=True)[1]
            stood[left[firsts]] = self._remove_distinct(tags[left[firsts]])
            left = np.delete(left, firsts)
            if not len(left):
                break
        return stood

    def _remove_distinct(self, tags: U64) -> Buckets:
        first, second = bucket_pair(tags, self._mask)
        left = self._clear(tags, first)
        found = first.view(np.int64)
        if left.any():
            found = found.copy()
            found[left] = second[left]
            left[left] = self._clear(tags[left], second[left])
            found[left] = NOWHERE
        return found

    def has(self, tags: U64) -> Flags:
        """Whether each tag stands here."""
        first, second = bucket_pair(tags, self._mask)
        column = tags[:, None]
        found: Flags = (self._read(first) == column).any(axis=1)
        found |= (self._read(second) == column).any(axis=1)
        return found

    def some(self, first: int, most_buckets: int, most_tags: int) -> tuple[U64, int]:
        """What stands in some buckets from the first on, and the bucket after them.

        At least one bucket, at most so many buckets and, but for the last one, tags.
        """
        rows = self._rows[first : first + most_buckets]
        held = rows != 0
        before = np.cumsum(np.count_nonzero(held, axis=1))
        count = min(len(rows), int(np.searchsorted(before, most_tags)) + 1)
        return rows[:count][held[:count]], first + count

    def _read(self, buckets: U64) -> U64:
        """Their words; several times as fast as with an array as index."""
        return self._rows.take(buckets.view(np.int64), axis=0)

    def _clear(self, tags: U64, buckets: U64) -> Flags:
        """Clear the first word of its bucket that holds each tag; True where none does."""
        found = _as_words(self._read(buckets) == tags[:, None])
        lowest = found & (~found + _ONE)
        place = ((lowest - _ONE) & _ONES) * _ONES >> _TOP_BYTE
        missing: Flags = found == 0
        hit = ~missing
        self._words[(buckets * np.uint64(WORDS) + place)[hit]] = 0
        return missing

    def _insert_batch(self, tags: U64) -> Buckets:
        """Rounds: each places what found a free word of its own, the rest chooses again."""
        went = np.full(len(tags), NOWHERE, dtype=np.int64)
        left: Buckets | None = None  # numbers of the tags of this round; None: all
        while len(tags):
            first, second = bucket_pair(tags, self._mask)
            free_first = _as_words(self._read(first) == 0) * _ONES
            free_second = _as_words(self._read(second) == 0) * _ONES
            take_first = free_first >> _TOP_BYTE >= free_second >> _TOP_BYTE
            buckets = np.where(take_first, first, second)
            running = np.where(take_first, free_first, free_second)
            count = running >> _TOP_BYTE
            rank = _rank_within(buckets)
            # The free word with `rank` free ones before it: as many as have a sum <= rank.
            sums = running.view(np.uint8).reshape(-1, WORDS)
            place = _as_words(sums <= rank[:, None]) * _ONES >> _TOP_BYTE
            placed = rank < count
            flat = buckets * np.uint64(WORDS) + place
            self._words[flat[placed]] = tags[placed]
            went[placed if left is None else left[placed]] = buckets[placed]
            hopeless = count == 0  # the emptier of the two is full
            if (placed | hopeless).all():
                break
            left = np.flatnonzero(~placed) if left is None else left[~placed]
            tags = tags[~placed]
        return went


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
