"""Rows taken back from one size class for another.

Who takes is said by `row_rights`; here is from whom. A row is taken back only when no slot of it is
pinned, reserved or quarantined: its blocks are evicted, every mover unmaps it, it is zeroed, then
its extents are for the claims that wait, and without any, for all.

Where a needy claim finds every row in use, one of them is *emptied* first: its free slots are given
out no more, what is readable leaves the index, copies under way end. So is a row of many blocks, a
few in each event; until they go they are pinned. Rows with leased or handed-off
blocks, which were promised, are the last that are taken, and only for a claim that has waited
PROMISED_NS: engines renew leases as long as requests wait, and may have one in each row.

A search looks at some rows in one event and goes on with the next ones in the next, so that it
costs the same in a pool of any size. In one of up to ROWS_LOOKED_AT rows it finds the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvd.core.actions import ReleaseRow, Reply, UnmapRow, ZeroRow
from kvd.core.blocks.row_grants import grant_row, grantable_extents
from kvd.core.blocks.slot_lifecycle import (
    forget_ready,
    pin,
    quarantine_ready,
    ready_in,
    unpin,
)
from kvd.core.claims import hand_off, lease
from kvd.core.events import RowRefused
from kvd.core.keys import MoverId, RowId, Slots
from kvd.core.model import backlog, row_claims
from kvd.core.model.gone import Fate, WhyGone
from kvd.core.model.row_claims import Claim
from kvd.core.model.size_class import RECLAIM_INTERVAL_NS, LeasesLeft, Row, SizeClass
from kvd.core.model.slots import FREE, QUARANTINED, READY, RESERVED, SlotState
from kvd.core.model.state import State
from kvd.core.model.turn import Turn
from kvd.core.room import row_rights

ROWS_LOOKED_AT = 128  # in one event
ROWS_WEIGHED = 32  # of those: their slots are read
SLOTS_WEIGHED = 1 << 16  # ... and so many slots
MAX_EMPTYING = 8  # rows
STUCK_NS = 2_000_000_000  # a row that is not unmapped, or not empty, so long is not waited for
PROMISED_NS = 3_000_000_000  # a claim waits so long before leases and hand-offs end for it
ROW_TAKEN = WhyGone(Fate.ROW_TAKEN)


def coldest_stamp(state: State, owner: SizeClass) -> np.uint32 | None:
    coldest = owner.policy.coldest(1)
    return state.slots.stamps[coldest[0]] if len(coldest) else None


def may_retire(state: State, row: Row) -> bool:
    """Whether nothing keeps the row but blocks that could be evicted."""
    states = state.slots.state[row.span]
    busy = (states == RESERVED) | (states == QUARANTINED)
    return not row.orphaned and not busy.any() and not state.slots.pins[row.span].any()


# -- for those who wait ---------------------------------------------------------------------------


def serve(turn: Turn) -> None:
    """Called after every event while somebody waits: give what is there, seek what is not.

    Does a bounded amount of work, and goes on after the next event.
    """
    state = turn.state
    for row in list(state.emptying.values()):
        if not len(row.left):
            _go_on_emptying(turn, row)
    row_rights.drop_stale(turn)
    for _ in range(row_claims.CLAIMS_SERVED):
        claim = state.claims.head()
        if claim is None:
            break
        if row_rights.is_stale(turn, claim):
            state.claims.drop(claim.owner)
            continue
        if grantable_extents(state) < claim.owner.shards:
            state.claims.give_way(claim, turn.now_ns)
            break  # what is there is kept for it
        grant_row(turn, claim.owner)
        claim.rows -= 1
        claim.since_ns = turn.now_ns
        state.claims.end_turn(claim)
        if not claim.rows:
            state.claims.drop(claim.owner)
    if first_filled(state) is None:
        _seek(turn)


def first_filled(state: State) -> Row | None:
    """The row that is being emptied the longest of those with blocks still to be given up."""
    return next((row for row in state.emptying.values() if len(row.left)), None)


def empty_some(turn: Turn) -> None:
    """A piece of what is in that row: an event of its own, so that no other takes longer."""
    filled = first_filled(turn.state)
    assert filled is not None, "no row is being emptied"
    _go_on_emptying(turn, filled)


def _seek(turn: Turn) -> None:
    """Begin to take back rows for the claims that what is free and on its way doesn't cover."""
    state = turn.state
    supply = len(state.free_extents) + _on_their_way(turn)
    for claim in state.claims.first():
        supply -= claim.rows * claim.owner.shards
        if supply >= 0 or turn.now_ns < claim.search_ns:
            continue
        row = _search(turn, claim)
        if row is not None:
            claim.looked, claim.second_best = 0, None
            if may_retire(state, row) and len(ready_in(state, row)) <= backlog.EMPTIED_IN_PASSING:
                retire_row(turn, row)
            else:
                _empty_row(turn, row)
        elif claim.looked == 0 and claim.owner.name in state.claims.growing:
            state.claims.drop(claim.owner)  # nothing is colder than what it has
        return  # one search an event


