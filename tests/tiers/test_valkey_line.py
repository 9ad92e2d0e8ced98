"""A line to a Valkey server, with servers that stutter, lie, fall silent and hang up."""

from __future__ import annotations

import gc
import select
import shutil
import signal
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.tiers.store import Outcome, TierError, TierReason, TierUnusable
from kvd.tiers.valkey.line import (
    MAX_TOLD_BYTES,
    MAX_TOLD_DEPTH,
    MAX_TOLD_VALUES,
    Answer,
    Command,
    Line,
    Room,
    ServerRefusal,
)
from kvd.tiers.valkey.names import MAX_PIECES_TOLD, SLOTS, NameBook
from kvd.tiers.valkey.options import ValkeyOptions
from kvd.tiers.valkey.servers import MAX_DIGITS, MAX_DOUBTS, Servers, count_in
from kvd.tiers.valkey.store import ValkeyStore
from tests.tiers.contract import BLOCK_BYTES, ONE, content, has, keep, key, soon, source
from tests.tiers.valkey_rig import ValkeyServer, certificate, server_binary, until

SECONDS = 0.5
PATIENT_S = 30.0  # where an answer comes
VALUE = bytes(range(256)) * 40
needs_server = pytest.mark.skipif(server_binary() is None, reason="no Valkey server is here")


@contextmanager
def one_that_says(
    *pieces: bytes,
    in_turn: bool = False,
    hangs_up: bool = False,
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
) -> Iterator[Line]:
    """A line to a server that says these pieces, whatever it is asked; `in_turn`: one a run.

    `tls`: how it and the line encrypt.
    """

    def say() -> None:
        line, _ = listener.accept()
        if tls is not None:
            line = tls[0].wrap_socket(line, server_side=True)
        with line, suppress(OSError):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.recv(1 << 20)
            for number, piece in enumerate(pieces):
                if in_turn and number:
                    line.recv(1 << 20)
                line.sendall(piece)
                time.sleep(0.002 if len(pieces) < 100 else 0)
            while not hangs_up and line.recv(1 << 20):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        speaker = threading.Thread(target=say)
        speaker.start()
        line = Line("127.0.0.1", listener.getsockname()[1], PATIENT_S, tls and tls[1])
        try:
            yield line
        finally:
            line.close()
            speaker.join()


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def halves(room: bytearray) -> Room:
    """Memory in two pieces, end to end."""
    view = memoryview(room)
    return view[: len(room) // 2], view[len(room) // 2 :]


def asked(line: Line, count: int, *into: Room, seconds: float = PATIENT_S) -> list[Answer]:
    return line.run([["GET", b"name"]] * count, seconds, into)


def cut(stream: bytes, size: int) -> list[bytes]:
    return [stream[at : at + size] for at in range(0, len(stream), size)]


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
def test_answers_are_the_same_however_they_are_cut(size: int) -> None:
    small = b"x" * 24
    nested = b"*3\r\n:-7\r\n*2\r\n$-1\r\n$2\r\nhi\r\n*-1\r\n"
    said = bulk(small) + b"+OK\r\n" + nested + b"-ERR no\r\n" + bulk(b"") + b"$-1\r\n"
    count = 1 if size == 1 else 40
    with one_that_says(*cut(said * count, size)) as line:
        answers = asked(line, 6 * count)
    for begin in range(0, len(answers), 6):
        first, ok, several, refused, empty, nothing = answers[begin : begin + 6]
        assert (first, ok, several) == (small, b"OK", [-7, [None, b"hi"], None])
        assert (refused.code, refused.reason, empty, nothing) == (
            "ERR",
            TierReason.REFUSED,
            b"",
            None,
        )


@pytest.mark.parametrize("size", [23, 4095, 4097, 1 << 20])
def test_values_come_into_their_memory_however_they_are_cut(size: int) -> None:
    rooms = [bytearray(n) for n in (len(VALUE), len(VALUE) - 1, len(VALUE) + 1, 24, 8, 8)]
    said = bulk(VALUE) * 3 + bulk(b"r" * 24) + b"$-1\r\n" + b"-MOVED 5 elsewhere:1\r\n"
    with one_that_says(*cut(said, size)) as line:
        answers = asked(line, 6, *[halves(room) for room in rooms])
    assert answers[:5] == [len(VALUE), -1, len(VALUE), 24, None]
    assert isinstance(answers[5], ServerRefusal)
    assert answers[5].code == "MOVED"
    assert rooms[0] == VALUE
    assert rooms[1] == VALUE[:-1]  # its beginning, where it is too long
    assert rooms[2] == VALUE + b"\0"
    assert rooms[3] == b"r" * 24


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$x\r\n",
        b"?3\r\n",
        b"+" + b"a" * 5000 + b"\r\n",
        b"$3\r\nabcdef\r\n",
        b"*%d\r\n" % (MAX_TOLD_VALUES + 1),
        b"*1\r\n" * (MAX_TOLD_DEPTH + 1) + b":1\r\n",
        b"*2\r\n*%d\r\n" % (MAX_TOLD_VALUES - 1),
        b"*2\r\n" + b"*1\r\n:1\r\n" + b"*%d\r\n" % (MAX_TOLD_VALUES - 2),
    ],
)
def test_what_is_no_answer_ends_the_line(said: bytes) -> None:
    with one_that_says(said) as line, pytest.raises(ConnectionError, match="no answer of a Valkey"):
        asked(line, 1)


