"""The pool's extents in a tier's process: mapped at their first use, shared by all copies."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from kvd.core.keys import RowId
from kvd.linux import calls
from kvd.processes.mappings import Bytes, ExtentFiles, Mapping, map_extent
from kvd.tiers.store import MapsMemory, TierError

# A tier has to do with every extent of the pool, and each that is mapped takes a descriptor and one
# of the 65,530 mappings that Linux gives a process. It takes no more than this part of them.
MAX_MAPPED_EXTENTS = 16_384
DESCRIPTOR_SHARE = 2


def most_mapped() -> int:
    """How many extents this process may keep mapped."""
    return max(1, min(MAX_MAPPED_EXTENTS, calls.most_descriptors() // DESCRIPTOR_SHARE))


class SharedExtents:
    """Which extents are mapped, and how many orders use each. Any thread may call.

    An extent stays mapped until its row is retired and nobody uses it. Where as many are mapped
    as may be, those that nobody uses make room, the longest unused first.
    """

    def __init__(
        self,
        files: ExtentFiles,
        unmapped: Callable[[RowId], None],
        most: int = MAX_MAPPED_EXTENTS,
        store: MapsMemory | None = None,
    ) -> None:
        """`store`: one that must be told of what is mapped."""
        self.extent_bytes = files.extent_bytes
        self._store = store
        self._files = files
        self._most = most
        self._unmapped = unmapped
        self._mapped: dict[int, Mapping] = {}  # the longest unused first
        self._uses: Counter[int] = Counter()
        self._retiring: dict[int, RowId] = {}
        self._left: dict[RowId, set[int]] = {}  # extents in use of the rows that are retiring
        self._lock = threading.Lock()

    def use(self, extents: frozenset[int]) -> bool:
        """Keep these mapped until `release`. False: one is being retired. OSError: can't be had."""
        with self._lock:
            if not self._retiring.keys().isdisjoint(extents):
                return False
            for extent in extents & self._mapped.keys():
                self._mapped[extent] = self._mapped.pop(extent)
            new = extents - self._mapped.keys()
            self._make_room(len(new), extents)
            for extent in new:
                self._mapped[extent] = self._map(extent)
            self._uses.update(extents)
            return True

    def release(self, extents: Iterable[int]) -> None:
        """End one `use` of the same extents."""
        done: list[RowId] = []
        with self._lock:
            for extent in extents:
                self._uses[extent] -= 1
                assert self._uses[extent] >= 0, "an extent was released more often than used"
                row = self._retiring.get(extent)
                if row is not None and self._uses[extent] == 0:
                    self._unmap(extent)
                    self._left[row].remove(extent)
                    if not self._left[row]:
                        self._end(row)
                        done.append(row)
        for row in done:
            self._unmapped(row)

    def retire(self, row: RowId, extents: Iterable[int]) -> None:
        """Unmap a row's extents once nobody uses them, and say so; at once where nobody does."""
        with self._lock:
            assert row not in self._left, "a row is retired twice"
            self._left[row] = set()
            for extent in extents:
                self._retiring[extent] = row
                if self._uses[extent]:
                    self._left[row].add(extent)
                else:
                    self._unmap(extent)
            if self._left[row]:
                return
            self._end(row)
        self._unmapped(row)

    def lend(self, extents: Iterable[int]) -> dict[int, Bytes]:
        """The bytes of extents in use, as arrays that nobody else holds.

        Whoever keeps a view of one keeps that very array alive.
        """
        with self._lock:  # `use` takes what is wanted out for a moment, to put it last
            mapped = {extent: self._mapped[extent].mapped for extent in extents}
        return {extent: np.frombuffer(each, np.uint8) for extent, each in mapped.items()}

    def _make_room(self, count: int, wanted: frozenset[int]) -> None:
        excess = len(self._mapped) + count - self._most
        if excess > 0:
            idle = (e for e in self._mapped if not self._uses[e] and e not in wanted)
            for extent in list(itertools.islice(idle, excess)):
                self._unmap(extent)

    def _map(self, extent: int) -> Mapping:
        mapping = map_extent(self._files, extent)
        if self._store is not None:
            try:
                self._store.map_memory(mapping.address, self.extent_bytes)
            except TierError as error:
                mapping.close()
                raise OSError(f"the store can't use it: {error}") from None
        return mapping

    def _unmap(self, extent: int) -> None:
        del self._uses[extent]
        mapping = self._mapped.pop(extent, None)
        if mapping is not None:
            if self._store is not None:
                self._store.unmap_memory(mapping.address)
            mapping.close()

    def _end(self, row: RowId) -> None:
        del self._left[row]
        for extent in [e for e, retiring in self._retiring.items() if retiring == row]:
            del self._retiring[extent]
