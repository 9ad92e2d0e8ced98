"""What became of blocks that are not there: the last that was decided of each, some of a tenant's.

Whoever frees a block, or does not store one, notes its tag and why: two copies into a ring, and one
line for all blocks of an event. A tenant has a ring of its own, as far as there are
MAX_GONE_SHARES, and the others have one together: what one tenant churns through makes nobody else
forget. A ring is searched only where somebody wants to know why a request missed.
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvd.core.keys import U32, U64, NamespaceId, Slots, TenantId
from kvd.core.model.reuse import ReuseSample
from kvd.core.model.slots import SECONDS_A_STAMP, STAMP_SHIFT, coarse_stamp
from kvd.core.told import ToldRequest

MAX_GONE_BLOCKS = 1 << 17  # that a share remembers
MAX_GONE_NOTES = 1 << 14  # events that made blocks go, of a share
MAX_GONE_SHARES = 8  # tenants with a share of their own
MAX_REQUESTS_RECALLED = 1024  # of a share
AGES_OF_EVICTION = (1, 10, 60, 300, 900, 3600, 14400, 86400)  # upper bounds of a histogram

_AGE_BOUNDS = np.array([age / SECONDS_A_STAMP for age in AGES_OF_EVICTION])
_LOW = 1 << 16
AGES_ONE_IN = 8  # whose age is looked at
COUNTED_AT_ONCE = 1 << 14  # blocks, where no tick comes before
_NO_REASON = ""
NOBODY = NamespaceId(0)


class Fate(enum.IntEnum):
    """Why a block is not there."""

    EVICTED = 1  # for a block of the same tenant
    ROW_TAKEN = 2  # its memory was given to another group, of whatever tenant
    QUOTA_LOWERED = 3
    CLEARED = 4  # by an operator
    UNUSABLE = 5  # its epoch or namespace was of use to nobody any more
    DAMAGED = 6  # its bytes were not those that were stored
    FILTERED = 7  # not stored: seen too few times
    REFUSED = 8  # not stored: see the reason
    FAILED = 9  # its copy failed: see the reason


@dataclass(frozen=True, slots=True)
class WhyGone:
    """Why blocks are not there."""

    fate: Fate
    reason: str = ""  # of docs/errors.md, where they were refused or failed
    by: NamespaceId = NOBODY  # whose blocks took their place


@dataclass(frozen=True, slots=True)
class Cause:
    """What became of a block before a request asked for it."""

    why: WhyGone
    before_s: float  # how long before the request
    unused_s: float  # for how long nobody had used it, then


@dataclass(slots=True, eq=False)
class Recalled:
    """A request that a client told of, and how things stood then."""

    told: ToldRequest
    tenant: TenantId
    namespace: NamespaceId
    epoch: str
    at_ns: int
    engine: str = ""
    hash_bytes: int = 0  # of its namespace's keys
    tag: int = 0  # of the first block that was not found; 0: none, or nobody opened its scope
    gone_before: int = 0  # how many blocks its share had noted
    epoch_entered_ns: int | None = None  # by a cache reset, in this session
    cleared_ns: int | None = None  # the namespace, the last time before
    cause: Cause | None = None
    is_open: bool = True  # the ring was not searched for it yet


@dataclass(slots=True, eq=False)
class GoneRing:
    """What is remembered for one tenant, or for those without a share of their own.

    Blocks stand in a ring by the order in which they went, and what they have in common in another
    one, with the number of the first of them.
    """

    requests: deque[Recalled] = field(default_factory=lambda: deque(maxlen=MAX_REQUESTS_RECALLED))
    tags: U64 = field(default_factory=lambda: np.zeros(MAX_GONE_BLOCKS, dtype=np.uint64))
    used: U32 = field(default_factory=lambda: np.zeros(MAX_GONE_BLOCKS, dtype=np.uint32))
    firsts: array[int] = field(default_factory=lambda: array("q", bytes(8 * MAX_GONE_NOTES)))
    stamps: array[int] = field(default_factory=lambda: array("q", bytes(8 * MAX_GONE_NOTES)))
    codes: array[int] = field(default_factory=lambda: array("q", bytes(8 * MAX_GONE_NOTES)))
    blocks: int = 0  # that were noted, in all
    notes: int = 0  # likewise
    counted: int = 0  # of the blocks, in sums
    searched: int = 0  # of the blocks, when somebody last asked
    is_late: bool = False  # its tenant may have had blocks before

    @property
    def is_whole(self) -> bool:
        """Nothing was forgotten yet."""
        fits = self.blocks <= MAX_GONE_BLOCKS and self.notes <= MAX_GONE_NOTES
        return fits and not self.is_late

    @property
    def oldest(self) -> int:
        """The number of the first block that is remembered."""
        first = max(0, self.blocks - MAX_GONE_BLOCKS)
        if self.notes > MAX_GONE_NOTES:
            first = max(first, self.firsts[self.notes % MAX_GONE_NOTES])
        return first

    def put(self, tags: U64, used: U32 | np.uint32, stamp: int, code: int) -> None:
        """These blocks went at this time, for this cause; the oldest are forgotten."""
        last = (self.notes - 1) % MAX_GONE_NOTES
        if not self.notes or self.stamps[last] != stamp or self.codes[last] != code:
            place = self.notes % MAX_GONE_NOTES
            self.firsts[place] = self.blocks
            self.stamps[place] = stamp
            self.codes[place] = code
            self.notes += 1
        start = self.blocks % MAX_GONE_BLOCKS
        end = start + len(tags)
        self.blocks += len(tags)
        if end <= MAX_GONE_BLOCKS:
            self.tags[start:end] = tags
            self.used[start:end] = used
        else:
            places = np.arange(start, end) % MAX_GONE_BLOCKS
            self.tags[places] = tags
            self.used[places] = used

    def notes_of(self, numbers: Slots) -> Slots:
        """The place of the note that each of these blocks belongs to; they are remembered."""
        first = max(0, self.notes - MAX_GONE_NOTES)
        places = np.arange(first, self.notes) % MAX_GONE_NOTES
        firsts = np.frombuffer(self.firsts, dtype=np.int64)[places]
        found: Slots = places[np.searchsorted(firsts, numbers, side="right") - 1]
        return found

    def notes_of_run(self, number: int, count: int) -> tuple[Slots, Slots, Slots]:
        """Of so many blocks from this one on: how many each note has, its time and its code."""
        end = number + count
        last = self.notes
        while self.firsts[(last - 1) % MAX_GONE_NOTES] >= end:
            last -= 1
        first = last - 1
        while self.firsts[first % MAX_GONE_NOTES] > number:
            first -= 1
        places = np.arange(first, last) % MAX_GONE_NOTES
        firsts = np.maximum(np.frombuffer(self.firsts, dtype=np.int64)[places], number)
        stamps = np.frombuffer(self.stamps, dtype=np.int64)[places]
        codes = np.frombuffer(self.codes, dtype=np.int64)[places]
        counts = np.empty_like(firsts)
        np.subtract(firsts[1:], firsts[:-1], out=counts[:-1])
        counts[-1] = end - firsts[-1]
        return counts, stamps, codes


class GoneBlocks:
    """What is remembered of all tenants, and what is counted of it."""

    def __init__(self, reuse: ReuseSample) -> None:
        self.shares: dict[TenantId, GoneRing] = {}
        self.others: GoneRing | None = None
        self.ages = np.zeros(len(AGES_OF_EVICTION) + 1, dtype=np.int64)  # evicted blocks
        self.age_sum_s = 0.0
        self._reuse = reuse
        self._reasons: list[str] = [_NO_REASON]
        self._has_forgotten = False  # a tenant

    def note(
        self, tenant: TenantId, tags: U64, used: U32 | None, cause: WhyGone, now_ns: int
    ) -> None:
        """These blocks are not there from now on. `used`: stamps of their last uses; None: now."""
        share = self.shares.get(tenant) or self.share_of(tenant)
        stamp = now_ns >> STAMP_SHIFT
        code = cause.fate | cause.by << 16
        if cause.reason:
            code |= self._number(cause.reason) << 8
        share.put(tags, coarse_stamp(now_ns) if used is None else used, stamp, code)
        if share.blocks - share.counted >= COUNTED_AT_ONCE:
            self._count(share)

    def _number(self, reason: str) -> int:
        if reason not in self._reasons:
            self._reasons.append(reason)
        return self._reasons.index(reason)

    def share_of(self, tenant: TenantId) -> GoneRing:
        """The tenant's own, or that of all others."""
        share = self.shares.get(tenant)
        if share is None and len(self.shares) < MAX_GONE_SHARES:
            is_late = self._has_forgotten or self.others is not None
            share = self.shares[tenant] = GoneRing(is_late=is_late)
        if share is None:
            share = self.others = self.others or GoneRing()
        return share

    def forget(self, tenant: TenantId) -> None:
        """The tenant is no more: its own share is another's to have. What went stays counted."""
        share = self.shares.pop(tenant, None)
        if share is not None:
            self._has_forgotten = True
            self._count(share)

    def all_shares(self) -> list[GoneRing]:
        """Of tenants, and of the others."""
        return [*self.shares.values(), *([self.others] if self.others is not None else [])]

    def count(self) -> None:
        """Bring the sums up to date."""
        for share in self.all_shares():
            if share.blocks > share.counted:
                self._count(share)

    def _count(self, share: GoneRing) -> None:
        """Take what went since the last time to the sums."""
        if share.requests and share.blocks - share.searched > MAX_GONE_BLOCKS // 2:
            self.search(share)  # before what they ask for is forgotten
        first, share.counted = max(share.counted, share.oldest), share.blocks
        while first < share.blocks:
            start = first % MAX_GONE_BLOCKS
            count = min(share.blocks - first, MAX_GONE_BLOCKS - start)
            self._count_run(share, first, count)
            first += count

    def _count_run(self, share: GoneRing, first: int, count: int) -> None:
        """So many blocks from this one on, which lie one behind the other."""
        run = slice(first % MAX_GONE_BLOCKS, first % MAX_GONE_BLOCKS + count)
        tags, used = share.tags[run], share.used[run]
        counts, stamps, codes = share.notes_of_run(first, count)
        are_evicted = codes & 0xFF <= Fate.QUOTA_LOWERED
        of_each = np.repeat(stamps, counts)
        if not are_evicted.all():
            chosen = np.repeat(are_evicted, counts)
            tags, used, of_each = tags[chosen], used[chosen], of_each[chosen]
        if not len(tags):
            return
        self._reuse.evicted(tags, of_each)
        ages = _stamps_between(used[::AGES_ONE_IN], of_each[::AGES_ONE_IN])
        found = np.bincount(np.searchsorted(_AGE_BOUNDS, ages), minlength=len(self.ages))
        # What one stands for: together as many as there are.
        self.ages += found * AGES_ONE_IN
        self.ages[int(np.argmax(found))] += len(tags) - int(found.sum()) * AGES_ONE_IN
        self.age_sum_s += float(ages.mean()) * SECONDS_A_STAMP * len(tags)

    def search(self, share: GoneRing) -> None:
        """Find out what became of the block of every request that was told since the last time."""
        share.searched = share.blocks
        asked = [each for each in share.requests if each.is_open]
        for each in asked:
            each.is_open = False
        asked = [each for each in asked if each.tag]
        if not asked or not share.blocks:
            return
        wanted, whose = np.unique(np.array([e.tag for e in asked], np.uint64), return_inverse=True)
        numbers, runs = _went(share, wanted)
        last: list[tuple[Recalled, int]] = []
        for each, number in zip(asked, whose.tolist(), strict=True):
            # One block may stand there 100,000 times: only the last one before the request counts.
            run = numbers[runs[number] : runs[number + 1]]
            if before := int(run.searchsorted(each.gone_before)):
                last.append((each, int(run[before - 1])))
        notes = share.notes_of(np.array([number for _, number in last], dtype=np.int64))
        for (each, number), note in zip(last, notes.tolist(), strict=True):
            self._blame(each, share, number, note)

    def _blame(self, each: Recalled, share: GoneRing, number: int, note: int) -> None:
        stamp, code = share.stamps[note], share.codes[note]
        before = (each.at_ns >> STAMP_SHIFT) - stamp
        unused = _stamps_between(share.used[number % MAX_GONE_BLOCKS], stamp)
        each.cause = Cause(
            WhyGone(Fate(code & 0xFF), self._reasons[code >> 8 & 0xFF], NamespaceId(code >> 16)),
            before * SECONDS_A_STAMP,
            float(unused) * SECONDS_A_STAMP,
        )


