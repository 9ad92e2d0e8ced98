"""Blocks of one size on one disk: where each lies, which are free, and who leaves next.

A class holds whole regions of the slab, cut into places of its size. Places are numbered densely,
so that the arrays take memory only for regions that the class has had.

Memory, a block: 43 bytes here, 25 in the index, 16 to 24 with the policy "lru" (see `lru`), what
its hash is long and one where it was asked for since the start, and for the rows that wait to be
written about 200 bytes each, of a bounded number.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U32, U64, Slots
from kvd.core.model.index import NOWHERE, Index
from kvd.core.policy import EvictionPolicy, PolicyMemory, Sight, make_policy
from kvd.core.sparse import sparse_zeros

MAX_PLACES = 1 << 27  # of one class
NO_REGION = -1
_SECOND = 1_000_000_000  # ns

Bools = npt.NDArray[np.bool_]


class PlaceState(enum.IntEnum):
    """What a place holds."""

    FREE = 0
    WRITING = 1
    READY = 2
    LEAVING = 3  # deleted; whoever deletes frees it, once nobody reads or writes it
    UNREAD = 4  # nobody finds it any more; its last reader frees it


class DiskSizeClass:
    """Callers hold the disk's lock."""

    def __init__(self, stride: int, region_bytes: int, regions: int, policy: str) -> None:
        self.stride = stride
        self.per_region = region_bytes // stride
        most = max(1, min(regions, MAX_PLACES // self.per_region))
        self.size = most * self.per_region
        self.regions = np.full(most, NO_REGION, dtype=np.int64)  # by the class's own number
        self._taken = np.zeros(most, dtype=np.int64)  # of each region's places, how many
        self.states = sparse_zeros(self.size, np.uint8)
        self.pins = sparse_zeros(self.size, np.uint16)
        self.scopes: U32 = sparse_zeros(self.size, np.uint32)
        self.lengths: U32 = sparse_zeros(self.size, np.uint32)
        self.seals: U64 = sparse_zeros(self.size, np.uint64)
        self.stamps: U32 = sparse_zeros(self.size, np.uint32)  # seconds, of its last use
        self.digests: U64 = sparse_zeros((self.size, 2), np.uint64)
        self.hash_bytes = sparse_zeros(self.size, np.uint8)  # 0: the engine's hash is not known
        self._hashes: list[U64] = []  # its words, each of all places, as many as were needed
        self.index = Index(self)
        self.policy: EvictionPolicy = make_policy(policy, self._capacity, PolicyMemory(self.size))
        self.free_places = 0
        self._free: U32 = sparse_zeros(self.size, np.uint32)  # so many of the first

    @property
    def tags(self) -> U64:
        """The digests' first words."""
        tags: U64 = self.digests[:, 0]
        return tags

    def keys(self, width: int) -> U64:
        """The digests: every key is two words here."""
        assert width == 2
        return self.digests

    def __len__(self) -> int:
        return len(self.index)

    # -- where blocks are -------------------------------------------------------------------

    def find(self, digests: U64, scopes: U32) -> Slots:
        """The place of each block, NOWHERE where there is none."""
        return self.index.find(np.ascontiguousarray(digests[:, 0]), digests, scopes)

    def keep(self, places: Slots) -> None:
        """They hold blocks now, all that is known of them being written down. Head first."""
        self.states[places] = PlaceState.READY
        self.index.insert(places, self.digests.shape[1])
        self.policy.insert(places, self.digests[places, 0])

    def take_out(self, places: Slots) -> None:
        """Nobody finds these blocks any more. Their places are not free yet."""
        self.index.remove(places)
        self.policy.remove(places)
        self.states[places] = PlaceState.LEAVING

    def used(self, places: Slots, now: int) -> None:
        """Those of them that are still there were used."""
        places = places[self.states[places] == PlaceState.READY]
        self.stamps[places] = now
        self.policy.touch(places, Sight(now * _SECOND))

    # -- what engines call them --------------------------------------------------------------

    def name(self, places: Slots, hashes: Sequence[bytes]) -> None:
        """By these hashes engines know the blocks in these places, as far as it isn't known yet."""
        new = np.flatnonzero(self.hash_bytes[places] == 0)
        if not new.size:
            return
        chosen = [hashes[row] for row in new.tolist()]
        words = -(-max(map(len, chosen)) // 8)
        while len(self._hashes) < words:
            self._hashes.append(sparse_zeros(self.size, np.uint64))
        padded = b"".join([each.ljust(words * 8, b"\0") for each in chosen])
        columns = np.frombuffer(padded, dtype=np.uint64).reshape(-1, words)
        for number in range(words):
            self._hashes[number][places[new]] = columns[:, number]
        self.hash_bytes[places[new]] = [len(each) for each in chosen]

    def names_of(self, places: Slots) -> list[tuple[int, bytes]]:
        """Scope and hash of those of these blocks whose hash is known."""
        places = places[self.hash_bytes[places] > 0]
        if not places.size:
            return []
        padded = np.stack([column[places] for column in self._hashes], axis=1)
        lengths = self.hash_bytes[places].tolist()
        hashes = [row.tobytes()[:size] for row, size in zip(padded, lengths, strict=True)]
        return list(zip(self.scopes[places].tolist(), hashes, strict=True))

    def in_use(self) -> slice:
        """Places that hold or have held something."""
        held = np.flatnonzero(self.regions != NO_REGION)
        return slice(0, (int(held[-1]) + 1) * self.per_region if held.size else 0)

    # -- places -----------------------------------------------------------------------------

    def take(self, count: int) -> Slots:
        """Up to `count` free places, neighbours if it can be; they are being written to now."""
        left = max(0, self.free_places - count)
        taken = np.sort(self._free[left : self.free_places]).astype(np.int64)
        self.free_places = left
        self.states[taken] = PlaceState.WRITING
        np.add.at(self._taken, taken // self.per_region, 1)
        self.hash_bytes[taken] = 0
        self.pins[taken] = 1  # the writer's
        return taken

    def free_the_rest(self) -> None:
        """What no block was laid into at the start is free."""
        self.free(np.flatnonzero(self.states[self.in_use()] == PlaceState.FREE))

    def free(self, places: Slots) -> None:
        """Nothing is in them any more, and nobody reads or writes them."""
        self.states[places] = PlaceState.FREE
        np.subtract.at(self._taken, places // self.per_region, 1)
        first, self.free_places = self.free_places, self.free_places + len(places)
        self._free[first : self.free_places] = np.sort(places)[::-1]

    def evict(self, count: int) -> Slots:
        """Have up to `count` blocks leave; their places, which are not free yet."""
        victims = self.policy.evict(min(count, len(self.index)), self._evictable)
        if victims is None:
            span = self.in_use()  # of all places there may be a hundred million
            held = (self.pins[span] > 0) & (self.states[span] == PlaceState.READY)
            evictable = len(self.index) - int(np.count_nonzero(held))
            victims = self.policy.evict(max(0, evictable), self._evictable)
        if victims is None or not victims.size:
            return np.zeros(0, np.int64)
        self.index.remove(victims)
        self.states[victims] = PlaceState.LEAVING
        return victims

    def coldest(self) -> int | None:
        """A place whose block is about to leave."""
        places = self.policy.coldest(1)
        return int(places[0]) if places.size else None

    # -- regions ----------------------------------------------------------------------------

    @property
    def may_grow(self) -> bool:
        """Whether it can have a further region."""
        return bool((self.regions == NO_REGION).any())

    def begin_with(self, regions: Slots) -> None:
        """Have these regions, in this order, at the start; none of their places is free yet."""
        self.regions[: len(regions)] = regions
        self._taken[: len(regions)] = self.per_region

    def add_region(self, region: int) -> None:
        """Its places are free."""
        number = int(np.flatnonzero(self.regions == NO_REGION)[0])
        self.regions[number] = region
        self._taken[number] = self.per_region
        self.free(self.places_of(number))

    def places_of(self, number: int) -> Slots:
        """All places of the region that has this number in the class."""
        return np.arange(number * self.per_region, (number + 1) * self.per_region)

    def empty_region(self) -> int | None:
        """The number of a region that holds nothing; of all there may be some ten thousand."""
        if self.free_places < self.per_region:
            return None
        empty = np.flatnonzero((self._taken == 0) & (self.regions != NO_REGION))
        return int(empty[0]) if empty.size else None

    def may_give_up(self, number: int) -> bool:
        """Whether nobody reads or writes in a region."""
        span = slice(number * self.per_region, (number + 1) * self.per_region)
        states = self.states[span]
        idle = (states == PlaceState.FREE) | (states == PlaceState.READY)
        return bool(idle.all()) and not self.pins[span].any()

    def give_up(self, number: int) -> int:
        """Let go of a region that it may give up; its number in the slab."""
        places = self.places_of(number)
        self.take_out(places[self.states[places] == PlaceState.READY])
        free = self._free[: self.free_places]
        kept = free[(free < places[0]) | (free > places[-1])]
        self.free_places = len(kept)
        self._free[: len(kept)] = kept
        self.states[places] = PlaceState.FREE
        self._taken[number] = 0
        region = int(self.regions[number])
        self.regions[number] = NO_REGION
        return region

    def give_up_all(self) -> Slots:
        """Let go of every region; their numbers in the slab. Nothing may be done with the class any
        more: who still walks through its places finds none in use."""
        held: Slots = self.regions[self.regions != NO_REGION]
        self.regions[:] = NO_REGION
        return held

    def offsets(self, places: Slots, region_bytes: int) -> Slots:
        """Where places begin, from the first region's beginning on."""
        numbers, within = np.divmod(places, self.per_region)
        offsets: Slots = self.regions[numbers] * region_bytes + within * self.stride
        return offsets

    def _capacity(self) -> int:
        return int((self.regions != NO_REGION).sum()) * self.per_region

    def _evictable(self, places: Slots) -> Bools:
        free: Bools = self.pins[places] == 0
        return free


__all__ = ["MAX_PLACES", "NOWHERE", "NO_REGION", "DiskSizeClass", "PlaceState"]
