"""Sessions and movers do what the meeting of scheduler and ranks decides."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.control.errors import OldEngineEnding
from kvd.control.registration import rendezvous as rendezvous_module
from kvd.control.registration.rendezvous import Rendezvous, process_of
from kvd.core.engines.layouts import GroupFigures, RankLayout, RankPlacement
from kvd.core.engines.meeting import EngineStart, SchedulerSide
from kvd.core.errors import UnknownRegistration
from kvd.core.keys import MoverId, SessionId
from kvd.runtime.driver import Driver
from tests.control.daemon_rig import identity
from tests.core.bench import BLOCK, spec

ENGINE = identity("engine")


SESSION = SessionId(1)


class Scheduler:
    """A session of two ranks."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def ranks_ready(self) -> None:
        self.told.append("ready")


def peer(token: str) -> Any:
    return SimpleNamespace(
        token=token,
        pid=1,
        process_number=1,
        program="p",
        alive=True,
        registrations=set(),
        on_end=lambda _then: None,
    )


def layout(rank: int) -> RankLayout:
    return RankLayout(2, RankPlacement(rank, rank, writer=True), (GroupFigures(BLOCK, 1),))


def rendezvous(*movers: int, ends: Iterable[bool] = ()) -> Rendezvous:
    running = {MoverId(mover): object() for mover in movers}
    to_come = iter(ends)

    def process_of(mover: MoverId) -> object:
        if mover not in running:
            raise UnknownRegistration(f"mover {mover} has ended")
        return running[mover]

    async def end_rank(_mover: MoverId, _reason: str) -> None:
        await asyncio.Event().wait()  # as if it hung in the kernel

    fleet = SimpleNamespace(process_of=process_of, attached=running)
    driver = SimpleNamespace(
        fleet=fleet,
        end_rank=end_rank,
        attach_rank=lambda *_: None,
        has_ends_to_come=lambda _session: next(to_come, False),
    )
    return Rendezvous(cast("Driver", driver))


def join(engines: Rendezvous, start: EngineStart) -> Scheduler:
    session, scheduler = Scheduler(), peer("scheduler")
    side = SchedulerSide(SESSION, process_of(scheduler), spec(shards=2), world_size=2)
    engines.join(start, scheduler, side, cast("Any", session))
    return session


async def test_ready_is_told_after_the_last_workers_answer() -> None:
    engines = rendezvous(100, 101)
    start = await engines.claim(0, ENGINE)
    session = join(engines, start)
    engines.seat(start, peer("a"), layout(0), MoverId(100))
    engines.answered(MoverId(100))
    engines.seat(start, peer("b"), layout(1), MoverId(101))
    assert session.told == []
    engines.answered(MoverId(101))
    assert session.told == ["ready"]


async def test_record_of_an_engines_start_goes_with_its_last_mover() -> None:
    engines = rendezvous(100, 101)
    start = await engines.claim(0, ENGINE)
    join(engines, start)
    for number in range(2):
        engines.seat(start, peer(f"{number}"), layout(number), MoverId(100 + number))
    engines.leave(start, SESSION)
    assert not start.ranks, "they may register again"
    engines.mover_gone(MoverId(100))
    assert await engines.claim(0, ENGINE) is start
    engines.mover_gone(MoverId(101))
    engines.mover_gone(MoverId(102))  # one that never had a place
    assert await engines.claim(0, ENGINE) is not start


async def test_mover_that_ended_before_it_had_a_place_gets_none() -> None:
    engines = rendezvous()
    start = await engines.claim(0, ENGINE)
    with pytest.raises(UnknownRegistration):
        engines.seat(start, peer("a"), layout(0), MoverId(100))
    assert not start.movers


async def test_who_waits_for_a_mover_that_does_not_end_is_told_to_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous_module, "OLD_MOVERS_SECONDS", 0.01)
    engines = rendezvous(100)
    start = await engines.claim(0, ENGINE)
    worker = peer("a")
    engines.seat(start, worker, layout(0), MoverId(100))
    with pytest.raises(OldEngineEnding, match="rank 0") as again:
        await engines.vacate(start, 0)
    assert again.value.field == "rank"
    worker.alive = False
    with pytest.raises(OldEngineEnding, match="earlier start") as anew:
        await engines.claim(0, identity("engine", b"m" * 16))
    assert anew.value.field == "identity.engine_id"
    assert await engines.claim(0, ENGINE) is start, "nothing has changed"


async def test_rank_waits_until_all_that_a_former_mover_copied_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = rendezvous(100, ends=itertools.chain([True] * 3, itertools.repeat(False)))
    start = await engines.claim(0, ENGINE)
    assert not await engines.vacate(start, 0), "without a session nothing was copied"
    join(engines, start)
    assert await engines.vacate(start, 0)
    assert not await engines.vacate(start, 0)
    monkeypatch.setattr(rendezvous_module, "OLD_MOVERS_SECONDS", 0.01)
    engines = rendezvous(100, ends=itertools.repeat(True))
    join(engines, start := await engines.claim(0, ENGINE))
    with pytest.raises(OldEngineEnding, match="former movers"):
        await engines.vacate(start, 0)
