"""A worker, a user and the daemon have no more movers than they may, however they ask for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.services.worker import WorkerServicer
from kvd.core import events as ev
from kvd.core.engines.layouts import RankPlacement
from kvd.core.errors import InvalidArgument, LimitExceeded
from kvd.core.keys import MoverId, NamespaceId, RowId, SessionId
from kvd.mover.layout import Region
from kvd.mover.process import MoverConfig, MoverStartError
from kvd.processes.mappings import ExtentFiles
from kvd.runtime import fleet, starts
from kvd.runtime.fleet import MoverFleet, MoverOwner
from kvd.runtime.turns import FairQueue
from tests.control.daemon_rig import (
    RawEngine,
    RawWorker,
    RunningDaemon,
    block,
    identity,
    refusal,
)
from tests.waiting import wait_until

CONFIG = MoverConfig(MoverId(0), (), (), ExtentFiles(Path(), 0, 4096))


class Started:
    pid = 0

    def __init__(self, mover: MoverId) -> None:
        self.mover = mover


def fleet_of(launch: Any) -> MoverFleet:
    nobody: Any = None
    return MoverFleet(nobody, lambda _event: None, nobody, FairQueue(), launch)


class HeldLaunches:
    """Launches that wait until they are let go; who is being started, in order."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._held: dict[int, asyncio.Future[None]] = {}

    async def __call__(self, config: MoverConfig, _sink: object) -> Any:
        self.begun.append(config.mover)
        self._held[config.mover] = asyncio.get_running_loop().create_future()
        await self._held[config.mover]
        return Started(config.mover)

    async def end(self, mover: int) -> None:
        self._held[mover].set_result(None)
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_few_movers_start_at_once_and_users_take_turns() -> None:
    launches = HeldLaunches()
    movers = fleet_of(launches)
    movers._starts = starts.StartsInTurn(processors=2)

    def start(number: int, uid: int) -> asyncio.Task[Any]:
        owner = MoverOwner(uid, f"worker {number}")
        return asyncio.create_task(movers.start(replace(CONFIG, mover=MoverId(number)), owner))

    of_one = [start(number, 1) for number in range(20)]
    await settled()
    assert launches.begun == list(range(starts.MAX_STARTS_OF_USER)), "its others wait for these"
    of_two = [start(100 + number, 2) for number in range(20)]
    await settled()
    begun = [*range(4), *range(100, 104)]
    assert launches.begun == begun
    assert len(begun) == movers._starts.most == 8
    of_three = start(200, 3)
    await settled()
    assert launches.begun == begun
    of_one[4].cancel()  # it waits no more
    of_two[3].cancel()  # and this one is no longer started
    await settled()
    assert launches.begun == [*begun, 200], "who has none comes first"
    for ended, following in ((0, 5), (1, 104), (100, 6)):
        await launches.end(ended)
        assert launches.begun[-1] == following, "of those who have as many, each in turn"
    assert len(launches.begun) == 12
    assert (await of_one[0]).mover == 0
    for task in (*of_one, *of_two, of_three):
        task.cancel()
    await asyncio.gather(*of_one, *of_two, of_three, return_exceptions=True)
    last = start(300, 1)
    await settled()
    await launches.end(300)
    assert (await last).mover == 300


async def test_a_start_that_takes_long_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starts, "MAX_START_HELD_S", 0.05)
    turns = starts.StartsInTurn(processors=2)
    begun: list[int] = []
    all_begun, ends = asyncio.Event(), asyncio.Event()

    async def start(number: int, user: int) -> None:
        async with turns.hold(user):
            begun.append(number)
            if len(begun) == 12:
                all_begun.set()
            await ends.wait()

    tasks = [asyncio.create_task(start(number, 1 + number % 2)) for number in range(12)]
    await settled()
    assert len(begun) == turns.most
    await asyncio.wait_for(all_begun.wait(), 20)
    ends.set()
    await asyncio.gather(*tasks)
    await asyncio.sleep(0.1)
    assert not turns._starting, "each was counted out once"


async def test_a_start_that_ends_just_as_it_no_longer_counts_is_counted_out_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starts, "MAX_START_HELD_S", 0)
    turns = starts.StartsInTurn(processors=2)
    async with turns.hold(1):
        await settled()
        assert not turns._starting
        # As with uvloop in that millisecond: a timer's time may be the loop's, rounded up.
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 0.0)
    assert not turns._starting


