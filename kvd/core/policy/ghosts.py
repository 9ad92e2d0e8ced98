"""Memory of what has left: tags of evicted blocks, in a table of fixed size.

A ghost is a 64-bit tag in a bucket of eight ways; its number (bucket and way) stands in one of
up to four queues, so that each list of ghosts has an exact order and length. A bucket that is
full forgets its oldest ghost: at half load, which is the most that a policy may ask for, that
happens to fewer than one ghost in a hundred. Forgetting a ghost costs a little of the
policy's judgement and nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64, Slots
from kvd.core.policy.slot_queue import MARK_MASK, NO_SLOTS, SlotQueue, new_places
from kvd.core.sparse import sparse_zeros

WAYS = 8
GHOSTS_MAX = 1 << 20  # most ghosts of one policy; the table is twice that
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: the top bits choose the bucket


class Ghosts:
    """Up to `limit` remembered tags in `lists` ordered lists."""

    def __init__(self, max_slots: int, lists: int = 1) -> None:
        self.limit = min(max_slots, GHOSTS_MAX)
        bits = max(7, (2 * self.limit - 1).bit_length() - 3)
        self._shift = np.uint64(64 - bits)
        self._tags = sparse_zeros((1 << bits, WAYS), np.uint64)
        self._places = new_places(WAYS << bits)
        self._lists = [SlotQueue(self._places, mark) for mark in range(lists)]

    @property
    def numbers(self) -> int:
        """Ghosts are numbered below this."""
        return int(self._places.size)

    def count(self, which: int) -> int:
        return len(self._lists[which])

    def find(self, tags: U64) -> tuple[npt.NDArray[np.bool_], Slots]:
        """Which tags are remembered, and the ghosts' numbers (only for those found, in order)."""
        if tags.size == 0:
            return np.zeros(0, np.bool_), NO_SLOTS
        buckets = self._buckets(tags)
        same = (self._tags[buckets] == tags[:, None]) & (self._ways(buckets) != 0)
        found = same.any(axis=1)
        numbers = buckets[found] * WAYS + same[found].argmax(axis=1)
        return found, numbers

    def list_of(self, numbers: Slots) -> npt.NDArray[np.int64]:
        """The list in which each of these ghosts stands."""
        return self._places[numbers] & MARK_MASK

    def add(self, which: int, tags: U64) -> Slots:
        """Remember tags at the young end of a list, the first of them oldest. Their numbers.

        None of them is remembered already (one that is stands twice for a while, no more).
        What a bucket can't hold is left out.
        """
        if tags.size == 0:
            return NO_SLOTS
        buckets = self._buckets(tags)
        order = np.argsort(buckets, kind="stable")
        grouped = buckets[order]
        nth = np.arange(grouped.size) - np.searchsorted(grouped, grouped)  # in its bucket
        fits = nth < WAYS
        places = self._ways(grouped[fits])
        way = places.argmin(axis=1)  # free ways first (place 0), then the oldest ghosts
        later = np.flatnonzero(nth[fits])
        if later.size:
            ranked = np.argsort(places[later], axis=1, kind="stable")  # argmin is its first
            way[later] = ranked[np.arange(later.size), nth[fits][later]]
        numbers = np.zeros(tags.size, np.int64)
        taken = np.zeros(tags.size, np.bool_)
        numbers[order[fits]] = grouped[fits] * WAYS + way
        taken[order[fits]] = True
        numbers = numbers[taken]
        self.forget(numbers[self._places[numbers] != 0])
        self._tags.reshape(-1)[numbers] = tags[taken]
        self._lists[which].append(numbers)
        return numbers

    def forget(self, numbers: Slots) -> None:
        """Forget these ghosts; a number may come twice."""
        if numbers.size == 0:
            return
        numbers = np.unique(numbers)
        lists = self.list_of(numbers)
        for mark, queue in enumerate(self._lists):
            queue.drop(numbers[lists == mark])

    def trim(self, which: int, count: int) -> None:
        """Forget the oldest ghosts of a list until at most `count` remain."""
        queue = self._lists[which]
        surplus = len(queue) - max(0, count)
        if surplus > 0:
            queue.drop(queue.first(surplus))

    def _buckets(self, tags: U64) -> Slots:
        return ((tags * _SPREAD) >> self._shift).astype(np.int64)

    def _ways(self, buckets: Slots) -> npt.NDArray[np.int64]:
        return self._places.reshape(-1, WAYS)[buckets]
