"""Blocks are written down to the tiers: when they are stored, used again, or about to be evicted.

What is on its way is pinned, so it is bounded: a tenant may have as much of a tier's bound as it
leaves to others. What is beyond waits, without a pin, for copies to end; so much may wait, shared
likewise, and tenants take turns. What is beyond that, too, is not written; a block has another
chance when it is offered or used again, and before it is evicted. What leaves host memory before it
could be written is counted.
"""

from __future__ import annotations

import numpy as np

from kvd.core.actions import WriteToTier
from kvd.core.blocks import namespaces, slot_lifecycle
from kvd.core.claims import damage, hand_off
from kvd.core.in_turn import InTurn
from kvd.core.keys import Bools, ScopeName, Slots
from kvd.core.model.job import Part
from kvd.core.model.size_class import SizeClass
from kvd.core.model.slots import READY
from kvd.core.model.state import Scope, State
from kvd.core.model.tiers import (
    MAX_BEHIND_BLOCKS,
    CopyKind,
    Late,
    Reach,
    TenantShare,
    Tier,
    TierCopy,
    WriteWhen,
)
from kvd.core.model.turn import Turn
from kvd.core.tiers import coldest, copies, residence

DEMOTED_AT_ONCE = 256  # and written
CAUGHT_UP_AT_ONCE = 8  # batches that wait for copies to end, in one event
LATE_AT_ONCE = 2048  # of their blocks


def stored(turn: Turn, owner: SizeClass, slots: Slots) -> None:
    """These blocks were stored, or are offered by a store and readable already."""
    state = turn.state
    for tier in state.below.tiers:
        if tier.terms.write is WriteWhen.THROUGH:
            _write_soon(turn, tier, owner, slots)
        elif tier.terms.reach is Reach.CLUSTER and state.handed_off:
            handed = [slot in state.handed_off for slot in slots.tolist()]
            _write_soon(turn, tier, owner, slots[handed])


def handed_off(turn: Turn, owner: SizeClass, slots: Slots) -> None:
    """Another engine shall go on with these blocks, and it may be on another node.

    So they are written where nodes share, whatever the tier's rule is, and held until they are
    there. What was written there before is offered again: the store may have given it up, or
    another node have cleared it, and nobody was told. Those that are still being stored follow
    when they are (`stored`).
    """
    table = turn.state.slots
    for tier in turn.state.below.tiers:
        if tier.terms.reach is Reach.CLUSTER:
            known = slots[table.below[slots] & tier.bit != 0]
            _write_soon(turn, tier, owner, slots)
            _write_soon(turn, tier, owner, known, again=True)


def used(turn: Turn, owner: SizeClass, slots: Slots) -> None:
    """A request has found these blocks."""
    for tier in turn.state.below.tiers:
        if tier.terms.write is WriteWhen.REUSE:
            often = tier.reuse.offer(turn.state.slots.tags[slots])
            _write_soon(turn, tier, owner, slots[often])


def _write_soon(
    turn: Turn, tier: Tier, owner: SizeClass, slots: Slots, *, again: bool = False
) -> None:
    """Write these down; what is too much for now, when copies have ended."""
    late = write(turn, tier, owner, slots, again=again)
    if not len(late):
        return
    tenant = owner.tenant.tenant
    fits = tier.behind_blocks.left(tenant, MAX_BEHIND_BLOCKS)
    if tier.terms.write is WriteWhen.REUSE:  # others are given it before it is evicted
        tier.counters.dropped += max(0, len(late) - fits)
    if fits:
        _put_behind(tier, Late(owner, late[:fits], again))


def _put_behind(tier: Tier, late: Late) -> None:
    tenant = late.owner.tenant.tenant
    tier.behind.add(tenant, [late])
    tier.behind_blocks.count(tenant, len(late.slots))


def catch_up(turn: Turn, tier: Tier) -> None:
    """Write down some of what was too much when its turn was, as far as it is still there."""
    blocks = LATE_AT_ONCE
    for _ in range(CAUGHT_UP_AT_ONCE):
        taken = tier.behind.take() if blocks else None
        if taken is None:
            return
        tenant, (owner, slots, again) = taken
        tier.behind_blocks.count(tenant, -len(slots))
        if tier.writing.fits(tenant, tier.terms.max_write_bytes, owner.block_bytes):
            some, rest = slots[:blocks], slots[blocks:]
            blocks -= len(some)
            late = write(turn, tier, owner, _still_of(turn.state, owner, some), again=again)
            slots = np.concatenate([late, rest])
        if len(slots):
            _put_behind(tier, Late(owner, slots, again))


def forget_late(tier: Tier) -> None:
    """What waits to be written waits no longer."""
    tier.behind = InTurn()
    tier.behind_blocks = TenantShare()


