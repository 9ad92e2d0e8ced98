"""Who waits for a row, and who has a right to one.

When no extent is free, a class that needs slots claims a row. Extents that become free belong to
the claims in the order in which they were made: nobody else is given one while a claim waits, so
that a row of many shards gathers all of its extents.

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

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING

from kvd.core.keys import NamespaceId, RowId
from kvd.core.rows import RECLAIM_INTERVAL_NS, SizeClass

if TYPE_CHECKING:
    from kvd.core.state import Session, State

CLAIMS_SERVED = 16  # looked at in one event, the first that were made
CLAIM_NS = 10_000_000_000  # life of a claim that is not asked for again
FIRST_NS = 10_000_000_000  # so long what is free is kept for the first claim, then for the next
SAFE_NS = 2_000_000_000  # of a row from when it was granted
IN_USE_NS = 60_000_000_000  # since its last store a class counts as one that needs its rights
SMALL_SHARE = 4  # 1/4 of what one row for each class of a payer leaves is a right of all of them

ClassName = tuple[NamespaceId, int]


@dataclass(slots=True, eq=False)
class Claim:
    """One class's wait for rows. `looked` and `second_best` are of the search that is under way."""

    owner: SizeClass
    rows: int  # still to come
    asked_ns: int
    since_ns: int  # when it was made, or last given a row
    first_ns: int = 0  # since when it has stood first
    search_ns: int = 0  # no search before
    looked: int = 0  # rows
    second_best: RowId | None = None  # taken when none is better


class Turns:
    """Claims of one kind by payer: the payers go round, and so do the claims of each."""

    def __init__(self) -> None:
        self._payers: dict[str, dict[ClassName, Claim]] = {}
        self._payer_of: dict[ClassName, str] = {}

    def __len__(self) -> int:
        return len(self._payer_of)

    def __contains__(self, name: ClassName) -> bool:
        return name in self._payer_of

    def __iter__(self) -> Iterator[Claim]:
        """The first claim of each payer, then the second of each, and so on."""
        return _interleaved(list(map(list, (of.values() for of in self._payers.values()))))

    def first(self, most: int) -> list[Claim]:
        """So many of those, without a look at all of the others."""
        turns = [list(islice(of.values(), most)) for of in islice(self._payers.values(), most)]
        return list(islice(_interleaved(turns), most))

    def get(self, name: ClassName) -> Claim | None:
        payer = self._payer_of.get(name)
        return None if payer is None else self._payers[payer][name]

    def put(self, claim: Claim, payer: str) -> None:
        """Behind the payer's others; one that waits keeps its place unless it has another payer."""
        name = claim.owner.name
        if self._payer_of.get(name) != payer:
            self.pop(name)
            self._payer_of[name] = payer
            self._payers.setdefault(payer, {})[name] = claim

    def pop(self, name: ClassName) -> Claim | None:
        payer = self._payer_of.pop(name, None)
        if payer is None:
            return None
        claim = self._payers[payer].pop(name)
        if not self._payers[payer]:
            del self._payers[payer]
        return claim

    def end_turn(self, name: ClassName) -> None:
        """Every other payer with a claim comes before the one whose claim it is."""
        payer = self._payer_of[name]
        self._payers[payer] = self._payers.pop(payer)

    def give_way(self, name: ClassName) -> None:
        """Every other claim comes before it."""
        self.end_turn(name)
        claims = self._payers[self._payer_of[name]]
        claims[name] = claims.pop(name)


def _interleaved(turns: list[list[Claim]]) -> Iterator[Claim]:
    return (claim for turn in zip_longest(*turns) for claim in turn if claim is not None)


@dataclass(slots=True, eq=False)
class Claims:
    """In the order in which they are served."""

    needy: Turns = field(default_factory=Turns)
    growing: Turns = field(default_factory=Turns)

    def __bool__(self) -> bool:
        return bool(self.needy or self.growing)

    def __iter__(self) -> Iterator[Claim]:
        return chain(self.needy, self.growing)

    def first(self) -> list[Claim]:
        """Those that are served now."""
        needy = self.needy.first(CLAIMS_SERVED)
        return needy + self.growing.first(CLAIMS_SERVED - len(needy))

    def head(self) -> Claim | None:
        """The one that is served next."""
        return next(iter(self.needy.first(1) or self.growing.first(1)), None)

    def drop(self, owner: SizeClass) -> None:
        """The class waits no more."""
        self.needy.pop(owner.name)
        self.growing.pop(owner.name)

    def end_turn(self, claim: Claim) -> None:
        """It was given a row: another payer is next."""
        self._kind(claim).end_turn(claim.owner.name)

    def give_way(self, claim: Claim, now_ns: int) -> None:
        """It stands first without enough: after a while the others of its kind come before it."""
        claim.first_ns = claim.first_ns or now_ns
        if now_ns - claim.first_ns > FIRST_NS:
            claim.first_ns = 0
            self._kind(claim).give_way(claim.owner.name)

    def _kind(self, claim: Claim) -> Turns:
        return self.needy if claim.owner.name in self.needy else self.growing


def ask(state: State, owner: SizeClass, need: int, missing: int) -> None:
    """The class wants `need` slots, and would have to evict, or do without, for `missing`."""
    now_ns, claims = state.now_ns, state.claims
    payer = state.rights.payer_of(owner.namespace)
    if payer is None:
        return  # it has no session, or what is free would be kept for it for ever
    _note_need(state, owner, -(-need // owner.slots_per_row))
    claim = claims.needy.get(owner.name) or claims.growing.get(owner.name)
    if claim is not None:
        claim.asked_ns = now_ns
    lacking = entitled_rows(state, owner) - owner.lasting_rows
    if lacking > 0:
        claims.growing.pop(owner.name)
        known = claims.needy.get(owner.name)
        rows = max(1, min(lacking, -(-missing // owner.slots_per_row)))
        claims.needy.put(known or Claim(owner, rows, now_ns, now_ns), payer.name)
    elif claim is None and now_ns - owner.searched_ns >= RECLAIM_INTERVAL_NS:
        owner.searched_ns = now_ns
        claims.growing.put(Claim(owner, 1, now_ns, now_ns), payer.name)


def _note_need(state: State, owner: SizeClass, rows: int) -> None:
    """Remember the most rows that it lately wanted at once."""
    now_ns = state.now_ns
    if rows >= owner.needed_rows or now_ns - owner.needed_ns > IN_USE_NS:
        owner.needed_rows, owner.needed_ns = rows, now_ns


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


def kept_rows(state: State, owner: SizeClass) -> int:
    """Rows that nobody may take from the class as long as its payer isn't crowded.

    Where one row for each of the payer's classes in use would take more than half of its share,
    those that didn't store for a while keep none.
    """
    payer = state.rights.payer_of(owner.namespace)
    if payer is None:
        return 0
    if state.now_ns - owner.stored_ns <= IN_USE_NS:
        return entitled_rows(state, owner)
    return 0 if 2 * payer.shards > state.rights.share(payer, state.usable_extents) else 1


def is_stale(state: State, claim: Claim) -> bool:
    """Whether its class is gone or doesn't ask any more."""
    gone = state.rights.payer_of(claim.owner.namespace) is None
    return gone or state.now_ns - claim.asked_ns > CLAIM_NS


def drop_stale(state: State) -> None:
    """Forget those claims, of the first ones."""
    for claim in state.claims.first():
        if is_stale(state, claim):
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
