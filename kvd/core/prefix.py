"""Recency by request: a prompt's tail leaves before its head, whenever each was stored.

A policy keeps this order within one batch. But a request finds its head first and stores its
tail later, in several batches, each of them younger than the head and not always in order. So
the machine remembers which blocks a request has used, in the order of its prompt, and renews
them all when more of them are admitted, and once again at the request's end, which is their last
use. When a copy ends says nothing about recency: a late one makes nothing young. What is
remembered pins nothing: a slot may have gone to another key meanwhile, and is then left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvd.core import residency
from kvd.core.block import SlotState
from kvd.core.job import Prefix, Used
from kvd.core.keys import RequestId, ScopeId, Slots
from kvd.core.state import Session, State

MAX_PREFIXES = 4096  # requests of one session; the oldest is forgotten
MAX_PREFIX_BLOCKS = 65536  # of one request and scope; what is behind them is not remembered


def of(session: Session, request: RequestId) -> Prefix:
    """The request's prefix, remembered from now on."""
    found = session.prefixes.get(request)
    if found is None:
        if len(session.prefixes) >= MAX_PREFIXES:
            del session.prefixes[next(iter(session.prefixes))]
        found = session.prefixes[request] = Prefix()
    return found


def end(state: State, session: Session, requests: Iterable[RequestId], now_ns: int) -> None:
    """These requests ended: their blocks were used until now, and are forgotten as theirs."""
    for request in requests:
        prefix = session.prefixes.pop(request, None)
        if prefix is None:
            continue
        for scope in prefix.used:
            _renew(state, prefix, scope, now_ns)


def note(state: State, prefix: Prefix, slots: Slots, blocks: Slots) -> None:
    """The request has used these blocks of one scope, that stand at `blocks` in its prompt."""
    if not len(slots):
        return
    scope = state.scope_of(int(slots[0]))
    firsts = state.slots.firsts(slots)
    slots, blocks = slots[firsts], blocks[firsts]
    before = prefix.used.get(scope)
    if before is not None:
        others = ~state.slots.among(before.slots, slots)
        slots = np.concatenate([before.slots[others], slots])
        blocks = np.concatenate([before.blocks[others], blocks])
    if (blocks[1:] < blocks[:-1]).any():
        order = np.argsort(blocks, kind="stable")
        slots, blocks = slots[order], blocks[order]
    prefix.used[scope] = Used(slots[:MAX_PREFIX_BLOCKS], blocks[:MAX_PREFIX_BLOCKS])


def grow(state: State, prefix: Prefix, slots: Slots, blocks: Slots, now_ns: int) -> None:
    """These blocks were admitted for the request: note them, and renew all that it has used."""
    scope = state.scope_of(int(slots[0]))
    in_order = scope not in prefix.used and not (blocks[1:] < blocks[:-1]).any()
    note(state, prefix, slots, blocks)
    if not in_order:  # else they are its only ones, and stand right as they came in
        _renew(state, prefix, scope, now_ns)


def held(state: State, prefix: Prefix, scope: ScopeId) -> Slots:
    """What the request has used of this scope and is still there, in prompt order."""
    used = prefix.used.get(scope)
    if used is None:
        return np.empty(0, dtype=np.int64)
    states = state.slots.state[used.slots]
    still = (states == SlotState.READY) | (states == SlotState.RESERVED)
    still &= state.slots.scopes[used.slots] == scope
    if not still.all():
        used = prefix.used[scope] = Used(used.slots[still], used.blocks[still])
    return used.slots


def _renew(state: State, prefix: Prefix, scope: ScopeId, now_ns: int) -> None:
    named = state.scopes.get(scope)
    if named is None:  # forgotten, so nothing of it is there
        return
    owner = state.classes[named.namespace, named.group]
    residency.touch(state, owner, held(state, prefix, scope), now_ns, as_use=False)
