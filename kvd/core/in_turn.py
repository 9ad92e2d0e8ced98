"""What waits for a turn: of each owner the first come first, and owners one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Thing = TypeVar("Thing")


class InTurn(Generic[Owner, Thing]):
    """Things that wait. Who takes them sees to it that nobody else does so at once."""

    def __init__(self) -> None:
        self._of: dict[Owner, deque[Thing]] = {}  # that have any; whose turn it is first

    def __len__(self) -> int:
        """How many owners have any."""
        return len(self._of)

    def __iter__(self) -> Iterator[Thing]:
        return chain.from_iterable(self._of.values())

    def owners(self) -> list[Owner]:
        """Those that have any."""
        return list(self._of)

    def add(self, owner: Owner, things: Iterable[Thing]) -> None:
        """These wait, too; there is one at least."""
        self._of.setdefault(owner, deque()).extend(things)

    def remove(self, owner: Owner, thing: Thing) -> None:
        """One is taken back."""
        things = self._of[owner]
        things.remove(thing)
        if not things:
            del self._of[owner]

    def has(self, owner: Owner, thing: Thing) -> bool:
        """Whether this one of the owner's waits."""
        return thing in self._of.get(owner, ())

    def take(self, may: Callable[[Owner], bool] | None = None) -> tuple[Owner, Thing] | None:
        """The next one, of an owner that may; the owner is behind the others then.

        None: there is none.
        """
        for owner in self._of:
            if may is None or may(owner):
                things = self._of.pop(owner)
                thing = things.popleft()
                if things:
                    self._of[owner] = things
                return owner, thing
        return None
