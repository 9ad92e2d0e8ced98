"""A driver as large as any, for `slowest_event`, and the time of every event that it was given."""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np

from kvd.core import actions, events, keys
from kvd.core.machine import Machine, MachineConfig
from kvd.core.model.tiers import TierTerms
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd.observability.metrics import Metrics
from kvd.pool import Pool, PoolConfig
from kvd.runtime.batching import run_pieces
from kvd.runtime.driver import Driver, OpenSessionRecord
from kvd.runtime.probes import native_probes
from kvd.runtime.tiers import TierOrder
from kvd_proto.groups import GroupKind
from kvd_proto.limits import MAX_GROUPS

# What `kvd.core.upkeep.chores` has, in the order of their turns.
CHORES = (
    "copies",
    "leases",
    "requests of sessions that are over",
    "leases that expired",
    "copies that are late",
    "movers of sessions that linger",
    "clears",
    "quotas",
    "rows",
    "epochs",
    "namespaces",
    "promotions",
    "copies of lost tiers",
    "searches of lost tiers",
    "doubted rows of tiers",
)

HASH_BYTES = 32
EXTENT_BYTES = 64 << 20
BLOCK_BYTES = {"small": 4096, "large": 2 << 20}
Ordered = TypeVar("Ordered", bound=TierOrder)
TENANTS = 16  # but for that of most blocks: one alone would have used its share of scopes


@dataclass(frozen=True)
class Scale:
    """How much there is of everything."""

    blocks: int = 1_000_000
    accounts: int = 20_000
    namespaces: int = 1_000
    live: int = 63  # of those, the ones of `groups` groups with a session each
    known_of_groups: int = 512  # of those without a session, the ones of `groups` groups
    groups: int = MAX_GROUPS
    leases: int = 16_384
    jobs: int = 1024  # of a session that dies


