"""A namespace is cleared: at once for everybody who looks, and piece by piece in the pool.

Its scopes lose their names: whatever is looked up, stored or read back from here on is of scopes
with new numbers, and no block of an old one is ever found, announced or made readable again. The
registry says so in one line, so it holds after a kill, too. What is left is given up in pieces
(`go_on`): running stores are called off, records become FREE and slots are free, or quarantined
while they are pinned, and at last the old scopes are forgotten. Only then is the caller told.

Meanwhile the old blocks are the first to be evicted: nothing makes them young any more.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvd.core.actions import (
    AnnounceCleared,
    ClearScopes,
    ForgetScopes,
    TellDone,
)
from kvd.core.blocks import namespaces, slot_lifecycle
from kvd.core.errors import RESET
from kvd.core.events import NamespaceCleared
from kvd.core.jobs import transfer
from kvd.core.keys import RowId, ScopeId, Slots
from kvd.core.model import backlog
from kvd.core.model.backlog import Clear
from kvd.core.model.job import Piece
from kvd.core.model.size_class import Row, SizeClass
from kvd.core.model.state import MAX_SCOPES, Namespace, State
from kvd.core.model.tiers import TierCopy
from kvd.core.model.turn import Turn
from kvd.core.room import reclaim
from kvd.core.tiers import promotion
from kvd.core.tiers import service as tiers


def namespace_cleared(turn: Turn, event: NamespaceCleared) -> None:
    """No block of the namespace is found any more; running stores into it come to nothing.

    Pinned blocks keep their slots, unseen, until their pins end.
    """
    state = turn.state
    namespace = state.require_namespace(event.namespace)
    turn.orders.append(AnnounceCleared(event.namespace))
    tally = namespace.tally
    found = state.backlog.clears.get(event.namespace)
    if found is None:
        nothing = not (tally.ready or tally.reserved or namespace.tenant.waiting_bytes)
        if nothing and not state.below.tiers:
            turn.orders.append(TellDone(event.token, 0))
            return
        found = state.backlog.clears[event.namespace] = Clear()
    found.answers.append((event.token, tally.ready - namespace.doomed))
    found.stores = deque(state.fillings)
    waiting = set(found.rows)
    found.rows.extend(
        row for owner in namespace.classes for row in owner.rows if row not in waiting
    )
    found.scopes.extend(namespace.scopes.values())
    namespace.scopes = {}
    namespace.cleared_below = ScopeId(state.next_scope)
    namespace.doomed = tally.ready
    namespace.cleared_ns = turn.now_ns
    turn.orders.append(ClearScopes(event.namespace, namespace.cleared_below))
    tiers.namespace_cleared(turn, namespace)
    for owner in namespace.classes:
        owner.policy.forget_gone()  # without what it learned of blocks that are gone
    # A namespace is known to the next incarnation by a scope, and by that its rows are.
    name = (event.namespace, "", "", 0)
    has_room = name in state.scope_ids or len(state.scope_ids) < MAX_SCOPES
    if has_room and namespaces.numbers_left(state):
        namespaces.open_named(turn, name, namespace.payer)


def go_on(turn: Turn) -> None:
    """A piece of the clear that has waited longest."""
    state = turn.state
    number = next(iter(state.backlog.clears))
    namespace, left = state.namespaces[number], state.backlog.clears[number]
    if left.stores:
        _call_off(turn, namespace, left)
    elif namespace.doomed:
        _give_up(turn, namespace, left)
    elif left.scopes:
        _forget_scopes(turn, left)
    else:
        del state.backlog.clears[number]
        turn.orders.extend(TellDone(token, blocks) for token, blocks in left.answers)


def _call_off(turn: Turn, namespace: Namespace, left: Clear) -> None:
    """Some of the stores into it. Those that end before their turn fail all the same."""
    parts = 0
    for _ in range(min(len(left.stores), backlog.STORES_LOOKED_AT)):
        piece = turn.state.fillings.get(left.stores.popleft())
        if piece is None or piece.failed:
            continue
        part = piece.parts[0]
        ours = part.size_class.namespace == namespace.namespace
        if ours and part.scope < namespace.cleared_below:
            if isinstance(piece, Piece):
                transfer.fail_piece(turn, piece, RESET)
            elif isinstance(piece, TierCopy):
                promotion.fail(turn.state, piece)
            parts += len(piece.parts)
            if parts >= backlog.PARTS_AT_ONCE:
                return


def _give_up(turn: Turn, namespace: Namespace, left: Clear) -> None:
    """Some of its READY blocks, row by row; those of rows of one class together."""
    state = turn.state
    assert left.rows, "a doomed block lies in no row"
    blocks, slots = backlog.BLOCKS_AT_ONCE, 0
    found: list[Slots] = []
    owner: SizeClass | None = None
    for _ in range(min(len(left.rows), backlog.ROWS_LOOKED_AT)):
        row = state.rows.get(left.rows[0])
        if row is not None and row.size_class.namespace == namespace.namespace:
            if owner is not None and owner is not row.size_class:
                break
            owner = row.size_class
            slots += row.slots
            doomed = _doomed_in(state, row, namespace)
            found.append(doomed)
            blocks -= len(doomed)
            if blocks < 0:
                break
        left.rows.popleft()
        if not blocks or slots >= backlog.SLOTS_LOOKED_AT:
            break
    if owner is None:
        return
    doomed = np.concatenate(found)
    some = slot_lifecycle.first_of(state, doomed, backlog.BLOCKS_AT_ONCE)
    state.counters.cleared += len(some)
    reclaim.give_up(turn, owner, some, slot_lifecycle.CLEARED)
    if len(some) < len(doomed):
        later = np.unique(doomed[len(some) :] // state.slots_per_extent).tolist()
        waiting = RowId(left.rows[0]) if left.rows else None
        left.rows.extendleft(RowId(row) for row in reversed(later) if row != waiting)


def _doomed_in(state: State, row: Row, namespace: Namespace) -> Slots:
    ready = slot_lifecycle.ready_in(state, row)
    doomed: Slots = ready[state.slots.scopes[ready] < namespace.cleared_below]
    return doomed


def _forget_scopes(turn: Turn, left: Clear) -> None:
    """Some of those that nothing names any more."""
    forgotten: list[ScopeId] = []
    while left.scopes and len(forgotten) < backlog.SCOPES_AT_ONCE:
        numbers = left.scopes[-1]
        while numbers and len(forgotten) < backlog.SCOPES_AT_ONCE:
            forgotten.append(numbers.pop())
            namespaces.forget_scope(turn.state, forgotten[-1])
        if not numbers:
            left.scopes.pop()
    if forgotten:
        turn.orders.append(ForgetScopes(tuple(forgotten)))
