"""What an earlier incarnation left in the pool, read back as events."""

from __future__ import annotations

import numpy as np

from kvd.core.actions import PublishTags, WriteFree
from kvd.core.blocks import namespaces
from kvd.core.blocks.row_grants import add_row
from kvd.core.events import PoolRecovered, RecoveredRow, RowsRecovered, ScopesRecovered
from kvd.core.keys import U64, RowId, Slots, are_among
from kvd.core.model.index import NOWHERE
from kvd.core.model.size_class import Row, SizeClass
from kvd.core.model.slots import FREE, STAMP_MASK, STAMP_SHIFT, SlotState
from kvd.core.model.state import Scope, State
from kvd.core.model.turn import Turn
from kvd.core.policy.base import Sight
from kvd.core.room import expiry
from kvd_proto.limits import MAX_GROUPS
from kvd_proto.tags import account_seed, tags_of

_STAMP_SHIFT = np.uint64(STAMP_SHIFT)  # as `coarse_stamp`


def scopes_recovered(turn: Turn, event: ScopesRecovered) -> None:
    state = turn.state
    number = event.namespace
    if number not in state.namespaces:
        namespaces.check_spec(state, event.spec)
        namespaces.add_namespace(turn, number, event.spec, event.spec.tenant)
    namespace = state.namespaces[number]
    state.recovered_scopes = None
    seeds: dict[tuple[str, int], int] = {}
    for scope, epoch, account, group, _ in event.scopes:
        seed = seeds.get((epoch, group))
        if seed is None:
            seed = seeds[epoch, group] = namespaces.group_seed(state, namespace, epoch, group)
        known = Scope(scope, number, epoch, account, group, account_seed(seed, account))
        namespaces.add_scope(state, known, event.spec.tenant)
    for epoch, own in dict.fromkeys((scope.epoch, scope.own) for scope in event.scopes):
        expiry.read_back(state, namespace, epoch, own=own)


def rows_recovered(turn: Turn, event: RowsRecovered) -> None:
    """The rows are granted again, with their READY blocks; these are known, not announced.

    A record whose key was already read, or whose scope is unknown, is freed.
    """
    state = turn.state
    owner = state.classes[event.namespace, event.group]
    rows = [_granted_again(state, owner, found) for found in event.rows]
    turn.orders.extend(row.grant() for row in rows)
    firsts = np.array([row.first_slot for row in rows], dtype=np.int64)
    table = state.slots
    slots = np.repeat(firsts, [found.ready for found in event.rows]) + event.ordinals
    table.scopes[slots] = event.scopes
    table.write_keys(slots, event.keys.words)
    # One from the future, of a machine whose clock was ahead, would stay the youngest for as long:
    # it counts as of now, and is written down as that.
    stamps = np.minimum(event.stamps, np.uint64(turn.now_ns) | STAMP_MASK)
    table.stamps[slots] = (stamps >> _STAMP_SHIFT).astype(np.uint32)
    table.noted[slots] = (event.stamps >> _STAMP_SHIFT).astype(np.uint32)
    if len(slots):
        latest = int(STAMP_MASK - (event.stamps & STAMP_MASK).min())
        state.blocks_made_ready = max(state.blocks_made_ready, latest + 1)
    kept = _kept(state, slots, event)
    dropped = slots[~kept]
    slots, stamps = slots[kept], event.stamps[kept]
    table.move(slots, SlotState.FREE, SlotState.READY)
    owner.count(ready=len(slots), evictable=len(slots))
    owner.tenant.used_bytes += len(slots) * owner.block_bytes
    state.index.insert(slots, event.keys.words.shape[1])
    state.recovered.setdefault((event.namespace, event.group), []).append((slots, stamps))
    state.counters.recovered += len(slots)
    _settle_free(state, owner, rows)
    if len(dropped):
        turn.orders.append(WriteFree(dropped))
    if len(slots):
        turn.orders.append(PublishTags(event.namespace, table.tags[slots]))


