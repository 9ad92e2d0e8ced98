"""However a session's stream ends, nothing is kept of it: by whom it is held, and who waits."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.access.tenants import TenantPolicy
from kvd.control.registration.rendezvous import Rendezvous, process_of
from kvd.control.sessions.session import SchedulerSession, SessionContext, SessionTerms
from kvd.core.engines.layouts import GroupFigures, RankLayout, RankPlacement
from kvd.core.errors import KvdError, UnknownRegistration
from kvd.core.keys import MoverId, SessionId
from kvd_proto.v1 import engine_pb2 as pb
from tests.control.daemon_rig import BLOCK_BYTES, group, identity, namespace
from tests.control.driver_stand import config_of, opened_driver

USER = os.getuid()


class ClientStream:
    """gRPC's side of a stream: what its client sends, and what it is told."""

    def __init__(self, common: SessionContext, peer: Peer, **opening: Any) -> None:
        self.told: asyncio.Queue[pb.SessionResponse] = asyncio.Queue()
        self.sent: list[str] = []
        self._said: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        fields: dict[str, Any] = {
            "identity": identity(),
            "namespace": namespace(),
            "world_size": 1,
        }
        opened = pb.OpenSession(**{**fields, **opening})
        self._said.put_nowait(pb.SessionRequest(open=opened))
        context: Any = self
        self.served = asyncio.ensure_future(common.serve(self._requests(), context, peer))

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while (request := await self._said.get()) is not None:
            yield request

    def close(self) -> None:
        """Its client says that its engine ends."""
        self._said.put_nowait(pb.SessionRequest(close=pb.CloseSession()))

    def end(self) -> None:
        """Its client sends no more."""
        self._said.put_nowait(None)

    async def send_initial_metadata(self, _metadata: object) -> None:
        self.sent.append("metadata")

    async def write(self, message: pb.SessionResponse) -> None:
        self.sent.append("answer")
        self.told.put_nowait(message)


@pytest.fixture
async def common(shared_directory: Path) -> AsyncIterator[SessionContext]:
    async with opened_driver(config_of(shared_directory)) as driver:
        terms = SessionTerms(2000, 1)
        made = SessionContext(driver, Rendezvous(driver), TenantPolicy(()), terms)
        yield made
        made.departures.close()


def scheduler(pidfd: int | None = None) -> Peer:
    credentials = Credentials(USER, os.getgid(), os.getpid(), pidfd)
    return Peer(credentials, Role.SCHEDULER, "test", lambda _message, _descriptors: None)


def nothing_is_left(common: SessionContext) -> bool:
    engines = common.engines
    held = (common.sessions.by_id, common.driver.sessions, engines._sessions)
    return not any(held) and not engines._meeting.starts and not len(engines._meeting.shares)


async def test_a_session_ends_with_its_client_though_its_stream_does_not(
    common: SessionContext, caplog: pytest.LogCaptureFixture
) -> None:
    """A killed process may have left the stream to a child."""
    caplog.set_level(logging.INFO)
    peer = scheduler()
    stream = ClientStream(common, peer)
    assert (await stream.told.get()).opened.session_id
    peer.end()
    assert nothing_is_left(common)
    await stream.served
    (why,) = (said for said in caplog.messages if " ends: " in said)
    assert why.endswith("its scheduler is gone")


async def test_a_session_of_a_client_that_ended_as_it_was_opened_ends_at_once(
    common: SessionContext,
) -> None:
    peer = scheduler()
    peer.end()
    await ClientStream(common, peer).served
    assert nothing_is_left(common)


async def test_a_client_that_opens_and_ends_sessions_is_noted_no_more_often(
    common: SessionContext,
) -> None:
    peer, noted = scheduler(), set[int]()
    for _ in range(3):
        stream = ClientStream(common, peer)
        assert (await stream.told.get()).opened.session_id
        stream.end()
        await stream.served
        assert nothing_is_left(common)
        noted.add(len(peer._on_end))
    assert len(noted) == 1


async def test_a_stream_that_is_given_up_ends_its_session(common: SessionContext) -> None:
    """Were metadata sent with its first answer, gRPC might send them again with its status."""
    stream = ClientStream(common, scheduler())
    assert (await stream.told.get()).opened.session_id
    assert stream.sent == ["metadata", "answer"]
    stream.served.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.served
    assert nothing_is_left(common)


@pytest.mark.parametrize("closes", [True, False])
async def test_whether_its_engine_ends_is_watched_unless_it_has_closed_its_session(
    common: SessionContext, closes: bool
) -> None:
    """What only the engine can use goes with its process, and at once where it said so."""
    peer = scheduler(os.pidfd_open(os.getpid()))
    stream = ClientStream(common, peer)
    assert (await stream.told.get()).opened.session_id
    if closes:
        stream.close()
    else:
        stream.end()
    await stream.served
    assert bool(common.departures._watched) is not closes
    peer.end()


async def test_of_a_client_that_reads_too_slowly_the_log_says_so(
    common: SessionContext, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stream = ClientStream(common, scheduler())
    session = SessionId((await stream.told.get()).opened.session_id)
    sink = common.driver.sessions[session].sink
    assert isinstance(sink, SchedulerSession)
    sink.outbox.overflowed.set()
    await stream.served
    (why,) = (said for said in caplog.messages if " ends: " in said)
    assert why.endswith("its client reads too slowly")


async def test_a_stream_is_over_once_its_session_has_had_its_turn_to_end(
    common: SessionContext,
) -> None:
    """Its client may come again at once, and would be one session too many."""
    stream = ClientStream(common, scheduler())
    assert (await stream.told.get()).opened.session_id
    for _ in range(20):
        common.ends.put(USER, lambda: None)
    stream.end()
    await stream.served
    assert nothing_is_left(common)


async def test_nobody_waits_for_the_rows_of_a_session_that_has_ended(
    common: SessionContext,
) -> None:
    peer = scheduler()
    stream = ClientStream(common, peer)
    session = SessionId((await stream.told.get()).opened.session_id)
    sink = common.driver.sessions[session].sink
    assert isinstance(sink, SchedulerSession)
    sink.ranks_ready()
    peer.end()
    await stream.served
    assert sink._telling is not None
    assert sink._telling.cancelled()


async def test_nothing_is_kept_of_an_engine_whose_session_is_refused(
    common: SessionContext,
) -> None:
    """Its user has 512 engines, and would have used one up."""
    large = namespace(groups=[group(shard_bytes=[1 << 30])])
    with pytest.raises(KvdError):
        await ClientStream(common, scheduler(), namespace=large).served
    assert nothing_is_left(common)


async def test_a_session_whose_rank_has_just_ended_is_refused_and_holds_nothing(
    common: SessionContext,
) -> None:
    """Its mover's process is gone, and the news of that is still to be handled."""
    meeting, mover = common.engines._meeting, MoverId(1)
    start = await common.engines.claim(USER, identity())
    placement = RankPlacement(0, 0, writer=True)
    layout = RankLayout(1, placement, (GroupFigures(BLOCK_BYTES, 1),))
    meeting.seat(start, mover, process_of(scheduler()), layout)
    with pytest.raises(UnknownRegistration):
        await ClientStream(common, scheduler()).served
    assert start.session is None
    meeting.mover_gone(mover)
    assert nothing_is_left(common)