@pytest.mark.parametrize(("processors", "of_user"), [(1, 4), (39, 4), (40, 5), (128, 16)])
def test_a_machine_of_many_processors_starts_more_at_once(processors: int, of_user: int) -> None:
    turns = starts.StartsInTurn(processors)
    assert (turns.most_of_user, turns.most) == (of_user, 2 * of_user)


async def test_each_share_is_held_and_given_back_when_a_mover_has_ended() -> None:
    async def launch(config: MoverConfig, _sink: object) -> Any:
        return Started(config.mover)

    movers = fleet_of(launch)
    started: list[MoverId] = []

    async def start(uid: int, worker: str) -> None:
        number = MoverId(len(started) + 1)
        await movers.start(replace(CONFIG, mover=number), MoverOwner(uid, worker))
        started.append(number)

    for _ in range(fleet.MAX_MOVERS_OF_WORKER):
        await start(1, "a")
    with pytest.raises(LimitExceeded, match="this worker's connection has 4 movers"):
        await start(1, "a")
    while len(started) < fleet.MAX_MOVERS_OF_USER:
        await start(1, f"worker {len(started)}")
    with pytest.raises(LimitExceeded, match="uid 1 has 64 movers") as refused:
        await start(1, "another")
    assert refused.value.field == "rank"
    while len(started) < fleet.MAX_MOVERS:
        await start(len(started), "a")
    with pytest.raises(LimitExceeded, match="there are 128 movers"):
        await start(500, "a stranger")
    movers.mover_gone(started[0], "ended")
    await start(500, "a stranger")


async def test_users_who_start_all_the_movers_they_can_leave_some_for_the_next() -> None:
    async def launch(config: MoverConfig, _sink: object) -> Any:
        return Started(config.mover)

    movers, had = fleet_of(launch), []
    for uid in range(9):
        count = 0
        with contextlib.suppress(LimitExceeded):
            while True:
                mover = MoverId(100 * uid + count)
                await movers.start(replace(CONFIG, mover=mover), MoverOwner(uid, str(count)))
                count += 1
        had.append(count)
    assert had == [64, 32, 16, 8, 4, 2, 1, 1, 0]


async def of_two_users(posted: list[Any]) -> MoverFleet:
    """Mover 1 is of one user, mover 2 of another one; `posted` is what the core hears."""

    async def launch(config: MoverConfig, _sink: object) -> Any:
        return Started(config.mover)

    nobody: Any = None
    movers = MoverFleet(nobody, posted.append, nobody, FairQueue(), launch)
    for number in (1, 2):
        owner = MoverOwner(1000 + number, "worker")
        process = await movers.start(replace(CONFIG, mover=MoverId(number)), owner)
        movers.attach(process, RankPlacement(0, 0, writer=True), SessionId(number), NamespaceId(1))
    return movers


async def test_what_movers_of_one_user_say_waits_for_no_other_users() -> None:
    posted: list[Any] = []
    movers = await of_two_users(posted)
    for row in range(100):
        movers.row_unmapped(MoverId(1), RowId(row))
    movers.row_unmapped(MoverId(2), RowId(0))
    await movers.handle_reports()
    assert len(posted) == 101
    assert posted.index(ev.RowUnmapped(MoverId(2), RowId(0))) == 1


async def test_a_tick_waits_a_bounded_time_for_what_movers_have_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "REPORTS_WAIT_S", 0.02)
    posted: list[Any] = []
    movers = await of_two_users(posted)
    slow = posted.append

    def post(event: Any) -> None:
        time.sleep(0.001)
        slow(event)

    movers._post = post
    for row in range(400):
        movers.row_unmapped(MoverId(1), RowId(row))
    movers.row_unmapped(MoverId(2), RowId(0))
    await movers.handle_reports()
    assert ev.RowUnmapped(MoverId(2), RowId(0)) in posted
    assert len(posted) < 401
    monkeypatch.undo()
    async with asyncio.timeout(30):
        while len(posted) < 401:
            await movers.handle_reports()


async def test_an_end_comes_after_what_was_said_before_and_has_all_of_it_said_in_turns() -> None:
    posted: list[Any] = []
    movers = await of_two_users(posted)
    for row in range(100):
        movers.row_unmapped(MoverId(1), RowId(row))
    for number in (1, 2):
        movers.mover_gone(MoverId(number), "killed")
    assert posted == [ev.MoverGone(MoverId(2), "killed")]
    assert not movers.running()
    async with asyncio.timeout(10):
        await movers.wait_gone(MoverId(1))
    assert [type(event) for event in posted[1:]] == [ev.RowUnmapped] * 100 + [ev.MoverGone]
    assert not movers.attached


