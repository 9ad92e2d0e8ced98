"""What the end of a session waits for, and that nothing is kept of it once its jobs have ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.control.sessions import session as module
from kvd.control.sessions.outbox import Outbox
from kvd.control.sessions.session import CLOSED, SchedulerSession
from kvd.control.sessions.verbs import LiveSession
from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.events import JobKind, JobStatus
from kvd.core.keys import JobId, NamespaceId, SessionId
from kvd.runtime.driver import Driver
from kvd_proto.v1 import engine_pb2 as pb
from tests.control.driver_stand import NoNews, config_of, opened_driver
from tests.core.bench import spec

JOB = JobId(7)


@pytest.fixture
async def driver(shared_directory: Path) -> AsyncIterator[Driver]:
    async with opened_driver(config_of(shared_directory)) as made:
        yield made


def opened(driver: Driver, name: str = "ns") -> SessionId:
    session, named = driver.allocate_session_id(), spec(name)
    driver.open_session(ev.SessionOpened(session, named, "", 1), {"model": "m"}, NoNews())
    return session


def end(session: SessionId) -> act.EndJob:
    return act.EndJob(session, JOB, JobKind.STORE, JobStatus.DONE, "", 1, 4096)


async def test_what_describes_a_namespace_is_kept_for_none_that_was_there(driver: Driver) -> None:
    """A second session of it opens no namespace, which would take the description."""
    for _ in range(2):
        opened(driver)
    assert not driver._fields


@pytest.mark.parametrize("closes_first", [True, False])
async def test_nothing_is_remembered_of_a_session_that_has_closed(
    driver: Driver, closes_first: bool
) -> None:
    session = opened(driver)
    driver.jobs.started(session, JOB)
    last: list[Callable[[], None]] = [
        lambda: driver._carry_out(end(session)),
        lambda: driver.close_session(session),
    ]
    for each in reversed(last) if closes_first else last:
        assert driver.jobs._ends
        each()
    assert not driver.jobs._ends
    assert not driver.jobs._live


async def test_room_is_remembered_of_namespaces_in_use_alone(driver: Driver) -> None:
    """A namespace that comes again has another number: those of before would only become more."""
    for name in ("one", "another"):
        session = opened(driver, name)
        namespace = driver.sessions[session].namespace
        for _ in range(10):
            await asyncio.sleep(0)
        assert set(driver._rooms) == {namespace}
        driver.close_session(session)


def session_of(driver: Driver) -> SchedulerSession:
    number = opened(driver)
    common: Any = SimpleNamespace(driver=driver)
    start: Any = SimpleNamespace()
    session = SchedulerSession(start, common, Outbox(quiet=False))
    peer: Any = SimpleNamespace(uid=0)
    session.live = LiveSession(number, NamespaceId(0), spec(), peer, "engine", 1)
    return session


def closing(driver: Driver) -> tuple[SessionId, asyncio.Task[str]]:
    """A session with a job under way, whose scheduler has said that it closes."""
    session = session_of(driver)
    number = session.live.id
    driver.jobs.started(number, JOB)

    async def messages() -> AsyncIterator[pb.SessionRequest]:
        yield pb.SessionRequest(close=pb.CloseSession())
        raise AssertionError("nothing is read after it")

    return number, asyncio.create_task(session.handle_all(messages()))


async def test_a_session_closes_once_its_copies_have_ended(driver: Driver) -> None:
    """Its engine was told that they are stored, or waits for what they load."""
    number, closed = closing(driver)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closed.done()
    driver._carry_out(end(number))
    assert await closed == CLOSED


async def test_a_copy_that_does_not_end_keeps_no_session_open(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSE_FLUSH_SECONDS", 0.0)
    _, closed = closing(driver)
    assert await closed == CLOSED
    assert "closes while copies run" in caplog.text


async def test_ranks_of_which_one_is_lost_meanwhile_are_not_told_to_be_ready(
    driver: Driver,
) -> None:
    """Told behind the loss, its client would take them all to be there."""
    session = session_of(driver)
    session.ranks_ready()
    session.rank_lost(1, "its process was killed")
    for _ in range(10):
        await asyncio.sleep(0)
    assert [each.WhichOneof("kind") for each in session.outbox._unsent] == ["rank_lost"]
    session.ranks_ready()  # it has come again
    for _ in range(10):
        await asyncio.sleep(0)
    assert session.outbox._unsent[-1].WhichOneof("kind") == "ranks_ready"
