"""Tiers below host memory, for a replay: what each would hold, and how long its copies take.

What leaves a full tier is chosen by the disk store's own books (`kvd.tiers.disk`), with no byte
behind them. What is written and read, and when, is the core's decision, as in the daemon.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvd.config.tiers import THROUGH, TierRule
from kvd.core import actions, events
from kvd.core.keys import U64, KeyBatch, Slots
from kvd.core.model.index import NOWHERE
from kvd.core.model.tiers import TierTerms
from kvd.runtime.tiers import terms_of
from kvd.tiers.disk.size_class import DiskSizeClass
from kvd.tiers.disk.space import DiskSpace

_SECOND = 1_000_000_000  # ns
_STRIDE = 4096  # of a place in the books; no byte of it exists
_MIXED = np.uint64(0x9E3779B97F4A7C15)  # spreads the trace's small numbers, as a hash is spread
_SCOPE = 1

Bools = npt.NDArray[np.bool_]
Order = actions.AskTier | actions.WriteToTier | actions.ReadFromTier
End = events.TierAnswered | events.TierCopyEnded
Word = End | events.TierForgot


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier as the command line names it.

    rate: bytes that it writes in a second, and likewise reads; None: copies take no time.
    """

    capacity_blocks: int
    policy: str = "lru"
    write: str = THROUGH
    reuse: int = 2
    rate: int | None = None
    deadline_s: float = 5.0


@dataclass(frozen=True, slots=True)
class TierResult:
    """What a replay found of one tier."""

    capacity_blocks: int
    policy: str
    write: str
    hit_ratio: float  # leading blocks read from it / blocks offered
    blocks_found: int
    blocks_written: int
    blocks_read: int  # also those that came too late or behind a hole
    bytes_written: int
    bytes_read: int
    blocks_evicted: int
    blocks_dropped: int  # gone from host memory unwritten: too much was on its way


class ModelStore:
    """Which blocks a disk of this size would hold."""

    def __init__(self, capacity_blocks: int, policy: str) -> None:
        self._space = DiskSpace(1, capacity_blocks * _STRIDE, policy, self._leave)
        self._left: list[U64] = []
        made = self._space.class_of(_STRIDE)
        assert made is not None, "one class has room"
        self._blocks: DiskSizeClass = made

    @property
    def evicted(self) -> int:
        return self._space.evicted

    def holds(self, words: U64) -> Bools:
        """Which of these blocks are there."""
        there: Bools = self._find(words) != NOWHERE
        return there

    def write(self, words: U64, now_s: int) -> Bools:
        """Keep these; which of them it has then."""
        there = self.holds(words)
        self._blocks.used(self._find(words[there]), now_s)
        new = np.flatnonzero(~there)
        places = self._space.take(self._blocks, len(new))
        kept = new[: len(places)]
        self._blocks.pins[places] = 0
        self._blocks.scopes[places] = _SCOPE
        self._blocks.digests[places] = _digests(words[kept])
        self._blocks.stamps[places] = now_s
        self._blocks.keep(places)
        there[kept] = True
        return there

    def read(self, words: U64, now_s: int) -> Bools:
        """Use these; which of them are there."""
        there = self.holds(words)
        self._blocks.policy.missed(_digests(words[~there])[:, 0])
        self._blocks.used(self._find(words[there]), now_s)
        return there

    def take_left(self) -> U64:
        """Blocks that had to leave since the last call: their words."""
        left = np.concatenate(self._left) if self._left else np.empty(0, dtype=np.uint64)
        self._left = []
        return left.reshape(-1, 1)

    def _leave(self, size_class: DiskSizeClass, places: Slots) -> None:
        self._left.append(size_class.digests[places, 1])

    def _find(self, words: U64) -> Slots:
        return self._blocks.find(_digests(words), np.full(len(words), _SCOPE, dtype=np.uint32))


def _digests(words: U64) -> U64:
    """Two words a block, as the disk's books have them."""
    numbers = np.ascontiguousarray(words[:, 0])
    return np.stack([numbers * _MIXED, numbers], axis=1)


