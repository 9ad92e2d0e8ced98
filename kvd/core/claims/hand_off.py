"""Hand-offs: blocks that one engine's request left for another engine to take over.

A hand-off claims blocks as a lease does and counts towards the same cap, but it belongs to no
session: the engine that left the blocks may be gone. A load of a block in any other session
takes it over and ends one hand-off's claim on it, that of the nearest deadline; so a prefix that
two requests handed off stays until it was loaded twice. What nobody takes goes at the deadline.
What a store that nodes share has taken is held no longer: whoever goes on with it finds it there.

A block whose store still runs is claimed as well, and left out if that store fails. Hand-offs
are not in the pool's files: a daemon that starts again has the blocks, but holds none of them.
"""

from __future__ import annotations

import numpy as np

from kvd.core.blocks.reading import check_keys, locate
from kvd.core.claims import lease
from kvd.core.errors import InvalidArgument
from kvd.core.events import HandOffRequested
from kvd.core.keys import SessionId, Slots
from kvd.core.model.index import NOWHERE
from kvd.core.model.leases import HandOff
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import Session, State
from kvd.core.model.turn import Turn

MAX_HAND_OFF_NS = 600_000_000_000
MAX_HAND_OFFS_PER_TENANT = 4096
MAX_EXPIRED_AT_ONCE = 8192  # blocks, so that a tick doesn't hold others up
# Of what leases and hand-offs may have together: where nobody takes what is handed off, requests
# still find what they need.
HAND_OFF_PART = 0.5
MAX_CLAIMS_PER_TENANT = 1 << 18  # blocks, one counted again for each hand-off that holds it


def hand_off(turn: Turn, event: HandOffRequested) -> tuple[SizeClass, Slots]:
    """Hold those of the blocks that are there, from the first on, as far as the caps allow.

    The answer is all that are there, or on their way.
    """
    state = turn.state
    session = state.require_session(event.session)
    (owner,) = check_keys(state, session, [(event.group, event.keys)])
    if not 0 < event.lasting_ns <= MAX_HAND_OFF_NS:
        raise InvalidArgument(
            f"a hand-off of {event.lasting_ns} ns, must be 1..{MAX_HAND_OFF_NS}", "deadline_ms"
        )
    account = event.context.account
    slots = locate(state, session, account, event.group, event.keys.words).slots
    there = slots[slots != NOWHERE]
    there = state.slots.distinct(there)
    found = state.hand_offs.get((event.session, event.context.request))
    held = found.held.get(event.group) if found is not None else None
    fresh = there if held is None else there[~np.isin(there, held)]
    taken = fresh[: _room(state, found, owner, fresh)]
    state.counters.handed_off += len(taken)
    state.counters.hand_off_unheld += len(event.keys) - len(there) + len(fresh) - len(taken)
    if len(taken) and found is None:
        found = _open(state, session, event)
    if found is not None:
        found.until_ns = max(found.until_ns, turn.now_ns + event.lasting_ns)
        if len(taken):
            _hold(state, found, owner, taken)
    return owner, there


def _room(state: State, found: HandOff | None, owner: SizeClass, slots: Slots) -> int:
    tenant = owner.tenant
    if found is None and tenant.hand_offs >= MAX_HAND_OFFS_PER_TENANT:
        return 0
    claims = MAX_CLAIMS_PER_TENANT - tenant.hand_off_claims
    part = state.config.lease_share * HAND_OFF_PART
    room = tenant.hand_off_room(state.pool_bytes, part) // owner.block_bytes
    fresh = np.cumsum([slot not in state.handed_off for slot in slots.tolist()])
    fits = int(np.count_nonzero(fresh <= max(room, 0)))
    return min(claims, fits, lease.within_cap(state, owner, slots))


def _open(state: State, session: Session, event: HandOffRequested) -> HandOff:
    made = HandOff(session.session, event.context.request, session.namespace)
    state.hand_offs[made.session, made.request] = made
    state.namespaces[made.namespace].tenant.hand_offs += 1
    return made


