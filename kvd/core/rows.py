"""Rows of extents: granted to size classes, and kept a little ahead of need.

A size class is one group of one namespace. A row is one extent for each shard; slot i lies at
the same ordinal in each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvd.core.actions import Action, GrantRow
from kvd.core.block import SlotState
from kvd.core.extents import NODE_UNKNOWN
from kvd.core.keys import MoverId, NamespaceId, RowId, Slots
from kvd.core.policy.base import EvictionPolicy
from kvd.core.quota import Tally, Tenant
from kvd.core.spec import GroupSpec

if TYPE_CHECKING:
    from kvd.core.lease import LeasesLeft
    from kvd.core.state import State

MIN_SLOT_BYTES = 4096  # smaller parts leave their extent partly unused
MAX_SPARE_ROWS_AT_ONCE = 8  # granted in one event
RECLAIM_INTERVAL_NS = 50_000_000  # a class looks for another's row at most this often
LONG_AGO_NS = -(1 << 62)  # before all that counts
FIRST_PAUSE_TICKS = 4  # a second
LONGEST_PAUSE_TICKS = 256
STACK_PIECE = 8192  # of free slots, moved together
SPARE_SHARE = 8  # at most 1/8 of the pool is granted ahead of need


class FreeSlots:
    """A stack of slot numbers; the last put is taken first, so that few rows stay in use.

    It lies in pieces, so that no call moves all of it, and a row is sought only in the pieces that
    may hold slots of it.
    """

    def __init__(self) -> None:
        self._full: list[tuple[int, int, Slots]] = []  # least, greatest and all slots of each
        self._below = 0  # slots in those
        self._top: Slots = np.empty(0, dtype=np.int64)  # the piece that is being filled
        self._count = 0  # slots in it

    def __len__(self) -> int:
        return self._below + self._count

    def put(self, slots: Slots) -> None:
        slots = slots[::-1]
        while len(slots):
            if self._count == STACK_PIECE:
                self._push(self._top)
                self._top, self._count = np.empty(0, dtype=np.int64), 0
            end = min(self._count + len(slots), STACK_PIECE)
            if end > len(self._top):
                self._resize(min(max(end, 2 * len(self._top)), STACK_PIECE))
            taken = end - self._count
            self._top[self._count : end] = slots[:taken]
            self._count, slots = end, slots[taken:]

    def take(self, count: int) -> Slots:
        assert count <= len(self), "more slots taken than are free"
        taken = []
        while count > self._count:
            taken.append(self._top[: self._count][::-1].copy())
            count -= self._count
            _, _, self._top = self._full.pop()
            self._count = len(self._top)
            self._below -= self._count
        self._count -= count
        taken.append(self._top[self._count : self._count + count][::-1].copy())
        self._shrink()
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def drop(self, first: int, slots: int) -> Slots:
        """Forget those in first .. first+slots-1 and return them."""
        full, self._full, self._below = self._full, [], 0
        dropped = []
        for least, greatest, piece in full:
            if greatest < first or least >= first + slots:
                self._full.append((least, greatest, piece))
                self._below += len(piece)
                continue
            inside = (piece >= first) & (piece < first + slots)
            dropped.append(piece[inside])
            self._push(piece[~inside])
        held = self._top[: self._count]
        inside = (held >= first) & (held < first + slots)
        dropped.append(held[inside])
        rest = held[~inside]
        self._top[: len(rest)] = rest
        self._count = len(rest)
        self._shrink()
        return np.concatenate(dropped)

    def all(self) -> Slots:
        pieces = [piece for _, _, piece in self._full]
        return np.concatenate([*pieces, self._top[: self._count]])

    def _push(self, slots: Slots) -> None:
        if len(slots):
            self._full.append((int(slots.min()), int(slots.max()), slots))
            self._below += len(slots)

    def _shrink(self) -> None:
        """Give memory back that a class needed when it had many more free slots."""
        if len(self._top) > max(1024, 8 * self._count):
            self._resize(2 * self._count)

    def _resize(self, size: int) -> None:
        other = np.empty(size, dtype=np.int64)
        other[: self._count] = self._top[: self._count]
        self._top = other


@dataclass(slots=True, eq=False)
class Row:
    row: RowId
    size_class: SizeClass
    extents: tuple[int, ...]
    first_slot: int
    slots: int
    orphaned: bool = False  # a mover of an earlier incarnation may still write to it
    drained: bool = False  # orphaned, and no block of it is left
    withheld: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # ... here
    granted_ns: int = LONG_AGO_NS
    emptying: bool = False  # to be taken back once no slot of it is in use
    copied_into: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # ... here
    left: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # to be given up
    emptied_ns: int = 0  # since when
    leases: LeasesLeft | None = None  # leases that may hold its blocks, and will be ended
    retired_ns: int = 0
    mapped_by: set[MoverId] = field(default_factory=set)  # while retiring: yet to unmap
    zeroing: bool = False

    @property
    def span(self) -> slice:
        return slice(self.first_slot, self.first_slot + self.slots)

    def grant(self) -> GrantRow:
        owner = self.size_class
        return GrantRow(
            self.row,
            owner.namespace,
            owner.group,
            self.extents,
            owner.spec.part_bytes,
            self.first_slot,
            self.slots,
        )


@dataclass(slots=True, eq=False)
class SizeClass:
    """Counts are of slots, and changed by `count` alone. `evictable` = READY without a pin."""

    namespace: NamespaceId
    group: int
    spec: GroupSpec
    width: int  # words of a key
    tenant: Tenant
    policy: EvictionPolicy
    slots_per_row: int
    tallies: tuple[Tally, ...]  # of the pool, the tenant and the namespace
    free: FreeSlots = field(default_factory=FreeSlots)
    rows: dict[RowId, Row] = field(default_factory=dict)
    capacity: int = 0
    reserved: int = 0
    ready: int = 0
    quarantined: int = 0
    evictable: int = 0
    searched_ns: int = -RECLAIM_INTERVAL_NS
    stored_ns: int = LONG_AGO_NS  # when it last wanted room
    needed_rows: int = 0  # the most that it lately wanted to fill at once, when all were taken
    needed_ns: int = LONG_AGO_NS
    emptying: dict[RowId, Row] = field(default_factory=dict)  # of its rows, those it loses

    block_bytes: int = field(init=False)
    shards: int = field(init=False)

    def __post_init__(self) -> None:
        self.block_bytes = self.spec.block_bytes
        self.shards = len(self.spec.shard_bytes)

    def count(
        self,
        *,
        capacity: int = 0,
        reserved: int = 0,
        ready: int = 0,
        quarantined: int = 0,
        evictable: int = 0,
    ) -> None:
        """Add to these counts, here and in the sums that the class is part of."""
        self.capacity += capacity
        self.reserved += reserved
        self.ready += ready
        self.quarantined += quarantined
        if evictable:
            self._count_evictable(evictable)
        size = self.block_bytes
        for tally in self.tallies:
            tally.capacity += capacity
            tally.reserved += reserved
            tally.ready += ready
            tally.quarantined += quarantined
            tally.evictable += evictable
            tally.capacity_bytes += capacity * size
            tally.reserved_bytes += reserved * size
            tally.ready_bytes += ready * size
            tally.quarantined_bytes += quarantined * size
            tally.evictable_bytes += evictable * size

    def _count_evictable(self, step: int) -> None:
        before, self.evictable = self.evictable, self.evictable + step
        if not before:
            self.tenant.evictable[self] = None
        elif not self.evictable:
            del self.tenant.evictable[self]

    @property
    def name(self) -> tuple[NamespaceId, int]:
        """What it is filed under."""
        return self.namespace, self.group

    @property
    def lasting_rows(self) -> int:
        """Rows that it has and doesn't lose yet."""
        return len(self.rows) - len(self.emptying)

    def put_free(self, slots: Slots) -> None:
        """Slots that became FREE may be given out, but for those of rows that it loses."""
        for row in self.emptying.values():
            slots = slots[(slots < row.first_slot) | (slots >= row.first_slot + row.slots)]
        self.free.put(slots)

    @property
    def slot_limit(self) -> int:
        """Slots that the class may have in use: those it owns, or fewer by the tenant's quota."""
        if not self.tenant.quota_bytes:
            return self.capacity
        return min(self.capacity, self.tenant.quota_bytes // self.block_bytes)


@dataclass(slots=True)
class GrantPause:
    """No row is granted for some ticks after the pool could not have one; longer each time."""

    ticks_left: int = 0
    next_ticks: int = FIRST_PAUSE_TICKS

    def begin(self) -> None:
        self.ticks_left = self.next_ticks
        self.next_ticks = min(2 * self.next_ticks, LONGEST_PAUSE_TICKS)

    def tick(self) -> None:
        if self.ticks_left:
            self.ticks_left -= 1
        else:
            self.next_ticks = max(FIRST_PAUSE_TICKS, self.next_ticks - 1)


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


def grant_row(state: State, owner: SizeClass, actions: list[Action]) -> None:
    """Give the class its next row from the free extents, of which there are enough.

    Each shard's extent is of the node of the rank that writes the shard, where one is free there.
    """
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
        granted_ns=state.now_ns,
    )
    add_row(state, row)
    slots = np.arange(row.first_slot, row.first_slot + row.slots, dtype=np.int64)
    owner.free.put(slots)
    state.counters.rows_granted += 1
    actions.append(row.grant())