@dataclass(slots=True)
class _Tier:
    spec: TierSpec
    store: ModelStore
    block_bytes: int
    written: int = 0
    read: int = 0
    free_ns: dict[type[Order], int] = field(default_factory=dict)  # when such a copy can begin

    def end_ns(self, order: Order, now_ns: int) -> int:
        """When the order ends that is given now. Questions take no time."""
        if self.spec.rate is None or isinstance(order, actions.AskTier):
            return now_ns
        begins = max(now_ns, self.free_ns.get(type(order), 0))
        lasts = len(order.keys) * self.block_bytes * _SECOND // self.spec.rate
        self.free_ns[type(order)] = begins + lasts
        return begins + lasts

    def carry_out(self, order: Order, now_ns: int) -> list[Word]:
        """What the tier says: a disk names what had to leave before it says what it has."""
        end = self._end(order, now_ns)
        left = self.store.take_left()
        if not len(left):
            return [end]
        keys = KeyBatch(left, order.keys.hash_bytes)
        return [events.TierForgot(order.tier, order.name, keys), end]

    def _end(self, order: Order, now_ns: int) -> End:
        now_s = now_ns // _SECOND
        words = order.keys.words
        match order:
            case actions.AskTier():
                return events.TierAnswered(order.tier, order.search, self.store.holds(words))
            case actions.WriteToTier():
                done = self.store.write(words, now_s)
                self.written += int(done.sum())
            case actions.ReadFromTier():
                done = self.store.read(words, now_s)
                self.read += int(done.sum())
        return events.TierCopyEnded(order.tier, order.copy, done)


class ReplayTiers:
    """All tiers of a replay: takes the core's orders, and says when each has ended."""

    def __init__(self, specs: Sequence[TierSpec], block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._tiers = [
            _Tier(spec, ModelStore(spec.capacity_blocks, spec.policy), block_bytes)
            for spec in specs
        ]
        self._under_way: list[tuple[int, int, Order]] = []  # heap of (end, number, order)
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._tiers)

    @property
    def longest_deadline_ns(self) -> int:
        """How long a request waits for them at most."""
        return int(max((tier.spec.deadline_s for tier in self._tiers), default=0.0) * _SECOND)

    def terms(self, pool_bytes: int) -> tuple[TierTerms, ...]:
        """What the core is told of them: as the daemon tells it."""
        rules = [
            TierRule(
                f"tier-{number}",
                "",
                write=tier.spec.write,
                reuse=tier.spec.reuse,
                deadline_seconds=tier.spec.deadline_s,
            )
            for number, tier in enumerate(self._tiers, 1)
        ]
        return terms_of(rules, pool_bytes)

    def give(self, order: Order, now_ns: int) -> None:
        """The core orders this now."""
        end_ns = self._tiers[order.tier].end_ns(order, now_ns)
        heapq.heappush(self._under_way, (end_ns, next(self._numbers), order))

    def next_end_ns(self) -> int | None:
        """When the next order ends; None: none is under way."""
        return self._under_way[0][0] if self._under_way else None

    def end_next(self) -> list[Word]:
        """Carry out the order that ends next: what the core hears then."""
        end_ns, _, order = heapq.heappop(self._under_way)
        return self._tiers[order.tier].carry_out(order, end_ns)

    def results(
        self, found: Sequence[int], dropped: Sequence[int], blocks_offered: int
    ) -> tuple[TierResult, ...]:
        """What became of each, given what requests found of it and what the core left out."""
        return tuple(
            TierResult(
                capacity_blocks=tier.spec.capacity_blocks,
                policy=tier.spec.policy,
                write=tier.spec.write,
                hit_ratio=blocks / blocks_offered if blocks_offered else 0.0,
                blocks_found=blocks,
                blocks_written=tier.written,
                blocks_read=tier.read,
                bytes_written=tier.written * self.block_bytes,
                bytes_read=tier.read * self.block_bytes,
                blocks_evicted=tier.store.evicted,
                blocks_dropped=left_out,
            )
            for tier, blocks, left_out in zip(self._tiers, found, dropped, strict=True)
        )
