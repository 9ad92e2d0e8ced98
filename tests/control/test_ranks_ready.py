"""The scheduler hears that its ranks are ready only when every worker was told of its mover."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kvd.control.registration.rendezvous import EngineStart, Rank, Rendezvous
from kvd.core.keys import MoverId
from kvd.runtime.driver import Driver
from tests.control.daemon_rig import identity


class Scheduler:
    """A session of two ranks."""

    world_size = 2

    def __init__(self) -> None:
        self.told: list[str] = []

    def attach(self, placement: object, mover: object) -> None:
        """Nothing to do here."""

    def ranks_ready(self) -> None:
        self.told.append("ready")


def rank(number: int) -> Any:
    peer = SimpleNamespace(registrations=set(), on_end=lambda _then: None)
    placement = SimpleNamespace(rank=number)
    mover = SimpleNamespace(mover=MoverId(100 + number))
    return Rank(cast("Any", peer), cast("Any", SimpleNamespace(placement=placement)), mover)  # type: ignore[arg-type]


def test_ready_is_told_after_the_last_workers_answer() -> None:
    fleet = SimpleNamespace(running=lambda: [MoverId(100), MoverId(101)])
    engines = Rendezvous(cast("Driver", SimpleNamespace(fleet=fleet)))
    session = Scheduler()
    start = EngineStart(0, "engine", b"n" * 16, cast("Any", session))
    engines.seat(start, rank(0))
    engines.answered(MoverId(100))
    engines.seat(start, rank(1))
    assert session.told == []
    engines.answered(MoverId(101))
    assert session.told == ["ready"]


async def test_record_of_an_engines_start_goes_with_its_last_mover() -> None:
    fleet = SimpleNamespace(attached={MoverId(100): None, MoverId(101): None})
    engines = Rendezvous(cast("Driver", SimpleNamespace(fleet=fleet)))
    start = await engines.claim(0, identity("engine"))
    session = cast("Any", Scheduler())
    engines.join(start, session)
    for number in range(2):
        engines.seat(start, rank(number))
    engines.leave(start, session)
    assert not start.ranks, "they may register again"
    engines.mover_gone(MoverId(100))
    assert await engines.claim(0, identity("engine")) is start
    engines.mover_gone(MoverId(101))
    engines.mover_gone(MoverId(102))  # one that never had a place
    assert await engines.claim(0, identity("engine")) is not start
