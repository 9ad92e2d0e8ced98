"""Invariants of who pays for what: scopes, namespaces and extents."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvd.core.keys import NamespaceId
from kvd.core.model.slots import SlotState
from kvd.core.model.state import State


def check_shares(state: State) -> None:
    """Who pays for what, and which scopes hold nothing, is as the tables say."""
    if state.recovered:
        return
    states = state.slots.state
    held = np.flatnonzero((states == SlotState.READY) | (states == SlotState.RESERVED))
    shares = state.scope_shares
    blocks = Counter(state.slots.scopes[held].tolist())
    assert shares.blocks == blocks, "blocks by scope"
    empty = {scope for scopes in shares.empty.values() for scope in scopes}
    assert empty == state.scopes.keys() - blocks.keys(), "scopes without a block"
    assert shares.taken.total() == len(state.scopes), "scopes by payer"
    paid = Counter(namespace.payer for namespace in state.namespaces.values())
    assert state.namespaces_of == paid, "namespaces by payer"


def check_rights(state: State) -> None:
    """Rights are counted as the sessions and rows are."""
    rights, payers = state.rights, state.rights.payers
    held: Counter[NamespaceId] = Counter()
    for row in state.rows.values():
        if not (row.orphaned or row.emptying):
            held[row.size_class.namespace] += len(row.extents)
    used = {s.namespace for s in state.sessions.values()}
    able = {n for n in used if state.namespaces[n].classes[0].shards <= state.usable_extents}
    assert rights.uses.keys() == held.keys() | able, "namespaces with rows or rights"
    for number, use in rights.uses.items():
        assert use.held == held[number], "extents held"
        assert (use.payer is not None) == (number in able), "a namespace in use is charged to one"
        users = Counter(s.payer for s in state.sessions.values() if s.namespace == number)
        assert use.sessions == (users if number in able else Counter()), "sessions by payer"
        if use.payer is not None:
            assert use.payer.name in users, "it is charged to one who doesn't use it"
            assert payers[use.payer.name] is use.payer, "a payer"
            assert (number in use.payer.shared) == (len(users) > 1), "a namespace that others use"
    for payer in payers.values():
        mine = [use for use in rights.uses.values() if use.payer is payer]
        assert mine, "a payer to whom nothing is charged"
        assert payer.classes == sum(use.classes for use in mine), "classes"
        assert payer.shards == sum(use.shards for use in mine), "shards"
        assert payer.held == sum(use.held for use in mine), "extents held by a payer"
        assert payer.widest == max(use.width for use in mine), "the widest row"
    assert rights.shards == sum(payer.shards for payer in payers.values()), "shards in all"
    assert rights.widest == sum(payer.widest for payer in payers.values()), "widest rows in all"
    shares = sum(rights.share(payer, state.usable_extents) for payer in payers.values())
    assert shares <= state.usable_extents, "shares add up to no more than the pool"