def _still_of(state: State, owner: SizeClass, slots: Slots) -> Slots:
    """Those that belong to the class; which block each holds by now is of no importance."""
    if not state.is_there(owner):
        return slots[:0]
    rows = slots // state.slots_per_extent
    kept = [row for row in np.unique(rows).tolist() if row in owner.rows]
    still: Slots = slots[np.isin(rows, kept)]
    return still


def write(turn: Turn, tier: Tier, owner: SizeClass, slots: Slots, *, again: bool = False) -> Slots:
    """Write down those that are READY and that the tier neither has nor is being given.

    `again`: those that it has, too, as far as was heard. The answer is those of them that are too
    much for now.
    """
    state = turn.state
    if not len(slots) or not tier.serves(state.namespaces[owner.namespace].spec.fingerprint):
        return slots[:0]
    table = state.slots
    if again:
        wanted = table.pins[slots] == table.leases[slots]  # it is not on its way there
    else:
        wanted = (table.below[slots] & tier.bit) == 0
    slots = slots[(table.state[slots] == READY) & wanted]
    scopes = state.slots.scopes[slots]
    slots = slots[scopes >= state.namespaces[owner.namespace].cleared_below]
    if not len(slots):
        return slots
    slots = state.slots.distinct(slots)
    tenant = owner.tenant.tenant
    fits = tier.writing.fits(tenant, tier.terms.max_write_bytes, owner.block_bytes)
    for scope, some in slot_lifecycle.by_scope(state, slots[:fits]):
        if not _goes(state, scope):
            _begin(turn, tier, Part(owner, (scope.scope,), some, some, copies.NO_BLOCKS), again)
    late: Slots = slots[fits:]
    return late


def _goes(state: State, scope: Scope) -> bool:
    """Whether nobody will ask for blocks of the scope again, so that they are about to go."""
    expiring = state.expiring
    return scope.namespace in expiring.ending or ((scope.namespace, scope.epoch) in expiring.epochs)


def _begin(turn: Turn, tier: Tier, part: Part, again: bool) -> None:
    state = turn.state
    owner, slots, scope = part.size_class, part.slots, state.scopes[part.scope]
    copy = copies.begin(state, tier, CopyKind.WRITE, part)
    copy.again = again
    state.slots.below[slots] |= tier.bit
    tier.writing.count(owner.tenant.tenant, copy.nbytes)
    generation = state.namespaces[owner.namespace].cleared_below
    name = ScopeName(scope.namespace, scope.epoch, scope.account, scope.group, generation)
    keys = slot_lifecycle.keys_of(state, owner, slots)
    turn.orders.append(WriteToTier(tier.tier, copy.copy, name, keys, slots, again))


def ended(
    turn: Turn,
    copy: TierCopy,
    done: Bools,
    damaged: Bools | None = None,
) -> None:
    """What the tier took, it has. What proved damaged on the way is nobody's any more."""
    state, tier = turn.state, copy.tier
    (part,) = copy.parts
    tier.writing.count(part.size_class.tenant.tenant, -copy.nbytes)
    count = int(np.count_nonzero(done))
    tier.counters.written += count
    tier.counters.written_bytes += count * part.size_class.block_bytes
    tier.counters.failed_writes += len(done) - count
    state.slots.below[part.slots[done]] |= tier.bit  # the tier may have lost it meanwhile
    scope = state.scopes.get(part.scope)  # none: cleared, and forgotten since
    if count and scope and not namespaces.is_cleared(state, scope.namespace, scope.scope):
        residence.written(turn, tier, scope, part.slots[done], again=copy.again)
        if tier.terms.reach is Reach.CLUSTER:
            hand_off.shared(state, part.size_class, part.slots[done])
    failed = part.slots[~done]
    state.slots.below[failed] &= ~np.uint8(tier.bit)
    if damaged is not None and damaged.any():
        damage.remove(turn, part, part.slots[damaged])
    copies.forget(state, copy)
    catch_up(turn, tier)
    if count:
        write_ahead(turn, part.size_class)


def write_ahead(turn: Turn, owner: SizeClass) -> None:
    """Write down the coldest blocks of a class that has hardly any room left.

    A tier that is given all that is stored lacks what was too much for it then.
    """
    state = turn.state
    tiers = [t for t in state.below.tiers if t.terms.write is not WriteWhen.REUSE and t.is_serving]
    if not tiers or not coldest.is_nearly_full(state, owner):
        return
    cold = coldest.next_to_go(owner)
    for tier in tiers:
        lacking = (state.slots.below[cold] & tier.bit) == 0
        write(turn, tier, owner, cold[lacking][:DEMOTED_AT_ONCE])
