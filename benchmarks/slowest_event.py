"""The slowest event of each kind, in a daemon as large as any: 10^6 blocks, 1,000 namespaces.

    python -m benchmarks.slowest_event [--shape small large] [--policy lru] [--blocks 1000000]
                                       [--rounds 15] [--output FILE]

A real driver with a real core and a real pool: slot table, row headers, registry, index pages and
event log are written as in a daemon, and count. Left out are the extents' files, whose bytes
control never touches, and the movers: what an event tells them is a frame each, and goes nowhere.

One namespace holds most of the blocks, of 20,000 accounts; 63 others of 64 groups have sessions;
the rest have none. The pool is full, of blocks of 2 MiB where the others leave room. In `small`
most blocks are of 4 KiB, 16,384 in a row; in `large` of 2 MiB, as all others are, 32 in a row, and
so 500 times as many rows. Each kind of event is handed over `--rounds` times at the size of its
bound; those that change everything, once. The bar is for milliseconds of processor time, because
what else the machine runs plays no part in what an event costs; wall time stands beside it.

`rooms` is what follows every event: how much could be stored now, written to the index pages.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import report
from kvd.app import settle_memory
from kvd.core import actions, events, keys
from kvd.core.machine import Machine, MachineConfig
from kvd.core.policy import POLICY_NAMES
from kvd.core.spec import GroupKind, GroupSpec, NamespaceSpec
from kvd.driver import Driver, OpenSessionRecord
from kvd.pieces import PIECE_KEYS, run_pieces
from kvd.pool import Pool, PoolConfig, space
from kvd.pool.extents import Extents
from kvd_proto.layout import MAX_GROUPS, MAX_JOBS_IN_FLIGHT, MAX_KEYS_PER_MESSAGE

HASH_BYTES = 32
EXTENT_BYTES = 64 << 20
BLOCK_BYTES = {"small": 4096, "large": 2 << 20}
ACCOUNTS = 20_000
LIVE = 63  # namespaces of MAX_GROUPS groups with a session each
NAMESPACES = 1_000
KNOWN_OF_GROUPS = 512  # of those without a session, with MAX_GROUPS groups each
MAIN = keys.SessionId(1)
JOBS = 1024  # of a session that dies
LEASES = 16_384
TENANTS = 16  # but for that of most blocks: one alone would have used its share of scopes
BAR_MS = 5.0


@dataclass(frozen=True)
class Shape:
    """Sizes that follow from the number of blocks and the bytes of one."""

    name: str
    blocks: int

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES[self.name]

    @property
    def slots_per_row(self) -> int:
        return EXTENT_BYTES // self.block_bytes

    @property
    def extents(self) -> int:
        """A row for each class that stores anything, and those of the many blocks."""
        return -(-self.blocks // self.slots_per_row) + (LIVE + 8) * MAX_GROUPS

    def spec(self, name: str, groups: int, tenant: str = "") -> NamespaceSpec:
        """A namespace of the tenant, or of the one of TENANTS that its name falls to."""
        tenant = tenant or f"tenant-{zlib.crc32(name.encode()) % TENANTS}"
        size = self.block_bytes if groups == 1 else BLOCK_BYTES["large"]
        group = GroupSpec(GroupKind.FULL_ATTENTION, 1, (size,))
        return NamespaceSpec(name, keys.TenantId(tenant), HASH_BYTES, (group,) * groups)


class SilentFleet:
    """Movers that are told and never answer: the benchmark answers for them."""

    def __init__(self) -> None:
        self.started: dict[int, actions.StartTransfer] = {}

    def start_transfer(self, order: actions.StartTransfer) -> None:
        self.started[order.transfer] = order

    def carry_out(self, order: object) -> None:
        """A frame that goes nowhere."""

    def map_row(self, order: actions.GrantRow) -> None:
        """The same."""


class SilentSink:
    """A session's stream that nobody reads."""

    def job_ended(self, order: actions.EndJob) -> None:
        """Told to nobody."""

    def rank_lost(self, rank: int, reason: str) -> None:
        """Told to nobody."""


