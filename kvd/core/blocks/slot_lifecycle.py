"""A block's way through its states, with every count, the index and the policy kept in line.

All functions take slots of one size class and assert the step they take.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvd.core.actions import (
    AnnounceRemoved,
    AnnounceStored,
    NotePolicySwitch,
    PublishTags,
    RetractTags,
    WriteFree,
    WriteReady,
)
from kvd.core.keys import I32, NO_SLOTS, U32, U64, KeyBatch, ScopeId, Slots
from kvd.core.model import backlog
from kvd.core.model.gone import Fate, WhyGone
from kvd.core.model.job import Offer
from kvd.core.model.size_class import Row, SizeClass
from kvd.core.model.slots import (
    QUARANTINED,
    READY,
    SlotState,
    coarse_stamp,
    in_order_of_stores,
)
from kvd.core.model.state import Scope, State
from kvd.core.model.story import BrokenSlots
from kvd.core.model.tiers import WriteWhen
from kvd.core.model.turn import Turn
from kvd.core.model.unretained import MANY_PASSED, SEARCHED_AGAIN_NS, Sparing, Unretained
from kvd.core.policy import AutoPolicy
from kvd.core.policy.base import Sight

CLEARED = WhyGone(Fate.CLEARED)


def ready_in(state: State, row: Row) -> Slots:
    """The row's READY slots."""
    return row.first_slot + np.flatnonzero(state.slots.state[row.span] == READY)


def reserve(turn: Turn, fresh: Offer, scope: ScopeId, sight: Sight) -> Slots:
    """FREE -> RESERVED for one new key each; the class has that many free slots.

    From here on the policy knows them: they are as young as their store's admission is late.
    """
    slots = occupy(turn, fresh, np.full(len(fresh.tags), scope, dtype=np.uint32))
    fresh.size_class.policy.insert(slots, fresh.tags, sight)
    return slots


def occupy(turn: Turn, fresh: Offer, scopes: U32) -> Slots:
    """`reserve` of blocks of several requests, each in a scope of its own: the caller tells the
    policy of them, each once."""
    state = turn.state
    owner = fresh.size_class
    slots = owner.free.take(len(fresh.tags))
    table = state.slots
    table.move(slots, SlotState.FREE, SlotState.RESERVED)
    table.tags[slots] = fresh.tags
    table.scopes[slots] = scopes
    table.stamps[slots] = coarse_stamp(turn.now_ns)
    table.write_keys(slots, fresh.words)
    if state.has_retained:
        table.retained[slots] = 0
        if owner.unretained is not None:
            owner.unretained.add(slots, fresh.tags)
    if state.below.tiers:
        table.below[slots] = 0
        table.sources[slots] = 0
    state.index.insert(slots, fresh.words.shape[1])
    state.scope_shares.put_each(scopes)
    owner.count(reserved=len(slots))
    owner.tenant.used_bytes += len(slots) * owner.block_bytes
    return slots


def make_ready(turn: Turn, owner: SizeClass, slots: Slots) -> None:
    """RESERVED -> READY: the records, then the tags, then the news."""
    state = turn.state
    table = state.slots
    table.move(slots, SlotState.RESERVED, SlotState.READY)
    evictable = len(slots) - int(np.count_nonzero(table.pins.take(slots)))
    owner.count(reserved=-len(slots), ready=len(slots), evictable=evictable)
    tags = table.tags.take(slots)
    words = table.keys(owner.width).take(slots, axis=0)
    hash_bytes = state.namespaces[owner.namespace].spec.hash_bytes
    table.noted[slots] = table.stamps.take(slots)
    stamps = in_order_of_stores(turn.now_ns, state.blocks_made_ready, len(slots))
    state.blocks_made_ready += len(slots)
    keys = KeyBatch(words, hash_bytes)
    turn.orders.append(WriteReady(slots, table.scopes[slots], keys, stamps))
    turn.orders.append(PublishTags(owner.namespace, tags))
    for scope, members in by_scope(state, slots):
        batch = keys if len(members) == len(slots) else keys_of(state, owner, members)
        turn.orders.append(
            AnnounceStored(scope.namespace, scope.epoch, scope.account, scope.group, batch)
        )


def evict(
    turn: Turn,
    owner: SizeClass,
    count: int,
    why: WhyGone,
) -> None:
    """Free `count` slots of blocks that the policy gives up; that many are evictable."""
    state = turn.state
    while owner.unwanted and count:
        first = owner.unwanted.take(state.slots, count)
        if len(first):
            owner.policy.remove(first)
            state.counters.evicted += len(first)
            _count_unwritten(state, owner, first)
            forget_ready(turn, owner, first, why)
            count -= len(first)
    if not count:
        return
    victims = _victims(turn, owner, count)
    state.counters.evicted += len(victims)
    _count_unwritten(state, owner, victims)
    forget_ready(turn, owner, victims, why)
    if isinstance(owner.policy, AutoPolicy) and (switch := owner.policy.take_switch()):
        before, after = switch
        state.live_policies[before] -= 1
        state.live_policies[after] += 1
        state.counters.policy_switches += 1
        turn.orders.append(NotePolicySwitch(owner.namespace, owner.group, before, after))


