"""A mover that comes hears of its namespace's rows a few at a time, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.blocks import row_grants
from kvd.core.engines.layouts import RankPlacement
from kvd.core.errors import RANKS_MISSING
from kvd.core.keys import JobId, MoverId, NamespaceId, RowId, SessionId, TransferId
from kvd.core.machine import Machine, MachineConfig
from kvd.core.model.size_class import Row, SizeClass
from kvd.core.model.turn import Turn
from kvd.core.room import reclaim
from kvd.mover.facts import MoverFacts
from kvd.mover.process import LocatedPart, MoverConfig, MoverProcess, MoverSink
from kvd.observability.metrics import Metrics
from kvd.pool.config import PoolConfig, PoolError
from kvd.pool.pool import Pool
from kvd.processes.mappings import ExtentFiles
from kvd.runtime import row_teller
from kvd.runtime.driver import Driver
from kvd.runtime.fleet import MoverOwner
from tests.core.bench import context, engine_blocks, keys, spec

EXTENT_BYTES = 65536
EXTENTS = 60
AT_ONCE = 4
MOVER = MoverId(1)
OWNER = MoverOwner(0, "worker")
PLACEMENT = RankPlacement(rank=0, shard=1, writer=True)


class NotingMover:
    """Maps rows, and asserts that each is told once, and only while it is there."""

    pid = 4_194_304  # above the largest that Linux gives: never a real process
    start_time = 1

    def __init__(self, mover: MoverId, sink: MoverSink) -> None:
        self.mover = mover
        self.sink = sink
        self.facts = MoverFacts()
        self.engine_blocks = ()
        self.driver: Driver
        self.shard = PLACEMENT.shard
        self.mapped: dict[RowId, int] = {}
        self.told = 0
        self.started: list[set[int]] = []  # extents of each transfer

    def map_row(self, row: RowId, extent: int) -> None:
        assert row not in self.mapped, "told twice"
        assert self.driver.machine.state.rows[row].extents[self.shard] == extent
        self.mapped[row] = extent
        self.told += 1

    def unmap_row(self, row: RowId) -> None:
        self.mapped.pop(row, None)
        asyncio.get_running_loop().call_soon(self.sink.row_unmapped, self.mover, row)

    def start_transfer(
        self, _t: TransferId, _j: tuple[JobId, ...], _k: Any, parts: Sequence[LocatedPart]
    ) -> bool:
        extents = {extent for part in parts for extent in part.extents.tolist()}
        assert extents <= set(self.mapped.values()), "a transfer of a row that is not mapped"
        self.started.append(extents)
        return True

    def revoke(self, _transfer: TransferId) -> None:
        pass  # what it never had it says nothing of

    def post(self, *_arguments: object) -> None:
        pass

    async def warm(self, _within_s: float) -> bool:
        return True

    def kill(self) -> None:
        self.sink.process_ended(self.mover, self.pid)
        self.sink.mover_gone(self.mover, "killed")


class Sink:
    def __init__(self) -> None:
        self.ended: list[act.EndJob] = []

    def job_ended(self, order: act.EndJob) -> None:
        self.ended.append(order)

    def rank_lost(self, rank: int, reason: str) -> None:
        pass


class Stage:
    """A driver with one session of two ranks, whose rows come and go as the test wants."""

    def __init__(self, directory: Path) -> None:
        config = PoolConfig(directory, EXTENTS * EXTENT_BYTES, EXTENT_BYTES)
        pool = Pool.open(config, lambda _done, _all: None)
        machine = Machine(MachineConfig(pool.extents, EXTENT_BYTES, spare_bytes=0))
        self.driver = Driver(machine, pool, Metrics("test"), launch=self._launch)
        self.driver.on_broken_invariant = lambda *_: None  # the test fails with it
        list(self.driver.recover())
        self.state = machine.state
        self.session = self.driver.allocate_session_id()
        self.sink = Sink()
        found = spec(groups=3, shards=2)
        opened = ev.SessionOpened(self.session, found, "", 2)
        self.driver.open_session(opened, {}, self.sink)
        self.owners: list[SizeClass] = list(self.state.classes.values())
        self.mover: NotingMover

    async def _launch(self, config: MoverConfig, sink: MoverSink) -> MoverProcess:
        return cast("MoverProcess", NotingMover(config.mover, sink))

    async def attach(self, mover: MoverId = MOVER, placement: RankPlacement = PLACEMENT) -> Any:
        config = MoverConfig(mover, (), (), ExtentFiles(Path(), 0, EXTENT_BYTES))
        process = cast("NotingMover", await self.driver.fleet.start(config, OWNER))
        process.driver, process.shard = self.driver, placement.shard
        self.driver.attach_rank(self.session, placement, cast("MoverProcess", process))
        return process

    def grant(self, group: int = 0) -> Row:
        turn = Turn(self.state, now_ns=0)
        row_grants.grant_row(turn, self.owners[group])
        self._carry_out(turn.orders)
        return self.state.rows[cast("act.GrantRow", turn.orders[0]).row]

    def retire(self, row: Row) -> None:
        turn = Turn(self.state, now_ns=0)
        reclaim.retire_row(turn, row)
        self._carry_out(turn.orders)

    def _carry_out(self, orders: list[act.Action]) -> None:
        for order in orders:
            self.driver._carry_out(order)

    def store(self, job: int, count: int = 1) -> act.Verdict:
        blocks = range(100 * job, 100 * job + count)
        run = ev.Run(0, keys(*blocks), engine_blocks(blocks))
        event = ev.StoreRequested(self.session, JobId(job), context(), (run,))
        found: act.Verdict = self.driver.call(event)
        return found

    def complete(self) -> bool:
        return self.driver.fleet.knows_rows(MOVER)

    async def until_told(self, count: int) -> None:
        mover = cast("NotingMover", self.driver.fleet.attached[MOVER].process)
        for _ in range(1000):
            if mover.told >= count:
                return
            await asyncio.sleep(0)
        pytest.fail(f"it was told of {mover.told} rows")

    async def until_complete(self) -> None:
        for _ in range(1000):
            if self.complete():
                return
            await asyncio.sleep(0)
        pytest.fail("it was never told of all rows")

    def expected(self) -> dict[RowId, int]:
        return {number: row.extents[PLACEMENT.shard] for number, row in self.state.rows.items()}


@pytest.fixture
async def stage(shared_directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.setattr(row_teller, "ROWS_TOLD_AT_ONCE", AT_ONCE)
    stage = Stage(shared_directory)
    yield stage
    await stage.driver.close()


async def test_rows_are_told_a_few_in_a_turn_of_the_loop(stage: Stage) -> None:
    for number in range(24):
        stage.grant(number % 3)
    mover = await stage.attach()
    told = Counter[int]()  # by turn
    for turn in range(1000):
        before = mover.told
        if turn:
            await asyncio.sleep(0)
        else:
            before = 0
        told[turn] = mover.told - before
        if stage.complete():
            break
    assert mover.mapped == stage.expected()
    assert len(mover.mapped) == 24
    assert max(told.values()) <= AT_ONCE, "all in one turn"


@pytest.mark.parametrize("seed", range(12))
async def test_rows_that_come_and_go_meanwhile_are_told_once_and_never_late(
    stage: Stage, seed: int
) -> None:
    random = Random(seed)
    for _ in range(random.randrange(24)):
        stage.grant(random.randrange(3))
    mover = await stage.attach()
    while not stage.complete():
        for _ in range(random.randrange(4)):
            if stage.state.rows and random.random() < 0.5:
                stage.retire(random.choice(list(stage.state.rows.values())))
            elif len(stage.state.free_extents) >= 2:
                stage.grant(random.randrange(3))
        await asyncio.sleep(0)
    assert mover.mapped == stage.expected()
    for _ in range(200):  # what was taken back is zeroed, and may be granted again
        if not stage.state.retiring:
            break
        await asyncio.sleep(0.005)
    while len(stage.state.free_extents) >= 2:
        stage.grant(random.randrange(3))
    assert mover.mapped == stage.expected()


async def test_row_that_is_taken_back_and_granted_again_is_told_as_the_new_one(
    stage: Stage,
) -> None:
    granted = [stage.grant() for _ in range(EXTENTS // 2)]
    mover = await stage.attach()
    await stage.until_told(AT_ONCE)
    known = granted[0]
    assert known.row in mover.mapped
    unknown = granted[-1]
    assert unknown.row not in mover.mapped
    stage.retire(known)
    stage.retire(unknown)
    assert not stage.complete()
    for _ in range(500):
        if not stage.state.retiring:
            break
        await asyncio.sleep(0.005)
    again = {stage.grant(1).row, stage.grant(1).row}
    assert again <= {known.row, unknown.row, *known.extents, *unknown.extents}
    await stage.until_complete()
    assert mover.mapped == stage.expected()


async def test_row_is_told_to_movers_of_its_namespace_alone(stage: Stage) -> None:
    """Of no other one would the core order that it unmaps it."""
    mover = await stage.attach()
    await stage.until_complete()
    config = MoverConfig(MoverId(2), (), (), ExtentFiles(Path(), 0, EXTENT_BYTES))
    process = await stage.driver.fleet.start(config, OWNER)
    stage.driver.fleet.attach(process, PLACEMENT, SessionId(99), NamespaceId(99))
    stage.grant()
    assert mover.mapped == stage.expected()
    assert not cast("NotingMover", process).mapped
    stage.driver.fleet.detach(MoverId(2))


async def test_transfer_that_a_mover_has_no_room_for_ends_its_job(stage: Stage) -> None:
    for number in (0, 1):
        mover = await stage.attach(MoverId(1 + number), RankPlacement(number, number, writer=True))
        mover.start_transfer = lambda *_: False
    await stage.until_complete()
    assert stage.store(1).accepted
    for _ in range(50):
        await asyncio.sleep(0)
    assert [end.job for end in stage.sink.ended] == [JobId(1)]


async def test_transfer_has_its_row_mapped_first(stage: Stage) -> None:
    for _ in range(20):
        stage.grant()
    await stage.attach(MoverId(2), RankPlacement(0, 0, writer=True))
    mover = await stage.attach(MOVER, RankPlacement(1, 1, writer=True))
    assert not mover.mapped
    assert stage.store(1).accepted
    (extents,) = mover.started
    assert set(mover.mapped.values()) == extents
    await stage.until_complete()
    assert mover.mapped == stage.expected()


async def test_transfer_of_more_rows_than_may_be_told_at_once_is_given_up(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_teller, "ROWS_TOLD_AT_ONCE", 1)
    for _ in range(20):
        stage.grant()
    await stage.attach(MoverId(2), RankPlacement(0, 0, writer=True))
    mover = await stage.attach(MOVER, RankPlacement(1, 1, writer=True))
    slots = stage.owners[0].slots_per_row
    stage.store(1, slots + 1)
    assert [end.reason for end in stage.sink.ended] == [RANKS_MISSING]
    assert not mover.started
    assert not mover.mapped
    await stage.until_complete()
    assert stage.store(2, slots + 1).accepted
    assert len(mover.started) == 1


async def test_row_that_the_pool_could_not_have_is_not_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.grant()

    def full(_order: act.GrantRow) -> None:
        raise PoolError("the file system is full")

    with monkeypatch.context() as patch:
        patch.setattr(stage.driver.pool, "grant_row", full)
        refused = stage.grant()
    mover = await stage.attach()
    mover_told = stage.driver.fleet.attached[MOVER].rows
    stage.driver._refused.add(refused.row)  # as while a store of its own call still uses it
    monkeypatch.setattr(stage.driver, "_tell_refused_rows", lambda: None)
    await stage.until_complete()
    assert mover_told.complete
    assert refused.row not in mover.mapped
    assert len(mover.mapped) == 1
    stage.driver._refused.clear()
    stage.driver.call(ev.RowRefused(refused.row))


async def test_session_is_warm_only_when_its_movers_know_all_rows(stage: Stage) -> None:
    for _ in range(20):
        stage.grant()
    mover = await stage.attach()
    waiting = asyncio.create_task(stage.driver.fleet.warm(stage.session, 5))
    while not waiting.done():
        assert len(mover.mapped) <= 20
        await asyncio.sleep(0)
    assert await waiting
    assert len(mover.mapped) == 20


async def test_session_is_ready_after_a_while_though_rows_are_still_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def let_nobody_in(_user: object) -> None:
        await never.wait()

    monkeypatch.setattr(stage.driver.turns, "let_others_in", let_nobody_in)
    stage.grant()
    await stage.attach()
    assert not await stage.driver.fleet.warm(stage.session, 0.01)
    never.set()
    await stage.until_complete()


async def test_mover_that_ends_meanwhile_is_told_no_more(stage: Stage) -> None:
    for _ in range(20):
        stage.grant()
    mover = await stage.attach()
    attached = stage.driver.fleet.attached[MOVER]
    waiting = asyncio.create_task(attached.warm(5))
    await stage.until_told(1)
    mover.kill()
    told = mover.told
    for _ in range(50):
        await asyncio.sleep(0)
    assert mover.told == told < 20
    assert waiting.done()
    session = SessionId(stage.session)
    stage.driver.close_session(session)
