"""What goes wrong with a bucket is called what it is, whatever numbers stand in names and ports."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("obstore", reason="obstore is not here")

from kvd.tiers.s3 import bucket as module
from kvd.tiers.s3.bucket import Bucket
from kvd.tiers.s3.hosts import kept_to_endpoint
from kvd.tiers.s3.options import S3Options
from kvd.tiers.s3.store import S3Store
from kvd.tiers.store import (
    Found,
    OptionValue,
    Outcome,
    TierError,
    TierReason,
    TierUnusable,
)
from tests.tiers.contract import ONE, key, read, soon, source, target
from tests.tiers.http_stand import serving
from tests.tiers.valkey_rig import certificate, free_ports

FLOOD_MIB = 256
NAME = "kvd/ab403cd507/401"


class Answering(ThreadingHTTPServer):
    """Answers each request with one status, without a word; 403 where the key is not right."""

    status = 500
    asked = 0
    statuses: dict[str, int] | None = None  # by name
    key = ""
    token: str | None = None
    hosts: ClassVar[list[str]] = []  # that requests were for


class Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        assert isinstance(self.server, Answering)
        self.server.asked += 1
        is_let_in = f"Credential={self.server.key}" in self.headers["Authorization"]
        is_let_in = is_let_in and self.headers["x-amz-security-token"] == self.server.token
        self.send_response(self.server.status if is_let_in else 403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_words: Any) -> None:
        """Nobody reads it."""


class Alike(Handler):
    """Whatever is asked is answered alike, by `_answer`."""

    def _take_all(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)


class Curt(Alike):
    """Whatever is asked, the answer is the server's status alone."""

    def _answer(self) -> None:
        assert isinstance(self.server, Answering)
        self.server.asked += 1
        self._take_all()
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()


class Uneven(Curt):
    """Answers by the object's name, 404 where it is not told how."""

    def _answer(self) -> None:
        assert isinstance(self.server, Answering)
        name = self.path.partition("?")[0].removeprefix("/blocks/")
        self.server.status = (self.server.statuses or {}).get(name, 404)
        super()._answer()

    def do_HEAD(self) -> None:
        self._answer()


class Page(Alike):
    """A page for people stands before the bucket: whatever is asked, it is the answer."""

    def _answer(self) -> None:
        self._take_all()
        page = b"<html><head><title>Soon back</title></head><body><p>Soon</p></body></html>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page)

    def do_HEAD(self) -> None:
        self._answer()


class Wordy(Alike):
    """Refuses to take or give an object, and says why; there are none."""

    def _answer(self) -> None:
        self._take_all()
        is_list = "list-type" in self.path
        said = (
            b"<Error><Code>RequestTimeTooSkewed</Code><Message>It&apos;s\nlate.</Message></Error>"
        )
        said = b'<?xml version="1.0" encoding="UTF-8"?>\n' + (b"<L></L>" if is_list else said)
        self.send_response(200 if is_list else 403)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


class Confused(Alike):
    """Whatever is to be removed: it says of another object that it may not be."""

    def _answer(self) -> None:
        self._take_all()
        said = b"<DeleteResult><Error><Key>another</Key><Code>AccessDenied</Code>"
        said += b"<Message>No.</Message></Error></DeleteResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


class Elsewhere(Alike):
    """The bucket is in another region: the server's status, and the word that goes with it."""

    def _answer(self) -> None:
        assert isinstance(self.server, Answering)
        self._take_all()
        words = {301: "PermanentRedirect", 400: "AuthorizationHeaderMalformed"}
        said = f"<Error><Code>{words[self.server.status]}</Code></Error>".encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said)

    def do_HEAD(self) -> None:
        self._answer()


