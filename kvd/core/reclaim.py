"""Rows taken back from one size class for another.

A row is taken back only when no slot of it is pinned, reserved or quarantined: its blocks are
evicted, every mover unmaps it, it is zeroed, then its extents are free for any class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.core.actions import Action, ReleaseRow, Reply, UnmapRow, ZeroRow
from kvd.core.block import SlotState, coarse_stamp
from kvd.core.events import RowRefused
from kvd.core.keys import MoverId, RowId
from kvd.core.residency import forget_ready
from kvd.core.rows import RECLAIM_INTERVAL_NS, Row, SizeClass, grant_row, grantable_extents

if TYPE_CHECKING:
    from kvd.core.state import State

COLDEST_LOOKED_AT = 1024  # blocks of a class whose rows are weighed against each other


def seek_row(
    state: State, storing: list[SizeClass], owner: SizeClass, at: tuple[int, list[Action]]
) -> None:
    """Begin to take back a row of a class whose blocks are colder than this one's coldest.

    Asked for when the class needs slots and no extent is free. Takes one row at a time: an
    empty one first, whoever owns it, else the coldest unpinned row of the coldest class.
    `storing` are the classes whose free slots the event in hand counts on; `at` = (now, actions).
    """
    now_ns, actions = at
    if now_ns - owner.searched_ns < RECLAIM_INTERVAL_NS:
        return
    if any(row.wanted_by is owner for row in state.retiring.values()):
        return
    owner.searched_ns = now_ns
    others = [c for c in state.classes.values() if c not in storing and c.rows]
    found = next((r for c in others for r in _empty_rows(state, c)), None)
    if found is None:
        limit = coarse_stamp(now_ns) if not owner.rows else coldest_stamp(state, owner)
        found = _coldest_row(state, others, None if not owner.rows else limit)
    if found is not None:
        state.waiting[owner] = None
        retire_row(state, found, owner, actions)


def coldest_stamp(state: State, owner: SizeClass) -> np.uint32 | None:
    coldest = owner.policy.coldest(1)
    return state.slots.stamps[coldest[0]] if len(coldest) else None


def may_retire(state: State, row: Row) -> bool:
    """Whether nothing keeps the row but blocks that could be evicted."""
    states = state.slots.state[row.span]
    busy = (states == SlotState.RESERVED) | (states == SlotState.QUARANTINED)
    return not row.undead and not busy.any() and not state.slots.pins[row.span].any()


def _empty_rows(state: State, owner: SizeClass) -> list[Row]:
    if len(owner.free) < owner.slots_per_row:
        return []
    extents = owner.free.all() // state.slots_per_extent
    free = np.bincount(extents, minlength=state.config.extents)
    whole = np.flatnonzero(free == owner.slots_per_row).tolist()
    return [owner.rows[RowId(number)] for number in whole if not owner.rows[RowId(number)].undead]


def _coldest_row(state: State, owners: list[SizeClass], limit: np.uint32 | None) -> Row | None:
    """The unpinned row with the oldest blocks on average, older than `limit` where given.

    Of each class those rows are looked at that hold its coldest blocks; all only where none of
    those can be taken.
    """
    best: Row | None = None
    best_stamp = float("inf") if limit is None else float(limit)
    for owner in owners:
        coldest = coldest_stamp(state, owner)
        if coldest is None or float(coldest) >= best_stamp:
            continue
        rows = [row for row in _rows_of_coldest(state, owner) if may_retire(state, row)]
        for row in rows or [row for row in owner.rows.values() if may_retire(state, row)]:
            ready = state.slots.state[row.span] == SlotState.READY
            stamp = float(state.slots.stamps[row.span][ready].mean()) if ready.any() else 0.0
            if stamp < best_stamp:
                best, best_stamp = row, stamp
    return best


def _rows_of_coldest(state: State, owner: SizeClass) -> list[Row]:
    extents = np.unique(owner.policy.coldest(COLDEST_LOOKED_AT) // state.slots_per_extent)
    return [owner.rows[RowId(number)] for number in extents.tolist()]


def retire_row(state: State, row: Row, wanted_by: SizeClass | None, actions: list[Action]) -> None:
    """Evict what the row holds, take its slots away, and have every mover unmap it."""
    owner = row.size_class
    states = state.slots.state[row.span]
    ready = row.first_slot + np.flatnonzero(states == SlotState.READY)
    if len(ready):
        owner.policy.remove(ready)
        state.counters.evicted += len(ready)
        forget_ready(state, owner, ready, actions)
    _leave_class(state, row)
    row.wanted_by = wanted_by
    row.mapped_by = set(state.movers_of(owner.namespace))
    state.retiring[row.row] = row
    state.counters.rows_taken_back += 1
    actions.extend(UnmapRow(mover, row.row) for mover in sorted(row.mapped_by))
    _zero_when_unmapped(row, actions)


def _leave_class(state: State, row: Row) -> None:
    """The row's slots, all FREE, exist no more."""
    owner = row.size_class
    slots = owner.free.drop(row.first_slot, row.slots)
    assert len(slots) == row.slots, "a row is taken back with a slot in use"
    state.slots.move(slots, SlotState.FREE, SlotState.ABSENT)
    owner.count(capacity=-row.slots)
    del owner.rows[row.row]
    del state.rows[row.row]


def row_unmapped(state: State, row_id: RowId, mover: MoverId, actions: list[Action]) -> None:
    row = state.retiring.get(row_id)
    if row is not None and mover in row.mapped_by:
        row.mapped_by.discard(mover)
        _zero_when_unmapped(row, actions)


def _zero_when_unmapped(row: Row, actions: list[Action]) -> None:
    if not row.mapped_by and not row.zeroing:
        row.zeroing = True
        actions.append(ZeroRow(row.row))


def row_zeroed(state: State, row_id: RowId, actions: list[Action]) -> None:
    """The extents are free; the class that waited for them gets a row at once."""
    row = state.retiring.get(row_id)
    if row is None or not row.zeroing:
        return
    del state.retiring[row_id]
    actions.append(ReleaseRow(row_id))
    for extent in row.extents:
        state.free_extents.put(extent)
    wanting = row.wanted_by
    if wanting is not None and grantable_extents(state) >= wanting.shards:
        grant_row(state, wanting, actions)


def row_refused(state: State, event: RowRefused) -> list[Action]:
    """The extents of a row that could not be had are free; none is granted for a while."""
    row = state.rows.get(event.row)
    states = state.slots.state[row.span] if row is not None else np.empty(0)
    if row is None or not bool((states == SlotState.FREE).all()):
        return [Reply(event.token, row is None)]
    _leave_class(state, row)
    for extent in row.extents:
        state.free_extents.put(extent)
    state.grant_pause.begin()
    state.counters.rows_refused += 1
    return [Reply(event.token, True)]
