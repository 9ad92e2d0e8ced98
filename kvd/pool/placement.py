"""From slot numbers, which the core deals in, to records, extents and offsets."""

from __future__ import annotations

import numpy as np

from kvd.core.actions import GrantRow
from kvd.core.keys import U32, U64, RowId, Slots
from kvd.pool.config import PoolConfig
from kvd.pool.row_table import GrantedRow
from kvd.pool.slot_table import Records

_NO_ROW = -1


class Placement:
    """Where each slot's bytes are: its extents and its ordinal in them.

    Arrays by slot and by row (its leading extent). To ask for a slot that is not granted
    is a defect of ours.
    """

    def __init__(self, config: PoolConfig) -> None:
        self._per_extent = config.slots_per_extent
        slots = config.extents * config.slots_per_extent
        # Row + 1 by slot, so that memory of slots never granted stays untouched zeros.
        self._row_after = np.zeros(slots, dtype=np.uint32)
        self._first_slot = np.full(config.extents, _NO_ROW, dtype=np.int64)
        self._slots = np.zeros(config.extents, dtype=np.int64)
        self._shards = np.zeros(config.extents, dtype=np.int64)
        self._extents = np.zeros((1, config.extents), dtype=np.uint32)
        self._part_bytes = np.zeros((1, config.extents), dtype=np.uint64)

    def add(self, order: GrantRow) -> None:
        """Learn where the row's slots lie; the same again changes nothing."""
        shards = len(order.extents)
        if shards > len(self._extents):
            self._grow(shards)
        self._row_after[order.first_slot : order.first_slot + order.slots] = order.row + 1
        self._first_slot[order.row] = order.first_slot
        self._slots[order.row] = order.slots
        self._shards[order.row] = shards
        self._extents[:shards, order.row] = order.extents
        self._part_bytes[:shards, order.row] = order.part_bytes

    def remove(self, row: RowId) -> None:
        first = int(self._first_slot[row])
        if first != _NO_ROW:
            self._row_after[first : first + int(self._slots[row])] = 0
            self._first_slot[row] = _NO_ROW

    def knows(self, slots: Slots) -> bool:
        """Whether each of these was granted."""
        return bool(self._row_after[slots].all())

    def records(self, slots: Slots) -> Records:
        """Record numbers of granted slots."""
        rows = self._rows(slots)
        return rows * self._per_extent + (slots - self._first_slot[rows])

    def records_of_row(self, row: GrantedRow) -> Records:
        first = row.row * self._per_extent
        return np.arange(first, first + row.slots)

    def shards_of(self, slot: int) -> int:
        """How many parts a granted slot has."""
        return int(self._shards[self._rows(np.array([slot]))[0]])

    def part_bytes_of(self, slot: int) -> tuple[int, ...]:
        """Bytes of each part of a granted slot."""
        row = self._rows(np.array([slot]))[0]
        return tuple(self._part_bytes[: self._shards[row], row].tolist())

    def parts(self, slots: Slots, shard: int) -> tuple[Slots, Slots]:
        """Extents and ordinals of one shard's parts of granted slots."""
        rows = self._rows(slots)
        return self._extents[shard, rows].astype(np.int64), slots - self._first_slot[rows]

    def locate(self, slots: Slots, shard: int) -> tuple[U32, U64]:
        """Extents and byte offsets of one shard's parts of granted slots."""
        rows = self._rows(slots)
        ordinals = (slots - self._first_slot[rows]).astype(np.uint64)
        return self._extents[shard, rows], ordinals * self._part_bytes[shard, rows]

    def _rows(self, slots: Slots) -> Slots:
        after = self._row_after[slots]
        assert after.all(), "a slot that no row was granted for"
        return after.astype(np.int64) - 1

    def _grow(self, shards: int) -> None:
        more = ((0, shards - len(self._extents)), (0, 0))
        self._extents = np.pad(self._extents, more)
        self._part_bytes = np.pad(self._part_bytes, more)
