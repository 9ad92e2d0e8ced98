"""The reuse filter: a block is stored on its n-th sighting, so that one-off text stays out.

A sighting is an offer to store. Sightings are remembered in a bounded table, four entries to a
set; a full set forgets the sighting that was renewed longest ago.
"""

from __future__ import annotations

import numpy as np

from kvd.core.keys import U64, Bools, Slots

_WAYS = 4
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MOST_COUNTED = 255


class ReuseFilter:
    """Counts sightings by tag. Tags name scope and key; a rare shared tag admits early."""

    def __init__(self, threshold: int, tracker_blocks: int) -> None:
        self.threshold = threshold
        sets = 1
        while sets * _WAYS < tracker_blocks:
            sets *= 2
        self._shift = np.uint64(64 - (sets.bit_length() - 1)) if sets > 1 else None
        shape = (sets, _WAYS) if threshold > 1 else (1, _WAYS)
        self._tags = np.zeros(shape, dtype=np.uint64)
        self._counts = np.zeros(shape, dtype=np.uint8)
        self._ages = np.zeros(shape, dtype=np.uint64)
        self._clock = 0

    def would_admit(self, tags: U64) -> Bools:
        """Whether an offer of each would be stored now; changes nothing."""
        if self.threshold <= 1:
            return np.ones(len(tags), dtype=np.bool_)
        sets = self._sets(tags)
        match = self._tags[sets] == tags[:, None]
        seen = np.where(match, self._counts[sets], 0).max(axis=1)
        return np.asarray(seen.astype(np.int64) + 1 >= self.threshold)

    def offer(self, tags: U64) -> Bools:
        """Count one sighting of each of these distinct tags; which of them may be stored."""
        admitted = self.would_admit(tags)
        if self.threshold <= 1:
            return admitted
        self._clock += 1
        sets = self._sets(tags)
        known = (self._tags[sets] == tags[:, None]).any(axis=1)
        self._count(sets[known], tags[known])
        left = np.flatnonzero(~known)
        for _ in range(_WAYS):  # a set remembers no more, and somebody may offer it thousands
            # One tag of each set at a time, so that two never take the same entry.
            _, firsts = np.unique(sets[left], return_index=True)
            self._count(sets[left[firsts]], tags[left[firsts]])
            left = np.delete(left, firsts)
            if not len(left):
                break
        return admitted

    def _count(self, sets: Slots, tags: U64) -> None:
        match = self._tags[sets] == tags[:, None]
        known = match.any(axis=1)
        ways = np.where(known, match.argmax(axis=1), self._ages[sets].argmin(axis=1))
        counts = np.where(known, self._counts[sets, ways], 0).astype(np.int64)
        self._tags[sets, ways] = tags
        self._counts[sets, ways] = np.minimum(counts + 1, _MOST_COUNTED)
        self._ages[sets, ways] = self._clock

    def _sets(self, tags: U64) -> Slots:
        if self._shift is None:
            return np.zeros(len(tags), dtype=np.int64)
        return np.asarray((tags * _FACTOR) >> self._shift, dtype=np.int64)
