"""Which rows a mover was told to map, until it has been told of all that its namespace had."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvd.core.actions import GrantRow
from kvd.core.keys import RowId
from kvd.mover.process import MoverProcess


class ToldRows:
    """The rows that one mover was told of, each of them once. Lives on the event loop."""

    def __init__(self, process: MoverProcess, shard: int) -> None:
        self._process = process
        self._shard = shard
        self._told: set[RowId] = set()  # while there may be others that it was not told of
        self._complete = asyncio.Event()

    @property
    def complete(self) -> bool:
        """Whether the mover knows every row of its namespace."""
        return self._complete.is_set()

    def tell(self, orders: Iterable[GrantRow]) -> None:
        """Have these mapped, but for those that it was told of already."""
        for order in orders:
            if order.row not in self._told:
                self._process.map_row(order.row, order.extents[self._shard])
                if not self.complete:
                    self._told.add(order.row)

    def unknown(self, rows: Iterable[RowId]) -> list[RowId]:
        """Those of them that it was not told of yet."""
        return [] if self.complete else [row for row in rows if row not in self._told]

    def taken_back(self, row: RowId) -> None:
        """It is told to unmap this one; a later row may have the same number."""
        self._told.discard(row)

    def end(self) -> None:
        """It was told of every row that was there when it came."""
        self._complete.set()
        self._told.clear()

    async def wait(self) -> None:
        """Until then."""
        await self._complete.wait()
