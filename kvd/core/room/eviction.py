"""Room for new blocks: free slots, free extents, then eviction; all of it or nothing.

A store for which a quota makes many smaller blocks give way would take long: it is refused, and
they go in pieces. The next one finds the room, as far as others of the tenant have left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from kvd.core.actions import TellDone
from kvd.core.blocks import slot_lifecycle
from kvd.core.blocks.row_grants import grant_row, unclaimed_extents
from kvd.core.errors import NO_ROOM, QUOTA
from kvd.core.keys import NamespaceId, Slots, TenantId
from kvd.core.model import backlog
from kvd.core.model.backlog import Shrink
from kvd.core.model.gone import Fate, WhyGone
from kvd.core.model.size_class import SizeClass, Tenant
from kvd.core.model.state import State
from kvd.core.model.turn import Turn
from kvd.core.room import row_rights
from kvd.core.room.reclaim import coldest_stamp

ORDERS_OF_ONE_SCOPE = 3  # when blocks of it are evicted: tags, records, news
LOWERED = WhyGone(Fate.QUOTA_LOWERED)
CLASSES_WEIGHED = 128  # of a tenant, against each other, in one event

# Blocks wanted, by size class: each class once, all of one tenant.
Needs = list[tuple[SizeClass, int]]
Kept = Sequence[tuple[SizeClass, Slots]]  # blocks that are needed themselves; distinct
Evictions = dict[SizeClass, int]  # how many blocks each class gives up, in this order


def make_room(turn: Turn, needs: Needs, kept: Callable[[], Kept] = tuple) -> str:
    """Free as many slots as each class needs, within the tenant's quota.

    The answer is "" or the reason why there is no room; then nothing was evicted or granted,
    though a claim for a row may have been made. What is `kept` is not evicted: it is asked for
    only where free slots are not enough.
    """
    if not needs:
        return ""
    tenant = needs[0][0].tenant
    excess = tenant.excess(sum(need * owner.block_bytes for owner, need in needs))
    if excess <= 0 and all(need <= len(owner.free) for owner, need in needs):
        for owner, _ in needs:
            owner.stored_ns = turn.now_ns
        return ""
    spared = [each for each in kept() if len(each[1])]
    for owner, slots in spared:
        slot_lifecycle.pin(turn.state, owner, slots)
    reason = _make_room(turn, needs, excess)
    for owner, slots in spared:
        slot_lifecycle.unpin(turn.state, owner, slots)
    return reason


def _make_room(turn: Turn, needs: Needs, excess: int) -> str:
    """`excess`: bytes by which the tenant would be beyond its quota with all of these."""
    state = turn.state
    evictions = _for_quota(state, needs, excess)
    if evictions is None:
        _make_room_later(state, needs, excess)
        return QUOTA
    extents = unclaimed_extents(state)
    rows: list[tuple[SizeClass, int]] = []
    short: list[tuple[SizeClass, int, int]] = []
    possible = True
    for owner, need in needs:
        owner.stored_ns = turn.now_ns
        missing = need - len(owner.free) - evictions.get(owner, 0)
        if missing <= 0:
            continue
        granted = min(-(-missing // owner.slots_per_row), extents // owner.shards)
        extents -= granted * owner.shards
        rows.append((owner, granted))
        missing -= granted * owner.slots_per_row
        if missing > 0:
            short.append((owner, need, missing))
            evictions[owner] = evictions.get(owner, 0) + missing
            possible = possible and evictions[owner] <= owner.evictable
    if possible:
        _commit(turn, needs[0][0].namespace, evictions, rows)
    for owner, need, missing in short:
        row_rights.ask(turn, owner, need, missing)
    return "" if possible else NO_ROOM


def _commit(
    turn: Turn, by: NamespaceId, evictions: Evictions, rows: list[tuple[SizeClass, int]]
) -> None:
    for owner, count in evictions.items():
        slot_lifecycle.evict(turn, owner, count, WhyGone(Fate.EVICTED, by=by))
    for owner, count in rows:
        for _ in range(count):
            grant_row(turn, owner)


def _for_quota(state: State, needs: Needs, excess: int) -> Evictions | None:
    """What must go for the tenant's quota; None where that can't be enough, or not in this event.

    The classes that store come first, then some of the tenant's others, coldest first.
    """
    tenant = needs[0][0].tenant
    evictions: Evictions = {}
    if excess <= 0:
        return evictions
    if not _can_give_way(tenant, excess):
        return None
    storing = [owner for owner, _ in needs]
    excess = _choose(storing, excess, evictions)
    if excess > 0:
        excess = _choose(_coldest_first(state, tenant, storing), excess, evictions)
    few = sum(evictions.values()) <= backlog.EVICTED_FOR_A_STORE
    return evictions if few and excess <= 0 else None


def _can_give_way(tenant: Tenant, excess: int) -> bool:
    return not tenant.shrinking and tenant.tally.evictable_bytes >= excess


def _choose(owners: list[SizeClass], excess: int, evictions: Evictions) -> int:
    """Note what these give up, until it is enough; the bytes that are still too many then."""
    for owner in owners:
        count = min(owner.evictable, -(-excess // owner.block_bytes))
        if count > 0:
            evictions[owner] = count
            excess -= count * owner.block_bytes
    return excess


def _make_room_later(state: State, needs: Needs, excess: int) -> None:
    """Have as much go in pieces as was too much for this event."""
    tenant = needs[0][0].tenant
    if _can_give_way(tenant, excess):
        shrink = state.backlog.shrinks.setdefault(tenant.tenant, Shrink())
        shrink.room_bytes = max(shrink.room_bytes, excess - tenant.excess(0))
        shrink.room_for = needs[0][0].namespace


def _coldest_first(state: State, tenant: Tenant, but: list[SizeClass]) -> list[SizeClass]:
    """Some of the tenant's classes that could evict, in turn; where there are few, all."""
    ranked = []
    for owner in list(islice(tenant.evictable, CLASSES_WEIGHED)):
        tenant.evictable[owner] = tenant.evictable.pop(owner)  # to the end
        stamp = coldest_stamp(state, owner)
        if stamp is not None and all(owner is not other for other in but):
            ranked.append((int(stamp), owner))
    ranked.sort(key=lambda pair: pair[0])
    return [owner for _, owner in ranked]