@pytest.mark.parametrize("said", [b":24\r\n", b"+OK\r\n", b"*0\r\n"])
def test_what_is_no_value_is_none_though_its_number_would_be_right(said: bytes) -> None:
    with one_that_says(said) as line, pytest.raises(ConnectionError, match="no answer of a Valkey"):
        asked(line, 1, halves(bytearray(24)))


def test_a_line_is_left_that_says_more_than_it_was_asked() -> None:
    with one_that_says(b"+OK\r\n+late\r\n") as line, pytest.raises(ConnectionError, match="more"):
        asked(line, 1)


def test_what_came_unasked_is_no_answer_to_the_next_question() -> None:
    with one_that_says(b"+OK\r\n", b"+late\r\n") as line:
        with suppress(ConnectionError):  # it has come already
            assert asked(line, 1) == [b"OK"]
        select.select([line._socket], [], [])
        with pytest.raises(ConnectionError, match="more answers than it was asked for"):
            asked(line, 1)


def test_what_is_just_in_the_bounds_is_told() -> None:
    deep = b"*1\r\n" * MAX_TOLD_DEPTH + b":1\r\n"
    with one_that_says(deep) as line:
        told: Answer = asked(line, 1)
        for _ in range(MAX_TOLD_DEPTH):
            (told,) = told
        assert told == [1]
    for length, kept in ((MAX_TOLD_BYTES, MAX_TOLD_BYTES), (MAX_TOLD_BYTES + 1, 0)):
        with one_that_says(bulk(bytes(length)), b"+OK\r\n") as line:
            value, ok = line.run([["GET", b"name"]] * 2, PATIENT_S)
            assert (len(value), ok) == (kept, b"OK")


