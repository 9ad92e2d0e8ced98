"""Recency by request: a prompt's tail leaves before its head, whenever each was stored.

A policy keeps this order within one batch. But a request finds its head first and stores its
tail later, in several batches, each of them younger than the head. So the machine remembers
which blocks a request has used, in prompt order, and renews them once blocks behind them have
become readable. What is remembered pins nothing: a slot may have gone to another key meanwhile,
and is then left out.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvd.core import residency
from kvd.core.block import SlotState
from kvd.core.job import Prefix
from kvd.core.keys import RequestId, ScopeId, Slots
from kvd.core.rows import SizeClass
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


def forget(session: Session, requests: Iterable[RequestId]) -> None:
    """These requests ended; what they still store is renewed all the same."""
    for request in requests:
        session.prefixes.pop(request, None)


def note(state: State, prefix: Prefix, slots: Slots) -> None:
    """The request has used these blocks of one scope, behind those noted before."""
    if not len(slots):
        return
    scope = state.scope_of(int(slots[0]))
    before = prefix.slots.get(scope)
    slots = slots[state.slots.firsts(slots)]
    if before is not None:
        slots = np.concatenate([before, state.slots.without(slots, before)])
    prefix.slots[scope] = slots[:MAX_PREFIX_BLOCKS]


def grow(state: State, owner: SizeClass, prefix: Prefix, slots: Slots, now_ns: int) -> None:
    """These blocks became readable behind the prefix: renew what is before them, then note them."""
    scope = state.scope_of(int(slots[0]))
    residency.touch(state, owner, readable(state, prefix, scope), now_ns)
    note(state, prefix, slots)


def readable(state: State, prefix: Prefix, scope: ScopeId) -> Slots:
    """What the request has used of this scope and is still there, in prompt order."""
    noted = prefix.slots.get(scope)
    if noted is None:
        return np.empty(0, dtype=np.int64)
    still = (state.slots.state[noted] == SlotState.READY) & (state.slots.scopes[noted] == scope)
    kept: Slots = noted[still]
    prefix.slots[scope] = kept
    return kept