class Redirecting(Alike):
    """Sends each request on to the same path of another host: to itself, by another address."""

    def _answer(self) -> None:
        assert isinstance(self.server, Answering)
        self._take_all()
        self.server.hosts.append(self.headers["Host"].partition(":")[0])
        self.send_response(307)
        self.send_header("Location", f"http://127.0.0.2:{self.server.server_port}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self._answer()


class Endless(Handler):
    """Says at once of each list that there is more, and names nothing; there are no objects."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Answering)
        self.server.asked += 1
        more = "<IsTruncated>true</IsTruncated><NextContinuationToken>1</NextContinuationToken>"
        said = f"<?xml version='1.0'?><ListBucketResult>{more}</ListBucketResult>".encode()
        self._say(said)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(b"")

    def _say(self, said: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", "1")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


class Flooding(Handler):
    """Of an object of 100 bytes, asked for its beginning, it sends a MiB again and again."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Answering)
        is_flood = "Range" in self.headers
        self.send_response(206 if is_flood else 200)
        if is_flood:
            self.send_header("Content-Range", "bytes 0-99/100")
        self.send_header("Content-Length", str(FLOOD_MIB << 20 if is_flood else 100))
        self.send_header("ETag", "1")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(FLOOD_MIB if is_flood else 0):
                self.wfile.write(bytes(1 << 20))
                self.server.asked += 1


@pytest.fixture(autouse=True)
def no_late_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletions wait for none of a process before."""
    monkeypatch.setattr(module, "UNANSWERED_S", 0.0)


@pytest.fixture
def answering() -> Iterator[Answering]:
    with serving(Answering(("127.0.0.1", 0), Handler)) as server:
        yield server


def options_of(port: int, place: Path) -> dict[str, OptionValue]:
    key = place / "key"
    key.write_text("none")
    return {
        "bucket": "blocks",
        "endpoint": f"http://127.0.0.1:{port}",
        "allow_http": True,
        "access_key_file": str(key),
        "secret_key_file": str(key),
    }


def forget_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def bucket(port: int, place: Path) -> Bucket:
    return Bucket(S3Options.of(options_of(port, place)))


def reason(of: Bucket) -> TierReason:
    with pytest.raises(TierError) as raised:
        of.has(NAME)
    return raised.value.reason


def test_a_dead_bucket_is_away_for_names_with_numbers_of_refusals_too(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    dead = bucket(port, tmp_path)
    assert reason(dead) is TierReason.UNREACHABLE
    assert dead.problem, "it is asked again at once"
    assert f"127.0.0.1:{port} ConnectionRefused" in dead.problem, "a proxy may be meant"


def test_an_answer_that_the_client_breaks_over_is_a_failure_of_the_bucket(tmp_path: Path) -> None:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Confused)) as server:
        asked = bucket(server.server_port, tmp_path)
        with pytest.raises(TierError, match="the client broke") as raised:
            asked.remove([NAME])
    assert raised.value.reason is TierReason.IO_ERROR
    assert any("the client broke" in note for note in asked.notes)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
def test_a_certificate_that_is_not_trusted_is_said(answering: Answering, tmp_path: Path) -> None:
    file, secret = certificate(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, secret)
    answering.socket = context.wrap_socket(answering.socket, server_side=True)
    options = options_of(answering.server_port, tmp_path)
    options["endpoint"] = f"https://localhost:{answering.server_port}"
    asked = Bucket(S3Options.of(options))
    assert reason(asked) is TierReason.UNREACHABLE
    assert "InvalidCertificate" in asked.problem
    assert asked.problem.endswith("; look at endpoint and ca_file")


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (400, TierReason.REFUSED),
        (401, TierReason.REFUSED),
        (403, TierReason.REFUSED),
        (500, TierReason.IO_ERROR),
        (429, TierReason.BUSY),
        (503, TierReason.BUSY),
        (507, TierReason.NO_SPACE),
    ],
)
def test_an_answer_is_called_by_its_status(
    answering: Answering, tmp_path: Path, status: int, wanted: TierReason
) -> None:
    answering.status = status
    assert reason(bucket(answering.server_port, tmp_path)) is wanted


def test_failures_are_told_while_they_are_new(
    answering: Answering,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answering.status = 500
    of = bucket(answering.server_port, tmp_path)
    assert [reason(of) for _ in range(3)] == [TierReason.IO_ERROR] * 3
    assert [note for note in of.notes if "fails requests: " in note]
    assert caplog.text.count("fails requests: ") == 1
    monkeypatch.setattr("kvd.tiers.s3.bucket.LOG_SECONDS", 0.0)
    assert not of.notes


@pytest.mark.parametrize("status", [404, 409, 412])
def test_what_says_nothing_of_an_object_is_a_failure(
    answering: Answering, tmp_path: Path, status: int
) -> None:
    """Also what would say something of it where the question was another."""
    answering.RequestHandlerClass, answering.status = Curt, status
    store = S3Store(options_of(answering.server_port, tmp_path))
    assert store.write([source(key(1), bytes(8))], soon()) == [Outcome.FAILED]
    with pytest.raises(TierError):
        store._bucket.remove([store._bucket.name_of(key(1))])
    if status == 404:
        assert store.exists([key(1)], soon()) == [False]
        assert read(store, key(1), 8)[0] is Outcome.MISSING
    else:
        with pytest.raises(TierError):
            store.exists([key(1)], soon())
        assert read(store, key(1), 8)[0] is Outcome.FAILED
    assert set(store.usage().errors) == {TierReason.IO_ERROR}
    store.close()


def test_a_block_of_which_the_server_says_nothing_is_not_called_absent(
    answering: Answering, tmp_path: Path
) -> None:
    answering.RequestHandlerClass = Uneven
    store = S3Store(options_of(answering.server_port, tmp_path))
    answering.statuses = {store._bucket.name_of(key(1)): 200, store._bucket.name_of(key(2)): 503}
    found = store.exists([key(n) for n in range(4)], soon())
    assert found == [Found.ABSENT, Found.THERE, Found.UNKNOWN, Found.ABSENT]
    store.close()


def test_who_is_refused_says_so_and_looks_whether_its_files_hold_other_credentials(
    answering: Answering,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("kvd.tiers.s3.bucket.RENEW_SECONDS", 0.0)
    answering.status, answering.key = 200, "none/"
    of = bucket(answering.server_port, tmp_path)
    assert of.has(NAME)
    answering.key = "another/"
    assert [reason(of) for _ in range(3)] == [TierReason.REFUSED] * 3
    assert "refuses us" in of.problem
    assert caplog.text.count("refuses us") == 1
    (tmp_path / "key").unlink()
    assert reason(of) is TierReason.REFUSED
    (tmp_path / "key").write_text("another")
    assert reason(of) is TierReason.REFUSED
    assert of.has(NAME)
    assert not of.problem


def test_a_buckets_own_word_for_a_refusal_is_noted_and_said(
    answering: Answering, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answering.RequestHandlerClass = Wordy
    store = S3Store(options_of(answering.server_port, tmp_path))
    assert store.write([source(key(1), bytes(8))], soon()) == [Outcome.FAILED]
    (note,) = store.usage().notes
    assert "refuses us: RequestTimeTooSkewed: It's late: set this machine's clock: " in note
    assert "<" not in note
    assert "refuses us: RequestTimeTooSkewed: " in caplog.text
    assert read(store, key(1), 8)[0] is Outcome.FAILED
    assert "refuses us: RequestTimeTooSkewed: " in str(store.usage().notes)
    store.close()


def test_a_buckets_own_word_is_heard_where_only_lookups_are_refused(
    answering: Answering, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A HEAD is answered without a word."""
    answering.RequestHandlerClass, answering.status = Wordy, 403
    store = S3Store(options_of(answering.server_port, tmp_path))
    for _ in range(3):
        with pytest.raises(TierError):
            store.exists([key(1)], soon())
        assert "refuses us: RequestTimeTooSkewed: " in str(store.usage().notes)
    assert caplog.text.count("refuses us: RequestTimeTooSkewed: ") == 1
    assert caplog.text.count("refuses us") == 2
    store.close()


@pytest.mark.parametrize(
    ("status", "said"), [(301, "configured region"), (400, "AuthorizationHeaderMalformed: ")]
)
def test_a_bucket_of_another_region_opens_no_tier_and_is_noted_later(
    answering: Answering, tmp_path: Path, status: int, said: str
) -> None:
    answering.RequestHandlerClass = Wordy
    store = S3Store(options_of(answering.server_port, tmp_path))
    answering.RequestHandlerClass, answering.status = Elsewhere, status
    with pytest.raises(TierUnusable, match=f"refuses us: .*{said}"):
        S3Store(options_of(answering.server_port, tmp_path))
    with pytest.raises(TierError):
        store.exists([key(1)], soon())
    assert said in str(store.usage().notes)
    assert store.write([source(key(1), bytes(8))], soon()) == [Outcome.FAILED]
    assert said in str(store.usage().notes)
    store.close()


def test_why_a_lookup_is_refused_is_asked_once_in_a_while(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAR_SECONDS", 60.0)
    answering.RequestHandlerClass, answering.status = Curt, 403
    of = bucket(answering.server_port, tmp_path)
    assert [reason(of) for _ in range(5)] == [TierReason.REFUSED] * 5
    assert answering.asked == 6


def test_a_session_token_of_the_environment_is_not_sent_with_a_files_keys(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another")
    answering.status, answering.key = 200, "none/"
    assert bucket(answering.server_port, tmp_path).has(NAME)


def test_temporary_keys_go_with_their_token_and_are_read_again_once_it_expires(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.0)
    token = tmp_path / "token"
    token.write_text("first\n")
    answering.status, answering.key, answering.token = 200, "none/", "first"
    options = options_of(answering.server_port, tmp_path) | {"session_token_file": str(token)}
    of = Bucket(S3Options.of(options))
    assert of.has(NAME)
    answering.token = "second"
    assert reason(of) is TierReason.REFUSED
    token.write_text("second\n")
    assert reason(of) is TierReason.REFUSED  # which has the files read again
    assert of.has(NAME)


def test_a_redirect_takes_neither_token_nor_request_to_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_proxies(monkeypatch)
    (tmp_path / "token").write_text("nobody else's")
    with serving(Answering(("0.0.0.0", 0), Redirecting)) as server:  # two addresses
        options = options_of(server.server_port, tmp_path)
        options["session_token_file"] = str(tmp_path / "token")
        of = Bucket(S3Options.of(options))
        asked: list[Callable[[], object]] = [
            lambda: of.has(NAME),
            lambda: of.read(NAME, target(key(1), 8)),
            lambda: list(of.names("kvd", soon())),
            lambda: of.remove([NAME]),
        ]
        for ask in asked:
            with pytest.raises(TierError, match="another host") as raised:
                ask()
            assert raised.value.reason is TierReason.REFUSED
        assert "sends us to another host (a redirect)" in str(of.notes)
        with pytest.raises(TierUnusable, match="look at endpoint"):
            of.meet()
        assert set(server.hosts) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("host", "is_kept"),
    [
        ("s3.example.org", True),
        ("[::1]", True),
        ("127.0.0.1", True),
        ("127.1", False),
        ("0x7f.0.0.1", False),
        ("s3.example.org.", False),
    ],
)
def test_only_a_host_that_all_programs_spell_alike_is_kept_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, *, is_kept: bool
) -> None:
    forget_proxies(monkeypatch)
    options = options_of(1, tmp_path) | {"endpoint": f"http://{host}:1"}
    assert bool(kept_to_endpoint(S3Options.of(options))) is is_kept
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert not kept_to_endpoint(S3Options.of(options))


def test_a_client_that_must_ask_others_for_its_keys_is_kept_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_proxies(monkeypatch)
    options = options_of(1, tmp_path)
    del options["access_key_file"], options["secret_key_file"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "some")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    assert not kept_to_endpoint(S3Options.of(options))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "some")
    assert kept_to_endpoint(S3Options.of(options))


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 is here")
def test_an_address_of_version_6_is_reached(tmp_path: Path) -> None:
    class Six(Answering):
        address_family = socket.AF_INET6

    with serving(Six(("::1", 0), Curt)) as server:
        server.status = 200
        options = options_of(1, tmp_path) | {"endpoint": f"http://[::1]:{server.server_port}"}
        assert Bucket(S3Options.of(options)).has(NAME)