@dataclass(frozen=True)
class Shape:
    """Sizes that follow from how much there is, and from the bytes of a block."""

    name: str
    scale: Scale

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES[self.name]

    @property
    def slots_per_row(self) -> int:
        return EXTENT_BYTES // self.block_bytes

    @property
    def extents(self) -> int:
        """A row for each class that stores anything, and those of the many blocks."""
        rows = -(-self.scale.blocks // self.slots_per_row)
        return rows + (self.scale.live + 8) * self.scale.groups

    def spec(
        self, name: str, groups: int, tenant: str = "", *, unshared: bool = False
    ) -> NamespaceSpec:
        """A namespace of the tenant, or of the one of TENANTS that its name falls to."""
        tenant = tenant or f"tenant-{zlib.crc32(name.encode()) % TENANTS}"
        size = self.block_bytes if groups == 1 else BLOCK_BYTES["large"]
        group = GroupSpec(GroupKind.FULL_ATTENTION, 1, (size,))
        whole = (group,) * groups
        return NamespaceSpec(name, keys.TenantId(tenant), HASH_BYTES, whole, unshared=unshared)


class SilentFleet:
    """Movers that are told and never answer: the benchmark answers for them."""

    def __init__(self) -> None:
        self.started: dict[int, actions.StartTransfer] = {}

    def start_transfer(self, order: actions.StartTransfer) -> None:
        self.started[order.transfer] = order

    def knows_rows(self, _mover: keys.MoverId) -> bool:
        """They are told of none."""
        return True

    def carry_out(self, order: object) -> None:
        """A frame that goes nowhere."""

    def map_row(self, order: actions.GrantRow) -> None:
        """The same."""


class SilentTiers:
    """Tiers that are ordered and never answer, likewise."""

    def __init__(self) -> None:
        self.orders: list[TierOrder] = []

    def carry_out(self, order: TierOrder) -> None:
        self.orders.append(order)

    def take(self, kind: type[Ordered]) -> list[Ordered]:
        """Orders of this kind, which are answered now."""
        taken: list[Ordered] = [each for each in self.orders if isinstance(each, kind)]
        self.orders = [order for order in self.orders if not isinstance(order, kind)]
        return taken

    def maps_as(self, _mover: keys.MoverId) -> bool:
        """They map nothing."""
        return False

    def scopes_cleared(self, namespace: keys.NamespaceId) -> None:
        """Noted nowhere."""


class SilentSink:
    """A session's stream that nobody reads."""

    def job_ended(self, order: actions.EndJob) -> None:
        """Told to nobody."""

    def rank_lost(self, rank: int, reason: str) -> None:
        """Told to nobody."""


class LoneDriver(Driver):
    """One that publishes rooms when it is told to, and says which events follow from others."""

    asked: events.Event | None = None
    timed: Callable[[str, Callable[[], Any]], Any]

    def _handle(self, event: events.Event) -> Any:
        handle = partial(super()._handle, event)
        if self.asked is None or event is self.asked:
            return handle()
        return self.timed(f"{type(event).__name__}, of another", handle)

    def publish_rooms(self) -> None:
        """What it does in a turn of its own after an event."""
        self._publish_rooms()

    def _schedule_rooms(self) -> None:
        self._rooms_stale = True

    def _schedule_room_turn(self) -> None:
        """The next event's turn goes on."""

    def _schedule_work(self) -> None:
        """It goes on when it is told to."""


class LateClock:
    """Goes on by as much as it is told to."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns


class Rig:
    """A driver in the wanted state, and the time of every event that it was given."""

    def __init__(self, shape: Shape, policy: str, directory: Path) -> None:
        self.shape = shape
        self.policy = policy
        self.directory = directory
        self.fleet = SilentFleet()
        self.tiers = SilentTiers()
        self.clock = LateClock()
        self.processor: dict[str, list[float]] = defaultdict(list)
        self.wall: dict[str, list[float]] = defaultdict(list)
        self.sessions = 0
        self.movers = 0
        self.jobs = 0
        self.keys = 0
        self.last = 0  # the first of the keys that were stored last
        self.silent = True
        self._start()

    def _start(self) -> None:
        self.pool = Pool.open(
            PoolConfig(self.directory / "pool", self.shape.extents * EXTENT_BYTES, EXTENT_BYTES),
            lambda _done, _total: None,
        )
        config = MachineConfig(
            self.shape.extents,
            EXTENT_BYTES,
            policy=self.policy,
            tag_secret=self.pool.tag_secret,
            tiers=(TierTerms("tier"),),
        )
        self.machine = Machine(config, native_probes())
        self.driver = LoneDriver(self.machine, self.pool, Metrics("rig"), self.clock)
        self.driver.timed = self.timed
        self.driver.fleet = self.fleet  # type: ignore[assignment]
        self.driver.tiers = self.tiers  # type: ignore[assignment]
        self.driver.on_broken_invariant = lambda *_: None

    def close_pool(self) -> None:
        """End without a word to anybody, as a daemon that is killed."""
        self.pool.close()

    def restart(self) -> None:
        """End, and have another driver read back what is in the pool."""
        self.close_pool()
        self.fleet.started.clear()
        self._start()
        assert not self.pool.cold_reason, self.pool.cold_reason
        self.sessions = self.movers = 0
        with mock.patch.object(self.driver, "call", self.call):
            self.timed("driver.recover, all events", lambda: list(self.driver.recover()))

    def timed(self, kind: str, work: Callable[[], Any]) -> Any:
        """Do the work and note what it took."""
        began = time.perf_counter(), time.thread_time()
        done = work()
        self._note(kind, *began)
        return done

    def _note(self, kind: str, began: float, worked: float) -> None:
        spent = time.thread_time() - worked
        if not self.silent:
            self.processor[kind].append(1000 * spent)
            self.wall[kind].append(1000 * (time.perf_counter() - began))

    def call(self, event: events.Event, kind: str = "") -> Any:
        """Have the driver handle the event, and publish rooms as it does after every turn."""
        name = type(event).__name__
        began = time.perf_counter(), time.thread_time()
        self.driver.asked = event
        try:
            done = Driver.call(self.driver, event)
        finally:
            self.driver.asked = None
        if isinstance(event, events.WorkContinued):
            kind = CHORES[self.machine.state.backlog.turn]
        self._note(name + (f", {kind}" if kind else ""), *began)
        if not self.silent:
            self.timed("rooms", self.driver.publish_rooms)
        return done

    def open(self, spec: NamespaceSpec, kind: str = "", epoch: str = "") -> keys.SessionId:
        """A session with one rank."""
        self.sessions += 1
        session = keys.SessionId(self.sessions)
        accepted = self.call(events.SessionOpened(session, spec, epoch, 1), kind)
        record = OpenSessionRecord(accepted.namespace, SilentSink(), 0)
        self.driver.sessions[session] = record
        return session

    def attach(self, session: keys.SessionId) -> keys.MoverId:
        self.movers += 1
        mover = keys.MoverId(self.movers)
        self.call(events.RankAttached(session, mover, 0, 0, True))
        return mover

    def close(self, session: keys.SessionId, kind: str = "", *, gone: bool = True) -> None:
        self.call(events.SessionClosed(session, gone), kind)
        self.driver.sessions.pop(session)

    def fresh_keys(self, count: int) -> keys.KeyBatch:
        """Keys that nobody has seen."""
        self.keys += count
        return numbered_keys(self.keys - count, count)

    def store(
        self, session: keys.SessionId, runs: tuple[events.Run, ...], kind: str, account: str = ""
    ) -> None:
        """Store these in pieces, as the driver does; the copies' ends are still to be told."""
        self.jobs += 1
        context = events.RequestContext(keys.RequestId(f"r{self.jobs}"), account=account)
        job = keys.JobId(self.jobs)
        self.driver.jobs.started(session, job)
        pieces = list(run_pieces(runs))
        for number, piece in enumerate(pieces, 1):
            last = number == len(pieces)
            event = events.StoreRequested(session, job, context, piece, last=last)
            self.call(event, kind)

    def store_together(
        self, session: keys.SessionId, accounts: Sequence[str], count: int, kind: str
    ) -> None:
        """So many keys for each of the last requests, of these accounts, in one event."""
        asked, stores = [], len(accounts)
        for number, account in enumerate(accounts):
            name = f"r{self.jobs - stores + 1 + number}"
            context = events.RequestContext(keys.RequestId(name), account=account)
            blocks = np.arange(number * count, (number + 1) * count, dtype=np.uint32)
            run = events.Run(0, self.fresh_keys(count), blocks.reshape(-1, 1), 1024)
            job = keys.JobId(self.jobs + 1 + number)
            self.driver.jobs.started(session, job)
            asked.append(events.StoreRequested(session, job, context, (run,)))
        self.jobs += stores
        begun = self.call(events.StoresRequested(session, tuple(asked)), kind)
        assert all(begun), "a store that has to begin alone"

    def finish(
        self, kind: str, outcome: events.TransferOutcome = events.TransferOutcome.DONE
    ) -> None:
        """Tell the end of every copy."""
        started, self.fleet.started = self.fleet.started, {}
        for order in started.values():
            event = events.TransferFinished(order.mover, order.transfer, outcome, 1, 1)
            self.call(event, kind)

    def run(self, count: int, group: int = 0, batch: keys.KeyBatch | None = None) -> events.Run:
        blocks = np.arange(count, dtype=np.uint32).reshape(-1, 1)
        return events.Run(group, batch or self.fresh_keys(count), blocks)

    def end_requests(self, session: keys.SessionId) -> None:
        left = tuple(keys.RequestId(f"r{n}") for n in range(self.jobs - 2000, self.jobs + 1))
        while left:
            left = self.call(events.RequestsEnded(session, left), "2,000 requests")


def numbered_keys(first: int, count: int) -> keys.KeyBatch:
    words = np.arange(4 * first, 4 * (first + count), dtype=np.uint64).reshape(-1, 4)
    return keys.KeyBatch(words * np.uint64(0x9E3779B97F4A7C15), HASH_BYTES)
