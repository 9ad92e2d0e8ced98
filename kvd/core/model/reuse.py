"""How much a pool of another size would find: SHARDS over the blocks that engines use.

A block's reuse distance is how many bytes of other blocks were used since it was last used. A pool
that evicts what was used longest ago has a block just where this is less than the pool. Exact
distances of all blocks would take memory and time for each; so only blocks whose tag's hash is
below a threshold are looked at, and what is counted stands for the others (Waldspurger et al.,
"Efficient MRC Construction with SHARDS", FAST 2015; fixed size, with its correction for a sample
that has more or less of the much used blocks than its share).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from kvd.core.keys import U64, Slots
from kvd.core.model.slots import SECONDS_A_STAMP, STAMP_SHIFT

MAX_SAMPLED_BLOCKS = 4096
FIRST_SHARE = 1.0  # of all blocks: of few, none is guessed; less once so many are known
SCALES = (0.5, 1.0, 2.0, 4.0)  # of the pool
REGRETTED_WITHIN = (60, 600, 3600)  # within which an evicted block is asked for again
_PLACES = 4 * MAX_SAMPLED_BLOCKS  # more than those and what one message brings
_BITS = 24
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - _BITS)


@dataclass(frozen=True, slots=True)
class ReuseCurve:
    """Estimated hit ratios of pools of so many sizes of this one."""

    points: tuple[tuple[float, float], ...]  # scale, hit ratio
    uses: int  # of sampled blocks
    share: float  # of all blocks that are sampled


class ReuseSample:
    """A sample of the blocks: MAX_SAMPLED_BLOCKS, and four times as many places in time."""

    def __init__(self, pool_bytes: int) -> None:
        self._sizes = [scale * pool_bytes for scale in SCALES]
        self._threshold = int((1 << _BITS) * FIRST_SHARE)
        self._places: dict[int, int] = {}  # by tag: the place in time of its last use
        self._weights = np.zeros(_PLACES, dtype=np.int64)  # bytes of the block that is there
        self._next = 0  # free place
        self._highest: list[tuple[int, int]] = []  # of minus the hash, and the tag
        self._all = 0.0  # uses of every block, as many as the present share would see
        self._sampled = 0.0
        self._hits = [0.0] * len(SCALES)
        self._uses = 0
        self._used: dict[int, int] = {}  # by tag: when, coarsely; of those in `_places`
        self._gone: dict[int, int] = {}  # of those, evicted and not used since: when
        self.regrets = [0.0] * len(REGRETTED_WITHIN)  # evicted blocks that were used so soon again

    def use(self, tags: U64, block_bytes: int, now_ns: int = 0) -> None:
        """These blocks are used now, the first of the prompt first; those of one message."""
        hashes = (tags * _MIX) >> _SHIFT
        self._all += len(tags) * self._share
        (chosen,) = (hashes < self._threshold).nonzero()
        if not len(chosen):
            return
        found = dict(zip(tags.take(chosen).tolist(), hashes.take(chosen).tolist(), strict=True))
        if self._next + len(found) > _PLACES:
            self._renumber()
        self._count(found, block_bytes)
        end = self._next + len(found)
        # The head of a prompt is kept longest.
        self._places.update(zip(reversed(found), range(self._next, end), strict=True))
        self._weights[self._next : end] = block_bytes
        self._next = end
        stamp = now_ns >> STAMP_SHIFT
        self._used.update(dict.fromkeys(found, stamp))
        if self._gone:
            for tag in found.keys() & self._gone.keys():
                self._regret(stamp - self._gone.pop(tag))
        if len(self._places) > MAX_SAMPLED_BLOCKS:
            self._lower()

    def evicted(self, tags: U64, stamps: Slots) -> None:
        """These blocks were evicted at these coarse times; it is told somewhat later."""
        chosen = np.flatnonzero(((tags * _MIX) >> _SHIFT) < self._threshold)
        pairs = zip(tags[chosen].tolist(), stamps[chosen].tolist(), strict=True)
        # First which of them are known at all: few are, and there may be 16,384.
        for tag, stamp in [pair for pair in pairs if pair[0] in self._used]:
            if (used := self._used[tag]) > stamp:
                self._regret(used - stamp)
            else:
                self._gone[tag] = stamp

    def _regret(self, stamps: int) -> None:
        age_s = stamps * SECONDS_A_STAMP
        for number, bound_s in enumerate(REGRETTED_WITHIN):
            if age_s <= bound_s:
                self.regrets[number] += 1 / self._share

    @property
    def blocks(self) -> int:
        """How many blocks are sampled now."""
        return len(self._places)

    @property
    def _share(self) -> float:
        return self._threshold / (1 << _BITS)

    def _count(self, found: dict[int, int], block_bytes: int) -> None:
        """For which sizes they are still there; then they leave their places."""
        self._uses += len(found)
        self._sampled += len(found)
        places = []
        for tag, hashed in found.items():
            place = self._places.get(tag)
            if place is None:
                heapq.heappush(self._highest, (-hashed, tag))
            else:
                places.append(place)
        if not places:
            return
        first = min(places)  # what was used before it is between no two uses
        sums = np.cumsum(self._weights[first : self._next])
        distances = (sums[-1] - sums[np.array(places) - first]) / self._share + block_bytes
        reached = np.searchsorted(self._sizes, distances)  # the smallest size that still has it
        for number, count in enumerate(np.bincount(reached, minlength=len(SCALES)).tolist()):
            for larger in range(number, len(SCALES)):
                self._hits[larger] += count
        self._weights[places] = 0

    def _lower(self) -> None:
        """Sample a smaller share: what was counted then stands for as much less."""
        before, places, left = self._threshold, self._places, []
        while len(places) > MAX_SAMPLED_BLOCKS:
            self._threshold = -self._highest[0][0]
            while self._highest and -self._highest[0][0] >= self._threshold:
                tag = heapq.heappop(self._highest)[1]
                left.append(places.pop(tag))
                del self._used[tag]
                self._gone.pop(tag, None)
        self._weights[left] = 0
        kept = self._threshold / before
        self._all *= kept
        self._sampled *= kept
        self._hits = [hits * kept for hits in self._hits]

    def _renumber(self) -> None:
        """The places of what is gone are free again."""
        tags = sorted(self._places, key=self._places.__getitem__)
        weights = self._weights[[self._places[tag] for tag in tags]]
        self._weights[:] = 0
        self._weights[: len(tags)] = weights
        self._places = dict(zip(tags, range(len(tags)), strict=True))
        self._next = len(tags)

    def curve(self) -> ReuseCurve | None:
        """None until something was used."""
        if self._all <= 0:
            return None
        missing = self._all - self._sampled  # uses of much used blocks, as far as they are few
        ratios = [min(1.0, max(0.0, float(hits + missing) / self._all)) for hits in self._hits]
        return ReuseCurve(tuple(zip(SCALES, ratios, strict=True)), self._uses, self._share)
