"""The kinds of blocks that a disk knows, by the lengths of their parts: a bounded number.

At the bound those without blocks are forgotten. Where all have some, the kinds with the fewest
blocks go, and their blocks with them: many kinds with a block each are of who makes up layouts,
and must not keep a model that comes later off the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import numpy as np

from kvd.core.keys import Slots
from kvd.tiers.disk.files import rounded_up
from kvd.tiers.disk.rows import RowWriter
from kvd.tiers.disk.size_class import DiskSizeClass, PlaceState

MAX_LENGTHS_KNOWN = 4096  # kinds of blocks that one disk knows at once
KINDS_AT_ONCE = 256  # that go where there are too many
FORGET_KINDS_AGAIN_S = 10.0  # after a look for those, of some hundredths of a second
UNKNOWN_KIND = -1
Leave = Callable[[DiskSizeClass, Slots], None]


def stride_of(lengths: bytes) -> int:
    """Bytes that blocks whose parts have these lengths take on the disk; 0 where there is none."""
    if not lengths or len(lengths) % 8:
        return 0
    parts = np.frombuffer(lengths, dtype=np.uint64)
    total = sum(parts.tolist())
    return rounded_up(total) if total < 1 << 62 else 0


class Kinds:
    """Callers hold the disk's lock. `leave` has blocks leave that nobody reads or writes."""

    def __init__(self, known: Mapping[int, bytes], rows: RowWriter, leave: Leave) -> None:
        self._numbers = {lengths: number for number, lengths in known.items()}
        self._free = sorted(set(range(1, MAX_LENGTHS_KNOWN + 1)) - set(known), reverse=True)
        self._rows, self._leave = rows, leave
        self._forget_at = 0.0

    def number_of(self, lengths: bytes) -> int:
        """UNKNOWN_KIND where there is no block of these."""
        return self._numbers.get(lengths, UNKNOWN_KIND)

    def add(self, lengths: bytes, classes: Collection[DiskSizeClass]) -> int | None:
        """The number of these, a new one where they are new. None: there is no room for more."""
        number = self._numbers.get(lengths)
        if number is None and not self._free:
            self._make_room(classes)
        if number is None and self._free:
            number = self._numbers[lengths] = self._free.pop()
            self._rows.add_lengths(number, lengths)
        return number

    def tell(self) -> None:
        """Tell an index that is empty of all of them."""
        for lengths, number in self._numbers.items():
            self._rows.add_lengths(number, lengths)

    def _make_room(self, classes: Collection[DiskSizeClass]) -> None:
        now = time.monotonic()
        if now < self._forget_at:
            return
        self._forget_at = now + FORGET_KINDS_AGAIN_S
        numbers = np.fromiter(self._numbers.values(), dtype=np.int64, count=len(self._numbers))
        counts, is_busy = _blocks_of_kinds(classes)
        going = numbers[~is_busy[numbers]]
        going = going[np.argsort(counts[going], kind="stable")]
        going = going[: max(KINDS_AT_ONCE, np.count_nonzero(counts[going] == 0))]
        for size_class in classes:
            span = size_class.in_use()
            ready = np.flatnonzero(size_class.states[span] == PlaceState.READY)
            self._leave(size_class, ready[np.isin(size_class.lengths[ready], going)])
        lengths = {number: lengths for lengths, number in self._numbers.items()}
        for number in going.tolist():
            del self._numbers[lengths[number]]
            self._rows.remove_lengths(number)
            self._free.append(number)


def _blocks_of_kinds(classes: Collection[DiskSizeClass]) -> tuple[Slots, np.ndarray]:
    """How many blocks there are of each kind, and which are read, written or deleted now."""
    counts = np.zeros(MAX_LENGTHS_KNOWN + 1, dtype=np.int64)
    is_busy = np.zeros(MAX_LENGTHS_KNOWN + 1, dtype=np.bool_)
    for size_class in classes:
        span = size_class.in_use()
        states, kinds = size_class.states[span], size_class.lengths[span]
        counts += np.bincount(kinds[states == PlaceState.READY], minlength=len(counts))
        busy = (states != PlaceState.READY) & (states != PlaceState.FREE)
        is_busy[kinds[busy | (size_class.pins[span] > 0)]] = True
    return counts, is_busy
