"""Every message of the companion socket against what may not be sent."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvd_proto.v1 import companion_pb2 as pb
from tests.faults.scene import links
from tests.faults.stand import Stand, resident_kib, standing
from tests.waiting import wait_until

HELLO = pb.CompanionRequest(hello=pb.Hello(role=pb.PEER_ROLE_WORKER, program="malformed"))
OFFER = pb.CompanionRequest(offer_memory=pb.OfferMemory(memory_token=1))
PAGE = pb.CompanionRequest(get_page=pb.GetPage(namespace_id=10**6))


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with standing() as made:
        yield made


class Raw:
    """A connection that sends whatever it is told to."""

    def __init__(self, stand: Stand) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(f"{stand.scene.daemon.socket}.companion")

    def send(self, content: bytes, *fds: int) -> None:
        if fds:
            socket.send_fds(self.socket, [content], list(fds))
        else:
            self.socket.sendall(content)

    def answer(self) -> str:
        """The reason of a refusal, else the kind of the answer; "" at the connection's end."""
        head = self.socket.recv(4, socket.MSG_WAITALL)
        if len(head) < 4:
            return ""
        body = self.socket.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)
        said = pb.CompanionResponse.FromString(body)
        kind = said.WhichOneof("kind") or ""
        return said.error.reason if kind == "error" else kind


@contextmanager
def raw(stand: Stand) -> Iterator[Raw]:
    connection = Raw(stand)
    try:
        yield connection
    finally:
        connection.socket.close()


def framed(message: pb.CompanionRequest) -> bytes:
    content = message.SerializeToString()
    return struct.pack("<I", len(content)) + content


BEFORE_HELLO: list[tuple[str, bytes, str]] = [
    ("an empty frame", struct.pack("<I", 0), "MALFORMED_MESSAGE"),
    ("an oversized frame", struct.pack("<I", 65537) + bytes(100), "MALFORMED_MESSAGE"),
    ("a huge frame", struct.pack("<I", 2**32 - 1), "MALFORMED_MESSAGE"),
    ("garbage", struct.pack("<I", 7) + b"\xff" * 7, "MALFORMED_MESSAGE"),
    ("no hello", framed(PAGE), "INVALID_ARGUMENT"),
    ("an offer first", framed(OFFER), "INVALID_ARGUMENT"),
    ("no kind", struct.pack("<I", 2) + b"\xf8\x7f"[:1] + b"\x01", "MALFORMED_MESSAGE"),
    (
        "an unknown role",
        framed(pb.CompanionRequest.FromString(b"\x0a\x02\x08\x63")),  # hello { role: 99 }
        "INVALID_ARGUMENT",
    ),
    ("no role", framed(pb.CompanionRequest(hello=pb.Hello())), "INVALID_ARGUMENT"),
]


@pytest.mark.parametrize(
    ("content", "reason"), [case[1:] for case in BEFORE_HELLO], ids=[c[0] for c in BEFORE_HELLO]
)
def test_stranger_that_begins_badly_is_told_why_and_shut_out(
    stand: Stand, content: bytes, reason: str
) -> None:
    with raw(stand) as connection:
        connection.send(content)
        assert connection.answer() == reason
        assert connection.answer() == ""


AFTER_HELLO: list[tuple[str, pb.CompanionRequest, str]] = [
    ("a second hello", HELLO, "INVALID_ARGUMENT"),
    ("an offer without its descriptor", OFFER, "INVALID_ARGUMENT"),
    ("a page of nowhere", PAGE, "UNKNOWN_NAMESPACE"),
    (
        "a page of the largest number",
        pb.CompanionRequest(get_page=pb.GetPage(namespace_id=2**64 - 1)),
        "UNKNOWN_NAMESPACE",
    ),
]


