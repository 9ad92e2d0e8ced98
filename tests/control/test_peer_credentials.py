"""Who is at the other end of a connection, as kernels of several ages say it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.control.access.peers import Credentials, Peer, Role, credentials_of
from kvd.linux.calls import SO_PEERPIDFD


class OlderKernels(socket.socket):
    """A connection whose kernel refuses one question, as kernels before 6.16 do."""

    refusal = 0

    def getsockopt(self, level: int, option: int, *size: int) -> Any:
        if option == SO_PEERPIDFD:
            raise OSError(self.refusal, os.strerror(self.refusal))
        return super().getsockopt(level, option, *size)


@pytest.fixture
def connection() -> Iterator[OlderKernels]:
    """To this process."""
    ours, theirs = socket.socketpair()
    with ours, OlderKernels(fileno=theirs.detach()) as connection:
        yield connection


def test_a_kernel_that_does_not_know_the_question_is_asked_by_number(
    connection: OlderKernels,
) -> None:
    connection.refusal = errno.ENOPROTOOPT
    found = credentials_of(connection)
    assert (found.pid, found.uid) == (os.getpid(), os.getuid())
    assert found.pidfd is not None
    os.close(found.pidfd)


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.ESRCH, errno.ENODATA, errno.EMFILE])
def test_the_number_of_a_peer_that_has_ended_is_not_believed(
    connection: OlderKernels, refusal: int
) -> None:
    connection.refusal = refusal
    found = credentials_of(connection)
    assert (found.uid, found.pidfd) == (os.getuid(), None)


def test_processes_are_told_apart_without_their_pids_where_the_kernel_can() -> None:
    def number_of(pid: int) -> int:
        credentials = Credentials(0, 0, 0, os.pidfd_open(pid))
        peer = Peer(credentials, Role.SCHEDULER, "vllm", lambda _message, _fds: None)
        assert credentials.pidfd is not None
        found = peer.process_number
        os.close(credentials.pidfd)
        return found

    ours = number_of(os.getpid())
    assert number_of(os.getpid()) == ours
    assert (number_of(os.getppid()) == ours) is (ours == 0)
    without = Credentials(0, 0, 0, None)
    assert Peer(without, Role.TOOL, "kvd", lambda _message, _fds: None).process_number == 0
