"""Secondary tiers: what the machine knows of each, of its copies, and of what is sought there."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.core.in_turn import InTurn
from kvd.core.keys import (
    NO_SLOTS,
    U64,
    CopyId,
    MoverId,
    RequestId,
    RowId,
    ScopeName,
    SearchId,
    SessionId,
    Slots,
    TenantId,
    TierId,
)
from kvd.core.lifecycle import step
from kvd.core.model.admission import ReuseFilter
from kvd.core.model.by_deadline import ByDeadline
from kvd.core.model.by_patience import ByPatience
from kvd.core.model.job import Filling
from kvd.core.model.marks import TagMarks
from kvd.core.model.size_class import SizeClass

NO_MOVER = MoverId(0)
# Blocks that are sought below: some 250 bytes each. Beyond, they are misses.
MAX_SOUGHT_BLOCKS = 32_768  # of one session
MAX_TENANT_SOUGHT_BLOCKS = 131_072  # of all its sessions
SEARCH_BLOCKS = 8  # as so many counts a search, of some 2 KiB, until its request is forgotten
MAX_BEHIND_BLOCKS = 65_536  # of one tier, that are written when its copies end
MAX_SEARCHES = 128  # of one request, in one group: a lookup that misses new blocks begins one


class WriteWhen(enum.Enum):
    """When a block is written to a tier."""

    THROUGH = "as soon as it is stored"
    REUSE = "once it was used again"
    DEMOTION = "before its slot is needed for another"


class Reach(enum.IntEnum):
    """Where a tier's blocks are found; numbered as `Tier` of kvd.v1."""

    DISK = 2  # on this node
    CLUSTER = 3  # on every node that shares the tier


@dataclass(frozen=True, slots=True)
class TierTerms:
    """What is settled of one tier."""

    name: str
    reach: Reach = Reach.DISK
    write: WriteWhen = WriteWhen.THROUGH
    reuses: int = 2  # with REUSE: written when it is used for the n-th time
    tracker_blocks: int = 65536  # with REUSE: of which uses are counted
    seek_ns: int = 2_000_000_000  # what was not found and read by then is a miss
    max_write_bytes: int = 256 * 2**20  # of the pool, on their way to the tier


class TierState(enum.Enum):
    """Whether a tier has a process."""

    AWAY = "no process serves it, and no copy of it runs"
    SERVING = "copies and questions go to it"


TIER_STEPS: frozenset[tuple[TierState, TierState]] = frozenset(
    {(TierState.AWAY, TierState.SERVING), (TierState.SERVING, TierState.AWAY)}
)


@dataclass(slots=True, eq=False)
class TierCounters:
    """Blocks since the start, unless the name says otherwise."""

    hits: int = 0
    misses: int = 0
    promoted: int = 0
    promoted_bytes: int = 0
    failed_reads: int = 0
    unpromoted: int = 0  # found, but there was no room for them, or nobody waited any more
    written: int = 0
    written_bytes: int = 0
    failed_writes: int = 0
    dropped: int = 0  # gone from host memory and not written, since too much was on its way
    too_slow: int = 0  # not asked for, or held and not read: it would have come too late
    refused: int = 0  # not asked for, or held and not read, since its process had too much to do
    unanswered: int = 0  # asked for, and it did not say, or not in time


