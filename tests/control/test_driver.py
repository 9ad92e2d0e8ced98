"""The driver keeps its word when something beside it fails or gives up."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks import row_grants
from kvd.core.engines.layouts import RankPlacement
from kvd.core.errors import LayoutMismatch, LimitExceeded
from kvd.core.keys import JobId, MoverId, NamespaceId, RowId, SessionId
from kvd.core.model import size_class
from kvd.core.model.turn import Turn
from kvd.core.room import reclaim
from kvd.mover.facts import GpuFacts, MoverFacts
from kvd.mover.process import MoverConfig, MoverProcess, MoverSink
from kvd.pool.config import PoolError
from kvd.pool.pool import Pool
from kvd.processes.mappings import ExtentFiles
from kvd.runtime import driver as module
from kvd.runtime.clock import AwakeClock
from kvd.runtime.driver import Driver
from kvd.runtime.fleet import MoverOwner
from tests import leaks
from tests.control.driver_stand import EXTENT_BYTES, NoNews, config_of, opened_driver
from tests.core.bench import context, engine_blocks, keys, spec

MOVER = MoverId(1)
OWNER = MoverOwner(0, "worker")
PLACEMENT = RankPlacement(rank=0, shard=0, writer=True)


class SlowlyDying:
    """A mover process that ends when the test says so."""

    pid = 4_194_304  # above the largest that Linux gives: never a real process
    start_time = 1

    def __init__(self, config: MoverConfig, sink: MoverSink) -> None:
        self.mover = config.mover
        self.sink = sink
        self.kills = 0
        self.facts = MoverFacts()
        self.engine_blocks = ()

    def map_row(self, row: RowId, extent: int) -> None:
        pass

    def kill(self) -> None:
        self.kills += 1

    def die(self) -> None:
        self.sink.process_ended(self.mover, self.pid)
        self.sink.mover_gone(self.mover, "killed")


async def _launch(config: MoverConfig, sink: MoverSink) -> MoverProcess:
    return cast("MoverProcess", SlowlyDying(config, sink))


@pytest.fixture
async def driver(shared_directory: Path) -> AsyncIterator[Driver]:
    async with opened_driver(config_of(shared_directory), _launch) as made:
        yield made


def open_session(driver: Driver) -> SessionId:
    session = driver.allocate_session_id()
    opened = ev.SessionOpened(session, spec(), "", 1)
    driver.open_session(opened, {}, NoNews())
    return session


async def start_mover(driver: Driver) -> Any:
    config = MoverConfig(MOVER, (), (), ExtentFiles(Path(), 0, EXTENT_BYTES))
    return await driver.fleet.start(config, OWNER)


async def test_one_who_gives_up_waiting_for_a_movers_end_takes_nobody_along(
    driver: Driver,
) -> None:
    process = await start_mover(driver)
    hasty = asyncio.create_task(driver.end_rank(MOVER, "a caller that gives up"))
    patient = asyncio.create_task(driver.end_rank(MOVER, "one that waits"))
    await asyncio.sleep(0)
    hasty.cancel()
    await asyncio.wait([hasty])
    late = asyncio.create_task(driver.end_rank(MOVER, "one that comes later"))
    await asyncio.sleep(0.01)
    assert not patient.done()
    assert not late.done()
    process.die()
    await asyncio.gather(patient, late)


async def test_a_mover_that_cannot_be_ended_holds_up_no_stop(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process = await start_mover(driver)
    monkeypatch.setattr(module, "MOVERS_END_S", 0.05)
    async with asyncio.timeout(5.0):
        await driver.close()
    assert process.kills == 1
    assert "1 movers can't be ended now" in caplog.text
    assert not driver._tasks


async def test_a_stop_waits_for_a_start(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    async def launch(config: MoverConfig, sink: MoverSink) -> None:
        sink.process_started(config.mover, SlowlyDying.pid, SlowlyDying.start_time)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            sink.process_ended(config.mover, SlowlyDying.pid)

    driver.fleet._launch = cast("Any", launch)
    starting = asyncio.create_task(start_mover(driver))
    await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.gather(starting, driver.close(), return_exceptions=True)
    assert "stays noted" not in caplog.text
    assert "can't be ended" not in caplog.text, "it hears of the end of what did not come up"


async def test_mover_that_the_core_refused_is_ended_like_any_other(driver: Driver) -> None:
    session = open_session(driver)
    process = await start_mover(driver)
    with pytest.raises(LayoutMismatch):
        driver.attach_rank(session, RankPlacement(0, shard=3, writer=True), process)
    ending = asyncio.create_task(driver.end_rank(MOVER, "its rank was refused"))
    await asyncio.sleep(0)
    assert process.kills == 1
    process.die()
    await ending


async def test_closed_sessions_mover_ends_by_the_cores_order_and_once(driver: Driver) -> None:
    session = open_session(driver)
    process = await start_mover(driver)
    gone: list[MoverId] = []
    driver.fleet.on_mover_gone = gone.append
    driver.attach_rank(session, PLACEMENT, process)
    driver.close_session(session)
    assert process.kills == 1
    ending = asyncio.create_task(driver.end_rank(MOVER, "its engine started anew"))
    await asyncio.sleep(0)
    assert process.kills == 1
    assert not ending.done()
    assert not gone
    process.die()
    await ending
    assert gone == [MOVER]
    assert not driver.machine.state.sessions


async def test_movers_end_is_handled_though_it_can_not_be_written_down(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(driver)
    process = await start_mover(driver)
    driver.attach_rank(session, PLACEMENT, process)

    def full(_pid: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(driver.pool, "forget_mover", full)
    ending = asyncio.create_task(driver.end_rank(MOVER, "its worker is gone"))
    await asyncio.sleep(0)
    process.die()
    await asyncio.wait_for(ending, 5)
    assert not driver.machine.state.movers


async def test_who_waits_for_a_movers_end_hears_of_it_whatever_its_news_do(
    driver: Driver,
) -> None:
    session = open_session(driver)
    process = await start_mover(driver)
    driver.attach_rank(session, PLACEMENT, process)

    def broken(_session: SessionId, _rank: int, _reason: str) -> None:
        raise OSError("no more descriptors")

    driver.fleet.on_rank_lost = broken
    ending = asyncio.create_task(driver.end_rank(MOVER, "its worker is gone"))
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="descriptors"):
        process.die()
    await asyncio.wait_for(ending, 5)
    assert not driver.machine.state.movers


@pytest.mark.parametrize(
    ("gpu", "known"), [(None, {}), (GpuFacts("GPU-1", "a GPU", "580", numa_node=1), {0: 1})]
)
async def test_the_core_is_told_the_node_of_a_ranks_gpu(
    driver: Driver, gpu: GpuFacts | None, known: dict[int, int]
) -> None:
    session = open_session(driver)
    process = await start_mover(driver)
    process.facts = MoverFacts(gpu=gpu)
    driver.attach_rank(session, PLACEMENT, process)
    (namespace,) = driver.machine.state.namespaces.values()
    assert namespace.shard_nodes == known
    process.die()


@pytest.mark.parametrize(
    "failure",
    [OSError(24, "Too many open files"), MemoryError(), RuntimeError("can't start new thread")],
)
async def test_row_that_could_not_be_zeroed_is_zeroed_later(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr("kvd.runtime.driver.ZERO_AGAIN_SECONDS", 0.01)
    zero_row, failures = driver.pool.zero_row, [failure]

    def zero(order: act.ZeroRow) -> None:
        if failures:
            raise failures.pop()
        zero_row(order)

    release_row, released = driver.pool.release_row, asyncio.Event()

    def release(order: act.ReleaseRow) -> None:
        release_row(order)
        released.set()

    monkeypatch.setattr(driver.pool, "zero_row", zero)
    monkeypatch.setattr(driver.pool, "release_row", release)
    state = driver.machine.state
    open_session(driver)
    owner = next(iter(state.classes.values()))
    turn = Turn(state, now_ns=0)
    row_grants.grant_row(turn, owner)
    reclaim.retire_row(turn, next(iter(owner.rows.values())))
    for order in turn.orders:
        driver._carry_out(order)
    await asyncio.wait_for(released.wait(), 10)
    assert not failures
    assert not state.retiring
    assert len(state.free_extents) == 4


async def test_a_row_that_is_zeroed_when_the_daemon_stops_is_nobodys_until_that_is_done(
    driver: Driver, shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner would give it to a group, and its blocks would be zeroed."""
    zero_row, begun, may_end = driver.pool.zero_row, threading.Event(), threading.Event()

    def zero(order: act.ZeroRow) -> None:
        begun.set()
        may_end.wait()
        zero_row(order)

    monkeypatch.setattr(driver.pool, "zero_row", zero)
    open_session(driver)
    owner = next(iter(driver.machine.state.classes.values()))
    turn = Turn(driver.machine.state, now_ns=0)
    row_grants.grant_row(turn, owner)
    reclaim.retire_row(turn, next(iter(owner.rows.values())))
    for order in turn.orders:
        driver._carry_out(order)
    await asyncio.to_thread(begun.wait)
    closing = asyncio.ensure_future(driver.close())
    await asyncio.wait([closing], timeout=0.2)
    config = config_of(shared_directory)
    try:
        with pytest.raises(PoolError, match="owned by another kvd"):
            Pool.open(config, lambda _done, _all: None).close()
    finally:
        may_end.set()
        await asyncio.wait_for(closing, 10)
    Pool.open(config, lambda _done, _all: None).close()