@pytest.mark.parametrize(
    ("message", "reason"), [case[1:] for case in AFTER_HELLO], ids=[c[0] for c in AFTER_HELLO]
)
def test_peer_that_asks_for_what_can_not_be_is_told_why_and_stays(
    stand: Stand, message: pb.CompanionRequest, reason: str
) -> None:
    with raw(stand) as connection:
        connection.send(framed(HELLO))
        assert connection.answer() == "welcome"
        for _ in range(3):
            connection.send(framed(message))
            assert connection.answer() == reason


def test_memory_that_can_not_be_mapped_is_refused_and_none_of_it_kept(
    stand: Stand, tmp_path: Path
) -> None:
    before = descriptors(stand)
    with ExitStack() as stack:
        for fd in bad_memories(tmp_path):
            stack.callback(os.close, fd)
            with raw(stand) as connection:
                connection.send(framed(HELLO))
                assert connection.answer() == "welcome"
                connection.send(framed(OFFER), fd)
                assert connection.answer() == "INVALID_ARGUMENT"
    wait_until(lambda: descriptors(stand) <= before, "the descriptors' end")


def bad_memories(tmp_path: Path) -> Iterator[int]:
    """A pipe, a socket, a directory, a file on a disk, an empty and a read-only memory."""
    reading, writing = os.pipe()
    os.close(writing)
    yield reading
    yield socket.socket(socket.AF_UNIX).detach()
    yield os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "file").write_bytes(bytes(4096))
    yield os.open(tmp_path / "file", os.O_RDWR)
    yield os.memfd_create("probe-empty")
    memory = os.memfd_create("probe-read-only")
    os.ftruncate(memory, 4096)
    yield os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
    yield os.eventfd(0)
    os.close(memory)


def test_descriptors_that_no_message_names_end_the_connection_and_are_closed(
    stand: Stand,
) -> None:
    before = descriptors(stand)
    memory = os.memfd_create("probe-flood")
    os.ftruncate(memory, 4096)
    with raw(stand) as connection:
        connection.send(framed(HELLO), *[memory] * 8)
        assert connection.answer() == "MALFORMED_MESSAGE"
        assert connection.answer() == ""
    os.close(memory)
    wait_until(lambda: descriptors(stand) <= before, "the descriptors' end")


def descriptors(stand: Stand) -> int:
    return len(links(stand.scene.daemon.pid))


def test_frame_that_is_cut_off_by_the_end_of_its_sender_leaves_nothing(stand: Stand) -> None:
    before = descriptors(stand)
    for cut in (1, 3, 4, 6):
        with raw(stand) as connection:
            connection.send(framed(HELLO))
            assert connection.answer() == "welcome"
            connection.send(framed(HELLO)[:cut])
    wait_until(lambda: descriptors(stand) <= before, "the descriptors' end")


def test_peer_that_never_reads_its_answers_is_dropped(stand: Stand) -> None:
    with raw(stand) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.send(framed(HELLO))
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            ask_without_listening(connection)


def ask_without_listening(connection: Raw) -> None:
    for _ in range(100_000):
        connection.send(framed(PAGE) * 100)


def test_thousands_of_bad_messages_leave_the_daemons_memory_as_it_was(stand: Stand) -> None:
    stand.bystander.order("churn", prefixes=["a", "b"], rounds=40, most=64)

    def throw_all(rounds: int) -> None:
        for _ in range(rounds):
            for _, content, reason in BEFORE_HELLO:
                with raw(stand) as connection:
                    connection.send(content)
                    assert connection.answer() == reason
            with raw(stand) as connection:
                connection.send(framed(HELLO))
                assert connection.answer() == "welcome"
                for _, message, reason in AFTER_HELLO * 10:
                    connection.send(framed(message))
                    assert connection.answer() == reason

    throw_all(10)
    before = resident_kib(stand.scene.daemon.pid)
    throw_all(60)
    grown = resident_kib(stand.scene.daemon.pid) - before
    assert stand.bystander.answer()["wrong"] == []
    assert grown < 8 * 1024, f"{grown} KiB"