def _on_their_way(turn: Turn) -> int:
    """Extents of rows that will be free soon."""
    state = turn.state
    retiring = (row for row in state.retiring.values() if turn.now_ns - row.retired_ns < STUCK_NS)
    emptying = (row for row in state.emptying.values() if turn.now_ns - row.emptied_ns < STUCK_NS)
    return sum(len(row.extents) for row in (*retiring, *emptying))


class _Weight(NamedTuple):
    """How well a row can be spared; the least is taken."""

    promised: bool  # blocks of it are leased or handed off
    crowding: bool  # its class has no more than its right
    safe: bool  # ... and only just got it
    busy: bool  # it would have to be emptied
    filled: bool
    stamp: float  # mean of its blocks


def _search(turn: Turn, claim: Claim) -> Row | None:
    """The best row for the claim among the next ones of the pool; None: none, or not yet.

    After a whole round without a row that can be taken at once, the best of the others.
    """
    state = turn.state
    limit = _limit(state, claim)
    stuck = _stuck_classes(turn)
    best: tuple[_Weight, Row] | None = None
    weighed = slots = 0
    for row in _next_rows(state):
        claim.looked += 1
        if not _is_spare(turn, claim, row) or row.size_class.name in stuck:
            continue
        weight = _weigh(turn, claim, row)
        if weight is not None and weight.stamp < limit and (best is None or weight < best[0]):
            best = weight, row
        weighed, slots = weighed + 1, slots + row.slots
        if weighed >= ROWS_WEIGHED or slots >= SLOTS_WEIGHED:
            break
    if best is not None and not best[0].crowding and not best[0].busy:
        return best[1]
    _keep_second_best(turn, claim, best)
    if claim.looked < len(state.rows):
        return None
    second = state.rows.get(claim.second_best) if claim.second_best is not None else None
    claim.looked, claim.second_best = 0, None
    claim.search_ns = turn.now_ns + RECLAIM_INTERVAL_NS
    if second is not None and _is_spare(turn, claim, second):
        return second if _weigh(turn, claim, second) is not None else None
    return None


def _next_rows(state: State) -> Iterator[Row]:
    """Rows in turn, those granted longest ago first; each that is yielded goes to the end."""
    for number in list(islice(state.rows, ROWS_LOOKED_AT)):
        state.rows.move_to_end(number)
        yield state.rows[number]


def _stuck_classes(turn: Turn) -> set[row_claims.ClassName]:
    """Classes whose movers don't unmap rows: another row of theirs wouldn't come either."""
    late = (r for r in turn.state.retiring.values() if turn.now_ns - r.retired_ns >= STUCK_NS)
    return {row.size_class.name for row in late}


def _limit(state: State, claim: Claim) -> float:
    """Blocks that may go for the claim are older than this."""
    if claim.owner.name in state.claims.needy:
        return float("inf")
    coldest = coldest_stamp(state, claim.owner)
    return -1.0 if coldest is None else float(coldest)


def _is_spare(turn: Turn, claim: Claim, row: Row) -> bool:
    """Whether the claim may be served with this row, as far as rights go."""
    state = turn.state
    owner = row.size_class
    if owner is claim.owner or row.orphaned or row.emptying:
        return False
    beyond_right = owner.lasting_rows > row_rights.kept_rows(turn, owner)
    if claim.owner.name in state.claims.growing:
        return beyond_right and not _is_safe(turn, row)
    asking, extents = claim.owner.namespace, state.usable_extents
    safe = _is_safe(turn, row)
    return beyond_right or state.rights.may_push(asking, owner.namespace, extents, safe=safe)


def _is_safe(turn: Turn, row: Row) -> bool:
    return turn.now_ns - row.granted_ns < row_rights.SAFE_NS


