"""The ordered, resumable record of what became readable and what went.

Changes carry sequence numbers without gaps. A watcher that comes back within the kept tail
goes on where it stopped; any other begins with a snapshot. Kept in memory only: an incarnation
has its own log, and its name tells a watcher that the old numbers mean nothing any more.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace

from kvd.core import actions as act
from kvd.core.keys import KeyBatch, NamespaceId, TenantId, TierId
from kvd.core.machine import Machine
from kvd.core.model.tiers import TierTerms
from kvd.runtime.turns import FairQueue

KEPT_CHANGES = 16384  # batches, not blocks
KEPT_BLOCKS = 1 << 19  # of all kept batches: 16 MiB of hashes of 32 bytes
DELIVERY_CHANGES = 64  # most changes in one delivery


class ChangeKind(enum.Enum):
    """What happened to the blocks of a change."""

    STORED = 1
    REMOVED = 2
    CLEARED = 3
    TIER_LOST = 4
    RIGHTS = 5  # nothing: others may see them than before. No watcher hears of it


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What happened to blocks of one (namespace, epoch, account, group); CLEARED has no keys.

    It names the tenant, because the namespace may be forgotten when the change is delivered. `tier`
    holds the blocks, or held them; None: host memory. TIER_LOST concerns all that it holds.
    """

    kind: ChangeKind
    tenant: TenantId
    namespace: NamespaceId
    epoch: str
    account: str
    group: int
    keys: KeyBatch | None
    tier: TierTerms | None = None


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class ChangeFilter:
    """What a watcher gets: changes of these namespaces, and whether those of tiers, too.

    `has_grown`: whether there are namespaces among them that were none when it was last asked.
    """

    namespaces: Callable[[TenantId, NamespaceId], bool]
    with_tiers: bool = False
    has_grown: Callable[[], bool] = _never

    def __call__(self, change: Change) -> bool:
        if change.tier is not None and not self.with_tiers:
            return False
        if change.kind is ChangeKind.RIGHTS:
            return False
        if change.kind is ChangeKind.TIER_LOST:
            return True
        return self.namespaces(change.tenant, change.namespace)


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """What a watcher gets: changes up to and including `sequence`."""

    sequence: int
    snapshot: bool
    snapshot_end: bool
    changes: tuple[Change, ...]


# The blocks resident in the wanted namespaces, piece by piece, each as it is when it is taken.
Snapshot = Callable[[ChangeFilter], Iterator[tuple[Change, ...]]]


class FellBehind(Exception):
    """A watcher took so long over its snapshot that the changes since then are not kept."""


Announcement = act.AnnounceStored | act.AnnounceRemoved | act.AnnounceCleared | act.AnnounceTierLost


def change_of(
    order: Announcement,
    tenant_of: Callable[[NamespaceId], TenantId],
    terms_of: Callable[[TierId], TierTerms],
) -> Change:
    """What the core announced."""
    match order:
        case act.AnnounceTierLost(tier):
            lost, nobody = ChangeKind.TIER_LOST, TenantId("")
            return Change(lost, nobody, NamespaceId(0), "", "", 0, None, terms_of(tier))
        case act.AnnounceCleared(namespace):
            cleared = ChangeKind.CLEARED
            return Change(cleared, tenant_of(namespace), namespace, "", "", 0, None)
        case act.AnnounceStored(namespace, epoch, account, group, keys, below):
            kind = ChangeKind.STORED
        case act.AnnounceRemoved(namespace, epoch, account, group, keys, below):
            kind = ChangeKind.REMOVED
    terms = None if below is None else terms_of(below)
    return Change(kind, tenant_of(namespace), namespace, epoch, account, group, keys, terms)


def resident_changes(machine: Machine, wanted: ChangeFilter) -> Iterator[tuple[Change, ...]]:
    """Every readable block that is wanted, as if it had just been stored; in pieces.

    There may be none in a piece: others have a turn after each.
    """
    for number in machine.namespaces():
        tenant = machine.tenant_of(number)
        if tenant is None or not wanted.namespaces(tenant, number):
            continue
        for piece in machine.resident(number, with_tiers=wanted.with_tiers):
            yield tuple(
                Change(
                    ChangeKind.STORED,
                    tenant,
                    number,
                    epoch,
                    account,
                    group,
                    keys,
                    None if tier is None else machine.terms_of(tier),
                )
                for epoch, account, group, keys, tier in piece
            )


