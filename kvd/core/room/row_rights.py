"""Who has a right to a row, and from whom one may be taken.

There are two kinds. A class that has fewer rows than it is *entitled* to is needy: it is served
first, and from whoever has more than its own right, however hot that one's blocks are; a class in
full swing has the youngest blocks always, so recency alone would starve every slow one. The pool is
shared among payers first (see `rights`). Of its payer's share a class in use is entitled to one
row, to a small part of what is left after one row for each, and, up to an equal part of that, to as
many rows as hold what it wants to store at once; to all of that equal part where the others'
classes want all the rest, so that nothing is left to recency. A class that has as much is growing:
it gets only what is colder than its own coldest block and beyond its owner's right (see `reclaim`).

How long a needy claim waits: payers take turns, a row each, and so do the claims of one payer. The
rights of payers add up to no more than the pool, and those of a payer's classes to no more than its
share, unless that hasn't got a row for each of them. So a row can be had at once, for every
claim, as soon as its copies have ended: one retirement each, up to CLAIMS_SERVED of them side by
side. A payer that is *crowded*, with too few rows for all of its classes, has its rows go round:
each is safe for SAFE_NS, then goes to the next class of it that waits. A turn of them takes
(extents of a row of each) / (extents of the share) times SAFE_NS and one retirement each. Others do
not wait for it. With more payers than rows all are crowded, and their rows go round among them
likewise. A claim ends with a row, when its class is no longer in use, or CLAIM_NS after it was
last asked for.
"""

from __future__ import annotations

from kvd.core.model.row_claims import Claim
from kvd.core.model.size_class import RECLAIM_INTERVAL_NS, SizeClass
from kvd.core.model.state import Session, State
from kvd.core.model.turn import Turn

CLAIM_NS = 10_000_000_000  # life of a claim that is not asked for again
SAFE_NS = 2_000_000_000  # of a row from when it was granted
IN_USE_NS = 60_000_000_000  # since its last store a class counts as one that needs its rights
SMALL_SHARE = 4  # 1/4 of what one row for each class of a payer leaves is a right of all of them


def ask(turn: Turn, owner: SizeClass, need: int, missing: int) -> None:
    """The class wants `need` slots, and would have to evict, or do without, for `missing`."""
    state = turn.state
    claims = state.claims
    payer = state.rights.payer_of(owner.namespace)
    if payer is None:
        return  # it has no session, or what is free would be kept for it for ever
    _note_need(turn, owner, -(-need // owner.slots_per_row))
    claim = claims.needy.get(owner.name) or claims.growing.get(owner.name)
    if claim is not None:
        claim.asked_ns = turn.now_ns
    lacking = entitled_rows(state, owner) - owner.lasting_rows
    if lacking > 0:
        claims.growing.pop(owner.name)
        known = claims.needy.get(owner.name)
        rows = max(1, min(lacking, -(-missing // owner.slots_per_row)))
        claims.needy.put(known or Claim(owner, rows, turn.now_ns, turn.now_ns), payer.name)
    elif claim is None and turn.now_ns - owner.searched_ns >= RECLAIM_INTERVAL_NS:
        owner.searched_ns = turn.now_ns
        claims.growing.put(Claim(owner, 1, turn.now_ns, turn.now_ns), payer.name)


def _note_need(turn: Turn, owner: SizeClass, rows: int) -> None:
    """Remember the most rows that it lately wanted at once."""
    if rows >= owner.needed_rows or turn.now_ns - owner.needed_ns > IN_USE_NS:
        owner.needed_rows, owner.needed_ns = rows, turn.now_ns


def entitled_rows(state: State, owner: SizeClass) -> int:
    """Rows that a class in use may have before anybody else has more than that."""
    rights, extents = state.rights, state.usable_extents
    payer = rights.payer_of(owner.namespace)
    if payer is None:
        return 1
    left = max(0, rights.share(payer, extents) - payer.shards) // payer.classes
    most = 1 + left // owner.shards
    if rights.others_want_all(payer, extents):
        return most
    small = 1 + left // SMALL_SHARE // owner.shards
    return min(most, max(small, owner.needed_rows))


def kept_rows(turn: Turn, owner: SizeClass) -> int:
    """Rows that nobody may take from the class as long as its payer isn't crowded.

    Where one row for each of the payer's classes in use would take more than half of its share,
    those that didn't store for a while keep none.
    """
    state = turn.state
    payer = state.rights.payer_of(owner.namespace)
    if payer is None:
        return 0
    if turn.now_ns - owner.stored_ns <= IN_USE_NS:
        return entitled_rows(state, owner)
    return 0 if 2 * payer.shards > state.rights.share(payer, state.usable_extents) else 1


def is_stale(turn: Turn, claim: Claim) -> bool:
    """Whether its class is gone or doesn't ask any more."""
    gone = turn.state.rights.payer_of(claim.owner.namespace) is None
    return gone or turn.now_ns - claim.asked_ns > CLAIM_NS


def drop_stale(turn: Turn) -> None:
    """Forget those claims, of the first ones."""
    state = turn.state
    for claim in state.claims.first():
        if is_stale(turn, claim):
            state.claims.drop(claim.owner)


def session_came(state: State, session: Session) -> None:
    """Its namespace is in use, unless none of its classes could have a row."""
    classes = state.namespaces[session.namespace].classes
    shards = classes[0].shards
    if shards <= state.usable_extents:
        state.rights.session_came(session.namespace, session.payer, len(classes), shards)


def session_went(state: State, session: Session) -> None:
    """The namespace is in use no longer with the last one."""
    state.rights.session_went(session.namespace, session.payer)