def _weigh(turn: Turn, claim: Claim, row: Row) -> _Weight | None:
    """None where the row can't be had, or not for this claim."""
    state = turn.state
    owner = row.size_class
    states = state.slots.state[row.span]
    busy = not may_retire(state, row)
    promised = bool(state.slots.leases[row.span].any())
    if busy:
        needy = claim.owner.name in state.claims.needy
        if not needy or len(state.emptying) >= MAX_EMPTYING or _hangs(turn, owner):
            return None
        if promised and turn.now_ns - claim.since_ns < PROMISED_NS:
            return None
    ready = states == READY
    filled = bool(ready.any())
    stamp = float(state.slots.stamps[row.span][ready].mean()) if filled else 0.0
    crowding = owner.lasting_rows <= row_rights.kept_rows(turn, owner)
    safe = crowding and _is_safe(turn, row)
    return _Weight(promised, crowding, safe, busy, filled or busy, stamp)


def _hangs(turn: Turn, owner: SizeClass) -> bool:
    """Whether copies of the class don't end: another busy row of it wouldn't come either."""
    return any(turn.now_ns - row.emptied_ns >= STUCK_NS for row in owner.emptying.values())


def _keep_second_best(turn: Turn, claim: Claim, best: tuple[_Weight, Row] | None) -> None:
    """Of what this search found and what an earlier one of the same round did."""
    if best is None:
        return
    before = turn.state.rows.get(claim.second_best) if claim.second_best is not None else None
    weight = None
    if before is not None and _is_spare(turn, claim, before):
        weight = _weigh(turn, claim, before)
    if weight is None or best[0] < weight:
        claim.second_best = best[1].row


# -- one row's way back ---------------------------------------------------------------------------


def _empty_row(turn: Turn, row: Row) -> None:
    """Give no slot of it out any more, and make what is in it go as its copies end.

    Slots that are being copied into get a pin, so that nobody takes them for evictable the
    moment that they are READY.
    """
    state = turn.state
    owner = row.size_class
    owner.free.drop(row.first_slot, row.slots)
    owner.emptying[row.row] = state.emptying[row.row] = row
    state.rights.hold(owner.namespace, -len(row.extents))
    row.emptying = True
    row.emptied_ns = turn.now_ns
    states = state.slots.state[row.span]
    row.copied_into = row.first_slot + np.flatnonzero(states == RESERVED)
    pin(state, owner, row.copied_into)
    if state.slots.leases[row.span].any():
        row.leases = _leases_of(state, owner)
    # What isn't given up at once has a pin meanwhile, so that nobody counts on evicting it.
    row.left = ready_in(state, row)
    pin(state, owner, row.left)
    if len(row.left) <= backlog.EMPTIED_IN_PASSING:
        _go_on_emptying(turn, row)


def _go_on_emptying(turn: Turn, row: Row) -> None:
    """Take it back once it is empty; leave it alone where a block of it was promised meanwhile.

    Not where somebody has waited so long that promises end: else whoever leases the right block at
    the right time would keep its rows for ever.
    """
    state = turn.state
    owner = row.size_class
    if row.leases is None and state.slots.leases[row.span].any():
        if not _has_waited(turn):
            _stop_emptying(state, row)
            return
        row.leases = _leases_of(state, owner)
    give_up_left(turn, row, backlog.EMPTIED_AT_ONCE)
    if row.leases is not None and state.slots.leases[row.span].any():
        if row.leases.is_over and not len(row.left):  # some were taken since; there can be no more
            row.leases = _leases_of(state, owner)
        lease.end_leases_on(state, owner, row.span, row.leases)
    give_up_copied(turn, row)
    if may_retire(state, row):
        retire_row(turn, row)


def _leases_of(state: State, owner: SizeClass) -> LeasesLeft:
    """Those that may hold blocks of the class."""
    return LeasesLeft(
        [s.session for s in state.sessions.values() if s.namespace == owner.namespace]
    )


def _has_waited(turn: Turn) -> bool:
    """Whether leases and hand-offs end for one of the claims that are served now."""
    needy = turn.state.claims.needy.first(row_claims.CLAIMS_SERVED)
    return any(turn.now_ns - claim.since_ns >= PROMISED_NS for claim in needy)


def give_up_left(turn: Turn, row: Row, most: int) -> None:
    """So many of the blocks that were in a row when it began to be emptied."""
    state = turn.state
    slots, row.left = row.left[:most], row.left[most:]
    if len(slots):
        unpin(state, row.size_class, slots)
        ready = slots[state.slots.state[slots] == READY]
        _evict(turn, row.size_class, ready)