def _hold(state: State, found: HandOff, owner: SizeClass, slots: Slots) -> None:
    lease.claim(state, owner, slots)
    owner.tenant.hand_off_claims += len(slots)
    before = found.held.get(owner.group)
    found.held[owner.group] = np.sort(slots) if before is None else np.union1d(before, slots)
    before_all = len(state.handed_off)
    for slot in slots.tolist():
        state.handed_off.setdefault(slot, []).append(found)
    owner.tenant.handed_off_bytes += (len(state.handed_off) - before_all) * owner.block_bytes


def loaded(state: State, session: SessionId, owner: SizeClass, slots: Slots) -> None:
    """This session has loaded these blocks: one hand-off to it has done its work for each."""
    if not state.handed_off:
        return
    served: dict[int, tuple[HandOff, list[int]]] = {}
    for slot in slots.tolist():
        holders = state.handed_off.get(slot)
        first = None if holders is None else _nearest(holders, session)
        if first is not None:
            served.setdefault(id(first), (first, []))[1].append(slot)
    for found, places in served.values():
        state.counters.hand_off_taken += len(places)
        _let_go(state, found, owner, np.array(places, dtype=np.int64))


def _nearest(holders: list[HandOff], session: SessionId) -> HandOff | None:
    """The holder of the nearest deadline that is not the session's own."""
    if len(holders) == 1:
        return None if holders[0].session == session else holders[0]
    others = [holder for holder in holders if holder.session != session]
    return min(others, key=lambda holder: holder.until_ns, default=None)


def blocks_lost(state: State, owner: SizeClass, slots: Slots) -> None:
    """These blocks will not be readable, or no longer: no hand-off waits for them."""
    state.counters.hand_off_unheld += _let_all_go(state, owner, slots)


def shared(state: State, owner: SizeClass, slots: Slots) -> None:
    """These blocks are in a store that nodes share: no hand-off has to hold them here."""
    state.counters.hand_off_taken += _let_all_go(state, owner, slots)


def _let_all_go(state: State, owner: SizeClass, slots: Slots) -> int:
    """Every hand-off gives up its claim on these; how many claims those were."""
    if not state.handed_off:
        return 0
    held: dict[int, tuple[HandOff, list[int]]] = {}
    for slot in slots.tolist():
        for holder in state.handed_off.get(slot, ()):
            held.setdefault(id(holder), (holder, []))[1].append(slot)
    for found, places in held.values():
        _let_go(state, found, owner, np.array(places, dtype=np.int64))
    return sum(len(places) for _, places in held.values())


def expire(turn: Turn) -> None:
    """Let go of hand-offs whose deadline has passed; what is beyond the bound, next time."""
    state = turn.state
    left = MAX_EXPIRED_AT_ONCE
    for found in [h for h in state.hand_offs.values() if h.until_ns <= turn.now_ns]:
        for group, slots in list(found.held.items()):
            late = slots[:left]
            if not len(late):
                return
            left -= len(late)
            state.counters.hand_off_expired += len(late)
            _let_go(state, found, state.classes[found.namespace, group], late)


def _let_go(state: State, found: HandOff, owner: SizeClass, slots: Slots) -> None:
    """Give up the claim on these of its blocks; with the last one the hand-off is over."""
    before = len(state.handed_off)
    for slot in slots.tolist():
        holders = state.handed_off[slot]
        if len(holders) == 1:
            del state.handed_off[slot]
        else:
            holders.remove(found)
    owner.tenant.handed_off_bytes -= (before - len(state.handed_off)) * owner.block_bytes
    held = found.held[owner.group]
    left = held[~np.isin(held, slots)] if len(slots) < len(held) else held[:0]
    if len(left):
        found.held[owner.group] = left
    else:
        del found.held[owner.group]
    owner.tenant.hand_off_claims -= len(slots)
    if not found.held:
        owner.tenant.hand_offs -= 1
        del state.hand_offs[found.session, found.request]
    lease.unclaim(state, owner, slots)