@pytest.mark.parametrize("movers", [0, 1])
async def test_row_that_was_refused_and_is_taken_back_before_the_core_hears_of_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, movers: int
) -> None:
    """The event that frees its last slot may take the row back, as a simulated world did."""
    grant_row = driver.pool.grant_row

    def refuse(_order: act.GrantRow) -> None:
        raise PoolError("no memory")

    state = driver.machine.state
    session = open_session(driver)
    for mover in range(movers):
        driver.call(ev.RankAttached(session, MoverId(mover), 0, 0, True))
    owner = next(iter(state.classes.values()))
    turn = Turn(state, now_ns=0)
    row_grants.grant_row(turn, owner)
    reclaim.retire_row(turn, next(iter(owner.rows.values())))
    monkeypatch.setattr(driver.pool, "grant_row", refuse)
    for order in turn.orders:
        driver._carry_out(order)
    driver.post(ev.TimerTicked())
    assert not driver._refused
    assert not state.retiring
    assert len(state.free_extents) == 4
    monkeypatch.setattr(driver.pool, "grant_row", grant_row)
    turn = Turn(state, now_ns=0)
    row_grants.grant_row(turn, owner)
    for order in turn.orders:
        driver._carry_out(order)
    (row,) = owner.rows
    assert driver.pool.extents_of_row(row)


