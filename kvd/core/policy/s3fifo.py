"""S3-FIFO: three first-in-first-out queues.

A new block enters *small*, a tenth of the capacity; one that is remembered as a *ghost* enters
*main*. A use only raises the block's counter, up to three. When small holds its share, its
oldest block leaves the cache and becomes a ghost, unless it was used more than once: then it
moves to main and its counter starts again at zero. Else the oldest block of main leaves,
unless its counter is above zero: then the counter falls by one and the block goes round again.
So what is used once passes through small quickly and never disturbs main.

Source: Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction",
SOSP 2023. Calls here are batches, so three things differ. Space is made for a whole batch
before it comes in: victims are chosen as if one new block entered small after each of them,
but those new ones are never victims themselves. The walk round main looks at no more than
WALK blocks in one call; after that the oldest leave whatever their counter, so that a call's
time is bounded. Blocks that may not be evicted go to the young end of their queue. Within a
batch the tail of the prefix is put in first, so that it leaves before its head.

Memory: 17 bytes a slot, rings of 4 to 16 bytes a resident block, 68 to 264 bytes a ghost.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvd.core.keys import U64, Bools, Slots
from kvd.core.policy.base import UNKNOWN, Evictable, Sight
from kvd.core.policy.ghosts import Ghosts
from kvd.core.policy.slot_queue import PIECE, Capacity, PolicyMemory, SlotQueue, joined, nth_true

SMALL_SHARE = 10  # small's share is one in so many
MOST_USES = 3
PROMOTED_ABOVE = 1  # uses in small
WALK = 2 * PIECE  # most blocks of main looked at in one call


class S3FifoPolicy:
    """Quick demotion of what is used once; everything else in first-in-first-out rounds."""

    heeds_requests: ClassVar = False

    def __init__(self, capacity: Capacity, memory: PolicyMemory) -> None:
        self._capacity = capacity
        self._small = SlotQueue(memory.places)
        self._main = SlotQueue(memory.places)
        self._tags = memory.tags
        self._uses = memory.uses
        self._ghosts = Ghosts(capacity, 1, memory.make_ghost_probe)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def insert(self, slots: Slots, tags: U64, sight: Sight = UNKNOWN) -> None:
        del sight  # neither the time nor the request matters here
        slots, tags = slots[::-1], tags[::-1]
        was_ghost, ghosts = self._ghosts.find(tags)
        self._tags[slots] = tags
        self._uses[slots] = 0
        if ghosts.size:
            self._ghosts.forget(ghosts)
            self._main.append(slots[was_ghost])
            slots = slots[~was_ghost]
        self._small.append(slots)

    def touch(self, slots: Slots, sight: Sight = UNKNOWN, *, as_use: bool = True) -> None:
        del sight
        in_small = self._small.holds(slots)
        assert (in_small | self._main.holds(slots)).all()
        if as_use:
            # a slot named twice in a batch counts once: it is one use
            self._uses[slots] = np.minimum(self._uses[slots] + 1, MOST_USES)
            return
        self._small.renew(slots[in_small][::-1])
        self._main.renew(slots[~in_small][::-1])

    def remove(self, slots: Slots) -> None:
        in_small = self._small.holds(slots)
        self._small.drop(slots[in_small])
        self._main.drop(slots[~in_small])
        _, ghosts = self._ghosts.find(self._tags[slots])
        self._ghosts.forget(ghosts)

    def evict(self, count: int, evictable: Evictable, now_ns: int = 0) -> Slots | None:
        del now_ns
        oldest = self._small.oldest(count)
        may_go = evictable(oldest)
        if np.count_nonzero(may_go) < count and not self._has_evictable(count, evictable):
            return None
        victims = [self._from_small(count, evictable, oldest, may_go)]
        self._remember(victims[0])
        missing = count - int(victims[0].size)
        if missing:
            victims.append(self._from_main(missing, evictable))
            missing -= int(victims[-1].size)
        for queue in (self._main, self._small):
            if missing:
                victims.append(queue.commit(queue.scan(missing, evictable)))
                missing -= int(victims[-1].size)
                if queue is self._small:
                    self._remember(victims[-1])
        assert missing == 0, "evictable slots vanished during one call"
        return joined(victims)

    def missed(self, tags: U64) -> None:
        """Ghosts are asked only when a block comes in."""

    def forget_gone(self) -> None:
        self._ghosts.forget_all()

    def coldest(self, count: int) -> Slots:
        small = self._small.first(count)
        return np.concatenate((small, self._main.first(count - int(small.size))))

    def _has_evictable(self, count: int, evictable: Evictable) -> bool:
        """Whether `count` may go; looks at little more than `count` when few are pinned."""
        found = 0
        for queue in (self._small, self._main):
            for _, _, slots in queue.pieces(count):
                if found >= count:
                    return True
                found += int(np.count_nonzero(evictable(slots)))
        return found >= count

    def _from_small(self, count: int, evictable: Evictable, oldest: Slots, may_go: Bools) -> Slots:
        """Up to `count` victims while small, victims replaced by new blocks, holds its share.

        Passes each block at most once, the `oldest` first.
        """
        victims: list[Slots] = []
        missing, left = count, len(self._small)
        promotions = left - max(1, self._capacity() // SMALL_SHARE) + 1  # then small is too short
        while missing > 0 and left > 0 and promotions > 0:
            if victims:
                oldest = self._small.oldest(missing)[:left]
                may_go = evictable(oldest)
            slots, used = oldest, self._uses[oldest] > PROMOTED_ABOVE
            upto = 1 + min(nth_true(may_go & ~used, missing), nth_true(may_go & used, promotions))
            slots, may_go, used = slots[:upto], may_go[:upto], used[:upto]
            victims.append(slots[may_go & ~used])
            promoted = slots[may_go & used]
            self._small.drop(victims[-1])
            self._main.receive(promoted, self._small)
            self._uses[promoted] = 0
            self._small.renew(slots[~may_go])
            left -= upto
            missing -= int(victims[-1].size)
            promotions -= int(promoted.size)
        return joined(victims)

    def _from_main(self, count: int, evictable: Evictable) -> Slots:
        """Up to `count` victims, walking round main."""
        victims: list[Slots] = []
        missing = count
        left = min(WALK, (MOST_USES + 1) * len(self._main))
        while missing > 0 and left > 0:
            slots = self._main.oldest(missing)[:left]
            if slots.size == 0:
                break
            may_go = evictable(slots)
            spared = self._uses[slots] > 0
            upto = 1 + nth_true(may_go & ~spared, missing)
            slots, may_go, spared = slots[:upto], may_go[:upto], spared[:upto]
            victims.append(slots[may_go & ~spared])
            self._uses[slots[may_go & spared]] -= 1
            self._main.drop(victims[-1])
            self._main.renew(slots[~may_go | spared])
            left -= upto
            missing -= int(victims[-1].size)
        return joined(victims)

    def _remember(self, victims: Slots) -> None:
        self._ghosts.add(0, self._tags.take(victims))
        capacity = self._capacity()
        self._ghosts.trim(0, min(capacity - capacity // SMALL_SHARE, self._ghosts.limit))