def give_up_copied(turn: Turn, row: Row) -> None:
    """The blocks that were being stored in a row when it began to be emptied, and are no more."""
    state, owner = turn.state, row.size_class
    ended = state.slots.state[row.copied_into] != RESERVED
    if ended.any():
        slots = row.copied_into[ended]
        row.copied_into = row.copied_into[~ended]
        unpin(state, owner, slots)
        _evict(turn, owner, slots[state.slots.state[slots] == READY])


def _stop_emptying(state: State, row: Row) -> None:
    owner = row.size_class
    unpin(state, owner, row.left)
    row.left = row.left[:0]
    row.emptying = False
    row.leases = None
    del owner.emptying[row.row], state.emptying[row.row]
    state.rights.hold(owner.namespace, len(row.extents))
    unpin(state, owner, row.copied_into)
    row.copied_into = row.copied_into[:0]
    free = np.flatnonzero(state.slots.state[row.span] == FREE)
    owner.free.drop(row.first_slot, row.slots)
    owner.free.put(row.first_slot + free)


def _evict(turn: Turn, owner: SizeClass, ready: Slots) -> None:
    turn.state.counters.evicted += len(ready)
    give_up(turn, owner, ready, ROW_TAKEN)


def give_up(turn: Turn, owner: SizeClass, ready: Slots, why: WhyGone) -> None:
    """READY blocks leave; those that are claimed or being loaded keep their bytes till then."""
    state = turn.state
    if not len(ready):
        return
    hand_off.blocks_lost(state, owner, ready[state.slots.leases[ready] > 0])
    owner.policy.remove(ready)
    pinned = state.slots.pins[ready] > 0
    if not pinned.all():
        forget_ready(turn, owner, ready[~pinned], why)
    if pinned.any():
        quarantine_ready(turn, owner, ready[pinned], why)


def retire_row(turn: Turn, row: Row) -> None:
    """Evict what the row holds, take its slots away, and have every mover unmap it."""
    state = turn.state
    owner = row.size_class
    _evict(turn, owner, ready_in(state, row))
    _leave_class(state, row)
    row.retired_ns = turn.now_ns
    row.mapped_by = set(state.movers_of(owner.namespace))
    state.retiring[row.row] = row
    state.counters.rows_taken_back += 1
    turn.orders.extend(UnmapRow(mover, row.row) for mover in sorted(row.mapped_by))
    _zero_when_unmapped(turn, row)


def _leave_class(state: State, row: Row) -> None:
    """The row's slots, all FREE, exist no more."""
    owner = row.size_class
    if row.emptying:
        row.emptying = False
        del owner.emptying[row.row], state.emptying[row.row]
    else:
        dropped = owner.free.drop(row.first_slot, row.slots)
        assert len(dropped) == row.slots, "a row is taken back with a slot in use"
        state.rights.hold(owner.namespace, -len(row.extents))
    state.slots.move(row.all_slots, SlotState.FREE, SlotState.ABSENT)
    owner.count(capacity=-row.slots)
    del owner.rows[row.row]
    del state.rows[row.row]


def row_unmapped(turn: Turn, row_id: RowId, mover: MoverId) -> None:
    row = turn.state.retiring.get(row_id)
    if row is not None and mover in row.mapped_by:
        row.mapped_by.discard(mover)
        _zero_when_unmapped(turn, row)


def _zero_when_unmapped(turn: Turn, row: Row) -> None:
    if not row.mapped_by and not row.zeroing:
        row.zeroing = True
        turn.orders.append(ZeroRow(row.row))


def row_zeroed(turn: Turn, row_id: RowId) -> None:
    """The extents are free; `serve` gives them to those who wait."""
    state = turn.state
    row = state.retiring.get(row_id)
    if row is None or not row.zeroing:
        return
    del state.retiring[row_id]
    turn.orders.append(ReleaseRow(row_id))
    for extent in row.extents:
        state.free_extents.put(extent)


def row_refused(turn: Turn, event: RowRefused) -> None:
    """The extents of a row that could not be had are free; none is granted for a while."""
    state = turn.state
    row = state.rows.get(event.row)
    states = state.slots.state[row.span] if row is not None else np.empty(0)
    if row is None or not bool((states == FREE).all()):
        turn.orders.append(Reply(row is None and event.row not in state.retiring))
        return
    _leave_class(state, row)
    for extent in row.extents:
        state.free_extents.put(extent)
    state.grant_pause.begin()
    state.counters.rows_refused += 1
    turn.orders.append(Reply(True))