async def test_starts_under_way_count_and_failed_ones_give_their_place_back() -> None:
    go_on = asyncio.Event()

    async def launch(_config: MoverConfig, _sink: object) -> Any:
        await go_on.wait()
        raise MoverStartError("it did not come up")

    movers = fleet_of(launch)
    owner = MoverOwner(1, "a")
    starting = [
        asyncio.create_task(movers.start(replace(CONFIG, mover=MoverId(number)), owner))
        for number in range(fleet.MAX_MOVERS_OF_WORKER)
    ]
    await asyncio.sleep(0)
    late = replace(CONFIG, mover=MoverId(50))
    with pytest.raises(LimitExceeded):
        await movers.start(late, owner)
    starting[0].cancel()
    await asyncio.wait(starting[:1])
    go_on.set()
    for task in starting[1:]:
        with pytest.raises(MoverStartError):
            await task
    with pytest.raises(MoverStartError):
        await movers.start(late, owner)


async def test_a_memory_that_is_taken_back_while_its_rank_waits_to_start_reaches_no_mover() -> None:
    """The number of its descriptor may be that of somebody else's memory by then."""
    launches = HeldLaunches()
    movers = fleet_of(launches)
    movers._starts = starts.StartsInTurn(processors=2)
    common: Any = SimpleNamespace(driver=SimpleNamespace(fleet=movers), engines=None)
    unused: Any = None
    servicer = WorkerServicer(common, unused, unused)
    credentials = Credentials(1, 1, 0, None)
    peer = Peer(credentials, Role.WORKER, "test", lambda _message, _fds: None)

    def offer() -> int:
        memory = os.memfd_create("memory")
        os.ftruncate(memory, 4096)
        peer.offer(7, memory, is_device=False)
        return memory

    others = [
        asyncio.create_task(
            movers.start(replace(CONFIG, mover=MoverId(number)), MoverOwner(1, f"{number}"))
        )
        for number in range(starts.MAX_STARTS_OF_USER)
    ]
    config = replace(CONFIG, mover=MoverId(50), regions=(Region(offer(), 0, 4096),))
    waiting = asyncio.create_task(servicer._start(config, peer))
    await settled()
    offer()
    await launches.end(0)
    assert 50 not in launches.begun
    with pytest.raises(InvalidArgument, match="taken back") as refused:
        await waiting
    assert refused.value.field == "memories[0]"
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    peer.end()


def test_a_worker_that_registers_rank_after_rank_has_no_more_movers_than_its_share(
    running: RunningDaemon,
) -> None:
    honest = RawEngine(running.socket)
    greedy = RawWorker(running.socket)
    said: list[str] = []

    def register(number: int) -> str:
        request = greedy.request(identity=identity(f"greedy {number}"))
        try:
            greedy.call(greedy.worker.RegisterRank, request)
        except grpc.RpcError as error:
            return refusal_of(error)
        return ""

    def refusal_of(error: Exception) -> str:
        def again() -> None:
            raise error

        return refusal(again)[1]

    with ThreadPoolExecutor(10) as threads:  # at once, so that most are still starting
        said = list(threads.map(register, range(10)))
    assert said.count("") == fleet.MAX_MOVERS_OF_WORKER
    assert set(said) == {"", "LIMIT_EXCEEDED"}
    assert len(running.movers()) == fleet.MAX_MOVERS_OF_WORKER + 1
    assert honest.store({1: block(1)}).blocks == 1
    other = RawWorker(running.socket)
    other.register(identity=identity("other"))
    greedy.close()
    wait_until(lambda: len(running.movers()) == 2, "the greedy worker's movers to end")
    for each in (other, honest):
        each.close()


async def test_who_waits_for_reports_no_more_holds_up_none_behind() -> None:
    posted: list[Any] = []
    movers = await of_two_users(posted)
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, what: failed.append(what))
    given_up = asyncio.get_running_loop().create_future()
    given_up.cancel()
    movers.report(given_up, 1)
    movers.row_unmapped(MoverId(1), RowId(3))
    await movers.handle_reports()
    assert posted == [ev.RowUnmapped(MoverId(1), RowId(3))]
    assert not failed, "the log would be full of it"
