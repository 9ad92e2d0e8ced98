"""Least recently used.

Blocks stand in one queue in the order of their last use. A block that becomes resident or is
used goes to the young end; the victim is taken from the old end. Within a batch the tail of
the prefix is put in first, so that it leaves before its head: a prefix cache can use a head
without its tail, but never a tail without its head. Blocks that may not be evicted now are
passed over and go to the young end, since whoever pins them uses them.

Source: folklore; the arrays are described in `slot_queue`. Memory: 8 bytes a slot for its
place, and a ring of 4 to at most 16 bytes a slot in use.
"""

from __future__ import annotations

from typing import ClassVar

from kvd.core.keys import U64, Slots
from kvd.core.policy.base import UNKNOWN, Evictable, Sight
from kvd.core.policy.slot_queue import PolicyMemory, SlotQueue


class LruPolicy:
    """The least recently used evictable block leaves first."""

    heeds_requests: ClassVar = False

    def __init__(self, memory: PolicyMemory) -> None:
        self._queue = SlotQueue(memory.places)

    def __len__(self) -> int:
        return len(self._queue)

    def insert(self, slots: Slots, tags: U64, sight: Sight = UNKNOWN) -> None:
        del sight  # neither the time nor the request matters here
        assert tags.size == slots.size
        self._queue.append(slots[::-1])

    def touch(self, slots: Slots, sight: Sight = UNKNOWN, *, as_use: bool = True) -> None:
        del sight, as_use  # to be young is all that a use does here
        self._queue.renew(slots[::-1])

    def remove(self, slots: Slots) -> None:
        self._queue.drop(slots)

    def evict(self, count: int, evictable: Evictable, now_ns: int = 0) -> Slots | None:
        del now_ns
        scan = self._queue.scan(count, evictable)
        return self._queue.commit(scan) if scan.victims.size == count else None

    def missed(self, tags: U64) -> None:
        """Nothing to learn: no ghosts."""

    def forget_gone(self) -> None:
        """Nothing of them is known."""

    def coldest(self, count: int) -> Slots:
        return self._queue.first(count)