def add_row(state: State, row: Row) -> None:
    """Make the row's slots exist, all FREE; the caller says which of them may be taken."""
    state.rows[row.row] = row
    row.size_class.rows[row.row] = row
    row.size_class.count(capacity=row.slots)
    if not row.orphaned:
        state.rights.hold(row.size_class.namespace, len(row.extents))
    slots = np.arange(row.first_slot, row.first_slot + row.slots, dtype=np.int64)
    state.slots.move(slots, SlotState.ABSENT, SlotState.FREE)


def grant_spare(state: State, owners: Iterable[SizeClass], actions: list[Action]) -> None:
    """Grant rows ahead of need, so that movers have mapped and pinned them before a store comes.

    Each class is given as many as `spare_bytes` hold, and, unless that is 0, at least until a whole
    row is free. At most 1/SPARE_SHARE of the pool, divided among the classes in use. On a machine
    whose extents lie apart the first ones wait for the ranks, which know where they should lie.
    What is more than one event may grant comes with the next ticks.
    """
    left = MAX_SPARE_ROWS_AT_ONCE
    for owner in owners:
        spare_slots = _spare_slots(state, owner)
        while len(owner.free) + owner.slots_per_row <= spare_slots:
            if not left or not _may_have_spare(state, owner):
                break
            grant_row(state, owner, actions)
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
