"""Bounds that users share: each has a share, some is left for others, and some for operators.

Nobody can have them all, nor can several: a user may have as many as are left free at most. So
one that takes all it can get leaves half, the next one half of that, and whoever comes after them
finds some.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvd.core.errors import LimitExceeded


@dataclass(frozen=True, slots=True)
class Bound:
    """How many of a thing there may be: in all, for a user, and in reserve for operators."""

    name: str  # of the things, for messages
    most: int  # of all users together
    each: int  # of one user
    reserved: int = 0  # of `most`, for operators alone
    field: str = ""  # of the request that asks for one


class Shares:
    """Counts how many of a thing each user has.

    A user's share holds for operators too, but they take what is free and their reserve.
    """

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
        bound, has = self.bound, self._taken[user]
        if has >= bound.each:
            raise self._too_many(
                f"uid {user} has {has} {bound.name}, as many as one user may: end some"
            )
        most = bound.most - (0 if operates else bound.reserved)
        kept = "" if operates or not bound.reserved else f", and {bound.reserved} for operators"
        if self._whole >= most:
            raise self._too_many(f"there are {most} {bound.name}{kept}, as many as there may be")
        if not operates and has >= most - self._whole:
            raise self._too_many(
                f"uid {user} has {has} {bound.name} and {most - self._whole} are free{kept}: a user"
                " may have as many as are left for others: end some"
            )
        self._taken[user] = has + 1
        self._whole += 1

    def _too_many(self, message: str) -> LimitExceeded:
        return LimitExceeded(message, self.bound.field)

    def give_back(self, user: int) -> None:
        """One less."""
        assert self._taken[user] > 0, f"uid {user} gives back what it never took"
        self._taken[user] -= 1
        self._whole -= 1
        if not self._taken[user]:
            del self._taken[user]