def _count_unwritten(state: State, owner: SizeClass, slots: Slots) -> None:
    """What leaves before a tier that should be given it could take it, each block once."""
    for tier in state.below.tiers:
        if tier.terms.write is WriteWhen.REUSE:
            continue
        if not tier.serves(state.namespaces[owner.namespace].spec.fingerprint):
            continue
        tenant, most = owner.tenant.tenant, tier.terms.max_write_bytes
        if tier.behind or not tier.writing.fits(tenant, most, owner.block_bytes):
            lacking = (state.slots.below[slots] & tier.bit) == 0
            tier.counters.dropped += int(np.count_nonzero(lacking))


def _victims(turn: Turn, owner: SizeClass, count: int) -> Slots:
    """By the policy; retained blocks only where others are not enough."""
    if not owner.tenant.retentions:
        owner.unretained = None
        return _by_policy(turn, owner, count)
    table, stamp = turn.state.slots, coarse_stamp(turn.now_ns)
    if owner.unretained is None or turn.now_ns >= owner.unretained.until_ns:
        sparing = Sparing(table, stamp)
        victims = owner.policy.evict(count, sparing, turn.now_ns)
        owner.unretained = _after(turn, sparing, victims)
        if victims is not None:
            return victims
    first = NO_SLOTS
    if owner.unretained is not None:
        first = owner.unretained.take(table, count, stamp)
        owner.policy.remove(first)
    left = count - len(first)
    return np.concatenate([first, _by_policy(turn, owner, left)]) if left else first


def _after(turn: Turn, sparing: Sparing, victims: Slots | None) -> Unretained | None:
    """What there is beside retained blocks, where the search had to pass by many of those."""
    if victims is not None and sparing.passed <= MANY_PASSED:
        return None
    table, found = turn.state.slots, sparing.found()
    found = found if victims is None else table.without(found, victims)
    others = Unretained(turn.now_ns + SEARCHED_AGAIN_NS)
    others.add(found, table.tags[found])
    return others


def _by_policy(turn: Turn, owner: SizeClass, count: int) -> Slots:
    pins = turn.state.slots.pins
    victims = owner.policy.evict(count, lambda slots: pins.take(slots) == 0, turn.now_ns)
    assert victims is not None, "the policy found fewer evictable blocks than there are"
    return victims


def forget_ready(turn: Turn, owner: SizeClass, slots: Slots, why: WhyGone) -> None:
    """READY -> FREE for unpinned blocks that the policy has already let go."""
    state = turn.state
    if np.count_nonzero(state.slots.pins.take(slots)):
        raise BrokenSlots("a pinned block was evicted", slots[state.slots.pins[slots] > 0])
    _leave_index(turn, owner, slots, why)
    turn.orders.append(WriteFree(slots))
    state.slots.move(slots, SlotState.READY, SlotState.FREE)
    owner.count(ready=-len(slots), evictable=-len(slots))
    owner.tenant.used_bytes -= len(slots) * owner.block_bytes
    owner.put_free(slots)


def quarantine_ready(turn: Turn, owner: SizeClass, slots: Slots, why: WhyGone) -> None:
    """READY -> QUARANTINED for pinned blocks that the policy has already let go."""
    state = turn.state
    if not (state.slots.pins[slots] > 0).all():
        unpinned = slots[state.slots.pins[slots] <= 0]
        raise BrokenSlots("an unpinned block needs no quarantine", unpinned)
    _leave_index(turn, owner, slots, why)
    turn.orders.append(WriteFree(slots))
    state.slots.move(slots, SlotState.READY, SlotState.QUARANTINED)
    owner.count(ready=-len(slots), quarantined=len(slots))


def quarantine_reserved(state: State, owner: SizeClass, slots: Slots) -> None:
    """RESERVED -> QUARANTINED, and on to FREE where no copy is left."""
    state.index.remove(slots)
    state.scope_shares.take_each(state.slots.scopes[slots])
    owner.policy.remove(slots)
    state.slots.move(slots, SlotState.RESERVED, SlotState.QUARANTINED)
    owner.count(reserved=-len(slots), quarantined=len(slots))
    _free_unpinned(state, owner, slots)


def pin(state: State, owner: SizeClass, slots: Slots) -> None:
    """One more reason not to evict each of these distinct slots."""
    state.slots.story.changed("pinned", slots)
    pins = state.slots.pins.take(slots)
    free = pins == 0
    free &= state.slots.state.take(slots) == READY
    pins += 1
    state.slots.pins[slots] = pins
    if fewer := int(np.count_nonzero(free)):
        owner.count_evictable(-fewer)


