"""Recency by request: a prompt's tail leaves before its head, whenever each was stored.

A policy keeps this order within one batch. But a request finds its head first and stores its
tail later, in several batches, each of them younger than the head and not always in order. So
the machine remembers which blocks a request has used, in the order of its prompt, and renews
them all when more of them are admitted, and once again at the request's end, which is their last
use. When a copy ends says nothing about recency: a late one makes nothing young. What is
remembered pins nothing: a slot may have gone to another key meanwhile, and is then left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvd.core.blocks import namespaces, slot_lifecycle
from kvd.core.claims import advice
from kvd.core.events import RequestContext
from kvd.core.keys import NO_SLOTS, Bools, RequestId, ScopeId, Slots
from kvd.core.model.job import Part, Prefix, Used
from kvd.core.model.size_class import SizeClass
from kvd.core.model.slots import READY, RESERVED
from kvd.core.model.state import Session, State
from kvd.core.model.turn import Turn
from kvd.core.policy.base import NO_PARENT, Sight

MAX_PREFIXES = 4096  # requests of one session; the oldest is forgotten
MAX_PREFIX_BLOCKS = 65536  # of one request and scope; what is behind them is not remembered
# Of all its requests, 16 bytes each: beyond, the session's oldest requests are forgotten.
MAX_SESSION_BLOCKS = 524_288
MAX_TENANT_BLOCKS = 2_097_152  # of all its sessions
ENDED_BLOCKS_AT_ONCE = 16_384  # of ended requests, in one event, but for those of the last scope
ENDED_SCOPES_AT_ONCE = 64  # likewise: 1 to 2 ms, however few blocks a request has used of each
FORGOTTEN_AT_ONCE = 512  # requests of a session that is over: to free each takes microseconds
# A request is renewed once it has grown by this part since it last was, a short one always: so
# each of its blocks is renewed some eight times, however long its prompt and small its pieces.
GROWTH = 8
SHORT_BLOCKS = 512


class Growth(NamedTuple):
    """Blocks of a scope that were admitted for a request, and their places in its prompt."""

    prefix: Prefix
    scope: ScopeId
    slots: Slots
    blocks: Slots


def of_context(state: State, session: Session, context: RequestContext) -> Prefix:
    """The request's prefix, remembered from now on, with the advice that comes with it."""
    found = of(state, session, context.request)
    if context.advice is not None:
        found.advice = context.advice
    return found


def of(state: State, session: Session, request: RequestId) -> Prefix:
    """The request's prefix, remembered from now on."""
    found = session.prefixes.get(request)
    if found is None:
        if len(session.prefixes) >= MAX_PREFIXES:
            _forget_oldest(session, None)
        state.requests += 1
        found = session.prefixes[request] = Prefix(session.remembered, number=state.requests)
    return found


def number_of(session: Session, request: RequestId) -> int:
    """The number of the request if it is remembered; else 0."""
    found = session.prefixes.get(request)
    return 0 if found is None else found.number


def end(turn: Turn, session: Session, requests: Iterable[RequestId]) -> int:
    """These requests ended: their blocks were used until now, and are forgotten as theirs.

    How many of them, from the first on; the others, where they have used much, or many scopes, are
    for another event.
    """
    blocks = scopes = whole = 0
    for request in requests:
        prefix = session.prefixes.get(request)
        while prefix is not None and prefix.used:
            if blocks >= ENDED_BLOCKS_AT_ONCE or scopes >= ENDED_SCOPES_AT_ONCE:
                return whole
            blocks += _end_in(turn, prefix, next(iter(prefix.used)))
            scopes += 1
        if prefix is not None:
            prefix.forget()
            del session.prefixes[request]
        whole += 1
    return whole


def _end_in(turn: Turn, prefix: Prefix, number: ScopeId) -> int:
    """The request's use of this scope is over. How many blocks were remembered of it."""
    scope = turn.state.scopes.get(number)
    if scope is not None and not namespaces.is_cleared(turn.state, scope.namespace, number):
        # else nothing of it is there, or to be found
        owner = turn.state.classes[scope.namespace, scope.group]
        _renew(turn, prefix, number, owner)
        if prefix.advice is not None:
            advice.heed(turn, owner, held(turn.state, prefix, number), prefix.advice)
    return prefix.drop(number)


def forget_all(state: State, session: Session) -> None:
    """The session is over, and no job is left that could add to what its requests have used."""
    session.remembered.add(-session.remembered.blocks)
    left, session.prefixes = session.prefixes, {}
    if len(left) > FORGOTTEN_AT_ONCE:
        state.backlog.forgotten.append(left)


def let_some_go(turn: Turn) -> None:
    """Give back the memory of some requests of sessions that are over."""
    queue = turn.state.backlog.forgotten
    for _ in range(min(FORGOTTEN_AT_ONCE, len(queue[0]))):
        queue[0].popitem()
    if not queue[0]:
        queue.popleft()


def note(state: State, session: Session, prefix: Prefix, slots: Slots, blocks: Slots) -> None:
    """The request has used these blocks of one scope, that stand at `blocks` in its prompt."""
    firsts = state.slots.firsts(slots)
    if np.count_nonzero(firsts) < len(slots):
        slots, blocks = slots[firsts], blocks[firsts]
    note_each(state, session, prefix, slots, blocks)