def test_files_are_not_read_for_each_refusal(
    answering: Answering, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.tiers.s3.bucket.RENEW_SECONDS", 60.0)
    answering.status, answering.key = 200, "another/"
    of = bucket(answering.server_port, tmp_path)
    assert reason(of) is TierReason.REFUSED
    (tmp_path / "key").write_text("another")
    assert [reason(of) for _ in range(3)] == [TierReason.REFUSED] * 3


def test_a_bucket_that_refuses_some_is_not_told_of_each_time(
    answering: Answering, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = bucket(answering.server_port, tmp_path)
    for _ in range(10):
        answering.status = 403
        assert reason(of) is TierReason.REFUSED
        answering.status = 200
        assert of.has(NAME)
    assert caplog.text.count("refuses us") == 1


def test_a_list_without_an_end_ends_at_the_deadline(answering: Answering, tmp_path: Path) -> None:
    answering.RequestHandlerClass, answering.status = Endless, 404
    options = options_of(answering.server_port, tmp_path)
    haste = {"request_timeout_seconds": 0.2, "connect_timeout_seconds": 0.2}
    store = S3Store({**options, **haste})  # which asks for one name
    assert answering.asked > 2
    with pytest.raises(TierError, match="before the bucket had named all"):
        store.delete_scopes([ONE], time.monotonic() + 0.3)
    asked = answering.asked
    time.sleep(0.1)
    assert answering.asked <= asked + 1, "it is asked for more though nobody waits"
    assert store.exists([key(1)], soon()) == [Found.ABSENT], "it is not silent"
    assert store.usage().errors == {TierReason.TIMEOUT: 1}
    store.close()


def test_of_an_objects_beginning_no_more_is_taken_than_was_asked_for(
    answering: Answering, tmp_path: Path
) -> None:
    answering.RequestHandlerClass = Flooding
    of = bucket(answering.server_port, tmp_path)
    assert of.read(NAME, target(key(1), 8)) is Outcome.FAILED
    assert answering.asked < FLOOD_MIB // 2
