"""Descriptors that clients were sent and don't read keep nobody else from theirs."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator, Sequence

import pytest

from kvd.control.access.closing import close_all
from kvd.control.access.unread import (
    LOOKED_AT,
    LOOKED_AT_EACH_TIME,
    MAX_UNREAD_FDS,
    UnreadDescriptors,
)
from kvd.core.errors import LimitExceeded
from kvd_proto.v1 import companion_pb2 as pb
from tests.control.daemon_rig import RawScheduler, RunningDaemon, identity
from tests.control.test_companion_socket import HELLO, answer, connect, framed

A_USER, ANOTHER, AN_OPERATOR = 7, 8, 0
CONNECTIONS, ASKED = 12, 300  # more pages than a user may leave unread


class Sender:
    """The daemon's ends of some connections, and what it counts."""

    def __init__(self) -> None:
        self.unread = UnreadDescriptors(lambda user: user == AN_OPERATOR, self._close)
        self.closed = 0
        self.ends: list[socket.socket] = []

    def _close(self, _user: int, fds: Sequence[int]) -> None:
        self.closed += len(fds)
        close_all(fds)

    def connect(self) -> int:
        """A connection's number."""
        self.ends += socket.socketpair()
        return len(self.ends) // 2 - 1

    def send(self, number: int, user: int) -> None:
        mine = self.ends[2 * number]
        self.unread.take(number, user, mine, 1)
        with open(os.devnull) as file:  # noqa: PTH123 - a descriptor of something
            socket.send_fds(mine, [b"x"], [file.fileno()])
        self.unread.left(number, 1)

    def send_all(self, user: int) -> list[int]:
        """Until no more may be sent; to which connections, one for each."""
        numbers: list[int] = []
        with contextlib.suppress(LimitExceeded):
            while True:
                numbers.append(self.connect())
                self.send(numbers[-1], user)
        return numbers[:-1]

    def read(self, number: int) -> None:
        close_all(socket.recv_fds(self.ends[2 * number + 1], 64, 64)[1])


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sender]:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (512, 512))
    made = Sender()
    yield made
    made.unread.end()
    for each in made.ends:
        each.close()


def test_who_reads_nothing_leaves_room_for_others_and_for_operators(sender: Sender) -> None:
    assert len(sender.send_all(A_USER)) == 120, "half of half of 512, but for the operators' part"
    assert len(sender.send_all(ANOTHER)) == 60
    assert len(sender.send_all(AN_OPERATOR)) > 16


def test_who_has_read_is_sent_more(sender: Sender) -> None:
    numbers = sender.send_all(A_USER)
    for number in numbers:
        sender.read(number)
    for number in numbers:
        sender.send(number, A_USER)
    assert len(sender.unread.shares) == len(numbers)


def test_what_went_unread_counts_until_its_client_ends(sender: Sender) -> None:
    """The daemon's own end of a connection may be closed: the descriptors lie in the other."""
    numbers = sender.send_all(A_USER)
    for number in numbers:
        sender.ends[2 * number].close()
    late = sender.connect()
    with pytest.raises(LimitExceeded):
        sender.send(late, A_USER)
    for number in numbers:
        sender.ends[2 * number + 1].close()
    sender.send(late, A_USER)
    looked_at = LOOKED_AT_EACH_TIME  # that was enough
    assert sender.closed == looked_at
    assert len(sender.unread.shares) == len(numbers) - looked_at + 1


def test_who_is_refused_has_more_of_them_looked_at(sender: Sender) -> None:
    numbers = sender.send_all(A_USER)
    looked_at_first = list(sender.unread._sent)[:LOOKED_AT_EACH_TIME]
    for number in numbers:
        if number not in looked_at_first:
            sender.read(number)
    late = sender.connect()
    sender.send(late, A_USER)
    assert sender.closed == LOOKED_AT


def test_what_waits_for_its_client_to_read_others_counts_as_unread(sender: Sender) -> None:
    """He may read all that lies in his socket just before it takes these."""
    full = sender.connect()
    sender.send(full, A_USER)
    sender.unread.take(full, A_USER, sender.ends[2 * full], 3)
    sender.read(full)
    other = sender.connect()
    sender.send(other, ANOTHER)
    assert sender.unread.shares.of(A_USER) == 4
    sender.unread.left(full, 3)
    sender.send(other, ANOTHER)
    assert sender.unread.shares.of(A_USER) == 0


def test_who_has_read_keeps_no_socket_of_the_daemon_s_open(sender: Sender) -> None:
    for _ in range(100):
        number = sender.connect()
        sender.send(number, A_USER)
        sender.read(number)
    assert 100 - sender.closed <= 2


def test_a_user_who_reads_no_page_is_sent_a_bounded_number(running: RunningDaemon) -> None:
    scheduler = RawScheduler(running.socket, identity=identity("pages", os.urandom(16)))
    page = pb.GetPage(namespace_id=scheduler.opened.namespace_id)
    clients = [connect(running) for _ in range(CONNECTIONS)]
    for client in clients:
        client.sendall(HELLO)
        assert answer(client).welcome.token
        with contextlib.suppress(OSError):  # it is dropped, since it does not read
            for _ in range(ASKED):
                client.sendall(framed(pb.CompanionRequest(get_page=page)))
    pages = 0
    for client in clients:
        client.shutdown(socket.SHUT_WR)
        while read := socket.recv_fds(client, 1 << 16, 253):
            pages += len(read[1])
            close_all(read[1])
            if not read[0]:
                break
        client.close()
    assert 0 < pages <= MAX_UNREAD_FDS // 2
    scheduler.close()
