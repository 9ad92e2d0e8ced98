"""How much of a full pool is whose by right: shared among payers first, then among their classes.

A payer may open as many sessions and groups as it likes: that gives it no more. Its share is one
row of its widest class, and an equal part of what a row for each payer leaves of the pool. Within
that its own classes have their rights (see `row_rights`). A payer whose classes want more rows than
its share holds is *crowded*: its classes go round, and what it has beyond its share goes to payers
that have less than theirs.

A namespace that several payers use is charged to the one that has the fewest other classes, so that
nobody loses rights to a neighbour who joins its namespace and then opens many of its own.

Kept with every session and row that comes or goes; no question walks over classes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvd.core.keys import NamespaceId


@dataclass(slots=True, eq=False)
class Payer:
    """What of the pool's classes in use is charged to it."""

    name: str
    classes: int = 0
    shards: int = 0  # extents of one row of each of those
    held: int = 0  # extents that it has and doesn't lose yet
    widths: Counter[int] = field(default_factory=Counter)  # namespaces by extents of a row
    shared: dict[NamespaceId, None] = field(default_factory=dict)  # with other payers

    @property
    def widest(self) -> int:
        return max(self.widths, default=0)


@dataclass(slots=True, eq=False)
class Use:
    """Of one namespace with sessions, whose classes can have a row, or with rows."""

    classes: int = 0
    width: int = 0
    held: int = 0
    payer: Payer | None = None  # None without sessions
    sessions: Counter[str] = field(default_factory=Counter)  # by payer

    @property
    def shards(self) -> int:
        return self.classes * self.width


class Rights:
    """Counts by payer, and the questions about them."""

    def __init__(self) -> None:
        self.payers: dict[str, Payer] = {}  # to whom something is charged
        self.uses: dict[NamespaceId, Use] = {}
        self.shards = 0  # extents of one row of each class in use
        self.widest = 0  # ... of the widest class of each payer

    # -- what comes and goes --

    def session_came(self, namespace: NamespaceId, payer: str, classes: int, width: int) -> None:
        """One of a namespace whose rows have `width` extents."""
        use = self.uses.setdefault(namespace, Use())
        use.classes, use.width = classes, width
        use.sessions[payer] += 1
        if use.payer is None:
            self._charge(namespace, use, payer)
        self._settle(namespace)
        # Whoever has more classes now has fewer rights for each.
        for number in list(self.payers[payer].shared) if payer in self.payers else ():
            self._settle(number)

    def session_went(self, namespace: NamespaceId, payer: str) -> None:
        """One that came."""
        use = self.uses.get(namespace)
        if use is None or not use.sessions[payer]:
            return
        use.sessions[payer] -= 1
        if use.sessions[payer]:
            return
        del use.sessions[payer]
        if use.payer is not None and use.payer.name == payer:
            self._discharge(namespace, use)
            if use.sessions:
                self._charge(namespace, use, min(use.sessions, key=self._load))
        self._settle(namespace)
        self._drop_if_empty(namespace, use)

    def hold(self, namespace: NamespaceId, extents: int) -> None:
        """The namespace has so many more of them, or fewer."""
        use = self.uses.setdefault(namespace, Use())
        use.held += extents
        assert use.held >= 0, "a namespace gives up extents that it never had"
        if use.payer is not None:
            use.payer.held += extents
        self._drop_if_empty(namespace, use)

    # -- questions --

    def payer_of(self, namespace: NamespaceId) -> Payer | None:
        """To whom it is charged; None where nobody uses it, or it can't have a row."""
        use = self.uses.get(namespace)
        return None if use is None else use.payer

    def share(self, payer: Payer, extents: int) -> int:
        """How many of the pool's `extents` are the payer's by right.

        The shares add up to no more than the pool. They are 0 in a pool without a row for each
        payer: there all go round.
        """
        left = extents - self.widest
        return payer.widest + left // len(self.payers) if left >= 0 else 0

    def is_crowded(self, payer: Payer, extents: int) -> bool:
        """Whether a row for each of its classes is more than its share."""
        return payer.shards > self.share(payer, extents)

    def others_want_all(self, payer: Payer, extents: int) -> bool:
        """Whether one row for each class of the others leaves it no more than its share."""
        return self.shards - payer.shards > extents - self.share(payer, extents)

    def may_push(
        self, asking: NamespaceId, owner: NamespaceId, extents: int, *, safe: bool
    ) -> bool:
        """Whether a class without what it has a right to may take a row that its class needs.

        From a payer that has more than its share, for one that gets no more than its own thereby;
        in turns, once the row is no longer safe, among the classes of a crowded payer, and from
        one crowded payer that has more to another.
        """
        mine, theirs = self.payer_of(asking), self.payer_of(owner)
        if mine is None or theirs is None or not self.is_crowded(theirs, extents):
            return False
        if mine is theirs:
            return not safe
        width = self.uses[asking].width
        within = mine.held + width <= self.share(mine, extents)
        if within and theirs.held > self.share(theirs, extents):
            return True
        return not safe and theirs.held > mine.held and self.is_crowded(mine, extents)

    # -- to whom it is charged --

    def _charge(self, namespace: NamespaceId, use: Use, name: str) -> None:
        payer = self.payers.setdefault(name, Payer(name))
        self.widest -= payer.widest
        payer.widths[use.width] += 1
        self.widest += payer.widest
        payer.classes += use.classes
        payer.shards += use.shards
        payer.held += use.held
        self.shards += use.shards
        use.payer = payer
        if len(use.sessions) > 1:
            payer.shared[namespace] = None

    def _discharge(self, namespace: NamespaceId, use: Use) -> None:
        payer = use.payer
        assert payer is not None
        self.widest -= payer.widest
        payer.widths[use.width] -= 1
        if not payer.widths[use.width]:
            del payer.widths[use.width]
        self.widest += payer.widest
        payer.classes -= use.classes
        payer.shards -= use.shards
        payer.held -= use.held
        self.shards -= use.shards
        payer.shared.pop(namespace, None)
        use.payer = None
        if not payer.classes:
            del self.payers[payer.name]

    def _settle(self, namespace: NamespaceId) -> None:
        """Charge it to whom it costs least; to the same one where several are alike."""
        use = self.uses.get(namespace)
        if use is None or use.payer is None:
            return
        if len(use.sessions) == 1:
            use.payer.shared.pop(namespace, None)
            return
        use.payer.shared[namespace] = None
        lightest = min(use.sessions, key=self._load)
        if self._load(lightest) < use.payer.shards - use.shards and lightest != use.payer.name:
            self._discharge(namespace, use)
            self._charge(namespace, use, lightest)

    def _load(self, name: str) -> int:
        payer = self.payers.get(name)
        return 0 if payer is None else payer.shards

    def _drop_if_empty(self, namespace: NamespaceId, use: Use) -> None:
        if not use.sessions and not use.held:
            self.uses.pop(namespace, None)