def _went(share: GoneRing, wanted: U64) -> tuple[Slots, list[int]]:
    """Numbers of the blocks with these tags, which are sorted: by tag, then in the order in which
    they went; and where the run of each tag begins, and the last one ends.
    """
    table = np.zeros(_LOW, dtype=np.bool_)
    table[wanted & np.uint64(_LOW - 1)] = True
    low: npt.NDArray[np.uint16] = share.tags.view("<u2")[::4]  # of x86-64, as all of kvd
    places = np.flatnonzero(table[low])
    which = np.minimum(wanted.searchsorted(share.tags[places]), len(wanted) - 1)
    right = share.tags[places] == wanted[which]
    places, which = places[right], which[right].astype(np.uint16)
    numbers = share.blocks - 1 - (share.blocks - 1 - places) % MAX_GONE_BLOCKS
    known = numbers >= share.oldest
    numbers, which = numbers[known], which[known]
    order = np.argsort(numbers)
    order = order[np.argsort(which[order], kind="stable")]
    return numbers[order], [0, *np.cumsum(np.bincount(which, minlength=len(wanted))).tolist()]


def _stamps_between(used: npt.ArrayLike, stamps: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """From coarse times of 32 bits to whole ones."""
    return (np.asarray(stamps, np.int64) - np.asarray(used, np.int64)) & 0xFFFFFFFF
