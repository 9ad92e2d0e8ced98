"""What `slowest_event` has happen to its driver: every kind of event, at the size of its bound."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np

from benchmarks.slowest_event_rig import Rig, numbered_keys
from kvd.core import events, keys
from kvd.core.told import MissedBlock, ToldRequest
from kvd.pool import PoolError
from kvd.runtime.batching import PIECE_IDS, PIECE_KEYS, SMALL_STORE_KEYS, STORES_TOGETHER
from kvd.runtime.event_log import ChangeFilter, resident_changes
from kvd.runtime.row_teller import ROWS_TOLD_AT_ONCE
from kvd_proto.limits import (
    MAX_GROUPS,
    MAX_JOBS_IN_FLIGHT,
    MAX_KEYS_PER_MESSAGE,
    MAX_REQUESTS_TOLD,
)

MAIN = "main"  # the namespace of most blocks, and its tenant
LAST = MAX_KEYS_PER_MESSAGE  # blocks that one account stored last
LEASED = 1024  # of those, the last ones, that sessions lease


def filled(rig: Rig) -> list[keys.SessionId]:
    """Namespaces, sessions, accounts and blocks; the sessions, that of most blocks first."""
    shape, scale = rig.shape, rig.shape.scale
    make_known(rig)
    sessions = open_live(rig)
    main, live = sessions[0], sessions[1:]
    for session in live:
        rig.store(session, tuple(rig.run(4, group) for group in range(scale.groups)), "")
        rig.finish("")
    each = max(1, scale.blocks // scale.accounts)
    for number in range(scale.accounts):
        rig.store(main, (rig.run(each),), "", f"account-{number}")
        rig.finish("")
        if number % 1000 == 999:
            rig.end_requests(main)
    rig.last = rig.keys
    rig.store(main, (rig.run(LAST),), "", "last")
    rig.finish("")
    rig.end_requests(main)
    filler = rig.open(shape.spec("filler", 2, "filler"))
    rig.attach(filler)
    while len(rig.machine.state.free_extents):
        rig.store(filler, (rig.run(PIECE_KEYS),), "")
        rig.finish("")
    rig.end_requests(filler)
    return sessions


def make_known(rig: Rig) -> None:
    """Namespaces without sessions and blocks."""
    scale = rig.shape.scale
    for number in range(scale.namespaces - scale.live - 1):
        groups = scale.groups if number < scale.known_of_groups else 1
        with mock.patch("kvd.core.upkeep.session.grant_spare"):  # as if their rows were taken back
            rig.close(rig.open(rig.shape.spec(f"known-{number}", groups)))


def open_live(rig: Rig) -> list[keys.SessionId]:
    """A session of each namespace that has some, with a rank, that of most blocks first."""
    spec, scale = rig.shape.spec, rig.shape.scale
    main = rig.open(spec(MAIN, 1, MAIN), "1 group")
    live = [rig.open(spec(f"live-{n}", scale.groups), "all groups") for n in range(scale.live)]
    for session in (main, *live):
        rig.attach(session)
    return [main, *live]


def drive_restart(rig: Rig) -> list[keys.SessionId]:
    """All is read back by another driver, and the sessions are opened anew."""
    rig.restart()
    silent, rig.silent = rig.silent, True
    make_known(rig)
    rig.silent = silent
    return open_live(rig)


def drive_verbs(rig: Rig, sessions: list[keys.SessionId]) -> None:
    """What engines send while they work."""
    main, live = sessions[0], sessions[1:]
    piece = PIECE_KEYS
    held = numbered_keys(rig.keys - piece, piece)
    context = events.RequestContext(keys.RequestId("asked"), account="last")
    for mode in (events.LeaseMode.NONE, events.LeaseMode.PREFIX):
        query = events.Query(context, 0, held, mode)
        rig.call(events.LookupRequested(main, (query,)), f"{piece} hits, {mode.name.lower()}")
    missing = events.Query(context, 0, rig.fresh_keys(piece), events.LeaseMode.PREFIX)
    rig.call(events.LookupRequested(main, (missing,)), f"{piece} misses")
    rig.call(events.LookupAnswered((bytes(piece),)), f"{piece} misses")
    rig.call(events.Touched(main, context, 0, held), f"{piece} keys")
    missed = MissedBlock(0, 1, held.words[:1], 0)
    told = ToldRequest(context.request, "last", 100, 0, 0, missed)
    rig.call(
        events.RequestsTold(main, (told,) * MAX_REQUESTS_TOLD), f"{MAX_REQUESTS_TOLD} requests"
    )
    rig.call(events.HandOffRequested(main, context, 0, held, 10**9), f"{piece} keys")
    rig.call(events.RequestsEnded(main, (context.request,)))
    rig.call(events.StepEnded(main))
    drive_release(rig, main, held)
    rig.store(main, (rig.run(piece),), f"{piece} keys, evicting", "last")
    rig.finish(f"store of {piece}")
    rig.store(main, (rig.run(piece),), f"{piece} keys, evicting")
    rig.finish(f"store of {piece}, failed", events.TransferOutcome.FAILED)
    session, groups = live[rig.jobs % len(live)], rig.shape.scale.groups
    runs = tuple(rig.run(piece // MAX_GROUPS, group) for group in range(groups))
    rig.store(session, runs, f"{piece} keys of all groups, evicting")
    rig.finish("store of all groups")
    drive_small_stores(rig, main)
    drive_load(rig, main)
    rig.end_requests(main)


def drive_small_stores(rig: Rig, main: keys.SessionId) -> None:
    """What a step stores of requests that decode, each of which has stored some blocks before."""
    count = SMALL_STORE_KEYS
    ways = {
        f"{STORES_TOGETHER} of {count} keys, evicting": ["last"] * STORES_TOGETHER,
        f"{STORES_TOGETHER} of {count} keys and accounts, evicting": [
            f"user {number}" for number in range(STORES_TOGETHER)
        ],
    }
    outcomes = (events.TransferOutcome.DONE, events.TransferOutcome.FAILED)
    for (named, accounts), outcome in itertools.product(ways.items(), outcomes):
        for account in accounts:
            rig.store(main, (rig.run(4 * count),), "", account)
        rig.finish("")
        rig.store_together(main, accounts, count, named)
        rig.finish(f"{named}, {outcome.name.lower()}", outcome)


def drive_release(rig: Rig, main: keys.SessionId, held: keys.KeyBatch) -> None:
    """As many leases as one event may end, of as many blocks as one piece asks for."""
    context = events.RequestContext(keys.RequestId("released"), account="last")
    query = events.Query(context, 0, held, events.LeaseMode.PREFIX)
    leases = []
    for _ in range(PIECE_IDS):
        (answer,) = rig.driver.call(events.LookupRequested(main, (query,)))
        leases.append(answer.lease)
    released = events.LeasesReleased(main, tuple(leases))
    rig.call(released, f"{PIECE_IDS} leases of {len(held)} blocks")
    settle(rig)


def keep_last(rig: Rig, session: keys.SessionId, count: int) -> None:
    """Have the last blocks of the account that stored last, where a policy let them go."""
    silent, rig.silent = rig.silent, True
    batch = numbered_keys(rig.last + LAST - count, count)
    rig.store(session, (rig.run(count, batch=batch),), "", "last")
    rig.finish("")
    rig.end_requests(session)
    rig.silent = silent


def drive_load(rig: Rig, main: keys.SessionId) -> None:
    """The most that a load may name, and so more than what was stored last."""
    count = LAST // 2
    keep_last(rig, main, count)
    rig.jobs += 1
    context = events.RequestContext(keys.RequestId(f"r{rig.jobs}"), account="last")
    run = rig.run(count, batch=numbered_keys(rig.last + LAST - count, count))
    job = keys.JobId(rig.jobs)
    rig.driver.jobs.started(main, job)
    verdict = rig.call(events.LoadRequested(main, job, context, (run,)), f"{count} keys")
    assert verdict.accepted, "a load that was meant to be one"
    rig.finish(f"load of {count}")


def drive_starved(rig: Rig, number: int) -> None:
    """A class that owns nothing seeks room in a full pool, and a row comes to it."""
    session = rig.open(rig.shape.spec(f"starved-{number}", 1), "1 group")
    rig.attach(session)
    if number % 2:  # the pool can't have the first one
        full = PoolError("the file system is full")
        with mock.patch.object(rig.pool, "grant_row", side_effect=full):
            seek_row(rig, session, 1)
    seek_row(rig, session)
    rig.store(session, (rig.run(4),), "first of a row")
    rig.finish("store of 4")
    rig.close(session, "idle")


def seek_row(rig: Rig, session: keys.SessionId, times: int = 40) -> None:
    """Have the session offer blocks until it has a row for them, or so many times."""
    state = rig.machine.state
    namespace = state.namespaces[rig.driver.sessions[session].namespace]
    for _ in range(times):
        rig.clock.ahead_ns += 10**9
        rig.store(session, (rig.run(4),), "no row yet")
        rig.finish("store of 4")
        settle(rig)
        zero_rows(rig)
        if namespace.classes[0].rows:
            return
    assert times == 1, "no row came"


def zero_rows(rig: Rig) -> None:
    """Answer for movers and zeroing threads: rows on their way back are free."""
    movers = list(rig.machine.state.movers)
    for row in list(rig.machine.state.retiring.values()):
        for mover in movers:
            rig.call(events.RowUnmapped(mover, row.row))
        rig.call(events.RowZeroed(row.row))


def drive_private(rig: Rig, number: int) -> None:
    """A namespace of one engine's own goes with its engine, with a row full of blocks."""
    session = rig.open(rig.shape.spec(f"private-{number}", 1, unshared=True), "1 group")
    mover = rig.attach(session)
    seek_row(rig, session)
    store_of_many(rig, session, rig.shape.slots_per_row - 4)
    rig.close(session, "unshared")
    rig.call(events.MoverGone(mover, "gone"), f"unshared, {rig.shape.slots_per_row} blocks")
    fingerprint = f"private-{number}"
    while fingerprint in rig.machine.state.by_fingerprint:
        settle(rig)
        zero_rows(rig)


