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
from dataclasses import dataclass

from kvd.core import actions as act
from kvd.core.keys import KeyBatch, NamespaceId, TenantId
from kvd.core.machine import Machine

KEPT_CHANGES = 16384  # batches, not blocks
KEPT_BLOCKS = 1 << 19  # of all kept batches: 16 MiB of hashes of 32 bytes
DELIVERY_CHANGES = 64  # most changes in one delivery
# A snapshot names every block, so few may be in memory: those who want one take turns.
SNAPSHOTS_AT_ONCE = 4


class ChangeKind(enum.Enum):
    STORED = 1
    REMOVED = 2
    CLEARED = 3


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Blocks of one (namespace, epoch, account, group); keys is None for CLEARED.

    It names the tenant, because the namespace may be forgotten when the change is delivered.
    """

    kind: ChangeKind
    tenant: TenantId
    namespace: NamespaceId
    epoch: str
    account: str
    group: int
    keys: KeyBatch | None


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """What a watcher gets: changes up to and including `sequence`."""

    sequence: int
    snapshot: bool
    snapshot_end: bool
    changes: tuple[Change, ...]


Wanted = Callable[[Change], bool]
Snapshot = Callable[[], Iterator[Change]]


def change_of(
    order: act.AnnounceStored | act.AnnounceRemoved | act.AnnounceCleared, tenant: TenantId
) -> Change:
    """What the core announced of a namespace of this tenant."""
    match order:
        case act.AnnounceCleared(namespace):
            return Change(ChangeKind.CLEARED, tenant, namespace, "", "", 0, None)
        case act.AnnounceStored(namespace, epoch, account, group, keys):
            return Change(ChangeKind.STORED, tenant, namespace, epoch, account, group, keys)
        case act.AnnounceRemoved(namespace, epoch, account, group, keys):
            return Change(ChangeKind.REMOVED, tenant, namespace, epoch, account, group, keys)


def resident_changes(machine: Machine) -> Iterator[Change]:
    """Every readable block, as if it had just been stored."""
    for figures in machine.statistics().namespaces:
        number, tenant = figures.namespace, figures.tenant
        for epoch, account, group, keys in machine.resident(number):
            yield Change(ChangeKind.STORED, tenant, number, epoch, account, group, keys)


class EventLog:
    """One writer, many watchers, all on one event loop."""

    def __init__(self, incarnation: bytes, snapshot: Snapshot, kept: int = KEPT_CHANGES) -> None:
        self.incarnation = incarnation
        self.sequence = 0  # of the newest change
        self._snapshot = snapshot
        self._kept: deque[Change] = deque()
        self._most_kept = kept
        self._blocks = 0  # in the kept changes
        self._news = asyncio.Event()
        self._turns = asyncio.Semaphore(SNAPSHOTS_AT_ONCE)

    def append(self, change: Change) -> None:
        """Number the change and wake the watchers."""
        self.sequence += 1
        self._kept.append(change)
        self._blocks += _blocks_of(change)
        while len(self._kept) > self._most_kept or self._blocks > KEPT_BLOCKS:
            self._blocks -= _blocks_of(self._kept.popleft())
        self._news.set()

    async def watch(
        self, after: tuple[bytes, int] | None, wanted: Wanted
    ) -> AsyncGenerator[Delivery, None]:
        """Changes after a place in the log, else a snapshot and then its tail. Never ends.

        A watcher that falls further behind than the kept tail gets a new snapshot. It must
        take a snapshot swiftly, because others wait for their turn, and close what it leaves.
        """
        cursor = -1
        if after is not None and after[0] == self.incarnation and after[1] <= self.sequence:
            cursor = after[1]
        while True:
            if cursor < self.sequence - len(self._kept):
                async with self._turns:
                    cursor = self.sequence
                    deliveries = self._snapshot_deliveries(wanted)
                    while deliveries:
                        yield deliveries.popleft()  # and keep nothing of it while it is written
                continue
            if cursor == self.sequence:
                await self._wait_for_news()
                continue
            start, cursor = cursor, min(cursor + DELIVERY_CHANGES, self.sequence)
            yield self._tail_delivery(start, wanted)

    async def _wait_for_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _tail_delivery(self, cursor: int, wanted: Wanted) -> Delivery:
        first_kept = self.sequence - len(self._kept)
        start = cursor - first_kept
        stop = min(start + DELIVERY_CHANGES, len(self._kept))
        changes = [self._kept[i] for i in range(start, stop)]
        return Delivery(
            sequence=first_kept + stop,
            snapshot=False,
            snapshot_end=False,
            changes=tuple(c for c in changes if wanted(c)),
        )

    def _snapshot_deliveries(self, wanted: Wanted) -> deque[Delivery]:
        """The blocks resident now, taken at once so that the tail fits on without a gap."""
        changes = [c for c in self._snapshot() if wanted(c)]
        pieces = [
            tuple(changes[i : i + DELIVERY_CHANGES])
            for i in range(0, len(changes), DELIVERY_CHANGES)
        ] or [()]
        last = len(pieces) - 1
        return deque(
            Delivery(self.sequence, snapshot=True, snapshot_end=i == last, changes=piece)
            for i, piece in enumerate(pieces)
        )


def _blocks_of(change: Change) -> int:
    return 0 if change.keys is None else len(change.keys)