def shrink_some(turn: Turn) -> None:
    """Evict some blocks of a tenant that has more than its quota, or too little room for a store,
    coldest classes first.

    Over when it keeps the quota, with that room, or only what is pinned is left.
    """
    state = turn.state
    number, left = next(iter(state.backlog.shrinks.items()))
    tenant, before = state.tenants[number], len(turn.orders)
    blocks, batch = backlog.EVICTED_AT_ONCE, backlog.EVICTED_IN_A_BATCH
    for owner in _coldest_first(state, tenant, []):
        while (excess := tenant.excess(left.room_bytes)) > 0 and owner.evictable:
            count = min(owner.evictable, -(-excess // owner.block_bytes), blocks, batch)
            told = len(turn.orders)
            slot_lifecycle.evict(turn, owner, count, _why(tenant, left))
            left.evicted += count
            blocks -= count
            # Many of one account are quicker in few large batches.
            alike = len(turn.orders) - told <= ORDERS_OF_ONE_SCOPE
            batch = 4 * batch if alike else backlog.EVICTED_IN_A_BATCH
            if not blocks or len(turn.orders) - before >= backlog.NEWS_AT_ONCE:
                break
        if excess <= 0 or not blocks or len(turn.orders) - before >= backlog.NEWS_AT_ONCE:
            break
    tenant.shrinking = tenant.excess(0) > 0
    if tenant.excess(left.room_bytes) <= 0 or not tenant.evictable:
        end_shrinking(turn, number)


def _why(tenant: Tenant, left: Shrink) -> WhyGone:
    if left.room_for is None or tenant.excess(0) > 0:
        return LOWERED
    return WhyGone(Fate.EVICTED, by=left.room_for)


def end_shrinking(turn: Turn, tenant: TenantId) -> None:
    """Tell who asked for the quota; pins that end later are seen to by ticks."""
    left = turn.state.backlog.shrinks.pop(tenant)
    turn.orders.extend(TellDone(token, left.evicted - before) for token, before in left.answers)


def storable(state: State, namespace: NamespaceId) -> tuple[int, ...]:
    """Blocks that a store could get now, by group: free, to be granted, or by eviction."""
    found = state.namespaces[namespace]
    if state.draining or found.tenant.shrinking:
        return tuple(0 for _ in found.classes)
    return tuple(_storable(state, owner) for owner in found.classes)


def _storable(state: State, owner: SizeClass) -> int:
    rows = unclaimed_extents(state) // owner.shards
    blocks = len(owner.free) + rows * owner.slots_per_row + owner.evictable
    if not blocks and (state.tally.evictable or state.tally.free or not owner.rows):
        # An offer is what makes the core take a row from another class. One without a row may have
        # it though all is promised: it only has to wait longer.
        blocks = 1
    tenant = owner.tenant
    if tenant.quota_bytes:
        left = max(0, tenant.quota_bytes - tenant.used_bytes)
        reachable = tenant.tally.evictable_bytes  # that eviction could free
        blocks = min(blocks, (left + reachable) // owner.block_bytes)
    return blocks
