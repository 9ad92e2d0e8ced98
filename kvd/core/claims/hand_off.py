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

from collections import Counter
from collections.abc import Mapping
from itertools import chain, islice
from operator import attrgetter

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
MAX_LATE_AT_ONCE = 2048  # hand-offs that a tick looks at; all are past their deadline
# Of what leases and hand-offs may have together: where nobody takes what is handed off, requests
# still find what they need.
HAND_OFF_PART = 0.5
MAX_CLAIMS_PER_TENANT = 1 << 18  # blocks, one counted again for each hand-off that holds it
_DEADLINE = attrgetter("until_ns")


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
    held = found.held.get(event.group, ()) if found is not None else ()
    fresh = there[[slot not in held for slot in there.tolist()]] if held else there
    taken = fresh[: _room(state, found, owner, fresh)]
    state.counters.handed_off += len(taken)
    missing = {row.tobytes() for row in event.keys.words[slots == NOWHERE]}
    state.counters.hand_off_unheld += len(missing) + len(fresh) - len(taken)
    if len(taken) and found is None:
        found = _open(state, session, event)
    if found is not None:
        _prolong(state, found, turn.now_ns + event.lasting_ns)
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


def _prolong(state: State, found: HandOff, until_ns: int) -> None:
    if until_ns > found.until_ns:
        state.hand_off_ends.remove(found)
        state.hand_off_ends.add(found, until_ns)
        found.until_ns = until_ns


def _hold(state: State, found: HandOff, owner: SizeClass, slots: Slots) -> None:
    lease.claim(state, owner, slots)
    owner.tenant.hand_off_claims += len(slots)
    found.held.setdefault(owner.group, set()).update(slots.tolist())
    before_all = len(state.handed_off)
    for slot in slots.tolist():
        state.handed_off.setdefault(slot, []).append(found)
    owner.tenant.handed_off_bytes += (len(state.handed_off) - before_all) * owner.block_bytes


def loaded(state: State, session: SessionId, owner: SizeClass, slots: Slots) -> None:
    """This session has loaded these blocks: one hand-off to it has done its work for each."""
    if not state.handed_off:
        return
    served: list[tuple[HandOff, int]] = []
    for slot in slots.tolist():
        holders = state.handed_off.get(slot)
        first = None if holders is None else _nearest(holders, session)
        if first is not None:
            served.append((first, slot))
    state.counters.hand_off_taken += len(served)
    _let_go(state, owner, served)


def _nearest(holders: list[HandOff], session: SessionId) -> HandOff | None:
    """The holder of the nearest deadline that is not the session's own."""
    first = min(holders, key=_DEADLINE)
    if first.session != session:
        return first
    others = [holder for holder in holders if holder.session != session]
    return min(others, key=_DEADLINE, default=None)


def blocks_lost(state: State, owner: SizeClass, slots: Slots) -> None:
    """These blocks will not be readable, or no longer: no hand-off waits for them."""
    state.counters.hand_off_unheld += _let_all_go(state, owner, slots)


def shared(state: State, owner: SizeClass, slots: Slots) -> None:
    """These blocks are in a store that nodes share: no hand-off has to hold them here."""
    state.counters.hand_off_taken += _let_all_go(state, owner, slots)


def _let_all_go(state: State, owner: SizeClass, slots: Slots) -> int:
    """Every hand-off gives up its claim on these; how many claims those were.

    A thousand hand-offs may hold the same blocks: for each of them it costs a microsecond or two.
    """
    if not state.handed_off:
        return 0
    holders = {s: state.handed_off.pop(s) for s in slots.tolist() if s in state.handed_off}
    owner.tenant.handed_off_bytes -= len(holders) * owner.block_bytes
    # In the order in which they came, as a replay has it, too.
    for found in dict.fromkeys(chain.from_iterable(holders.values())):
        found.held[owner.group].difference_update(holders)
        _close_if_empty(state, owner, found)
    _unclaim(state, owner, {slot: len(several) for slot, several in holders.items()})
    return sum(map(len, holders.values()))


def expire(turn: Turn) -> None:
    """Let go of hand-offs whose deadline has passed; what is beyond the bounds, next time."""
    state = turn.state
    left = MAX_EXPIRED_AT_ONCE
    late: dict[SizeClass, list[tuple[HandOff, int]]] = {}
    for found in state.hand_off_ends.late(turn.now_ns, MAX_LATE_AT_ONCE):
        for group, slots in found.held.items():
            some = [(found, slot) for slot in islice(slots, left)]
            left -= len(some)
            if some:
                late.setdefault(state.classes[found.namespace, group], []).extend(some)
    for owner, pairs in late.items():
        state.counters.hand_off_expired += len(pairs)
        _let_go(state, owner, pairs)


def _let_go(state: State, owner: SizeClass, pairs: list[tuple[HandOff, int]]) -> None:
    """Each hand-off gives up its claim on the slot; with its last one it is over."""
    before = len(state.handed_off)
    for found, slot in pairs:
        holders = state.handed_off[slot]
        if len(holders) == 1:
            del state.handed_off[slot]
        else:
            holders.remove(found)
        found.held[owner.group].remove(slot)
        _close_if_empty(state, owner, found)
    owner.tenant.handed_off_bytes -= (before - len(state.handed_off)) * owner.block_bytes
    _unclaim(state, owner, Counter(slot for _, slot in pairs))


def _close_if_empty(state: State, owner: SizeClass, found: HandOff) -> None:
    if not found.held[owner.group]:
        del found.held[owner.group]
    if not found.held:
        owner.tenant.hand_offs -= 1
        del state.hand_offs[found.session, found.request]
        state.hand_off_ends.remove(found)


def _unclaim(state: State, owner: SizeClass, claims: Mapping[int, int]) -> None:
    """So many claims on each of these slots are gone."""
    if claims:
        owner.tenant.hand_off_claims -= sum(claims.values())
        slots = np.array(list(claims), dtype=np.int64)
        lease.unclaim(state, owner, slots, np.array(list(claims.values()), dtype=np.int32))
