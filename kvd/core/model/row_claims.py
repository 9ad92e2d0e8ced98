"""Who waits for a row, and who has a right to one.

When no extent is free, a class that needs slots claims a row. Extents that become free belong to
the claims in the order in which they were made: nobody else is given one while a claim waits, so
that a row of many shards gathers all of its extents.

Which rows a class has a right to: `row_rights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest

from kvd.core.keys import NamespaceId, RowId
from kvd.core.model.size_class import SizeClass

CLAIMS_SERVED = 16  # looked at in one event, the first that were made
FIRST_NS = 10_000_000_000  # so long what is free is kept for the first claim, then for the next

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
        return iter(self.first(len(self)))

    def first(self, most: int) -> list[Claim]:
        """So many of those, without a look at all of the others."""
        turns = [list(islice(of.values(), most)) for of in islice(self._payers.values(), most)]
        interleaved = (claim for turn in zip_longest(*turns) for claim in turn if claim is not None)
        return list(islice(interleaved, most))

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
