"""Who pays for which scopes and namespaces, and which scopes hold nothing.

Nobody can have them all: a payer may have so many that three quarters of what the others leave are
its own at most. So one that takes all it can get leaves a quarter, the next one a quarter of that,
and who has few finds some free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice

import numpy as np

from kvd.core.keys import U32, ScopeId

TIMES_WHAT_IS_FREE = 3
LOOKED_AT = 1024  # scopes without a block, in one search for some that can be forgotten
FORGOTTEN_AT_ONCE = 256  # beyond those that are needed


def share_left(has: int, whole: int, most: int) -> int:
    """How many more a payer may take that has `has` of the `whole`, of which there may be `most`.

    The last of them is a third or more of what is free before it, so that whoever has none can
    have some as long as any are free.
    """
    free = most - whole
    if free <= 0:
        return 0
    # The most n with has + n <= 3 * (free - n + 1).
    return max(0, min(free, (TIMES_WHAT_IS_FREE * (free + 1) - has) // (TIMES_WHAT_IS_FREE + 1)))


class ScopeShares:
    """Kept with every change, so that no question reads all scopes or slots."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()  # scopes by payer
        self._payers: dict[int, str] = {}  # by scope
        self.blocks: Counter[int] = Counter()  # that can be found, or are being stored, by scope
        self.empty: dict[str, dict[int, None]] = {}  # by payer; longest ago looked at first

    def opened(self, scope: int, payer: str) -> None:
        self._payers[scope] = payer
        self.taken[payer] += 1
        self.empty.setdefault(payer, {})[scope] = None

    def forgotten(self, scope: int) -> None:
        payer = self._payers.pop(scope)
        self.taken[payer] -= 1
        if not self.taken[payer]:
            del self.taken[payer]
        self.blocks.pop(scope, None)
        self._not_empty(scope, payer)

    def put(self, scope: int, blocks: int) -> None:
        """So many blocks more."""
        if blocks:
            self.blocks[scope] += blocks
            self._not_empty(scope, self._payers[scope])

    def put_each(self, scopes: U32) -> None:
        """One block more of each of these."""
        for scope, blocks in _counted(scopes):
            self.put(scope, blocks)

    def take_each(self, scopes: U32) -> None:
        """One block less of each of these."""
        for scope, blocks in _counted(scopes):
            self.blocks[scope] -= blocks
            if not self.blocks[scope]:
                del self.blocks[scope]
                self.empty.setdefault(self._payers[scope], {})[scope] = None

    def forgettable(
        self, payer: str, wanted: int, may_go: Callable[[ScopeId], bool]
    ) -> list[ScopeId]:
        """Empty scopes of this payer: those wanted and some more, as far as one search finds them.

        What it looked at in vain comes last in the next search.
        """
        empty = self.empty.get(payer, {})
        found: list[ScopeId] = []
        for scope in list(islice(empty, LOOKED_AT)):
            if may_go(ScopeId(scope)):
                found.append(ScopeId(scope))
            else:
                del empty[scope]
                empty[scope] = None
            if len(found) >= wanted + FORGOTTEN_AT_ONCE:
                break
        return found

    def _not_empty(self, scope: int, payer: str) -> None:
        mine = self.empty.get(payer)
        if mine is not None:
            mine.pop(scope, None)
            if not mine:
                del self.empty[payer]


def _counted(scopes: U32) -> list[tuple[int, int]]:
    """Each with how often it stands there; nearly always there is one."""
    if not len(scopes):
        return []
    if np.count_nonzero(scopes == scopes[0]) == len(scopes):
        return [(int(scopes[0]), len(scopes))]
    numbers, counts = np.unique(scopes, return_counts=True)
    return list(zip(numbers.tolist(), counts.tolist(), strict=True))