@dataclass(slots=True, eq=False)
class TenantShare:
    """Bytes or blocks that tenants share: each may have as many as are left for others."""

    taken: dict[str, int] = field(default_factory=dict)
    whole: int = 0

    def left(self, tenant: str, most: int) -> int:
        """How much the tenant may still take of so much."""
        return max(0, (most - self.whole - self.taken.get(tenant, 0)) // 2)

    def fits(self, tenant: str, most: int, each: int) -> int:
        """How many things of this size the tenant may still take of so much.

        One, however large, where it has none and others leave any: else it would never have one.
        """
        may_have_one = tenant not in self.taken and self.whole < most
        return self.left(tenant, most) // each or int(may_have_one)

    def count(self, tenant: str, change: int) -> None:
        """The tenant takes some, or (below 0) gives some back."""
        has = self.taken.get(tenant, 0) + change
        assert has >= 0, "more is given back than was taken"
        self.whole += change
        if has:
            self.taken[tenant] = has
        else:
            self.taken.pop(tenant, None)


@dataclass(slots=True, eq=False)
class TierPace:
    """How long a tier takes now: exponentially weighted means, and what is under way."""

    answer_ns: float = 0.0
    read_ns: float = 0.0
    reads: dict[CopyId, int] = field(default_factory=dict)  # when each began, the eldest first
    probe_ns: int = 0  # before that, nobody tries it though it is slow


class Late(NamedTuple):
    """Blocks that are yet to be written; `again`, though the tier had them when it was heard of."""

    owner: SizeClass
    slots: Slots
    again: bool


@dataclass(slots=True, eq=False)
class Tier:
    """What the machine knows of one tier."""

    tier: TierId
    terms: TierTerms
    state: TierState = TierState.AWAY
    mover: MoverId = NO_MOVER  # as which its process maps rows
    copies: dict[CopyId, TierCopy] = field(default_factory=dict)
    searches: dict[SearchId, Search] = field(default_factory=dict)  # that it was asked
    clearing: dict[str, None] = field(default_factory=dict)  # fingerprints, yet to be deleted
    reuse: ReuseFilter = field(init=False)
    writing: TenantShare = field(default_factory=TenantShare)
    behind: InTurn[str, Late] = field(default_factory=InTurn)  # of tenants
    behind_blocks: TenantShare = field(default_factory=TenantShare)
    pace: TierPace = field(default_factory=TierPace)  # for all; only told
    paces: dict[TenantId, TierPace] = field(default_factory=dict)  # by which it is asked or not
    counters: TierCounters = field(default_factory=TierCounters)
    told: TagMarks = field(default_factory=TagMarks)  # what watchers know that it holds
    doubted: deque[RowId] = field(default_factory=deque)  # whose slots may have its bit in vain

    def __post_init__(self) -> None:
        self.reuse = ReuseFilter(self.terms.reuses, self.terms.tracker_blocks)

    @property
    def is_serving(self) -> bool:
        return self.state is TierState.SERVING

    @property
    def bit(self) -> int:
        """Its bit in SlotTable.below."""
        return 1 << self.tier

    def move(self, new: TierState) -> None:
        """Take a step of the table."""
        self.state = step(TIER_STEPS, self.state, new)

    def pace_for(self, tenant: TenantId) -> TierPace:
        """How long it takes for what this tenant asks."""
        found = self.paces.get(tenant)
        if found is None:
            found = self.paces[tenant] = TierPace()
        return found

    def serves(self, fingerprint: str) -> bool:
        """Whether blocks of this namespace may be sought there, read and written."""
        return self.is_serving and fingerprint not in self.clearing


class CopyKind(enum.Enum):
    """Which way a tier's process copies."""

    WRITE = "from slots to the tier"
    READ = "from the tier to slots"


@dataclass(slots=True, eq=False)
class TierCopy(Filling):
    """Blocks of one scope that a tier's process copies; a read fills their slots."""

    copy: CopyId
    tier: Tier
    kind: CopyKind
    sought: Sought | None = None  # of a read: for whom
    places: Slots = field(default_factory=lambda: NO_SLOTS)  # and where there
    again: bool = False  # of a write: the tier had the blocks, as far as was heard

    @property
    def until_ns(self) -> int:
        """When nobody waits for a read any longer."""
        assert self.sought is not None, "a read is for somebody"
        return self.sought.until_ns

    @property
    def nbytes(self) -> int:
        return sum(len(part.slots) * part.size_class.block_bytes for part in self.parts)


class Belief(enum.IntEnum):
    """What is known of a block that is sought below."""

    ASKED = 1  # whether a tier holds it
    HELD = 2  # by a tier; not read yet
    ON_ITS_WAY = 3  # a promotion reads it
    ABSENT = 4  # no tier holds it, or it could not be read


@dataclass(slots=True, eq=False)
class Search:
    """Blocks of one group that a query misses in the pool; tiers are asked one after the other."""

    search: SearchId
    sought: Sought
    words: U64  # [n, width]
    places: Slots  # in the prompt, in blocks; ascending
    beliefs: npt.NDArray[np.uint8]
    holders: npt.NDArray[np.uint8]  # of what is HELD: the tier
    asked: Slots  # which of them the tier was asked, that it is with now
    to_ask: list[TierId]  # later
    asked_ns: int = 0  # when that tier was
    tries: TierId | None = None  # a tier that is slow, and is asked nevertheless
    deferred: int = 0  # bits of tiers that were silent, and are asked after the others


@dataclass(slots=True, eq=False)
class Sought:
    """What one request seeks below in one group."""

    session: SessionId
    request: RequestId
    owner: SizeClass
    name: ScopeName
    seed: int  # of the scope's tags
    is_prefix: bool  # of use only up to the first that is nowhere
    patience_ns: int  # of who asks: as long as the slowest of its tiers may take
    until_ns: int  # what is not there by then is a miss
    blocks: dict[int, tuple[Search, int]] = field(default_factory=dict)  # by tag
    searches: list[Search] = field(default_factory=list)
    cut: int | None = None  # place of the first block that is nowhere
    is_prefetch: bool = False  # by a hint: nobody waits for it, and no request's end ends it
    # Another node may be about to write what is not there: which tiers are asked again, which
    # searches wait for that, and when it is time.
    shared: tuple[TierId, ...] = ()
    waiting: list[Search] = field(default_factory=list)
    again_ns: int = 0
    wait_ns: int = 0
    is_over: bool = False  # forgotten; an answer is of no use any more


@dataclass(slots=True, eq=False)
class Stalled:
    """Requests that wait for room: of each tenant the first come first, and tenants in turn."""

    of: dict[str, OrderedDict[Sought, None]] = field(default_factory=dict)  # whose turn it is first

    def __len__(self) -> int:
        return sum(map(len, self.of.values()))

    def __iter__(self) -> Iterator[Sought]:
        return chain.from_iterable(self.of.values())

    def add(self, sought: Sought) -> None:
        """It waits."""
        self.of.setdefault(sought.owner.tenant.tenant, OrderedDict())[sought] = None

    def discard(self, sought: Sought) -> None:
        """It waits no longer, if it did."""
        tenant = sought.owner.tenant.tenant
        waiting = self.of.get(tenant, OrderedDict())
        waiting.pop(sought, None)
        if not waiting:
            self.of.pop(tenant, None)

    def take_of(self, tenant: str, most: int | None) -> list[Sought]:
        """The tenant's first ones; it is behind the others then. `most`: None takes all."""
        waiting: OrderedDict[Sought, None] = self.of.pop(tenant, OrderedDict())
        count = len(waiting) if most is None else min(most, len(waiting))
        taken = [waiting.popitem(last=False)[0] for _ in range(count)]
        if waiting:
            self.of[tenant] = waiting
        return taken

    def take_of_others(self, tenant: str, most: int | None) -> list[Sought]:
        """Likewise, of all tenants but this one in turn."""
        taken: list[Sought] = []
        while most is None or len(taken) < most:
            other = next((each for each in self.of if each != tenant), None)
            if other is None:
                break
            taken += self.take_of(other, 1)
        return taken


@dataclass(slots=True, eq=False)
class Below:
    """All tiers, in the order in which they are asked."""

    tiers: tuple[Tier, ...] = ()
    copies: dict[CopyId, TierCopy] = field(default_factory=dict)
    # Those of them that bring up and are not given up: `promoting` is of them.
    reading: ByDeadline[TierCopy] = field(default_factory=ByDeadline)
    promoting: TenantShare = field(default_factory=TenantShare)
    due: deque[Sought] = field(default_factory=deque)  # to be promoted, some an event
    stalled: Stalled = field(default_factory=Stalled)  # until promotions end
    lost: deque[TierCopy] = field(default_factory=deque)  # their tier's process has ended
    unanswered: deque[Search] = field(default_factory=deque)  # likewise
    expiring: ByPatience[Sought] = field(default_factory=ByPatience)
    sought_of: dict[str, int] = field(default_factory=dict)  # blocks and searches, by tenant
    next_search: int = 1
    next_copy: int = 1

    @property
    def in_doubt(self) -> bool:
        """Whether slots may have a tier's bit in vain."""
        return any(tier.doubted for tier in self.tiers)
