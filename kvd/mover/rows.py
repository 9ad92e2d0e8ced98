"""Which rows a mover has mapped, and who still uses them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from kvd.core.keys import RowId
from kvd.mover.copy_engine import CopyEngine


class MappedRows:
    """The rows that a mover has mapped, one extent of its shard for each. Any thread may call.

    An extent is unmapped as soon as it is retired and nobody uses it, never before.
    """

    def __init__(self, engine: CopyEngine, unmapped: Callable[[RowId], None]) -> None:
        self._engine = engine
        self._unmapped = unmapped
        self._extents: dict[RowId, int] = {}
        self._rows: dict[int, RowId] = {}
        self._bytes: dict[int, npt.NDArray[np.uint8]] = {}
        self._retired: set[int] = set()
        self._uses: Counter[int] = Counter()
        self._lock = threading.Lock()

    def map(self, row: RowId, extent: int) -> None:
        """Map the row's extent, unless it is mapped already. OSError from the engine."""
        with self._lock:
            if extent in self._rows or row in self._extents:
                return
            self._bytes[extent] = self._engine.open_extent(extent)
            self._extents[row] = extent
            self._rows[extent] = row

    def retire(self, row: RowId) -> None:
        """Unmap the row once nobody uses it; a row that isn't mapped is reported at once."""
        with self._lock:
            extent = self._extents.get(row)
            if extent is not None:
                self._retired.add(extent)
                if self._uses[extent] > 0:
                    return
                self._unmap(extent)
        self._unmapped(row)

    def use(self, extents: Iterable[int]) -> bool:
        """Keep these extents mapped until `release`. False: one is not, or is being retired."""
        wanted = tuple(extents)
        with self._lock:
            if not all(e in self._rows and e not in self._retired for e in wanted):
                return False
            self._uses.update(wanted)
            return True

    def release(self, extents: Iterable[int]) -> None:
        """End one `use` of the same extents."""
        done: list[RowId] = []
        with self._lock:
            for extent in extents:
                self._uses[extent] -= 1
                assert self._uses[extent] >= 0, "an extent was released more often than used"
                if self._uses[extent] == 0 and extent in self._retired:
                    done.append(self._rows[extent])
                    self._unmap(extent)
        for row in done:
            self._unmapped(row)

    def bytes_of(self, extent: int) -> npt.NDArray[np.uint8]:
        """The bytes of an extent that the caller uses; to be let go of before its `release`."""
        return self._bytes[extent]

    def retiring(self, extent: int) -> bool:
        """Whether somebody waits for the extent to be unmapped."""
        return extent in self._retired

    def _unmap(self, extent: int) -> None:
        del self._bytes[extent]
        self._engine.close_extent(extent)
        del self._extents[self._rows.pop(extent)]
        self._retired.discard(extent)
        del self._uses[extent]
