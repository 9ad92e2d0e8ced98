"""What is waited for, and how long: the first that is due is found without a look at all."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class ByPatience(Generic[T]):
    """Each has a patience, one of a few. Of those with the same the eldest are due first; one
    that is patient keeps no other from being due."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[T, None]] = {}

    def add(self, one: T, patience_ns: int) -> None:
        """As the youngest."""
        self._queues.setdefault(patience_ns, OrderedDict())[one] = None

    def remove(self, one: T, patience_ns: int) -> bool:
        """False: it is not there any more."""
        queue = self._queues.get(patience_ns)
        if queue is None or one not in queue:
            return False
        del queue[one]
        return True

    def due(self, is_due: Callable[[T], bool], most: int) -> list[T]:
        """The eldest that are, so many of each patience at most."""
        return [
            one
            for queue in self._queues.values()
            for one in itertools.takewhile(is_due, itertools.islice(queue, most))
        ]

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(self._queues.values())

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