class LoneDriver(Driver):
    """One that publishes rooms when it is told to."""

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
        self.pool = Pool.open(
            PoolConfig(directory / "pool", shape.extents * EXTENT_BYTES, EXTENT_BYTES),
            lambda _done, _total: None,
        )
        config = MachineConfig(
            shape.extents, EXTENT_BYTES, policy=policy, tag_secret=self.pool.tag_secret
        )
        self.machine = Machine(config)
        self.fleet = SilentFleet()
        self.clock = LateClock()
        self.driver = LoneDriver(self.machine, self.pool, self.clock)
        self.driver.fleet = self.fleet  # type: ignore[assignment]
        self.driver.on_broken_invariant = lambda _event, _error: None
        self.processor: dict[str, list[float]] = defaultdict(list)
        self.wall: dict[str, list[float]] = defaultdict(list)
        self.sessions = 0
        self.movers = 0
        self.jobs = 0
        self.keys = 0
        self.silent = True

    def timed(self, kind: str, work: Callable[[], Any]) -> Any:
        """Do the work and note what it took."""
        began, worked = time.perf_counter(), time.thread_time()
        done = work()
        spent = time.thread_time() - worked
        if not self.silent:
            self.processor[kind].append(1000 * spent)
            self.wall[kind].append(1000 * (time.perf_counter() - began))
        return done

    def call(self, event: events.Event, kind: str = "") -> Any:
        """Have the driver handle the event, and publish rooms as it does after every turn."""
        name = type(event).__name__ + (f", {kind}" if kind else "")
        done = self.timed(name, lambda: self.driver.call(event))
        if not self.silent:
            self.timed("rooms", self.driver.publish_rooms)
        return done

    def open(self, spec: NamespaceSpec, kind: str = "", epoch: str = "") -> keys.SessionId:
        """A session with one rank."""
        self.sessions += 1
        session = keys.SessionId(self.sessions)
        accepted = self.call(events.SessionOpened(1, session, spec, epoch, 1), kind)
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
        return _keys(self.keys - count, count)

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
            event = events.StoreRequested(1, session, job, context, piece, last=last)
            self.call(event, kind)

    def finish(self, kind: str) -> None:
        """Tell the end of every copy."""
        started, self.fleet.started = self.fleet.started, {}
        for order in started.values():
            done = events.TransferOutcome.DONE
            event = events.TransferFinished(order.mover, order.transfer, done, 1, 1)
            self.call(event, kind)

    def run(self, count: int, group: int = 0, batch: keys.KeyBatch | None = None) -> events.Run:
        blocks = np.arange(count, dtype=np.uint32).reshape(-1, 1)
        return events.Run(group, batch or self.fresh_keys(count), blocks)

    def end_requests(self, session: keys.SessionId) -> None:
        names = tuple(keys.RequestId(f"r{n}") for n in range(self.jobs - 2000, self.jobs + 1))
        self.call(events.RequestsEnded(session, names), "2,000 requests")


def _keys(first: int, count: int) -> keys.KeyBatch:
    words = np.arange(4 * first, 4 * (first + count), dtype=np.uint64).reshape(-1, 4)
    return keys.KeyBatch(words * np.uint64(0x9E3779B97F4A7C15), HASH_BYTES)


