"""Memory of what has left: tags of evicted blocks, in a table as large as their class.

A ghost is 63 bits of a tag and a mark, in a bucket of eight ways; the tag's highest bit follows
from its bucket. The ghost's number (bucket and way) stands in one of up to four queues, so that
each list of ghosts has an exact order and length. A bucket that is full forgets its oldest ghost:
at half load, which is the most that a policy may ask for, that happens to fewer than one ghost in
a hundred. Forgetting a ghost costs a little of the policy's judgement and nothing else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.core.keys import NO_SLOTS, U64, Bools, Slots, each_once
from kvd.core.policy.base import GhostProbe, MakeGhostProbe
from kvd.core.policy.slot_queue import (
    NUMBER_MASK,
    Capacity,
    Places,
    SlotQueue,
)

WAYS = 8
GHOSTS_MAX = 1 << 20  # most ghosts of one policy
LEAST_GHOSTS = 64  # that a table is made for
LOAD = 4  # a new table has so many places for each ghost that there may be now
GROWS_AT = 2  # times as many ghosts as it was made for: then it is half full at most
SHRINKS_AT = 16  # times fewer
_STRIDE = 2 * WAYS  # from one bucket's numbers to the next one's
_MARK = np.uint64(1 << 63)  # in the place of a tag's highest bit
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: the top bits choose the bucket


class Ghosts:
    """Up to `limit` remembered tags in `lists` ordered lists."""

    def __init__(
        self, capacity: Capacity, lists: int = 1, make_probe: MakeGhostProbe | None = None
    ) -> None:
        self._capacity = capacity
        self._count = lists
        self._make_probe = make_probe
        self.forget_all()

    @property
    def limit(self) -> int:
        """Most that may be remembered."""
        return min(self._count * self._capacity(), GHOSTS_MAX)

    @property
    def bytes_used(self) -> int:
        """Bytes of the table, where all of it is touched."""
        return self._places.nbytes

    def forget_all(self) -> None:
        """Remember nothing, and take no memory until there is something to remember."""
        self._make(0)

    def _make(self, limit: int) -> None:
        self._made_for = limit
        room = min(LOAD * limit, GROWS_AT * GHOSTS_MAX)  # no more ghosts than that ever come
        bits = max(1, (room - 1).bit_length() - 3) if limit else 0
        self._shift = np.uint64(64 - bits)
        # A bucket's places and then its tags: what is asked of one bucket lies together.
        places = Places(_STRIDE << bits)
        self._places = places.array
        self._tags = places.array.view(np.uint64)
        self._lists = [SlotQueue(places) for _ in range(self._count)]
        self._probe: GhostProbe | None = None
        if self._make_probe is not None and bits:
            self._probe = self._make_probe(self._places, bits)

    def _fit(self) -> None:
        """Follow the class: one that outgrew its table by far begins with a larger one, empty.

        So no event has to hash a million ghosts anew, and a class that never evicted has no
        table. What is lost is a little of the policy's judgement.
        """
        wanted = max(self.limit, LEAST_GHOSTS)
        if wanted > GROWS_AT * self._made_for or SHRINKS_AT * wanted < self._made_for:
            self._make(wanted)

    def count(self, which: int) -> int:
        return len(self._lists[which])

    def find(self, tags: U64) -> tuple[Bools, Slots]:
        """Which tags are remembered, and the ghosts' numbers (only for those found, in order)."""
        if tags.size == 0 or not self._made_for:
            return np.zeros(tags.size, np.bool_), NO_SLOTS
        if self._probe is not None:
            numbers = self._probe.find(tags)
            found = numbers >= 0
            return found, numbers[found]
        buckets = self._buckets(tags)
        rows = self._tags.reshape(-1, WAYS).take(2 * buckets + 1, axis=0).ravel()
        rows |= _MARK
        at = np.flatnonzero(rows == (tags | _MARK).repeat(WAYS))
        row = at // WAYS
        numbers = buckets.take(row) * _STRIDE + at % WAYS
        held = self._places.take(numbers) != 0
        row, numbers = row[held], numbers[held]
        found = np.zeros(tags.size, np.bool_)
        found[row] = True
        if row.size > 1 and (row[1:] == row[:-1]).any():  # one that stands twice
            first = np.concatenate(([True], row[1:] != row[:-1]))
            numbers = numbers[first]
        return found, numbers

    def list_of(self, numbers: Slots) -> npt.NDArray[np.int64]:
        """The list in which each of these ghosts stands."""
        places, found = self._places[numbers] & NUMBER_MASK, np.zeros(numbers.size, np.int64)
        for which, queue in enumerate(self._lists[1:], 1):
            found[places == queue.number] = which
        return found

    def unmarked(self, numbers: Slots) -> Slots:
        """Those of these ghosts that were not marked since they were added."""
        marked = self._tags.take(numbers + WAYS) >= _MARK
        return numbers[~marked]

    def mark(self, numbers: Slots) -> None:
        """Mark these ghosts, for whoever asks; a number comes once."""
        self._tags[numbers + WAYS] |= _MARK

    def add(self, which: int, tags: U64) -> None:
        """Remember tags at the young end of a list, the first of them oldest.

        None of them is remembered already (one that is stands twice for a while, no more).
        What a bucket can't hold is left out.
        """
        if tags.size == 0:
            return
        self._fit()
        numbers = self._place(tags) if self._probe is None else self._probe.place(tags)
        if (numbers < 0).any():
            numbers = numbers[numbers >= 0]
        self.forget(numbers[self._places.take(numbers) != 0])
        self._lists[which].append(numbers)

    def _place(self, tags: U64) -> Slots:
        """As a probe does."""
        numbers = self._places_for(self._buckets(tags))
        taken = numbers >= 0
        self._tags[numbers[taken] + WAYS] = tags[taken] & ~_MARK
        return numbers

    def _places_for(self, buckets: Slots) -> Slots:
        """A place in each bucket, none of them twice; -1 for what the bucket can't hold.

        Free ways come first (their place is 0), then the oldest ghosts.
        """
        places = self._ways(buckets)
        numbers = buckets * _STRIDE
        numbers += places.argmin(axis=1)
        # Several want one bucket: by its number and their order, which fit into one word.
        bits = buckets.size.bit_length()
        grouped = buckets << bits | np.arange(buckets.size)
        if 64 - int(self._shift) + bits < 32:
            grouped = grouped.astype(np.int32)  # sorted twice as fast
        grouped.sort()
        row = grouped & (1 << bits) - 1
        grouped >>= bits
        again = np.flatnonzero(grouped[1:] == grouped[:-1]) + 1
        if again.size:
            nth = again - np.searchsorted(grouped, grouped[again])  # in its bucket
            row = row[again]
            ranked = np.argsort(places[row], axis=1, kind="stable")  # the smallest is its first
            way = ranked[np.arange(row.size), np.minimum(nth, WAYS - 1)]
            numbers[row] = np.where(nth < WAYS, buckets[row] * _STRIDE + way, -1)
        return numbers

    def forget(self, numbers: Slots) -> None:
        """Forget these ghosts; a number may come twice."""
        if numbers.size == 0:
            return
        numbers = each_once(numbers)
        for queue in self._lists:
            queue.drop(numbers[queue.holds(numbers)])

    def trim(self, which: int, count: int) -> None:
        """Forget the oldest ghosts of a list until at most `count` remain."""
        queue = self._lists[which]
        surplus = len(queue) - max(0, count)
        if surplus > 0:
            queue.drop_oldest(surplus)

    def _buckets(self, tags: U64) -> Slots:
        return ((tags * _SPREAD) >> self._shift).astype(np.int64)

    def _ways(self, buckets: Slots) -> npt.NDArray[np.int64]:
        return self._places.reshape(-1, WAYS).take(2 * buckets, axis=0)