def unpin(state: State, owner: SizeClass, slots: Slots, reasons: I32 | int = 1) -> None:
    """Take so many such reasons away; a quarantined slot's last one sets it free."""
    state.slots.story.changed("unpinned", slots)
    after = state.slots.pins.take(slots)
    after -= reasons
    if np.count_nonzero(after < 0):
        raise BrokenSlots("a pin was taken away twice", slots[after < 0])
    state.slots.pins[slots] = after
    states = state.slots.state.take(slots)
    free = after == 0
    free &= states == READY
    if more := int(np.count_nonzero(free)):
        owner.count_evictable(more)
    quarantined = states == QUARANTINED
    if np.count_nonzero(quarantined):
        _free_unpinned(state, owner, slots[quarantined])


def touch(turn: Turn, owner: SizeClass, slots: Slots, request: int, *, as_use: bool = True) -> None:
    """The request used these blocks, or (not `as_use`) they shall be young; repeats count once."""
    touch_each(turn, owner, turn.state.slots.distinct(slots), request, as_use=as_use)


def touch_each(
    turn: Turn, owner: SizeClass, slots: Slots, request: int, *, as_use: bool = True
) -> None:
    """`touch` of distinct slots."""
    if len(slots):
        owner.policy.touch(slots, Sight(turn.now_ns, request), as_use=as_use)
        turn.state.slots.stamps[slots] = coarse_stamp(turn.now_ns)


def _free_unpinned(state: State, owner: SizeClass, slots: Slots) -> None:
    """QUARANTINED -> FREE where no pin is left. Their records say FREE already."""
    slots = slots[state.slots.pins[slots] == 0]
    state.slots.move(slots, SlotState.QUARANTINED, SlotState.FREE)
    owner.count(quarantined=-len(slots))
    owner.tenant.used_bytes -= len(slots) * owner.block_bytes
    owner.put_free(slots)


def _leave_index(turn: Turn, owner: SizeClass, slots: Slots, why: WhyGone) -> None:
    """Those that were READY: nobody finds them, and everybody who could is told."""
    state = turn.state
    state.index.remove(slots)
    state.scope_shares.take_each(state.slots.scopes.take(slots))
    tags = state.slots.tags.take(slots)
    turn.orders.append(RetractTags(owner.namespace, tags))
    namespace = state.namespaces[owner.namespace]
    if namespace.doomed:  # everybody was told of these when the namespace was cleared
        live = state.slots.scopes[slots] >= namespace.cleared_below
        namespace.doomed -= int(np.count_nonzero(~live))
        note_gone(turn, owner, slots[~live], tags[~live], CLEARED)
        slots, tags = slots[live], tags[live]
    note_gone(turn, owner, slots, tags, why)
    _announce_removed(turn, owner, slots)


def note_gone(turn: Turn, owner: SizeClass, slots: Slots, tags: U64, why: WhyGone) -> None:
    """Remember why the blocks of these slots are not there any more."""
    if len(slots):
        used = turn.state.slots.stamps.take(slots)
        turn.state.gone.note(owner.tenant.tenant, tags, used, why, turn.now_ns)


def _announce_removed(turn: Turn, owner: SizeClass, slots: Slots) -> None:
    state = turn.state
    for scope, members in by_scope(state, slots):
        keys = keys_of(state, owner, members)
        turn.orders.append(
            AnnounceRemoved(scope.namespace, scope.epoch, scope.account, scope.group, keys)
        )


def keys_of(state: State, owner: SizeClass, slots: Slots) -> KeyBatch:
    hash_bytes = state.namespaces[owner.namespace].spec.hash_bytes
    return KeyBatch(state.slots.keys(owner.width).take(slots, axis=0), hash_bytes)


def by_scope(state: State, slots: Slots) -> Iterator[tuple[Scope, Slots]]:
    """The slots by scope; nearly always there is one."""
    if not len(slots):
        return
    scopes = state.slots.scopes.take(slots)
    if np.count_nonzero(scopes == scopes[0]) == len(scopes):
        yield state.scopes[ScopeId(int(scopes[0]))], slots
        return
    # Sorted once: with an account a user a row holds blocks of thousands of scopes.
    order = np.argsort(scopes, kind="stable")
    numbers, starts = np.unique(scopes[order], return_index=True)
    members = np.split(slots[order], starts[1:])
    for scope, inside in zip(numbers.tolist(), members, strict=True):
        yield state.scopes[ScopeId(scope)], inside


def first_of(state: State, slots: Slots, most: int) -> Slots:
    """As many as one event gives up: each scope and each claim takes longer than a block."""
    slots = slots[:most]
    scopes = state.slots.scopes[slots]
    changes = np.flatnonzero(scopes[1:] != scopes[:-1])
    if len(changes) > backlog.SCOPES_CHANGED_AT_ONCE:
        slots = slots[: changes[backlog.SCOPES_CHANGED_AT_ONCE] + 1]
    claimed = np.flatnonzero(state.slots.leases[slots])
    if len(claimed) > backlog.CLAIMED_AT_ONCE:
        slots = slots[: claimed[backlog.CLAIMED_AT_ONCE]]
    return slots