def store_of_many(rig: Rig, session: keys.SessionId, count: int) -> None:
    """So many blocks, of an account each few; nobody looks at what it takes."""
    silent, rig.silent = rig.silent, True
    each = max(4, rig.shape.scale.blocks // rig.shape.scale.accounts)
    for number, first in enumerate(range(0, count, each)):
        rig.store(session, (rig.run(min(each, count - first)),), "", f"account-{number}")
        rig.finish("")
    rig.silent = silent


def drive_life(rig: Rig, number: int) -> None:
    """Sessions come, take all that they may, and die."""
    session = rig.open(rig.shape.spec(f"live-{number}", rig.shape.scale.groups), "all groups")
    mover = rig.attach(session)
    rig.call(events.EpochChanged(session, f"epoch-{number}"), "all groups")
    rig.call(events.TimerTicked(), "after an epoch")
    settle(rig)
    drive_epoch(rig, number)
    drive_deaths(rig)
    rig.close(session, "own epoch")
    rig.call(events.MoverGone(mover, "gone"), "idle")
    settle(rig)


def drive_epoch(rig: Rig, number: int) -> None:
    """An engine of the largest namespace resets its cache, and again when it has stored much."""
    leases = f"{rig.shape.scale.leases} leases"
    other = rig.open(rig.shape.spec(MAIN, 1, MAIN), "1 group")
    mover = rig.attach(other)
    lease(rig, other)
    rig.call(events.EpochChanged(other, f"own-{number}"), leases)
    settle(rig)
    count = min(2 * rig.shape.slots_per_row, rig.shape.scale.blocks // 8)
    store_of_many(rig, other, max(count, LAST))
    rig.call(events.EpochChanged(other, f"next-{number}"), f"{max(count, LAST)} blocks")
    settle(rig)
    rig.close(other)
    rig.call(events.MoverGone(mover, "gone"), "idle")
    settle(rig)


def drive_deaths(rig: Rig) -> None:
    """A session ends with leases and copies, so does a mover, and another that was told to."""
    scale = rig.shape.scale
    transfers = f"{scale.jobs} transfers"
    other = rig.open(rig.shape.spec(MAIN, 1, MAIN), "1 group")
    mover = rig.attach(other)
    lease(rig, other)
    busy(rig, other, mover)
    rig.close(other, f"{scale.leases} leases, {scale.jobs} jobs")
    settle(rig)
    rig.call(events.MoverGone(keys.MoverId(rig.movers), "gone"), transfers)
    settle(rig)
    other = rig.open(rig.shape.spec(MAIN, 1, MAIN), "1 group")
    busy(rig, other, rig.attach(other))
    rig.call(events.RankEnding(keys.MoverId(rig.movers), "ending"), transfers)
    settle(rig)
    rig.fleet.started.clear()
    rig.call(events.MoverGone(keys.MoverId(rig.movers), "gone"), "after RankEnding")
    rig.close(other)
    settle(rig)


def lease(rig: Rig, session: keys.SessionId) -> None:
    """Leases of one block each, of requests of 16."""
    keep_last(rig, session, LEASED)
    for start in range(0, rig.shape.scale.leases, MAX_GROUPS):
        asked = []
        for place in range(start, start + MAX_GROUPS):
            name = keys.RequestId(f"lease-{place // 16}")
            context = events.RequestContext(name, account="last")
            batch = numbered_keys(rig.last + LAST - 1 - place % LEASED, 1)
            asked.append(events.Query(context, 0, batch, events.LeaseMode.PREFIX))
        rig.driver.call(events.LookupRequested(session, tuple(asked)))
    assert len(rig.machine.state.sessions[session].leases) == rig.shape.scale.leases


def busy(rig: Rig, session: keys.SessionId, mover: keys.MoverId) -> None:
    """Stores of 16 blocks under way at the mover."""
    assert mover in rig.machine.state.movers
    silent, rig.silent = rig.silent, True
    for place in range(min(rig.shape.scale.jobs, MAX_JOBS_IN_FLIGHT)):
        blocks = np.arange(16 * place, 16 * place + 16, dtype=np.uint32).reshape(-1, 1)
        rig.store(session, (events.Run(0, rig.fresh_keys(16), blocks),), "", "last")
    rig.fleet.started.clear()
    rig.silent = silent


def settle(rig: Rig) -> None:
    """Let everything that goes in pieces go on to its end."""
    while rig.machine.has_work():
        rig.call(events.WorkContinued())
    rig.call(events.TimerTicked(), "going on")


def drive_reads(rig: Rig, main: keys.SessionId) -> None:
    """What the daemon asks its machine between events, at once or in pieces."""
    rig.timed("statistics", rig.machine.statistics)
    namespace = rig.driver.sessions[main].namespace
    rows = rig.machine.granted_rows(namespace, ROWS_TOLD_AT_ONCE)
    while rig.timed("a piece of the rows that a new mover maps", lambda: next(rows, None)):
        pass
    wanted = ChangeFilter(lambda _tenant, number: number == namespace, with_tiers=True)
    pieces = resident_changes(rig.machine, wanted)
    for _ in range(16):
        rig.timed("a piece of an event snapshot", lambda: next(pieces, None))


def drive_upheaval(rig: Rig, sessions: list[keys.SessionId]) -> None:
    """What changes everything, once."""
    main = sessions[0]
    namespace = rig.driver.sessions[main].namespace
    tenant = keys.TenantId(MAIN)
    used = rig.machine.state.tenants[tenant].used_bytes
    rig.call(events.QuotaSet(1, tenant, used // 2), "half of what is there")
    settle(rig)
    rig.call(events.TimerTicked(), "after a quota")
    rig.call(events.QuotaSet(1, tenant, 0), "none")
    rig.call(events.NamespaceCleared(1, namespace), "the rest of it")
    settle(rig)
    rig.call(events.TimerTicked(), "after a clear")
    for number, session in enumerate(sessions[1:]):
        rig.close(session, "all groups")
        if number < 4:
            rig.call(events.TimerTicked(), "after a close")
    terms = rig.machine.config
    rig.call(
        events.TermsChanged(
            terms.lease_share / 2,
            terms.submit_deadline_ns,
            terms.copy_deadline_ns,
            terms.private_grace_ns,
        )
    )
    rig.call(events.DrainStarted())
    rig.call(events.DrainEnded())
