"""Rows that the core granted and the pool has no memory for, until the core has taken them back."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import RowId


class RefusedRows(set[RowId]):
    """Nobody has mapped such a row, and nothing lies in it."""

    def take_back(
        self, order: act.UnmapRow | act.ZeroRow | act.ReleaseRow
    ) -> Iterator[ev.RowUnmapped | ev.RowZeroed]:
        """What follows the order where the core takes a row back as any other, before it has heard
        of the refusal: in the event that freed its last slot, say."""
        match order:
            case act.UnmapRow():
                yield ev.RowUnmapped(order.mover, order.row)
            case act.ZeroRow():
                yield ev.RowZeroed(order.row)
            case act.ReleaseRow():
                self.discard(order.row)
