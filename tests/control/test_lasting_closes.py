"""Descriptors that take long to close, which a client has given, hold nobody up."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.control.access.closing import Closer
from kvd.linux.calls import SO_PASSRIGHTS
from kvd.native import library
from kvd_proto.v1 import companion_pb2 as pb
from tests.control.daemon_rig import Caller, RunningDaemon
from tests.control.test_companion_socket import HELLO, answer, connect
from tests.waiting import wait_until

LINGER_S = 60
PROMPT_S = 10.0  # of a machine that is busy with others
OFFER = pb.CompanionRequest(offer_memory=pb.OfferMemory(memory_token=1)).SerializeToString()


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """A TCP socket whose last close waits: nobody takes its bytes."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        ours.setblocking(False)
        for _ in range(2):
            with contextlib.suppress(BlockingIOError):
                while True:
                    ours.send(bytes(1 << 16))
            time.sleep(0.1)  # what was on its way to their buffer has come
        how = struct.pack("ii", 1, LINGER_S)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, how)
        yield ours
        how = struct.pack("ii", 1, 0)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, how)  # resets it: none waits on


def sockets_of(running: RunningDaemon) -> int:
    links = Path(f"/proc/{running.pid}/fd").iterdir()
    with contextlib.suppress(OSError):  # one of them is closed meanwhile
        return sum(1 for each in links if str(each.readlink()).startswith("socket:"))
    return sockets_of(running)


@pytest.mark.parametrize("content", [OFFER, b"\x01"], ids=["offered", "of half a message"])
def test_a_socket_that_lingers_keeps_nobody_waiting(running: RunningDaemon, content: bytes) -> None:
    neighbour = Caller(running.socket)
    neighbour.status()
    before = sockets_of(running)
    with lingering() as given:
        with connect(running) as client:
            client.sendall(HELLO)
            assert answer(client).welcome.token
            message = struct.pack("<I", len(OFFER)) + content
            socket.send_fds(client, [message], [given.fileno()])
            given.close()
        began = time.monotonic()
        for _ in range(50):
            neighbour.status()
        assert time.monotonic() - began < PROMPT_S
        if library() is not None:
            wait_until(lambda: sockets_of(running) <= before, "its end")
    neighbour.close()


def test_descriptors_are_refused_where_nobody_reads_them(running: RunningDaemon) -> None:
    """Linux would close them, on a thread of gRPC's that serves others."""
    neighbour = Caller(running.socket)
    neighbour.status()
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 1)
        except OSError:
            pytest.skip("this kernel can't refuse descriptors")
        probe.connect(running.socket)
        with Path(os.devnull).open() as file, pytest.raises(PermissionError):
            socket.send_fds(probe, [b"PRI"], [file.fileno()])
        assert probe.send(b"PRI"), "bytes alone are taken"
    neighbour.close()


@pytest.mark.skipif(library() is None, reason="the native library is not built")
def test_what_lingers_in_a_socket_that_is_closed_keeps_no_other_waiting() -> None:
    closer = Closer()
    closer.begin()
    reading, writing = os.pipe()
    with lingering() as given:
        holder, other = socket.socketpair()
        socket.send_fds(other, [b"\x01"], [given.fileno()])
        given.close()
        other.close()
        closer.close(1, [holder.detach()])
        closer.close(1, [writing])
        began = time.monotonic()
        assert not os.read(reading, 1), "its writing end is closed"
        assert time.monotonic() - began < PROMPT_S
    os.close(reading)
    closer.end()


def test_what_waits_when_nothing_more_comes_is_closed() -> None:
    closer = Closer()
    pipes = [os.pipe() for _ in range(3)]
    for reading, writing in pipes:
        closer.close(reading, [writing])
    closer.close(0, [])
    closer.end()
    closer.begin()
    for reading, _ in pipes:
        assert not os.read(reading, 1)
        os.close(reading)
