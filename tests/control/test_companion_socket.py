"""The companion socket against what clients may send, well meant or not."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_client.companion import CompanionRefused, CompanionSocket
from kvd_proto.layout import PAGE_MAGIC
from kvd_proto.v1 import companion_pb2
from tests.control.daemon_rig import (
    Caller,
    RawScheduler,
    RunningDaemon,
    identity,
)
from tests.waiting import wait_until

F_SEAL_FUTURE_WRITE = 0x0010  # Python 3.11 has no name for it
PROMPT_S = 10.0  # of a machine that is busy with others


@pytest.fixture
def raw(running: RunningDaemon) -> Iterator[socket.socket]:
    with connect(running) as connected:
        yield connected


def connect(running: RunningDaemon) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX)
    connected.settimeout(10)
    connected.connect(f"{running.socket}.companion")
    return connected


def framed(request: companion_pb2.CompanionRequest) -> bytes:
    content = request.SerializeToString()
    return struct.pack("<I", len(content)) + content


HELLO = framed(
    companion_pb2.CompanionRequest(
        hello=companion_pb2.Hello(role=companion_pb2.PEER_ROLE_TOOL, program="raw")
    )
)


def answer(connected: socket.socket) -> companion_pb2.CompanionResponse:
    (length,) = struct.unpack("<I", connected.recv(4, socket.MSG_WAITALL))
    return companion_pb2.CompanionResponse.FromString(connected.recv(length, socket.MSG_WAITALL))


def open_descriptors(running: RunningDaemon) -> int:
    return sum(1 for _ in Path(f"/proc/{running.pid}/fd").iterdir())


def test_hello_is_answered_with_a_token_of_ones_own(running: RunningDaemon) -> None:
    one, other = Caller(running.socket), Caller(running.socket)
    assert one.welcome.token != other.welcome.token
    one.close()
    other.close()


def test_a_message_may_come_in_pieces(raw: socket.socket) -> None:
    for byte in HELLO:
        raw.send(bytes([byte]))
    assert answer(raw).welcome.token


def test_messages_may_come_together(raw: socket.socket) -> None:
    page = companion_pb2.CompanionRequest(get_page=companion_pb2.GetPage(namespace_id=9))
    raw.sendall(HELLO + framed(page))
    assert answer(raw).welcome.token
    assert answer(raw).error.reason == "UNKNOWN_NAMESPACE"


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 65537) + b"x" * 100,
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 5) + b"\xff\xff\xff\xff\xff",
    ],
    ids=["empty", "too-long", "far-too-long", "no-message"],
)
def test_what_can_not_be_read_is_refused_and_the_connection_closed(
    raw: socket.socket, content: bytes
) -> None:
    raw.sendall(content)
    assert answer(raw).error.reason == "MALFORMED_MESSAGE"
    assert raw.recv(1) == b""


def test_whoever_does_not_begin_with_hello_is_refused(raw: socket.socket) -> None:
    page = companion_pb2.CompanionRequest(get_page=companion_pb2.GetPage(namespace_id=1))
    raw.sendall(framed(page))
    assert answer(raw).error.reason == "INVALID_ARGUMENT"
    assert raw.recv(1) == b""


def test_a_second_hello_is_refused_and_the_connection_stays(raw: socket.socket) -> None:
    raw.sendall(HELLO + HELLO)
    assert answer(raw).welcome.token
    assert answer(raw).error.reason == "INVALID_ARGUMENT"
    raw.sendall(framed(companion_pb2.CompanionRequest(get_page=companion_pb2.GetPage())))
    assert answer(raw).error.reason == "UNKNOWN_NAMESPACE"


def test_a_flood_of_descriptors_ends_the_connection_and_none_is_kept(
    running: RunningDaemon,
) -> None:
    before = open_descriptors(running)
    raw = connect(running)
    with Path(os.devnull).open() as file:
        rights = array.array("i", [file.fileno()] * 200)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        raw.sendmsg([HELLO], control)
    answers = [answer(raw).WhichOneof("kind")]
    assert answers == ["error"]
    raw.close()
    wait_until(lambda: open_descriptors(running) <= before, "the descriptors' end")


def test_only_writable_shared_memory_is_accepted(running: RunningDaemon, tmp_path: Path) -> None:
    companion = CompanionSocket(running.socket, 5.0)
    companion.hello(companion_pb2.PEER_ROLE_WORKER, "test")
    on_disk = tmp_path / "disk"
    on_disk.write_bytes(b"x" * 4096)
    good = os.memfd_create("kvd-test")
    empty = os.memfd_create("kvd-test-empty")
    os.ftruncate(good, 8192)
    read_only = os.open(f"/proc/self/fd/{good}", os.O_RDONLY)
    disk = os.open(on_disk, os.O_RDWR)
    reading, writing = os.pipe()
    for fd in (empty, read_only, disk, reading):
        with pytest.raises(CompanionRefused, match="INVALID_ARGUMENT"):
            companion.offer_memory(1, fd)
    companion.offer_memory(1, good)
    companion.close()
    for fd in (good, empty, read_only, disk, reading, writing):
        os.close(fd)


@pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, F_SEAL_FUTURE_WRITE])
def test_memory_that_is_sealed_against_writes_is_refused_as_it_is_offered(
    running: RunningDaemon, seal: int
) -> None:
    companion = CompanionSocket(running.socket, 5.0)
    companion.hello(companion_pb2.PEER_ROLE_WORKER, "test")
    with os.fdopen(os.memfd_create("kvd-test", os.MFD_ALLOW_SEALING), "wb") as file:
        file.truncate(8192)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        companion.offer_memory(1, file.fileno())  # these do no harm
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seal)
        with pytest.raises(CompanionRefused, match="sealed against writes"):
            companion.offer_memory(2, file.fileno())
    companion.close()


def test_an_offer_without_its_descriptor_is_refused(raw: socket.socket) -> None:
    offer = companion_pb2.CompanionRequest(offer_memory=companion_pb2.OfferMemory(memory_token=1))
    raw.sendall(HELLO + framed(offer))
    assert answer(raw).welcome.token
    assert answer(raw).error.reason == "INVALID_ARGUMENT"


def test_no_more_than_256_memories_are_kept(running: RunningDaemon) -> None:
    before = open_descriptors(running)
    companion = CompanionSocket(running.socket, 5.0)
    companion.hello(companion_pb2.PEER_ROLE_WORKER, "test")
    fd = os.memfd_create("kvd-test")
    os.ftruncate(fd, 4096)
    for number in range(256):
        companion.offer_memory(number, fd)
    with pytest.raises(CompanionRefused, match="LIMIT_EXCEEDED"):
        companion.offer_memory(256, fd)
    companion.offer_memory(255, fd)  # in place of the earlier one
    companion.close()
    os.close(fd)
    wait_until(lambda: open_descriptors(running) <= before, "the descriptors' end")


def test_the_index_page_comes_read_only_and_sealed(running: RunningDaemon) -> None:
    scheduler = RawScheduler(running.socket, identity=identity("pages"))
    fd = scheduler.companion.get_page(scheduler.opened.namespace_id)
    assert int.from_bytes(os.pread(fd, 8, 0), "little") == PAGE_MAGIC
    with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
        os.pwrite(fd, b"lies", 0)
    os.close(fd)
    scheduler.close()


def test_the_end_of_the_companion_connection_ends_the_session(running: RunningDaemon) -> None:
    scheduler = RawScheduler(running.socket, identity=identity("eof"))
    assert scheduler.opened.session_id
    watcher = Caller(running.socket)
    scheduler.companion.close()
    wait_until(
        lambda: all(s.engine_id != "eof" for s in watcher.status().sessions), "the session's end"
    )
    watcher.close()
    scheduler.close()


@pytest.mark.parametrize("kind", ["memory", "device_memory"])
def test_a_file_whose_server_stands_still_keeps_nobody_waiting(
    running: RunningDaemon, kind: str
) -> None:
    """Whoever may mount a FUSE file system can make any question of its files wait for ever."""
    neighbour = Caller(running.socket)
    neighbour.status()
    command = [sys.executable, "-m", "tests.control.fuse_file", f"{running.socket}.companion", kind]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        if server.stdout.readline().strip() != "offered":
            pytest.skip("no FUSE file system can be mounted here")
        ending = threading.Timer(PROMPT_S, server.stdin.close)  # a daemon that waits goes on then
        ending.start()
        for _ in range(20):
            neighbour.status()
        was_prompt = ending.is_alive()
        ending.cancel()
        server.stdin.close()
    assert was_prompt
    neighbour.close()
