"""A size class, its rows and free slots, and the sums that it counts in.

A size class is one group of one namespace. A row is one extent for each shard; slot i lies at
the same ordinal in each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvd.core.actions import GrantRow
from kvd.core.keys import NO_SLOTS, LeaseId, MoverId, NamespaceId, RowId, SessionId, Slots, TenantId
from kvd.core.model.unretained import Unretained
from kvd.core.model.unwanted import Unwanted
from kvd.core.policy.base import EvictionPolicy
from kvd.core.spec import GroupSpec

MIN_SLOT_BYTES = 4096  # smaller parts leave their extent partly unused
RECLAIM_INTERVAL_NS = 50_000_000  # a class looks for another's row at most this often
LONG_AGO_NS = -(1 << 62)  # before all that counts
FIRST_PAUSE_TICKS = 4  # a second
LONGEST_PAUSE_TICKS = 256
STACK_PIECE = 8192  # of free slots, moved together


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
class Tally:
    """Sums over some size classes, kept with every change, because there may be many classes."""

    capacity: int = 0
    reserved: int = 0
    ready: int = 0
    quarantined: int = 0
    evictable: int = 0
    capacity_bytes: int = 0
    reserved_bytes: int = 0
    ready_bytes: int = 0
    quarantined_bytes: int = 0
    evictable_bytes: int = 0

    @property
    def free(self) -> int:
        return self.capacity - self.reserved - self.ready - self.quarantined

    @property
    def free_bytes(self) -> int:
        used = self.reserved_bytes + self.ready_bytes + self.quarantined_bytes
        return self.capacity_bytes - used


@dataclass(slots=True, eq=False)
class Remembered:
    """Blocks that are remembered of all requests of a session, or of a tenant's sessions."""

    blocks: int = 0
    tenant: Remembered | None = None

    def add(self, blocks: int) -> None:
        self.blocks += blocks
        if self.tenant is not None:
            self.tenant.blocks += blocks


@dataclass(slots=True, eq=False)
class Tenant:
    """`used_bytes` counts every slot that is reserved, ready or quarantined."""

    tenant: TenantId
    quota_bytes: int = 0  # 0 = no quota
    used_bytes: int = 0
    namespaces: int = 0
    leased_bytes: int = 0  # of distinct blocks, under leases or handed off
    leased_claims: int = 0  # blocks under leases, one counted again for each that holds it
    remembered: Remembered = field(default_factory=Remembered)  # of its sessions' requests
    waiting_bytes: int = 0  # of keys that its sessions' jobs wait for
    hand_offs: int = 0
    handed_off_bytes: int = 0  # of distinct blocks
    retained_bytes: int = 0  # by hints
    retentions: list[tuple[int, int]] = field(default_factory=list)  # a heap: until when, bytes
    hand_off_claims: int = 0  # blocks of those, one counted again for each that holds it
    shrinking: bool = False  # more than the quota is there still; nothing is admitted
    tally: Tally = field(default_factory=Tally)
    # Classes that could evict; those looked at longest ago for that come first.
    evictable: dict[SizeClass, None] = field(default_factory=dict)

    def excess(self, more_bytes: int) -> int:
        """Bytes that must go before `more_bytes` may come; 0 or less means they fit."""
        if not self.quota_bytes:
            return 0
        return self.used_bytes + more_bytes - self.quota_bytes

    def lease_room(self, pool_bytes: int, share: float, least_bytes: int) -> int:
        """Bytes that leases and hand-offs may still hold, of this share of what it may have.

        So many bytes as one block has, or one of each group, may always be leased, whatever is
        handed off: else nobody could load larger ones, or not until hand-offs end.
        """
        room = self.part(pool_bytes, share) - self.leased_bytes
        of_leases_alone = self.leased_bytes - self.handed_off_bytes
        return max(room, least_bytes - of_leases_alone)

    def hand_off_room(self, pool_bytes: int, share: float) -> int:
        """Bytes that may still be handed off, of this share."""
        return self.part(pool_bytes, share) - self.handed_off_bytes

    def part(self, pool_bytes: int, share: float) -> int:
        """This share of the bytes that it may have."""
        limit = min(self.quota_bytes, pool_bytes) if self.quota_bytes else pool_bytes
        return int(limit * share)


@dataclass(slots=True, eq=False)
class LeasesLeft:
    """Leases yet to be looked at: of one session, and of others."""

    sessions: list[SessionId]
    session: SessionId | None = None
    leases: list[LeaseId] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether all were looked at."""
        return not (self.sessions or self.leases)


@dataclass(slots=True, eq=False)
class Row:
    """One extent for each shard, given to one class."""

    row: RowId
    size_class: SizeClass
    extents: tuple[int, ...]
    first_slot: int
    slots: int
    orphaned: bool = False  # a mover of an earlier incarnation may still write to it
    drained: bool = False  # orphaned, and no block of it is left
    withheld: Slots = field(default_factory=lambda: NO_SLOTS)  # ... here
    granted_ns: int = LONG_AGO_NS
    emptying: bool = False  # to be taken back once no slot of it is in use
    copied_into: Slots = field(default_factory=lambda: NO_SLOTS)  # ... here
    left: Slots = field(default_factory=lambda: NO_SLOTS)  # to be given up
    emptied_ns: int = 0  # since when
    leases: LeasesLeft | None = None  # leases that may hold its blocks, and will be ended
    retired_ns: int = 0
    mapped_by: set[MoverId] = field(default_factory=set)  # while retiring: yet to unmap
    zeroing: bool = False

    @property
    def span(self) -> slice:
        return slice(self.first_slot, self.first_slot + self.slots)

    @property
    def all_slots(self) -> Slots:
        """Ascending."""
        return np.arange(self.first_slot, self.first_slot + self.slots, dtype=np.int64)

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
    unwanted: Unwanted = field(default_factory=Unwanted)  # its blocks that are to go first
    unretained: Unretained | None = None  # where nearly all is retained, its blocks that are not

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
            self._know_whether_evictable(evictable)
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

    def count_evictable(self, step: int) -> None:
        """`count` of this alone, which all that is looked up comes to."""
        self._know_whether_evictable(step)
        size = step * self.block_bytes
        for tally in self.tallies:
            tally.evictable += step
            tally.evictable_bytes += size

    def _know_whether_evictable(self, step: int) -> None:
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
