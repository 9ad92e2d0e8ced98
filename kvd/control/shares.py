"""Bounds that users share: each has a share, and some is kept for operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvd.core.errors import LimitExceeded


@dataclass(frozen=True, slots=True)
class Bound:
    """How many of a thing there may be."""

    name: str  # of the things, for messages
    most: int  # of all users together
    each: int  # of one user
    reserved: int = 0  # of `most`, for operators alone


class Shares:
    """Counts who has how many. A user's share holds for operators too: a reserve is theirs."""

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self._taken: Counter[int] = Counter()
        self._whole = 0

    def __len__(self) -> int:
        return self._whole

    def of(self, user: int) -> int:
        """How many the user has."""
        return self._taken[user]

    def take(self, user: int, *, operates: bool = False) -> None:
        """One more for the user; LimitExceeded, with nothing changed, where that is too many."""
        bound = self.bound
        if self._taken[user] >= bound.each:
            raise LimitExceeded(
                f"uid {user} has {bound.each} {bound.name}, as many as one user may: end some"
            )
        most = bound.most - (0 if operates else bound.reserved)
        if self._whole >= most:
            kept = "" if operates or not bound.reserved else f", and {bound.reserved} for operators"
            raise LimitExceeded(f"there are {most} {bound.name}{kept}, as many as there may be")
        self._taken[user] += 1
        self._whole += 1

    def give_back(self, user: int) -> None:
        """One less."""
        assert self._taken[user] > 0, f"uid {user} gives back what it never took"
        self._taken[user] -= 1
        self._whole -= 1
        if not self._taken[user]:
            del self._taken[user]