def test_all_answers_of_a_run_have_in_all_what_one_may_have_and_the_next_run_as_much_again() -> (
    None
):
    half = bulk(bytes(MAX_TOLD_BYTES // 2))
    with one_that_says(half + b"*2\r\n" + half + bulk(b"x"), half, in_turn=True) as line:
        one, (other, short) = line.run([["MGET", b"name"]] * 2, PATIENT_S)
        assert (len(one), len(other), short) == (MAX_TOLD_BYTES // 2, MAX_TOLD_BYTES // 2, b"")
        (again,) = line.run([["GET", b"name"]], PATIENT_S)
        assert len(again) == MAX_TOLD_BYTES // 2


@pytest.mark.parametrize("kind", ["+", ":"])
def test_lines_in_lists_are_bounded_in_sum(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.tiers.valkey.line.MAX_TOLD_BYTES", 8)
    four = f"{kind}1234\r\n".encode()
    with one_that_says(b"*2\r\n" + 2 * four, b"*2\r\n" + 2 * four, in_turn=True) as line:
        for _ in range(2):
            assert len(line.run([["SCAN", b"0"]], PATIENT_S)[0]) == 2
    with one_that_says(b"*3\r\n" + 3 * four) as line, pytest.raises(ConnectionError):
        line.run([["SCAN", b"0"]], PATIENT_S)


def test_lists_that_are_just_in_the_bounds_together_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvd.tiers.valkey.line.MAX_TOLD_VALUES", 5)
    nested = b"*2\r\n*1\r\n:1\r\n*2\r\n:2\r\n:3\r\n"
    said = (nested, nested + b"*0\r\n", nested + b"*1\r\n:1\r\n")
    with one_that_says(*said, in_turn=True) as line:
        assert line.run([["SCAN", b"0"]], PATIENT_S) == [[[1], [2, 3]]]
        assert line.run([["SCAN", b"0"]] * 2, PATIENT_S) == [[[1], [2, 3]], []]
        with pytest.raises(ConnectionError):
            line.run([["SCAN", b"0"]] * 2, PATIENT_S)


@pytest.mark.parametrize("hangs_up", [False, True])
@pytest.mark.parametrize("said", [b"", b"$100", b"$10000\r\nabc", bulk(VALUE), bulk(VALUE)[:-2]])
def test_a_server_that_stops_speaking_is_waited_for_once(said: bytes, *, hangs_up: bool) -> None:
    began = time.monotonic()
    failure = ConnectionError if hangs_up else TimeoutError
    room = memoryview(bytearray(len(VALUE)))
    with one_that_says(said, hangs_up=hangs_up) as line, pytest.raises(failure):
        asked(line, 2, (room,), (room,), seconds=SECONDS)
    assert time.monotonic() - began < 2 * SECONDS + 0.5


def test_a_server_that_trickles_is_not_waited_for_longer() -> None:
    with one_that_says(*[b"+"] * 99, hangs_up=True) as line:  # 2 ms each
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            line.run([["GET", b"name"]], 0.05)
        assert time.monotonic() - began < 5  # and not 30


def test_a_server_that_speaks_late_is_not_waited_for_as_long_again() -> None:
    with one_that_says(*[b"+"] * 22) as line:  # in a twentieth of a second or more
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"within 0.08 s"):
            line.run([["GET", b"name"]], 0.08)
        assert time.monotonic() - began < 0.12


def test_a_server_that_does_not_read_is_not_waited_for_longer() -> None:
    lent = np.zeros(64 << 20, dtype=np.uint8)
    mark, view = weakref.ref(lent), memoryview(lent)  # type: ignore[arg-type]
    del lent
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = Line("127.0.0.1", listener.getsockname()[1], SECONDS)
        began = time.monotonic()
        gc.disable()
        try:
            with pytest.raises(TimeoutError):
                line.run([["SET", b"name", view]], 0.1)
            del view
            assert time.monotonic() - began < 0.4
            until(lambda: mark() is None)
        finally:
            gc.enable()
            line.close()


def test_nothing_more_goes_out_once_a_line_is_closed() -> None:
    """As the system closes those of a killed process: its next may clear what that had written."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = Line("127.0.0.1", listener.getsockname()[1], PATIENT_S)
        server, _ = listener.accept()
        with server:
            with pytest.raises(TimeoutError):
                line.run([["SET", b"name", memoryview(bytes(64 << 20))]], 0.1)
            line.close()
            server.settimeout(PATIENT_S)
            with pytest.raises(ConnectionResetError):
                list(iter(lambda: server.recv(1 << 20), b""))


# -- with real servers ------------------------------------------------------------------------


@contextmanager
def opened(server: ValkeyServer, **options: object) -> Iterator[ValkeyStore]:
    patience = {"request_timeout_seconds": SECONDS, "connect_timeout_seconds": SECONDS}
    store = ValkeyStore({"addresses": [server.address], **patience, **options})  # type: ignore[dict-item]
    yield store
    store.close()


@needs_server
def test_a_line_that_the_server_ended_while_it_was_idle_costs_no_block(
    server: ValkeyServer,
) -> None:
    with opened(server) as store:
        for first in range(0, 40, 4):
            keep(store, range(first, first + 4))
            server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            assert all(has(store, n) for n in range(first, first + 4))
        assert not store.usage().errors


@needs_server
def test_nothing_of_a_write_that_was_cut_off_comes_after_a_delete(server: ValkeyServer) -> None:
    """The server is frozen until the line is full: one value is sent in part."""
    with opened(server, threads=2) as store:
        keep(store, [1])
        server.signal(signal.SIGSTOP)
        blocks = [source(key(n), content(n, 1 << 20)) for n in range(2, 24)]
        assert set(store.write(blocks, soon())) == {Outcome.FAILED}
        server.signal(signal.SIGCONT)

        def deletes() -> bool:
            with suppress(Exception):
                store.delete_scopes([key(1).scope], soon())
                return True
            return False

        until(deletes)
        time.sleep(0.3)
        assert "keys=" not in server.call("INFO", "keyspace")
        keep(store, range(8))
        until(lambda: not store._servers._doubts)


@needs_server
def test_writes_that_may_happen_yet_are_so_many_at_most(server: ValkeyServer) -> None:
    with opened(server) as store:
        keep(store, [1])
        lines = [Line("127.0.0.1", server.port, SECONDS) for _ in range(MAX_DOUBTS)]
        store._servers._doubts += [("elsewhere:1", line) for line in lines]
        assert store.write([source(key(2), content(2))], soon()) == [Outcome.FAILED]
        assert has(store, 1)
        store._servers._settled(store._servers._doubts[0])
        assert store.write([source(key(2), content(2))], soon()) == [Outcome.DONE]


@needs_server
def test_a_deadline_that_is_nearer_than_the_patience_leaves_no_server_alone(
    server: ValkeyServer,
) -> None:
    with opened(server, request_timeout_seconds=30) as store:
        keep(store, [1, 2])
        server.signal(signal.SIGSTOP)
        block = source(key(3), content(3))
        began = time.monotonic()
        assert store.write([block], began + 0.1) == [Outcome.FAILED]
        assert time.monotonic() - began < 5  # and not 30
        server.signal(signal.SIGCONT)
        assert has(store, 1)  # at once
        assert "does not answer" not in str(store.usage().notes)


@needs_server
def test_a_call_that_broke_leaves_no_answer_to_the_next(server: ValkeyServer) -> None:
    with opened(server) as store:
        servers = store._servers
        (home,) = servers.homes()
        like_an_answer = bulk(b"of another")
        for name, value in ((b"one", like_an_answer), (b"two", b"its own")):
            servers.run(home, [["SET", name, value]], soon(), changes=True)
        with pytest.raises(TypeError):
            servers.fill(home, [b"one"], [[memoryview(like_an_answer)]], soon())  # read-only
        assert servers.heads(home, [b"two"], soon()) == [b"its own"]


@needs_server
@pytest.mark.parametrize(
    "said",
    [
        *(5, None, b"x", [5], [[0, 1]], [[-1, 5, [b"a", 1]]], [[0, SLOTS, [b"a", 1]]]),
        *([[0, 1, [b"a", 0]]], [[0, 1, [b"a", 1 << 16]]], [[0, 1, [b"a", b"1"]]]),
        *([[0, 1, [5, 1]]], [[0, 1, [b"\xff", 1]]]),
        [[0, SLOTS - 1, [b"a", 1]], [7, 7, [b"b", 1]]],
    ],
)
def test_slots_that_can_not_be_end_no_watch(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, said: Answer
) -> None:
    with opened(server) as store:
        servers = store._servers
        run = servers._run

        def lie(home: str, commands: list[Command], *args: float, **named: Any) -> list[Answer]:
            asks = commands[0][0] == "CLUSTER"
            return [said] if asks else run(home, commands, *args, **named)

        monkeypatch.setattr(servers, "_run", lie)
        with pytest.raises(TierError):
            servers.refresh()
        assert servers.homes() == [server.address]


def record_of_length(length: int) -> bytes:
    return b"kvS1" + (8).to_bytes(4, "little") + bytes(8) + length.to_bytes(8, "little")


@needs_server
def test_a_record_of_a_length_that_can_not_be_costs_its_block_alone(server: ValkeyServer) -> None:
    with opened(server) as store:
        name = store._book.record_name(key(1))
        record = record_of_length((1 << 64) - 1)
        (home,) = store._servers.homes()
        store._servers.run(home, [["SET", name, record]], soon())
        keep(store, [1, 2])
        assert has(store, 1)
        assert has(store, 2)
        store._servers.run(home, [["SET", name, record]], soon())
        store.delete_scopes([ONE], soon())
        assert server.call("DBSIZE") == ":0\r\n"


def test_the_most_pieces_that_a_record_may_tell_of_are_named() -> None:
    book = NameBook("kvd", 1 << 20)
    most = MAX_PIECES_TOLD << 20
    assert book.suffixes_told(record_of_length(most)) == book.shape((most,)).suffixes
    assert book.suffixes_told(record_of_length(most + 1)) == ()
    assert book.suffixes_told(record_of_length(1 << 10)) == book.shape((1 << 10,)).suffixes == ()


@needs_server
@pytest.mark.parametrize("count", ["", "x", "-1", "1.5", "9" * (MAX_DIGITS + 1), "9" * 5000, "²"])
def test_counts_that_can_not_be_end_no_watch(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, count: str
) -> None:
    with opened(server) as store:
        servers = store._servers
        run = servers._run
        words = f"db0:keys={count},expires=0\nmaxmemory:{count}\nused_memory:{count}\n"
        said = f"run_id:1\n{words}evicted_keys:{count}\n".encode()

        def lie(home: str, commands: list[Command], *args: float, **named: Any) -> list[Answer]:
            return [said] if commands == [["INFO"]] else run(home, commands, *args, **named)

        monkeypatch.setattr(servers, "_run", lie)
        for _ in range(2):  # what it says is compared with what it said before
            servers._look()
        usage = store.usage()
        assert (usage.blocks, usage.bytes, usage.capacity_bytes, usage.evicted_blocks) == (0,) * 4


def test_a_server_that_is_heard_of_while_notes_are_made_costs_none() -> None:
    servers = Servers(ValkeyOptions.of({"addresses": ["127.0.0.1:1"]}))

    class Said(dict[str, str]):
        def get(self, word: str, other: str = "") -> str:  # type: ignore[override]
            servers.told[f"{word}:{len(servers.told)}"] = {}
            return super().get(word, other)

    servers.told = {"one": Said(maxmemory="0")}
    assert "a server has no maxmemory" in str(servers.notes)


def test_the_largest_number_that_a_server_may_say_is_told() -> None:
    assert count_in({"maxmemory": "9" * MAX_DIGITS}, "maxmemory") == 10**MAX_DIGITS - 1


# -- encrypted --------------------------------------------------------------------------------


@contextmanager
def encrypted(server: ValkeyServer, context: ssl.SSLContext) -> Iterator[str]:
    """Where the server is reached by TLS alone: an address."""

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)

    def serve(come: socket.socket) -> None:
        place = (server.host, server.port)
        with (
            suppress(OSError),
            context.wrap_socket(come, server_side=True) as outer,
            socket.create_connection(place) as inner,
        ):
            back = threading.Thread(target=pass_on, args=(inner, outer))
            back.start()
            pass_on(outer, inner)
            back.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                thread = threading.Thread(target=serve, args=(listener.accept()[0],))
                thread.start()
                threads.append(thread)

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()


def both_sides(place: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """How a server encrypts, and how who trusts it."""
    file, secret = certificate(place, "server")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(file, secret)
    return theirs, ssl.create_default_context(cafile=str(file))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_what_came_encrypted_and_unasked_is_no_answer_to_the_next_question(tmp_path: Path) -> None:
    tls = both_sides(tmp_path)
    with one_that_says(b"+OK\r\n", b"+right\r\n", in_turn=True, tls=tls) as line:
        assert asked(line, 1) == [b"OK"]
        assert asked(line, 1) == [b"right"], "what TLS says for itself is nothing"

    def ask_twice(line: Line) -> None:
        assert asked(line, 1) == [b"OK"]  # unless the other has come already
        select.select([line._socket], [], [])
        asked(line, 1)

    with (
        one_that_says(b"+OK\r\n", b"+late\r\n", tls=tls) as line,
        pytest.raises(ConnectionError, match="more answers than it was asked for"),
    ):
        ask_twice(line)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_an_encrypted_line_that_was_idle_and_is_closed_says_so(tmp_path: Path) -> None:
    """Then another is made at once, and the server is not called away."""
    with one_that_says(b"+OK\r\n", hangs_up=True, tls=both_sides(tmp_path)) as line:
        assert asked(line, 1) == [b"OK"]
        select.select([line._socket], [], [])
        with pytest.raises(ConnectionResetError):
            asked(line, 1)


@needs_server
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_blocks_go_encrypted_where_both_sides_trust(server: ValkeyServer, tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path, "server"))
    mine = certificate(tmp_path, "mine")
    context.load_verify_locations(mine[0])
    context.verify_mode = ssl.CERT_REQUIRED
    trust = {"tls": True, "ca_file": str(tmp_path / "server.pem")}
    known = {"cert_file": str(mine[0]), "key_file": str(mine[1])}
    stranger = dict(zip(known, map(str, certificate(tmp_path, "stranger")), strict=True))
    with encrypted(server, context) as address:
        patient = {f"{what}_timeout_seconds": PATIENT_S for what in ("request", "connect")}
        with opened(server, addresses=[address], **trust, **known, **patient) as store:
            keep(store, range(8))
            large = source(key(99), content(99, 3 << 20), content(98, 8))
            assert store.write([large], soon()) == [Outcome.DONE]
            assert all(has(store, n) for n in range(8))
            store.delete_scopes([ONE], soon())
            assert not has(store, 1)
        others: list[dict[str, object]] = [
            {},
            trust,
            trust | stranger,
            trust | known | {"ca_file": str(mine[0])},
        ]
        for options in others:
            with opened(server, addresses=[address], **options) as store:
                block = source(key(9), content(9, BLOCK_BYTES))
                assert store.write([block], soon()) == [Outcome.FAILED]
        (tmp_path / "none.pem").write_text("no certificate")
        for wrong in ("ca_file", "cert_file"):
            files = trust | known | {wrong: str(tmp_path / "none.pem")}
            with (
                pytest.raises(TierUnusable, match=wrong),
                opened(server, addresses=[address], **files),
            ):
                pass