def _granted_again(state: State, owner: SizeClass, found: RecoveredRow) -> Row:
    assert len(found.extents) == owner.shards, "a row was read back with other shards"
    for extent in found.extents:
        state.free_extents.take_recovered(extent)
    first = found.extents[0] * state.slots_per_extent
    row = Row(RowId(found.row), owner, found.extents, first, owner.slots_per_row)
    row.orphaned = found.quarantined
    state.usable_extents -= len(found.extents) if row.orphaned else 0
    add_row(state, row)
    return row


def _kept(
    state: State, slots: Slots, event: RowsRecovered
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Compute the tags; which records are the first of their key, in a known scope.

    All scopes at once: with an account a user, a row holds blocks of thousands.
    """
    numbers, seeds, owners = _known_scopes(state)
    rows = np.flatnonzero(are_among(event.scopes, numbers))
    places = numbers.searchsorted(event.scopes[rows])
    theirs = owners.take(places) == event.namespace * MAX_GROUPS + event.group
    rows, places = rows[theirs], places[theirs]
    words, scopes = event.keys.words[rows], event.scopes[rows]
    tags = tags_of(words, seeds.take(places))
    state.slots.tags[slots[rows]] = tags
    known = state.index.find(tags, words, scopes) != NOWHERE
    kept = np.zeros(len(slots), dtype=np.bool_)
    kept[rows] = ~known
    ordered = np.sort(tags)
    if (ordered[1:] == ordered[:-1]).any():
        once = np.zeros(len(rows), dtype=np.bool_)
        once[np.unique(tags, return_index=True)[1]] = True
        kept[rows] &= once
    return kept


def _known_scopes(state: State) -> tuple[Slots, U64, Slots]:
    """Numbers of all scopes, ascending, the seed of each, and whose it is as one number."""
    if state.recovered_scopes is None:
        known = [scope for _, scope in sorted(state.scopes.items())]
        state.recovered_scopes = (
            np.array([scope.scope for scope in known], dtype=np.int64),
            np.array([scope.seed for scope in known], dtype=np.uint64),
            np.array([s.namespace * MAX_GROUPS + s.group for s in known], dtype=np.int64),
        )
    return state.recovered_scopes


def _settle_free(state: State, owner: SizeClass, rows: list[Row]) -> None:
    firsts = np.array([row.first_slot for row in rows if not row.orphaned], dtype=np.int64)
    slots = (firsts[:, None] + np.arange(owner.slots_per_row)).reshape(-1)
    owner.free.put(slots[state.slots.state[slots] == FREE])
    for row in rows:
        if row.orphaned:
            _withhold(state, row)


def _withhold(state: State, row: Row) -> None:
    """A mover that outlived its daemon may still write these: they are never given out again."""
    owner = row.size_class
    free = row.first_slot + np.flatnonzero(state.slots.state[row.span] == FREE)
    state.slots.move(free, SlotState.FREE, SlotState.QUARANTINED)
    state.slots.pins[free] = 1
    row.withheld = free
    owner.count(quarantined=len(free))
    owner.tenant.used_bytes += len(free) * owner.block_bytes


def pool_recovered(turn: Turn, event: PoolRecovered) -> None:
    """The policies learn the blocks in the order of their last use, the shares whose they are.

    At the end: with an account a user, nearly every block of a row is of another scope.
    """
    state = turn.state
    for key, batches in state.recovered.items():
        slots: Slots = np.concatenate([batch[0] for batch in batches])
        stamps: U64 = np.concatenate([batch[1] for batch in batches])
        # A policy takes a batch head first, and its tail goes first: youngest to oldest.
        order = np.argsort(~stamps, kind="stable")
        tags = state.slots.tags[slots[order]]
        state.classes[key].policy.insert(slots[order], tags, Sight(turn.now_ns))
        state.scope_shares.put_each(state.slots.scopes[slots])
    state.recovered = {}
    state.recovered_scopes = None
    state.next_namespace = max(state.next_namespace, event.next_namespace)
    state.next_scope = max(state.next_scope, event.next_scope)
