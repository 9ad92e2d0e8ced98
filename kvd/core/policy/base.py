"""The seam between the machine and a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U64, Bools, Slots

# Given slots, says which of them may be evicted now (READY, no pin, not just offered).
Evictable = Callable[[Slots], Bools]


NO_PARENT = -1


class Sight(NamedTuple):
    """When a batch was seen, and in which request; what is not known has no weight."""

    now_ns: int = 0  # 0: not known
    request: int = 0  # a number that rises from request to request; 0: not known
    parent: int = NO_PARENT  # slot of the nearest block before the batch in the request's prompt


UNKNOWN = Sight()


class EvictionPolicy(Protocol):
    """Order of eviction within one size class. Holds slots, never keys; all calls are batches.

    Slots of one batch come in prefix order, head first: within a batch the tail is to be
    evicted before the head. A slot is known between `insert` and `remove`/`evict`.
    `tags` (one per slot) name the blocks beyond their slot's life, for policies with ghosts.
    """

    heeds_requests: ClassVar[bool]  # else blocks of several requests may come in one batch

    def __len__(self) -> int:
        """Slots that are known."""

    def insert(self, slots: Slots, tags: U64, sight: Sight = UNKNOWN) -> None:
        """These blocks are coming in, readable soon; none of the slots is known."""

    def touch(self, slots: Slots, sight: Sight = UNKNOWN, *, as_use: bool = True) -> None:
        """These resident blocks were used. Unknown slots are a broken invariant.

        Where it is no use (a prefix is kept together, say) they become young, and no more.
        """

    def remove(self, slots: Slots) -> None:
        """These blocks left without the policy's doing: forget them, ghosts too."""

    def evict(self, count: int, evictable: Evictable, now_ns: int = 0) -> Slots | None:
        """Take exactly `count` victims out, best first, or None and change nothing that matters.

        All or nothing: None means that fewer than `count` known slots are evictable. Slots
        that are not evictable keep their place or go to the young end.
        """

    def missed(self, tags: U64) -> None:
        """These blocks were looked for and not resident: a ghost hit may adapt the policy."""

    def forget_gone(self) -> None:
        """What has left before is of no interest any more; what is known stays as it is."""

    def coldest(self, count: int) -> Slots:
        """Up to `count` known slots near the eviction end, evictable or not; changes nothing."""


class GhostProbe(Protocol):
    """Does the work of a table of ghosts one by one: handed in, for numpy does it as well."""

    def find(self, tags: U64) -> Slots:
        """The number of each tag's ghost, below 0 where there is none."""

    def place(self, tags: U64) -> Slots:
        """Write tags, without marks, where there is room or the oldest ghosts are, no two of them
        at one place; their numbers, below 0 for what its bucket can't hold."""


# Of the table and the number of bits that tell a bucket.
MakeGhostProbe = Callable[[npt.NDArray[np.int64], int], GhostProbe]