async def test_rooms_of_many_namespaces_are_published_a_few_at_a_time(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.runtime.driver.ROOMS_AT_ONCE", 3)
    namespaces = []
    for number in range(10):
        session = driver.allocate_session_id()
        opened = ev.SessionOpened(session, spec(f"ns {number}"), "", 1)
        namespaces.append(driver.open_session(opened, {}, NoNews()).namespace)
    published: list[list[int]] = [[]]  # by turn; the first is scheduled already
    turn = driver._publish_rooms

    def counted() -> None:
        published.append([])
        turn()

    def room(namespace: int) -> tuple[int, ...]:
        published[-1].append(namespace)
        return (7,)

    monkeypatch.setattr(driver, "_publish_rooms", counted)
    monkeypatch.setattr(driver.machine, "room", room)
    driver.call(ev.TimerTicked())
    for _ in range(50):
        await asyncio.sleep(0)
    told = [namespace for some in published for namespace in some]
    assert set(told) == set(namespaces)
    assert max(map(len, published)) == 3
    assert len(told) <= 3 * len(namespaces), "it goes on telling what has not changed"


async def test_row_that_there_is_no_memory_for_costs_its_store_and_nothing_else(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(driver)
    process = await start_mover(driver)
    started: list[act.StartTransfer] = []
    monkeypatch.setattr(driver.fleet, "start_transfer", started.append)
    monkeypatch.setattr(driver.fleet, "carry_out", lambda _order: None)
    driver.attach_rank(session, PLACEMENT, process)

    def store(job: int) -> act.Verdict:
        run = ev.Run(0, keys(job), engine_blocks([job]))
        event = ev.StoreRequested(session, JobId(job), context(), (run,))
        found: act.Verdict = driver.call(event)
        return found

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ended: list[act.EndJob] = []
    monkeypatch.setattr(driver.sessions[session].sink, "job_ended", ended.append)
    state = driver.machine.state
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        store(1)
        assert [order.reason for order in ended] == ["NO_ROOM"]
        assert not started
        assert not state.rows
        assert len(state.free_extents) == driver.pool.extents
        assert store(2).reason == "NO_ROOM"  # not asked again at once
        for _ in range(size_class.FIRST_PAUSE_TICKS):
            driver.call(ev.TimerTicked())
        store(3)
        assert [order.reason for order in ended] == ["NO_ROOM"] * 3
    for _ in range(size_class.LONGEST_PAUSE_TICKS):
        driver.call(ev.TimerTicked())
    assert store(4).accepted
    assert len(started) == 1
    process.die()


async def test_long_work_goes_on_by_itself_and_lets_others_in(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(driver)
    process = await start_mover(driver)
    started: list[act.StartTransfer] = []
    monkeypatch.setattr(driver.fleet, "start_transfer", started.append)
    monkeypatch.setattr(driver.fleet, "carry_out", lambda _order: None)
    driver.attach_rank(session, PLACEMENT, process)
    for job in range(1, 33):
        run = ev.Run(0, keys(job), engine_blocks([job]))
        driver.call(ev.StoreRequested(session, JobId(job), context(), (run,)))
    assert len(started) == 32
    ended: list[act.EndJob] = []
    monkeypatch.setattr(driver.sessions[session].sink, "job_ended", ended.append)
    driver.call(ev.MoverGone(process.mover, "killed"))
    assert len(ended) < 32
    seen = {len(ended)}
    for _ in range(200):
        await asyncio.sleep(0)
        seen.add(len(ended))
    assert len(ended) == 32
    assert len(seen) > 2
    assert not driver.machine.has_work()
    assert driver._working is None
    process.die()


async def test_reports_that_wait_are_handled_before_anything_is_found_late(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    ticked = asyncio.Event()
    handle = driver.machine.handle

    def noted(event: ev.Event, now_ns: int) -> list[act.Action]:
        heard.append(type(event).__name__)
        if isinstance(event, ev.TimerTicked):
            ticked.set()
        return handle(event, now_ns)

    driver.machine.handle = noted  # type: ignore[method-assign]
    monkeypatch.setattr("kvd.runtime.driver.TICK_SECONDS", 0.0)
    for row in range(50):
        driver.fleet.row_unmapped(MOVER, RowId(row))
    ticking = asyncio.create_task(driver.run())
    await ticked.wait()
    ticking.cancel()
    assert heard.index("TimerTicked") == 50


def test_the_drivers_clock_stands_still_while_the_process_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter([0, 250, 500, 70_500, 70_750, 72_000, 72_250])
    monkeypatch.setattr("time.monotonic_ns", lambda: next(readings) * 1_000_000)
    clock = AwakeClock()
    assert [clock.now_ns() // 1_000_000 for _ in range(6)] == [250, 500, 500, 750, 750, 1000]


@pytest.mark.parametrize("call", ["memfd_create", "open", "posix_fallocate"])
async def test_session_whose_index_page_cannot_be_had_is_refused_and_nobody_else_is(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    broken: list[Exception] = []
    driver.on_broken_invariant = lambda _event, error, _story: broken.append(error)
    one = open_session(driver)
    before = leaks.descriptors()

    def refuse(*_args: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def open_another() -> SessionId:
        session = driver.allocate_session_id()
        opened = ev.SessionOpened(session, spec("another"), "", 1)
        driver.open_session(opened, {}, NoNews())
        return session

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(LimitExceeded, match="LimitNOFILE") as refused:
            open_another()
        again = open_session(driver)
    assert refused.value.field == "namespace"
    assert not broken
    assert leaks.descriptors() == before
    assert {one, again} == set(driver.machine.state.sessions)
    assert len(driver.machine.namespaces()) == 1
    open_another()
    assert len(driver.machine.namespaces()) == 2


async def test_clears_come_one_after_another_whoever_gives_up_waiting(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(driver)
    started: list[act.StartTransfer] = []
    monkeypatch.setattr(driver.fleet, "start_transfer", started.append)
    driver.call(ev.RankAttached(session, MOVER, 0, 0, True))

    def store(number: int) -> None:
        run = ev.Run(0, keys(number), engine_blocks([number]))
        job = JobId(number)
        driver.call(ev.StoreRequested(session, job, context(), (run,)))
        transfer = started.pop().transfer
        done = ev.TransferOutcome.DONE
        driver.call(ev.TransferFinished(MOVER, transfer, done, 1, 1))

    store(1)
    [namespace] = driver.machine.namespaces()
    first, hasty, last = (
        asyncio.create_task(driver.long_work.clear([namespace])) for _ in range(3)
    )
    for _ in range(2):  # the first one has begun then
        await asyncio.sleep(0)
    store(2)
    hasty.cancel()
    assert await asyncio.wait_for(first, 5) == 1
    assert await asyncio.wait_for(last, 5) == 1
    assert await driver.long_work.clear([namespace, NamespaceId(77)]) == 0
    assert driver.machine.statistics().slots.ready == 0
    driver.call(ev.MoverGone(MOVER, "the test is over"))


async def test_a_clear_whose_caller_gives_up_between_two_namespaces_clears_both(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        session = driver.allocate_session_id()
        driver.open_session(ev.SessionOpened(session, spec(name), "", 1), {}, NoNews())
    cleared: list[NamespaceId] = []
    handle = driver.machine.handle

    def noted(event: ev.Event, now_ns: int) -> list[act.Action]:
        if isinstance(event, ev.NamespaceCleared):
            cleared.append(event.namespace)
        return handle(event, now_ns)

    monkeypatch.setattr(driver.machine, "handle", noted)
    both = driver.machine.namespaces()
    hasty = asyncio.create_task(driver.long_work.clear(both))
    for _ in range(2):
        await asyncio.sleep(0)
    assert cleared == both[:1]
    hasty.cancel()
    assert await asyncio.wait_for(driver.long_work.clear([]), 5) == 0
    assert cleared == both
    assert hasty.cancelled()


async def test_a_clear_whose_caller_gives_up_before_its_turn_begins_nothing(
    driver: Driver,
) -> None:
    open_session(driver)
    namespaces = driver.machine.namespaces()
    begun: list[str] = []
    first = asyncio.create_task(driver.long_work.clear(namespaces, lambda: begun.append("first")))
    hasty = asyncio.create_task(driver.long_work.clear(namespaces, lambda: begun.append("hasty")))
    await asyncio.sleep(0)
    hasty.cancel()
    assert await asyncio.wait_for(first, 5) == 0
    assert await asyncio.wait_for(driver.long_work.clear(namespaces), 5) == 0
    assert begun == ["first"]