def note_each(state: State, session: Session, prefix: Prefix, slots: Slots, blocks: Slots) -> None:
    """`note` of distinct slots."""
    if not len(slots) or prefix.is_forgotten or not _fits(session, prefix, len(slots)):
        return
    scope = state.scope_of(int(slots[0]))
    before = prefix.used.get(scope)
    if before is not None:
        again = state.slots.among(before.slots, slots)
        if np.count_nonzero(again):
            before = Used(before.slots[~again], before.blocks[~again])
        slots = np.concatenate([before.slots, slots])
        blocks = np.concatenate([before.blocks, blocks])
    if np.count_nonzero(blocks[1:] < blocks[:-1]):
        order = np.argsort(blocks, kind="stable")
        slots, blocks = slots[order], blocks[order]
    prefix.set(scope, Used(_first(slots), _first(blocks)))


def _first(places: Slots) -> Slots:
    """As many as are remembered, in an array of their own."""
    return places if len(places) <= MAX_PREFIX_BLOCKS else places[:MAX_PREFIX_BLOCKS].copy()


def _fits(session: Session, prefix: Prefix, blocks: int) -> bool:
    """Whether so many more may be remembered; older requests of the session make room."""
    mine, tenant = session.remembered, session.remembered.tenant
    while mine.blocks + blocks > MAX_SESSION_BLOCKS or (
        tenant is not None and tenant.blocks + blocks > MAX_TENANT_BLOCKS
    ):
        if not _forget_oldest(session, prefix):
            return False
    return True


def _forget_oldest(session: Session, keep: Prefix | None) -> bool:
    """Forget the session's oldest request but this one. False: there is none."""
    for request, each in session.prefixes.items():
        if each is not keep:
            each.forget()
            del session.prefixes[request]
            return True
    return False


def grow(turn: Turn, session: Session, prefix: Prefix, part: Part, blocks: Slots) -> None:
    """These blocks were admitted for the request: note them, and renew all that it has used, now
    or with one of the next if there is much of it.
    """
    if _has_grown(turn.state, session, Growth(prefix, part.scope, part.slots, blocks)):
        _renew(turn, prefix, part.scope, part.size_class)


def grow_together(turn: Turn, session: Session, owner: SizeClass, grown: Sequence[Growth]) -> None:
    """`grow` of several requests."""
    state = turn.state
    due = [(each.prefix, each.scope) for each in grown if _has_grown(state, session, each)]
    if owner.policy.heeds_requests:
        for prefix, scope in due:
            _renew(turn, prefix, scope, owner)
    elif due:
        slots = held_together(state, due)
        slot_lifecycle.touch_each(turn, owner, slots, 0, as_use=False)


def _has_grown(state: State, session: Session, more: Growth) -> bool:
    """Note the blocks. Whether all that the request has used is to be renewed."""
    prefix, scope, blocks = more.prefix, more.scope, more.blocks
    in_order = scope not in prefix.used and not (blocks[1:] < blocks[:-1]).any()
    note_each(state, session, prefix, more.slots, blocks)
    used = prefix.used.get(scope)
    if used is None:
        return False
    size, before = len(used.slots), prefix.renewed.get(scope, 0)
    is_due = size <= SHORT_BLOCKS or size >= before + before // GROWTH
    if in_order or is_due:
        prefix.renewed[scope] = size
    return is_due and not in_order  # else they are its only ones, and stand right as they came in


def held(state: State, prefix: Prefix, scope: ScopeId) -> Slots:
    """What the request has used of this scope and is still there, distinct, in prompt order."""
    used = prefix.used.get(scope)
    if used is None:
        return NO_SLOTS
    still = _is_there(state, used.slots, scope)
    if np.count_nonzero(still) < len(still):
        used = Used(used.slots[still], used.blocks[still])
        prefix.set(scope, used)
    return used.slots


def held_together(state: State, asked: Iterable[tuple[Prefix, ScopeId]]) -> Slots:
    """`held` of several requests, each in a scope, distinct."""
    some = [(prefix, scope) for prefix, scope in asked if scope in prefix.used]
    if not some:
        return NO_SLOTS
    used = [prefix.used[scope].slots for prefix, scope in some]
    slots = np.concatenate(used)
    scopes = np.array([scope for _, scope in some]).repeat([len(each) for each in used])
    still = _is_there(state, slots, scopes)
    if np.count_nonzero(still) < len(still):  # the place of one that is gone may be another's soon
        slots = np.concatenate([held(state, *each) for each in some])
    return state.slots.distinct(slots)


def _is_there(state: State, slots: Slots, scope: ScopeId | Slots) -> Bools:
    """Which of the slots still hold blocks of the scope, or of the one that each is asked for."""
    states = state.slots.state.take(slots)
    still: Bools = states == READY
    still |= states == RESERVED
    still &= state.slots.scopes.take(slots) == scope
    return still


def sight(turn: Turn, prefix: Prefix, scope: ScopeId, first_block: int) -> Sight:
    """What a policy is told of blocks that come in there in the request's prompt."""
    state, used, parent = turn.state, prefix.used.get(scope), NO_PARENT
    if used is not None:
        before = int(np.searchsorted(used.blocks, first_block)) - 1
        slot = int(used.slots[before]) if before >= 0 else NO_PARENT
        there = (RESERVED, READY)
        if before >= 0 and state.slots.scopes[slot] == scope and state.slots.state[slot] in there:
            parent = slot
    return Sight(turn.now_ns, prefix.number, parent)


def _renew(turn: Turn, prefix: Prefix, scope: ScopeId, owner: SizeClass) -> None:
    slots = held(turn.state, prefix, scope)
    slot_lifecycle.touch_each(turn, owner, slots, prefix.number, as_use=False)