class EventLog:
    """The changes that watchers are told of. One writer, many watchers, all on one event loop."""

    def __init__(self, incarnation: bytes, snapshot: Snapshot, turns: FairQueue) -> None:
        self.incarnation = incarnation
        self.sequence = 0  # of the newest change
        self._snapshot = snapshot
        self._kept: deque[Change] = deque()
        self._blocks = 0  # in the kept changes
        self._rights_changed_at = 0  # the change that says so
        self._news = asyncio.Event()
        self._turns = turns

    def append(self, change: Change) -> None:
        """Number the change and wake the watchers."""
        self.sequence += 1
        self._kept.append(change)
        self._blocks += _blocks_of(change)
        while len(self._kept) > KEPT_CHANGES or self._blocks > KEPT_BLOCKS:
            self._blocks -= _blocks_of(self._kept.popleft())
        self._news.set()

    def rights_changed(self) -> None:
        """Others may see a namespace than before: some watchers lack what was there already.

        It has a number of its own, by which a place from before it differs from one behind it.
        """
        nobody = TenantId("")
        self.append(Change(ChangeKind.RIGHTS, nobody, NamespaceId(0), "", "", 0, None))
        self._rights_changed_at = self.sequence

    async def watch(
        self, after: tuple[bytes, int] | None, wanted: ChangeFilter, user: int = 0
    ) -> AsyncGenerator[Delivery, None]:
        """Changes after a place in the log, else a snapshot and then its tail. Never ends.

        A watcher that falls further behind than the kept tail gets a new snapshot; FellBehind
        where that happens within one. So does one that may see more than before. Nobody waits for
        a watcher that takes its time.
        """
        cursor = -1
        if (
            after is not None
            and after[0] == self.incarnation
            and self._rights_changed_at <= after[1] <= self.sequence
        ):
            cursor = after[1]
        while True:
            if wanted.has_grown() or cursor < self._first_kept:
                async for delivery in self._snapshot_deliveries(wanted, user):
                    cursor = delivery.sequence
                    yield delivery
                    del delivery  # the next may be long in coming
                continue
            if cursor == self.sequence:
                await self._wait_for_news()
                await self._turns.let_others_in(user)  # one change wakes every watcher
                continue
            delivery = self._tail_delivery(cursor, wanted)
            cursor = delivery.sequence
            yield delivery
            del delivery
            if cursor < self.sequence:
                await self._turns.let_others_in(user)

    @property
    def _first_kept(self) -> int:
        """The number behind which every change is kept."""
        return self.sequence - len(self._kept)

    async def _wait_for_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _tail_delivery(self, cursor: int, wanted: ChangeFilter) -> Delivery:
        start = cursor - self._first_kept
        stop = min(start + DELIVERY_CHANGES, len(self._kept))
        changes = [self._kept[i] for i in range(start, stop)]
        return Delivery(
            sequence=cursor + stop - start,
            snapshot=False,
            snapshot_end=False,
            changes=tuple(c for c in changes if wanted(c)),
        )

    async def _snapshot_deliveries(
        self, wanted: ChangeFilter, user: int
    ) -> AsyncGenerator[Delivery, None]:
        """The resident blocks piece by piece, then what changed meanwhile.

        What a piece could not know stands among those changes, so that all of them, one after
        the other, make what is resident at the end. Whoever may see more by then gets another
        snapshot: of what was taken away and given back meanwhile, it has not heard all. The one
        before ends where nobody goes on from. Whoever may see less hears no more of it, from any
        piece.
        """

        def piece(changes: tuple[Change, ...]) -> Delivery:
            still = tuple(filter(wanted, changes))
            return Delivery(began, snapshot=True, snapshot_end=False, changes=still)

        has_grown = True
        while has_grown:
            has_grown = False
            cursor = began = self.sequence
            last: tuple[Change, ...] = ()  # held back: it may be the snapshot's end
            for changes in self._snapshot(wanted):
                has_grown |= wanted.has_grown()
                if changes and last:
                    yield piece(last)
                last = changes or last
                del changes
                await self._turns.let_others_in(user)
            while cursor < self.sequence:
                if cursor < self._first_kept:
                    raise FellBehind
                has_grown |= wanted.has_grown()
                tail = self._tail_delivery(cursor, wanted)
                cursor = tail.sequence
                if tail.changes:
                    yield piece(last)
                    last = tail.changes
                await self._turns.let_others_in(user)
            has_grown |= wanted.has_grown()
            end = self._rights_changed_at - 1 if has_grown else cursor
            yield replace(piece(last), sequence=end, snapshot_end=True)


def _blocks_of(change: Change) -> int:
    return 0 if change.keys is None else len(change.keys)
