"""Auto: the policy that finds the most on this traffic, as a sample of it shows.

It begins with one policy and lets all of them duel on a sample (`duel`). When another one is
clearly better, that one takes over. No block moves: the policy from before keeps its blocks, gives
all victims as long as it has one that may go, and hands over each block that is used. The next
switch waits until it has no block left. So a policy stays for as long as the pool takes to turn
over, at least. Where it has many blocks of which none may go, it is asked again after a while.

A class has its own duel, and a class is of one tenant. So nobody sways another's.

Memory: beside that of the live policy 11 bytes a slot, and at most 4,096 blocks in each of the
shadows.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvd.core.keys import NO_SLOTS, U64, Slots
from kvd.core.policy.base import NO_PARENT, UNKNOWN, Evictable, EvictionPolicy, Sight
from kvd.core.policy.duel import Duel, MakePolicy
from kvd.core.policy.slot_queue import Capacity, PolicyMemory

DUELLISTS = ("turns", "lru", "arc", "s3fifo")  # the first one begins
MANY_BLOCKS = 8192  # with more, that may not go, the policy from before is left alone
LEFT_ALONE = 8  # ... while 1/8 as many are evicted
_ERAS = 256


class AutoPolicy:
    """Evicts by the policy that a duel on a sample found the best."""

    heeds_requests: ClassVar = True

    def __init__(
        self, capacity: Capacity, memory: PolicyMemory, make: MakePolicy, first: str = DUELLISTS[0]
    ) -> None:
        self._capacity, self._memory, self._make = capacity, memory, make
        self._tags, self._eras, self._marks = memory.tags, memory.eras, memory.marks
        self._era = 0
        self.live_name = first
        self._told_name = first
        self._live = self._made(first)
        self._before: EvictionPolicy | None = None  # has blocks from before the last switch
        self._left_alone = 0  # so many are evicted until it is asked again
        self._duel = Duel(DUELLISTS, capacity, make)

    def __len__(self) -> int:
        return len(self._live) + (0 if self._before is None else len(self._before))

    def _made(self, name: str) -> EvictionPolicy:
        return self._make(name, self._capacity, self._memory)

    def insert(self, slots: Slots, tags: U64, sight: Sight = UNKNOWN) -> None:
        if not slots.size:
            return
        marks = Duel.marks_of(tags, -1 if sight.parent < 0 else int(self._marks[sight.parent]))
        self._marks[slots] = marks
        self._tags[slots] = tags
        self._eras[slots] = self._era
        self._duel.use(tags, marks, sight)
        if sight.parent >= 0 and self._eras[sight.parent] != self._era:
            sight = sight._replace(parent=NO_PARENT)  # of another policy's
        self._live.insert(slots, tags, sight)

    def touch(self, slots: Slots, sight: Sight = UNKNOWN, *, as_use: bool = True) -> None:
        if as_use and slots.size:
            self._duel.use(self._tags.take(slots), self._marks.take(slots), sight)
        if self._before is not None:
            self._hand_over(slots, sight)
        self._live.touch(slots, sight, as_use=as_use)

    def _hand_over(self, slots: Slots, sight: Sight) -> None:
        """Take those of these that the policy from before has."""
        assert self._before is not None
        old = slots[self._eras.take(slots) != self._era]
        if not old.size:
            return
        _, first = np.unique(old, return_index=True)
        old = old[np.sort(first)]
        self._before.remove(old)
        self._eras[old] = self._era
        self._live.insert(old, self._tags.take(old), sight._replace(parent=NO_PARENT))
        self._let_go()

    def remove(self, slots: Slots) -> None:
        if self._before is not None:
            old = self._eras.take(slots) != self._era
            self._before.remove(slots[old])
            slots = slots[~old]
            self._let_go()
        self._live.remove(slots)

    def missed(self, tags: U64) -> None:
        self._live.missed(tags)

    def forget_gone(self) -> None:
        self._live.forget_gone()
        if self._before is not None:
            self._before.forget_gone()
        self._duel.forget()

    def evict(self, count: int, evictable: Evictable, now_ns: int = 0) -> Slots | None:
        self._duel.fit()
        self._consider()
        if self._before is None:
            return self._live.evict(count, evictable, now_ns)
        old = self._from_before(count, evictable, now_ns)
        if old is not None:
            self._let_go()
        return old

    def _from_before(self, count: int, evictable: Evictable, now_ns: int) -> Slots | None:
        """Those from before first; of the live policy what they are too few for."""
        assert self._before is not None
        if self._left_alone > 0:
            self._left_alone -= count
            young = self._live.evict(count, evictable, now_ns)
            if young is not None:
                return young
        if count < len(self._before):
            old = self._before.evict(count, evictable, now_ns)
            if old is not None:
                return old
        may_go = int(np.count_nonzero(evictable(self._before.coldest(len(self._before)))))
        may_go = min(may_go, count)
        young = self._live.evict(count - may_go, evictable, now_ns) if count > may_go else NO_SLOTS
        if young is None:
            return None
        old = self._before.evict(may_go, evictable, now_ns) if may_go else NO_SLOTS
        assert old is not None, "evictable slots vanished during one call"
        if len(self._before) > MANY_BLOCKS:
            self._left_alone = len(self._before) // LEFT_ALONE
        return np.concatenate((old, young))

    def take_switch(self) -> tuple[str, str] | None:
        """The names of the policy when this was last asked, and of now, where they differ."""
        before, self._told_name = self._told_name, self.live_name
        return None if before == self.live_name else (before, self.live_name)

    def coldest(self, count: int) -> Slots:
        if self._before is None:
            return self._live.coldest(count)
        old = self._before.coldest(count)
        return np.concatenate((old, self._live.coldest(count - int(old.size))))

    def _consider(self) -> None:
        """Switch if another policy is clearly better, and the last switch is over."""
        if self._before is not None:
            return
        name = self._duel.better_than(self.live_name)
        if name is None:
            return
        self._before, self._live = self._live, self._made(name)
        self._era = (self._era + 1) % _ERAS
        self._left_alone = 0
        self.live_name = name
        self._let_go()

    def _let_go(self) -> None:
        if self._before is not None and not len(self._before):
            self._before = None
