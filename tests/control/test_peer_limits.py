"""What one companion connection may pile up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import socket
import threading
from pathlib import Path

import pytest

from kvd.control.access import closing, descriptors
from kvd.control.access.companion import (
    MAX_ENGINE_CONNECTIONS_OF_A_USER,
    MAX_UNCLOSED,
    MESSAGES_AT_ONCE,
    CompanionServer,
    PageOf,
)
from kvd.control.access.peers import (
    MAX_REGISTRATIONS,
    Credentials,
    Peer,
    Peers,
    Role,
    shares_of_memories,
)
from kvd.core.errors import InvalidArgument, LimitExceeded, UnknownNamespace
from kvd.runtime.turns import EndsInTurn, FairQueue
from kvd_proto.v1 import companion_pb2
from tests.control.test_companion_socket import HELLO, framed


def listening(
    path: str, peers: Peers | None = None, page_of: PageOf = lambda _peer, _number: -1
) -> CompanionServer:
    """A companion socket's server for whom everybody is an operator; the test closes it."""
    peers = Peers() if peers is None else peers
    server = CompanionServer(peers, page_of, lambda _uid: True, EndsInTurn(FairQueue()))
    server.listen(path, 0o600)
    return server


def test_a_connection_registers_only_so_often() -> None:
    peer = Peer(Credentials(0, 0, 1, None), Role.WORKER, "test", lambda _message, _fds: None)
    peer.registrations.update(range(MAX_REGISTRATIONS - 1))
    peer.require_registration()
    peer.registrations.add(MAX_REGISTRATIONS)
    with pytest.raises(LimitExceeded):
        peer.require_registration()


def test_what_a_peer_gave_is_closed_as_it_was_told() -> None:
    """And not by itself: to free a large memory takes seconds."""
    closed: list[int] = []
    peer = Peer(
        Credentials(0, 0, 1, None), Role.WORKER, "test", lambda _message, _fds: None, closed.extend
    )
    memories = [os.memfd_create("kvd-test") for _ in range(3)]
    for fd in memories:
        os.ftruncate(fd, 4096)
    unfit = os.open(os.devnull, os.O_RDONLY)
    peer.offer(1, memories[0])
    peer.offer(1, memories[1])
    peer.offer(2, memories[2])
    with pytest.raises(InvalidArgument):
        peer.offer(3, unfit)
    assert closed == [memories[0], unfit]
    peer.end()
    assert closed == [memories[0], unfit, memories[1], memories[2]]
    for fd in closed:
        os.close(fd)


def test_memories_that_a_user_offers_leave_room_for_others_and_for_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is a descriptor of the daemon's, and those are few where the system lets it have few."""
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (512, 512))
    shares = shares_of_memories()
    peers: list[Peer] = []

    def offer_all(user: int) -> int:
        who = Credentials(user, user, 1, None)
        peer = Peer(who, Role.WORKER, "test", lambda *_: None, operates=user == 0, shares=shares)
        peers.append(peer)
        with contextlib.suppress(LimitExceeded):
            while True:
                fd = os.memfd_create("kvd-test")
                os.ftruncate(fd, 4096)
                peer.offer(len(peer.memories), fd)
        before = len(peer.memories)
        fd = os.memfd_create("kvd-test")
        os.ftruncate(fd, 4096)
        peer.offer(0, fd)  # in the place of another
        assert len(peer.memories) == before
        return before

    assert (offer_all(7), offer_all(8)) == (120, 60), "half of what is left for users, each"
    assert offer_all(0) == 76, "all that is free"
    for peer in peers:
        peer.end()
    assert len(shares) == 0


async def test_clients_that_end_together_are_let_go_one_by_one(tmp_path: Path) -> None:
    """As those of one process that is killed: each end takes a millisecond or two."""
    peers, path = Peers(), str(tmp_path / "companion")
    server = listening(path, peers)
    with contextlib.ExitStack() as clients:
        for _ in range(20):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(path)
            client.sendall(HELLO)
        while len(peers) < 20:  # noqa: ASYNC110 - it lets the server go on
            await asyncio.sleep(0)
        for peer in peers._by_token.values():
            peer.on_end(lambda: None)
    most = 0
    while peers:
        before = len(peers)
        await asyncio.sleep(0)
        most = max(most, before - len(peers))
    server.close()
    assert most == 1


async def test_a_client_that_opened_nothing_makes_room_at_once(tmp_path: Path) -> None:
    peers, path = Peers(), str(tmp_path / "companion")
    server = listening(path, peers)
    for _ in range(2 * MAX_ENGINE_CONNECTIONS_OF_A_USER):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            client.sendall(HELLO)
            while not peers:  # noqa: ASYNC110 - it lets the server go on
                await asyncio.sleep(0)
            client.shutdown(socket.SHUT_RDWR)  # a thread that closes may hold it for a moment
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not len(peers)
    server.close()


async def test_messages_that_come_together_are_handled_a_few_at_a_time(tmp_path: Path) -> None:
    """Else one client that sends thousands stops the daemon ten milliseconds at a time."""
    asked = 0

    def page_of(_peer: Peer, _number: int) -> int:
        nonlocal asked
        asked += 1
        raise UnknownNamespace("none")

    path = str(tmp_path / "companion")
    server = listening(path, page_of=page_of)
    page = framed(companion_pb2.CompanionRequest(get_page=companion_pb2.GetPage()))
    many = 20 * MESSAGES_AT_ONCE
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(HELLO + many * page)
        client.setblocking(False)
        most = 0
        while asked < many:
            before = asked
            await asyncio.sleep(0)
            most = max(most, asked - before)
            with contextlib.suppress(BlockingIOError):
                client.recv(1 << 20)
        assert most <= MESSAGES_AT_ONCE
        client.sendall(page)
        while asked == many:  # noqa: ASYNC110 - it lets the server go on
            await asyncio.sleep(0)
    server.close()


async def test_no_connection_is_taken_while_many_refused_ones_wait_to_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a descriptor of those that are kept from clients."""
    closes, path = threading.Event(), str(tmp_path / "companion")
    monkeypatch.setattr(descriptors, "are_scarce", lambda: True)
    close = closing._close_without_waiting

    def close_late(fds: list[int]) -> None:
        closes.wait()
        close(fds)

    monkeypatch.setattr(closing, "_close_without_waiting", close_late)
    server = listening(path)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
        for client in clients:
            client.connect(path)

        def refused() -> int:
            return len(select.select(clients, [], [], 0.0)[0])

        while refused() < MAX_UNCLOSED:  # noqa: ASYNC110 - it lets the server go on
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert refused() <= MAX_UNCLOSED + 16, "within those that one look takes"
        closes.set()
        while refused() < len(clients):  # noqa: ASYNC110 - the others had only to wait
            await asyncio.sleep(0.01)
    server.close()
