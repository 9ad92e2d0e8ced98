"""Advice: what an application says of a request's blocks, heeded when the request ends.

Retained blocks are the last to be evicted until their time is over, as long as the tenant's
retained blocks stay below a share of what it may have. Blocks of a demoted or released request are
the first to go, unless another request retains them or somebody has used them since. (What is to be
prefetched comes by the search of tiers; only its count is here.)

Nothing of it is a right: where no others can be evicted, retained blocks are, and a row is taken
back whatever is in it. No other tenant's blocks are moved by it.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvd.core.events import Advice, Hint
from kvd.core.keys import Slots
from kvd.core.model.size_class import SizeClass, Tenant
from kvd.core.model.slots import coarse_stamp
from kvd.core.model.state import State
from kvd.core.model.turn import Turn

RETAINED_PART = 0.25  # of what the tenant may have
MAX_RETENTIONS = 4096  # requests of a tenant whose blocks are retained
MAX_UNWANTED_BLOCKS = 65536  # of a class, that are remembered to go first
STALE_PART = 8  # once 1/8 of those was offered, stale ones are looked for again
FOLLOWED, BEYOND, RETAINED, NO_TIER = "followed", "beyond_share", "retained", "no_tier"


def heed(turn: Turn, owner: SizeClass, slots: Slots, advice: Advice) -> None:
    """The request that used these blocks has ended, with this advice."""
    if advice.hint is Hint.RETAIN:
        _retain(turn, owner, slots, advice.lasting_ns)
    else:
        _give_back(turn, owner, slots, advice.hint)


def _retain(turn: Turn, owner: SizeClass, slots: Slots, lasting_ns: int) -> None:
    state, tenant = turn.state, owner.tenant
    until_ns = turn.now_ns + lasting_ns
    # What is retained for most of that time already is not charged again.
    enough = coarse_stamp(turn.now_ns + lasting_ns // 2)
    fresh = slots[state.slots.retained[slots] < enough]
    room = max(0, tenant.part(state.pool_bytes, RETAINED_PART) - tenant.retained_bytes)
    if len(tenant.retentions) >= MAX_RETENTIONS:
        room = 0
    taken = fresh[: room // owner.block_bytes]
    count(state, Hint.RETAIN, FOLLOWED, len(slots) - len(fresh) + len(taken))
    count(state, Hint.RETAIN, BEYOND, len(fresh) - len(taken))
    if len(taken):
        state.slots.retained[taken] = coarse_stamp(until_ns)
        nbytes = len(taken) * owner.block_bytes
        tenant.retained_bytes += nbytes
        heapq.heappush(tenant.retentions, (until_ns, nbytes))
        state.has_retained = True


def _give_back(turn: Turn, owner: SizeClass, slots: Slots, hint: Hint) -> None:
    """But for what another request retains: it may be the head of more than this one had."""
    state, unwanted = turn.state, owner.unwanted
    if state.has_retained:
        is_retained = state.slots.retained[slots] >= coarse_stamp(turn.now_ns)
        count(state, hint, RETAINED, int(np.count_nonzero(is_retained)))
        slots = slots[~is_retained]
    unwanted.offered += len(slots)
    is_short = len(unwanted) + len(slots) > MAX_UNWANTED_BLOCKS
    if is_short and unwanted.offered >= MAX_UNWANTED_BLOCKS // STALE_PART:
        unwanted.forget_stale(state.slots)
    room = MAX_UNWANTED_BLOCKS - len(unwanted)
    some = slots[max(0, len(slots) - max(room, 0)) :]  # the tail goes first
    count(state, hint, FOLLOWED, len(some))
    count(state, hint, BEYOND, len(slots) - len(some))
    if len(some):
        state.slots.retained[some] = 0
        unwanted.add(state.slots, some)


def expire(state: State, now_ns: int) -> None:
    """The tenants' shares have room again for what is retained no longer."""
    if state.has_retained:
        left = [_expire(tenant, now_ns) for tenant in state.tenants.values()]
        state.has_retained = any(left)


def _expire(tenant: Tenant, now_ns: int) -> bool:
    while tenant.retentions and tenant.retentions[0][0] <= now_ns:
        _, nbytes = heapq.heappop(tenant.retentions)
        tenant.retained_bytes -= nbytes
    return bool(tenant.retentions)


def count(state: State, hint: Hint, outcome: str, blocks: int) -> None:
    """So many blocks came with this hint."""
    name = (hint.value, outcome)
    if blocks:
        state.counters.hinted[name] = state.counters.hinted.get(name, 0) + blocks
