"""Rows of extents: granted to size classes, and kept a little ahead of need."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.core.keys import NODE_UNKNOWN, RowId
from kvd.core.model.size_class import MIN_SLOT_BYTES, Row, SizeClass
from kvd.core.model.slots import SlotState
from kvd.core.model.state import State
from kvd.core.model.turn import Turn
from kvd.core.spec import GroupSpec

MAX_SPARE_ROWS_AT_ONCE = 8  # granted in one event
SPARE_SHARE = 8  # at most 1/8 of the pool is granted ahead of need


def grantable_extents(state: State) -> int:
    """Extents of which rows may be made now."""
    return 0 if state.grant_pause.ticks_left else len(state.free_extents)


def unclaimed_extents(state: State) -> int:
    """Of those, the ones that nobody waits for."""
    return 0 if state.claims else grantable_extents(state)


def slots_per_row(spec: GroupSpec, extent_bytes: int) -> int:
    """Slots that one row gives, 0 where a part is larger than an extent."""
    fitting = min(extent_bytes // part for part in spec.part_bytes)
    return min(fitting, extent_bytes // MIN_SLOT_BYTES)


def grant_row(turn: Turn, owner: SizeClass) -> None:
    """Give the class its next row from the free extents, of which there are enough.

    Each shard's extent is of the node of the rank that writes the shard, where one is free there.
    """
    state = turn.state
    nodes = state.namespaces[owner.namespace].shard_nodes
    extents = tuple(
        state.free_extents.take(nodes.get(shard, NODE_UNKNOWN)) for shard in range(owner.shards)
    )
    row = Row(
        RowId(extents[0]),
        owner,
        extents,
        extents[0] * state.slots_per_extent,
        owner.slots_per_row,
        granted_ns=turn.now_ns,
    )
    add_row(state, row)
    owner.free.put(row.all_slots)
    state.counters.rows_granted += 1
    turn.orders.append(row.grant())


def add_row(state: State, row: Row) -> None:
    """Make the row's slots exist, all FREE; the caller says which of them may be taken."""
    state.rows[row.row] = row
    row.size_class.rows[row.row] = row
    row.size_class.count(capacity=row.slots)
    if not row.orphaned:
        state.rights.hold(row.size_class.namespace, len(row.extents))
    state.slots.move(row.all_slots, SlotState.ABSENT, SlotState.FREE)


def grant_spare(turn: Turn, owners: Iterable[SizeClass]) -> None:
    """Grant rows ahead of need, so that movers have mapped and pinned them before a store comes.

    Each class is given as many as `spare_bytes` hold, and, unless that is 0, at least until a whole
    row is free. At most 1/SPARE_SHARE of the pool, divided among the classes in use. On a machine
    whose extents lie apart the first ones wait for the ranks, which know where they should lie.
    What is more than one event may grant comes with the next ticks.
    """
    state = turn.state
    left = MAX_SPARE_ROWS_AT_ONCE
    for owner in owners:
        spare_slots = _spare_slots(state, owner)
        while len(owner.free) + owner.slots_per_row <= spare_slots:
            if not left or not _may_have_spare(state, owner):
                break
            grant_row(turn, owner)
            left -= 1
        if not left:
            return


def _spare_slots(state: State, owner: SizeClass) -> int:
    live = len(state.namespaces) - len(state.expiring.namespaces)
    groups = len(state.namespaces[owner.namespace].classes)
    share = state.pool_bytes // SPARE_SHARE // max(1, live * groups)
    spare_slots = state.config.spare_bytes // owner.block_bytes
    if spare_slots:  # grants while less than a row is free
        spare_slots = max(spare_slots, 2 * owner.slots_per_row - 1)
    return min(spare_slots, share // owner.block_bytes)


def _may_have_spare(state: State, owner: SizeClass) -> bool:
    if unclaimed_extents(state) < owner.shards:
        return False
    return not state.free_extents.is_numa or any(
        s.usable() for s in state.sessions.values() if s.namespace == owner.namespace
    )
