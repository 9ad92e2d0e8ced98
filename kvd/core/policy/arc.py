"""Adaptive replacement cache.

Resident blocks stand in two queues: *recent* holds those used once since they came, *frequent*
those used again. Blocks evicted from either are remembered for a while as ghosts of that
queue. A miss on a ghost of recent says that recent was too small, one on a ghost of frequent
the opposite: a target size for recent, the one tuned number, moves accordingly, by more the
rarer that kind of ghost is. The victim is the oldest of recent while recent is larger than its
target, else the oldest of frequent. A block that comes back while it is a ghost goes straight
to frequent. Recent and its ghosts together never exceed the capacity, all four lists never
twice the capacity.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
Three things differ, because calls are batches. Space is made for a whole batch before it comes
in: the victims are chosen as if one new block came into recent after each eviction. Within a
batch of misses the list lengths stand still, and ghosts of recent count before ghosts of
frequent. A ghost moves the target once, when it is first missed or when it comes back,
however often it is asked for in between. Within a batch the tail of the prefix is put in
first, so that it leaves before its head.

Memory: 16 bytes a slot, rings of 4 to 16 bytes a resident block, 68 to 264 bytes a ghost.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from kvd.core.keys import U64, Slots, each_once
from kvd.core.policy.base import UNKNOWN, Evictable, Sight
from kvd.core.policy.ghosts import Ghosts
from kvd.core.policy.slot_queue import Capacity, PolicyMemory, SlotQueue

RECENT, FREQUENT = 0, 1


class ArcPolicy:
    """Balances recency and frequency by its own misses."""

    heeds_requests: ClassVar = False

    def __init__(self, capacity: Capacity, memory: PolicyMemory) -> None:
        self._capacity = capacity
        self._recent = SlotQueue(memory.places)
        self._frequent = SlotQueue(memory.places)
        self._tags = memory.tags
        self._ghosts = Ghosts(capacity, 2, memory.make_ghost_probe)
        self._target = 0.0  # the paper's p: how many blocks recent should hold

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    @property
    def target(self) -> float:
        """Blocks that recent should hold."""
        return self._target

    def insert(self, slots: Slots, tags: U64, sight: Sight = UNKNOWN) -> None:
        del sight  # neither the time nor the request matters here
        slots, tags = slots[::-1], tags[::-1]
        was_ghost, ghosts = self._ghosts.find(tags)
        self._tags[slots] = tags
        if ghosts.size:
            self._learn(ghosts)
            self._ghosts.forget(ghosts)
            self._frequent.append(slots[was_ghost])
            slots = slots[~was_ghost]
        self._recent.append(slots)
        self._trim_ghosts()

    def touch(self, slots: Slots, sight: Sight = UNKNOWN, *, as_use: bool = True) -> None:
        del sight
        slots = slots[::-1]
        if as_use:
            self._frequent.receive(slots, self._recent)
            return
        in_recent = self._recent.holds(slots)
        self._recent.renew(slots[in_recent])
        self._frequent.renew(slots[~in_recent])

    def remove(self, slots: Slots) -> None:
        in_recent = self._recent.holds(slots)
        self._recent.drop(slots[in_recent])
        self._frequent.drop(slots[~in_recent])
        _, ghosts = self._ghosts.find(self._tags[slots])
        self._ghosts.forget(ghosts)

    def evict(self, count: int, evictable: Evictable, now_ns: int = 0) -> Slots | None:
        del now_ns
        if count > len(self):
            return None
        from_recent = count - self._share_of_frequent(count)
        recent = self._recent.scan(from_recent, evictable)
        frequent = self._frequent.scan(count - recent.victims.size, evictable)
        if recent.victims.size + frequent.victims.size < count:
            recent = self._recent.scan(count - frequent.victims.size, evictable)
        if recent.victims.size + frequent.victims.size < count:
            return None
        self._remember(RECENT, self._recent.commit(recent))
        self._remember(FREQUENT, self._frequent.commit(frequent))
        self._trim_ghosts()
        return np.concatenate((recent.victims, frequent.victims))

    def missed(self, tags: U64) -> None:
        """Move the target by the ghosts among these tags that have not moved it yet."""
        self._learn(self._ghosts.find(tags)[1])

    def _learn(self, ghosts: Slots) -> None:
        if ghosts.size:
            ghosts = each_once(self._ghosts.unmarked(ghosts))
        if ghosts.size == 0:
            return
        self._ghosts.mark(ghosts)  # it has moved the target
        of_frequent = int(self._ghosts.list_of(ghosts).sum())
        of_recent = int(ghosts.size) - of_frequent
        recent, frequent = self._ghosts.count(RECENT), self._ghosts.count(FREQUENT)
        if of_recent:
            step = max(1.0, frequent / recent)
            self._target = min(self._target + of_recent * step, float(self._capacity()))
        if of_frequent:
            step = max(1.0, recent / frequent)
            self._target = max(self._target - of_frequent * step, 0.0)

    def forget_gone(self) -> None:
        self._ghosts.forget_all()
        self._target = 0.0

    def coldest(self, count: int) -> Slots:
        queues = [self._recent, self._frequent]
        if len(self._recent) <= self._target:
            queues.reverse()
        first = queues[0].first(count)
        return np.concatenate((first, queues[1].first(count - int(first.size))))

    def _share_of_frequent(self, count: int) -> int:
        """Victims from frequent until recent, growing by one a victim, passes its target."""
        room = math.floor(self._target) - len(self._recent) + 1
        return min(max(room, 0), count)

    def _remember(self, which: int, victims: Slots) -> None:
        self._ghosts.add(which, self._tags.take(victims))

    def _trim_ghosts(self) -> None:
        capacity = min(self._capacity(), self._ghosts.limit)
        self._ghosts.trim(RECENT, capacity - len(self._recent))
        others = len(self) + self._ghosts.count(RECENT)
        both = self._ghosts.limit - self._ghosts.count(RECENT)
        self._ghosts.trim(FREQUENT, min(2 * capacity - others, both))
