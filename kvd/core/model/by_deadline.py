"""What is to end by a time of its own: what is late is found without a look at the rest."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
GONE_KEPT = 64  # that were removed and are still in the heap, beside as many as are there


class _Place(NamedTuple):
    until_ns: int
    number: int  # of those with the same time, the one that came first is first


class ByDeadline(Generic[T]):
    """Each has a deadline; they may come in any order."""

    def __init__(self) -> None:
        self._places: dict[T, _Place] = {}
        self._heap: list[tuple[_Place, T]] = []
        self._numbers = itertools.count()

    def add(self, one: T, until_ns: int) -> None:
        """One that is not there yet."""
        place = self._places[one] = _Place(until_ns, next(self._numbers))
        heapq.heappush(self._heap, (place, one))

    def remove(self, one: T) -> bool:
        """False: it is not there any more."""
        if self._places.pop(one, None) is None:
            return False
        if len(self._heap) > 2 * len(self._places) + GONE_KEPT:
            self._heap = [(place, each) for each, place in self._places.items()]
            heapq.heapify(self._heap)
        return True

    def late(self, by_ns: int, most: int) -> list[T]:
        """So many at most with a deadline of then or before, the earliest first. They stay."""
        found: list[tuple[_Place, T]] = []
        while self._heap and self._heap[0][0].until_ns <= by_ns and len(found) < most:
            place, one = heapq.heappop(self._heap)
            if self._places.get(one) == place:
                found.append((place, one))
        for each in found:
            heapq.heappush(self._heap, each)
        return [one for _, one in found]

    def __iter__(self) -> Iterator[T]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
