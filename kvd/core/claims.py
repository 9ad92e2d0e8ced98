"""Who waits for a row, and who has a right to one.

When no extent is free, a class that needs slots claims a row. Extents that become free belong to
the claims in the order in which they were made: nobody else is given one while a claim waits, so
that a row of many shards gathers all of its extents.

There are two kinds. A class that has fewer rows than it is *entitled* to is needy: it is served
first, and from whoever has more than its own right, however hot that one's blocks are; a class in
full swing has the youngest blocks always, so recency alone would starve every slow one. Entitled is
a class in use to one row, to a small share of what is left of the pool after one row for each, and,
up to an equal share of that, to as many rows as hold what it wants to store at once. A class that
has as much is growing: it gets only what is colder than its own coldest block and beyond its
owner's right (see `reclaim`).

How long a needy claim waits: the rights add up to no more than the pool, unless the pool hasn't
got a row for each class in use. So a row can be had at once, for every claim, as soon as its
copies have ended: one retirement each, up to CLAIMS_SERVED of them side by side. In a pool that is
*crowded*, with too few rows for all, rows go round: each is safe for SAFE_NS, then goes to the
next who waits. A turn of all classes takes (extents of a row of each) / (extents of the pool) times
SAFE_NS and one retirement each. A claim ends with a row, when its class is no longer in use,
or CLAIM_NS after it was last asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

from kvd.core.keys import NamespaceId, RowId
from kvd.core.rows import RECLAIM_INTERVAL_NS, SizeClass

if TYPE_CHECKING:
    from kvd.core.state import State

CLAIMS_SERVED = 16  # looked at in one event, the first that were made
CLAIM_NS = 10_000_000_000  # life of a claim that is not asked for again
FIRST_NS = 10_000_000_000  # so long what is free is kept for the first claim, then for the next
SAFE_NS = 2_000_000_000  # of a row from when it was granted
IN_USE_NS = 60_000_000_000  # since its last store a class counts as one that needs its rights
SMALL_SHARE = 4  # 1/4 of what one row for each class leaves is shared out as a right

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


@dataclass(slots=True, eq=False)
class Claims:
    """In the order in which they were made."""

    needy: dict[ClassName, Claim] = field(default_factory=dict)
    growing: dict[ClassName, Claim] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.needy or self.growing)

    def __iter__(self) -> Iterator[Claim]:
        return chain(self.needy.values(), self.growing.values())

    def first(self) -> list[Claim]:
        """Those that are served now."""
        return list(islice(self, CLAIMS_SERVED))

    def drop(self, owner: SizeClass) -> None:
        """The class waits no more."""
        self.needy.pop(owner.name, None)
        self.growing.pop(owner.name, None)

    def give_way(self, claim: Claim, now_ns: int) -> None:
        """It stands first without enough: after a while the others of its kind come before it."""
        claim.first_ns = claim.first_ns or now_ns
        if now_ns - claim.first_ns <= FIRST_NS:
            return
        claim.first_ns = 0
        kind = self.needy if claim.owner.name in self.needy else self.growing
        kind[claim.owner.name] = kind.pop(claim.owner.name)


def ask(state: State, owner: SizeClass, need: int, missing: int) -> None:
    """The class wants `need` slots, and would have to evict, or do without, for `missing`."""
    now_ns, claims = state.now_ns, state.claims
    if owner.shards > state.usable_extents:
        return  # what is free would be kept for it for ever
    _note_need(state, owner, -(-need // owner.slots_per_row))
    claim = claims.needy.get(owner.name) or claims.growing.get(owner.name)
    if claim is not None:
        claim.asked_ns = now_ns
    lacking = entitled_rows(state, owner) - owner.lasting_rows
    if lacking > 0:
        rows = max(1, min(lacking, -(-missing // owner.slots_per_row)))
        if owner.name not in claims.needy:
            claims.growing.pop(owner.name, None)
            claims.needy[owner.name] = Claim(owner, rows, now_ns, now_ns)
    elif claim is None and now_ns - owner.searched_ns >= RECLAIM_INTERVAL_NS:
        owner.searched_ns = now_ns
        claims.growing[owner.name] = Claim(owner, 1, now_ns, now_ns)


def _note_need(state: State, owner: SizeClass, rows: int) -> None:
    """Remember the most rows that it lately wanted at once."""
    now_ns = state.now_ns
    if rows >= owner.needed_rows or now_ns - owner.needed_ns > IN_USE_NS:
        owner.needed_rows, owner.needed_ns = rows, now_ns


def entitled_rows(state: State, owner: SizeClass) -> int:
    """Rows that a class in use may have before anybody else has more than that."""
    left = max(0, state.usable_extents - state.live_shards) // max(1, state.live_classes)
    most = 1 + left // owner.shards
    small = 1 + left // SMALL_SHARE // owner.shards
    return min(most, max(small, owner.needed_rows))


def kept_rows(state: State, owner: SizeClass) -> int:
    """Rows that nobody may take from the class as long as the pool isn't crowded.

    Where one row for each class in use would take more than half of the pool, those that didn't
    store for a while keep none.
    """
    if owner.namespace in state.disuse.namespaces:
        return 0
    if state.now_ns - owner.stored_ns <= IN_USE_NS:
        return entitled_rows(state, owner)
    return 0 if 2 * state.live_shards > state.usable_extents else 1


def is_crowded(state: State) -> bool:
    """Whether the pool has too few extents for a row of each class in use."""
    return state.live_shards > state.usable_extents


def drop_stale(state: State) -> None:
    """Forget the claims of those who are gone or don't ask any more, of the first ones."""
    for claim in state.claims.first():
        gone = claim.owner.namespace in state.disuse.namespaces
        if gone or state.now_ns - claim.asked_ns > CLAIM_NS:
            state.claims.drop(claim.owner)


def count_live(state: State) -> None:
    """A session came or went: count the classes in use anew, of those that can have a row."""
    live = {session.namespace for session in state.sessions.values()}
    known = [state.namespaces[number].classes for number in live]
    classes = [some for some in known if some[0].shards <= state.usable_extents]
    state.live_classes = sum(map(len, classes))
    state.live_shards = sum(len(some) * some[0].shards for some in classes)
