"""Watchers of events that take nothing: each is told why it was ended, and counts until then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.access.tenants import TenantPolicy
from kvd.control.namespaces import Namespaces
from kvd.control.services import events
from kvd.core.keys import KeyBatch, NamespaceId, TenantId
from kvd.runtime.event_log import Change, ChangeKind, EventLog
from kvd.runtime.turns import FairQueue
from kvd_proto.v1 import events_pb2, events_pb2_grpc
from tests.control.served_calls import USER, EndsOfCalls, served

KEYS = 16384  # of one change: more bytes than gRPC sends, or keeps, for who reads nothing
REQUEST = events_pb2.WatchEventsRequest()


def new_peer() -> Peer:
    return Peer(Credentials(USER, USER, 0, None), Role.TOOL, "test", lambda *_: None)


@contextlib.asynccontextmanager
async def watched(
    path: Path, observer: Any, peers: Any = None
) -> AsyncIterator[events_pb2_grpc.EventServiceStub]:
    """Calls of a server whose snapshot is one large change."""
    keys = KeyBatch(np.ones((KEYS, 4), dtype=np.uint64), 32)
    change = Change(ChangeKind.STORED, TenantId("default"), NamespaceId(1), "", "", 0, keys)
    driver: Any = SimpleNamespace(
        event_log=EventLog(b"a" * 16, lambda _: iter([(change,)]), FairQueue()),
        machine=SimpleNamespace(knows=lambda _: True),
        pool=SimpleNamespace(namespace_fields=lambda _: {"tenant": "default"}),
    )
    peer = new_peer()
    peers = peers or SimpleNamespace(behind=lambda _: peer)
    servicer = events.EventServicer(driver, Namespaces(driver, TenantPolicy(root=False)), peers)
    add_service = partial(events_pb2_grpc.add_EventServiceServicer_to_server, servicer)
    async with served(path, observer, add_service) as channel:
        yield events_pb2_grpc.EventServiceStub(channel)


async def end_of(call: Any) -> tuple[str, str]:
    """Why a call ends, once all that came before was read; its code's name."""
    try:
        while await asyncio.wait_for(call.read(), 10):
            pass
    except grpc.aio.AioRpcError as error:
        return str(error.details()), error.code().name
    raise AssertionError("it ended without an error")


async def test_a_watcher_that_takes_no_message_is_told_so_and_counts_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "WRITE_SECONDS", 0.05)
    monkeypatch.setattr(events, "MAX_WATCHERS_OF_A_USER", 1)
    observer = EndsOfCalls()
    async with watched(tmp_path / "sock", observer) as stub:
        slow = stub.WatchEvents(REQUEST)
        assert await observer.next_end() == "DEADLINE_EXCEEDED"
        said, code = await end_of(stub.WatchEvents(REQUEST))
        assert code == "RESOURCE_EXHAUSTED"
        assert "1 event watchers" in said, "what gRPC holds for the first counts"
        said, code = await end_of(slow)
        assert (code, said) == ("DEADLINE_EXCEEDED", "the watcher took no message for 0.05 s")
        assert observer.reasons == ["DEADLINE", "LIMIT_EXCEEDED"]
        next_one = stub.WatchEvents(REQUEST)
        assert (await asyncio.wait_for(next_one.read(), 10)).snapshot


async def test_a_watcher_without_its_companion_connection_is_told_so_and_counts_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_WATCHERS_OF_A_USER", 1)
    first, second = new_peer(), new_peer()
    callers = iter([first, second, second])
    writing, deliver = asyncio.Event(), events._deliver

    async def tell_and_deliver(*given: Any) -> None:
        writing.set()
        await deliver(*given)

    monkeypatch.setattr(events, "_deliver", tell_and_deliver)
    observer, peers = EndsOfCalls(), SimpleNamespace(behind=lambda _: next(callers))
    async with watched(tmp_path / "sock", observer, peers) as stub:
        slow = stub.WatchEvents(REQUEST)
        await asyncio.wait_for(writing.wait(), 10)
        first.end()
        assert await observer.next_end() == "UNAUTHENTICATED"
        _, code = await end_of(stub.WatchEvents(REQUEST))
        assert code == "RESOURCE_EXHAUSTED", "what gRPC holds for the first counts"
        said, code = await end_of(slow)
        assert (code, "names no live companion connection" in said) == ("UNAUTHENTICATED", True)
        next_one = stub.WatchEvents(REQUEST)
        assert (await asyncio.wait_for(next_one.read(), 10)).snapshot