def filled(rig: Rig) -> list[keys.SessionId]:
    """Namespaces, sessions, accounts and blocks; the sessions with MAX_GROUPS groups each."""
    shape = rig.shape
    for number in range(NAMESPACES - LIVE - 1):
        groups = MAX_GROUPS if number < KNOWN_OF_GROUPS else 1
        with mock.patch("kvd.core.session.grant_spare"):  # as if their rows were taken back
            rig.close(rig.open(shape.spec(f"known-{number}", groups)))
    assert rig.sessions == NAMESPACES - LIVE - 1
    main = rig.open(shape.spec("main", 1, "main"))
    live = [rig.open(shape.spec(f"live-{n}", MAX_GROUPS)) for n in range(LIVE)]
    for session in (main, *live):
        rig.attach(session)
    for session in live:
        rig.store(session, tuple(rig.run(4, group) for group in range(MAX_GROUPS)), "")
        rig.finish("")
    each = max(1, shape.blocks // ACCOUNTS)
    for number in range(ACCOUNTS):
        rig.store(main, (rig.run(each),), "", f"account-{number}")
        rig.finish("")
        if number % 1000 == 999:
            rig.end_requests(main)
    rig.store(main, (rig.run(MAX_KEYS_PER_MESSAGE),), "", "last")
    rig.finish("")
    rig.end_requests(main)
    filler = rig.open(shape.spec("filler", 2, "filler"))
    rig.attach(filler)
    while len(rig.machine.state.free_extents):
        rig.store(filler, (rig.run(PIECE_KEYS),), "")
        rig.finish("")
    rig.end_requests(filler)
    return [main, *live]


def drive_verbs(rig: Rig, sessions: list[keys.SessionId]) -> None:
    """What engines send while they work."""
    main, live = sessions[0], sessions[1:]
    piece, most = PIECE_KEYS, MAX_KEYS_PER_MESSAGE
    last = rig.keys
    held = _keys(last - piece, piece)
    context = events.RequestContext(keys.RequestId("asked"), account="last")
    for mode in (events.LeaseMode.NONE, events.LeaseMode.PREFIX):
        query = events.Query(context, 0, held, mode)
        rig.call(events.LookupRequested(1, main, (query,)), f"{piece} hits, {mode.name.lower()}")
    missing = events.Query(context, 0, rig.fresh_keys(piece), events.LeaseMode.PREFIX)
    rig.call(events.LookupRequested(1, main, (missing,)), f"{piece} misses")
    rig.call(events.Touched(main, context, 0, held), f"{piece} keys")
    rig.call(events.HandOffRequested(main, context, 0, held, 10**9), f"{piece} keys")
    rig.call(events.RequestsEnded(main, (context.request,)))
    rig.call(events.StepEnded(main))
    rig.store(main, (rig.run(piece),), f"{piece} keys, evicting")
    rig.finish(f"store of {piece}")
    session = live[rig.jobs % len(live)]
    runs = tuple(rig.run(piece // MAX_GROUPS, group) for group in range(MAX_GROUPS))
    rig.store(session, runs, f"{piece} keys of {MAX_GROUPS} groups, evicting")
    rig.finish(f"store of {MAX_GROUPS} groups")
    rig.jobs += 1
    context = events.RequestContext(keys.RequestId(f"r{rig.jobs}"), account="last")
    run = rig.run(most // 2, batch=_keys(last - most // 2 - 4096, most // 2))
    job = keys.JobId(rig.jobs)
    rig.driver.jobs.started(main, job)
    verdict = rig.call(events.LoadRequested(1, main, job, context, (run,)), f"{most // 2} keys")
    assert verdict.accepted == bool(rig.fleet.started), "a load that was not meant"
    rig.finish(f"load of {most // 2}")
    rig.call(events.JobsCompleted(main, (job,)))
    rig.end_requests(main)


def drive_starved(rig: Rig, number: int) -> None:
    """A class that owns nothing seeks room in a full pool, and a row comes to it."""
    session = rig.open(rig.shape.spec(f"starved-{number}", 1), "1 group")
    rig.attach(session)
    rig.clock.ahead_ns += 10**9
    rig.store(session, (rig.run(4),), "no row yet")
    movers = list(rig.machine.state.movers)
    for row in list(rig.machine.state.retiring.values()):
        for mover in movers:
            rig.call(events.RowUnmapped(mover, row.row))
        rig.call(events.RowZeroed(row.row))
    rig.store(session, (rig.run(4),), "first of a row")
    rig.finish("store of 4")
    rig.close(session, "idle")


def drive_life(rig: Rig, number: int) -> None:
    """A session of MAX_GROUPS groups comes, takes all that it may, and dies."""
    spec = rig.shape.spec(f"live-{number}", MAX_GROUPS)
    session = rig.open(spec, f"{MAX_GROUPS} groups, known")
    mover = rig.attach(session)
    lease(rig, session, LEASES)
    rig.call(events.EpochChanged(1, session, f"epoch-{number}"), f"{LEASES} leases")
    rig.call(events.TimerTicked(), "after an epoch")
    settle(rig)
    other = rig.open(rig.shape.spec("main", 1, "main"), "1 group, known")
    lease(rig, other, LEASES)
    busy(rig, other, rig.attach(other))
    rig.close(other, f"{LEASES} leases, {JOBS} jobs")
    settle(rig)
    rig.call(events.MoverGone(keys.MoverId(rig.movers), "gone"), f"{JOBS} transfers")
    settle(rig)
    other = rig.open(rig.shape.spec("main", 1, "main"), "1 group, known")
    busy(rig, other, rig.attach(other))
    rig.call(events.RankEnding(keys.MoverId(rig.movers), "ending"), f"{JOBS} transfers")
    settle(rig)
    rig.fleet.started.clear()
    rig.call(events.MoverGone(keys.MoverId(rig.movers), "gone"), "after RankEnding")
    rig.close(other)
    rig.close(session, "own epoch")
    rig.call(events.MoverGone(mover, "gone"), "idle")
    settle(rig)


def lease(rig: Rig, session: keys.SessionId, count: int) -> None:
    """That many leases of one block each, of requests of 16."""
    namespace = rig.driver.sessions[session].namespace
    main = rig.machine.state.namespaces[namespace].spec.fingerprint == "main"
    first = rig.keys - 4096 if main else 0
    for start in range(0, count if main else 0, MAX_GROUPS):
        asked = []
        for place in range(start, start + MAX_GROUPS):
            name = keys.RequestId(f"lease-{place // 16}")
            context = events.RequestContext(name, account="last")
            batch = _keys(first + place % 1024, 1)
            asked.append(events.Query(context, 0, batch, events.LeaseMode.PREFIX))
        rig.driver.call(events.LookupRequested(1, session, tuple(asked)))


def busy(rig: Rig, session: keys.SessionId, mover: keys.MoverId) -> None:
    """JOBS stores of 16 blocks under way at the mover."""
    assert mover in rig.machine.state.movers
    rig.silent = True
    for place in range(min(JOBS, MAX_JOBS_IN_FLIGHT)):
        blocks = np.arange(16 * place, 16 * place + 16, dtype=np.uint32).reshape(-1, 1)
        rig.store(session, (events.Run(0, rig.fresh_keys(16), blocks),), "", "last")
    rig.fleet.started.clear()
    rig.silent = False


def settle(rig: Rig, what: str = "") -> None:
    """Let everything that goes in pieces go on to its end."""
    while rig.machine.has_work():
        rig.call(events.WorkContinued(), what)
    rig.call(events.TimerTicked(), "going on")


def drive_upheaval(rig: Rig, sessions: list[keys.SessionId]) -> None:
    """What changes everything, once."""
    main = sessions[0]
    namespace = rig.driver.sessions[main].namespace
    tenant = keys.TenantId("main")
    used = rig.machine.state.tenants[tenant].used_bytes
    rig.call(events.QuotaSet(1, tenant, used // 2), "half of what is there")
    settle(rig, "a quota")
    rig.call(events.TimerTicked(), "after a quota")
    rig.call(events.QuotaSet(1, tenant, 0), "none")
    rig.call(events.NamespaceCleared(1, namespace), "the rest of it")
    settle(rig, "a clear")
    rig.call(events.TimerTicked(), "after a clear")
    for number, session in enumerate(sessions[1:]):
        rig.close(session, f"{MAX_GROUPS} groups")
        if number < 4:
            rig.call(events.TimerTicked(), "after a close")
    rig.call(events.DrainStarted())


async def measure(shape: Shape, policy: str, rounds: int) -> dict[str, dict[str, report.Spread]]:
    """Milliseconds by kind: of the processor, and of the wall's clock."""
    directory = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir="/dev/shm"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        stack.enter_context(_without_extents())
        rig = Rig(shape, policy, directory)
        began = time.monotonic()
        sessions = filled(rig)
        settle_memory()
        figures = rig.machine.statistics()
        print(
            f"{shape.name}, {policy}: {figures.slots.ready} blocks, {len(figures.namespaces)}"
            f" namespaces, {len(rig.machine.state.classes)} classes,"
            f" {len(rig.machine.state.scopes)} scopes, {figures.rows} rows;"
            f" filled in {time.monotonic() - began:.0f} s, {_resident_mib()} MiB resident",
            flush=True,
        )
        rig.silent = False
        for _ in range(rounds):
            drive_verbs(rig, sessions)
            rig.call(events.TimerTicked())
            rig.timed("statistics", rig.machine.statistics)
        for number in range(min(rounds, 8)):
            drive_starved(rig, number)
        for number in range(min(rounds, 3)):
            drive_life(rig, number)
        drive_upheaval(rig, sessions)
        return {
            kind: {
                "processor": report.Spread.of(rig.processor[kind]),
                "wall": report.Spread.of(rig.wall[kind]),
            }
            for kind in rig.processor
        }


def _without_extents() -> ExitStack:
    """No file of an extent is made: nobody here touches its bytes."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(Extents, "create_all"))
    stack.enter_context(mock.patch.object(space, "require_space"))
    # Records of slots that no row has take no memory here.
    stack.enter_context(mock.patch("kvd.pool.slot_table.have_all", _sparse))
    stack.enter_context(mock.patch.object(Pool, "zero_row"))
    return stack


def _sparse(descriptor: int, size: int, _path: Path) -> None:
    os.ftruncate(descriptor, size)


def _resident_mib() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def as_table(found: dict[str, dict[str, report.Spread]]) -> str:
    """Kinds of events, the slowest first."""
    ranked = sorted(found.items(), key=lambda item: -item[1]["processor"].high)
    rows = [
        [
            kind,
            spreads["processor"].count,
            f"{spreads['processor'].median:.2f}",
            f"{spreads['processor'].high:.2f}",
            f"{spreads['wall'].high:.2f}",
            "OVER" if spreads["processor"].high > BAR_MS else "",
        ]
        for kind, spreads in ranked
    ]
    return report.table(["event", "times", "median ms", "slowest ms", "slowest wall ms", ""], rows)


def _chosen(options: argparse.Namespace) -> Iterator[tuple[Shape, str]]:
    for shape in options.shape:
        for policy in options.policy:
            yield Shape(shape, options.blocks), policy


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slowest_event")
    parser.add_argument("--shape", nargs="+", choices=BLOCK_BYTES, default=list(BLOCK_BYTES))
    parser.add_argument("--policy", nargs="+", choices=POLICY_NAMES, default=["lru"])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for shape, policy in _chosen(options):
        found = asyncio.run(measure(shape, policy, options.rounds))
        print(as_table(found), flush=True)
        results[f"{shape.name}, {policy}"] = found
    report.write("slowest_event", results, options.output)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
