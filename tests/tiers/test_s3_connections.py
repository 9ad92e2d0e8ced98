"""A bucket that ends the connections it was to keep costs no block."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

pytest.importorskip("obstore", reason="obstore is not here")

from kvd.tiers.s3 import bucket as module
from kvd.tiers.s3.bucket import Bucket
from kvd.tiers.store import Outcome, TierError, TierReason, TierTimeout
from tests.tiers.contract import key, soon, source
from tests.tiers.http_stand import serving
from tests.tiers.test_s3_answers import NAME, bucket
from tests.tiers.valkey_rig import free_ports


class Forgetful(ThreadingHTTPServer):
    """Answers `most` requests of a connection, and ends it in place of the next answer."""

    most = 1
    asked = 0
    together: threading.Barrier | None = None  # so many answers are given at once

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), OfForgetful)
        self.names: set[str] = set()


class OfForgetful(BaseHTTPRequestHandler):
    """There are no objects, and every one is taken. Only of lists are they, each on its page."""

    protocol_version = "HTTP/1.1"
    answered = 0  # of this connection

    def do_HEAD(self) -> None:
        assert isinstance(self.server, Forgetful)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked += 1
        self.answered += 1
        if self.answered > self.server.most:
            self.close_connection = True
            return
        if self.server.together is not None:
            self.server.together.wait()
        body = self._carried_out(self.server.names, content)
        self.send_response(404 if self.command == "HEAD" else 200)
        self.send_header("ETag", "1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_HEAD  # noqa: N815 - as the server calls them

    def _carried_out(self, names: set[str], content: bytes) -> bytes:
        where = urlsplit(self.path)
        if self.command == "PUT":
            names.add(where.path.removeprefix("/blocks/"))
        if self.command == "POST":
            gone = re.findall("<Key>(.*?)</Key>", content.decode())
            names.difference_update(gone)
            told = [f"<Deleted><Key>{name}</Key></Deleted>" for name in gone]
            return f"<DeleteResult>{''.join(told)}</DeleteResult>".encode()
        if self.command != "GET":
            return b""
        asked = dict(parse_qsl(where.query))
        behind = asked.get("continuation-token") or asked.get("start-after", "")
        left = sorted(each for each in names if each > behind)
        page = "<ListBucketResult>"
        for name in left[:1]:
            page += f"<Contents><Key>{name}</Key><Size>1</Size><ETag>1</ETag>"
            page += "<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        if len(left) > 1:
            page += f"<NextContinuationToken>{left[0]}</NextContinuationToken>"
        page += f"<IsTruncated>{str(len(left) > 1).lower()}</IsTruncated>"
        return f"{page}</ListBucketResult>".encode()

    def log_message(self, *_words: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def forgetful() -> Iterator[Forgetful]:
    with serving(Forgetful()) as server:
        yield server


@pytest.fixture
def asked(forgetful: Forgetful, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket with a kept connection, which is ended under the next request."""
    monkeypatch.setattr(module, "QUIET_SECONDS", 60.0)
    made = bucket(forgetful.server_port, tmp_path)
    assert not made.has(NAME)
    return made


def test_a_question_whose_kept_connection_is_ended_is_asked_on_another(
    asked: Bucket, forgetful: Forgetful
) -> None:
    assert not asked.has(NAME)
    assert forgetful.asked == 3
    assert asked.notes == ()


def test_a_write_whose_kept_connection_is_ended_is_made_again_and_may_happen_late(
    asked: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = asked.name_of(key(1))
    asked._unanswered.clear()  # that of a process before
    asked.require_no_late_writes(name)
    assert asked.write(name, source(key(1), bytes(8))) is Outcome.DONE
    with pytest.raises(TierTimeout, match="may happen yet"):
        asked.require_no_late_writes(name)


def test_what_a_clear_asks_whose_kept_connection_is_ended_is_asked_on_another(
    asked: Bucket, forgetful: Forgetful
) -> None:
    blocks = [f"kvd/00/{number}" for number in range(3)]
    forgetful.names.update(blocks)
    witness = asked.bear_witness("kvd/00")
    pages = list(asked.names("kvd/00", soon(), at_once=1))
    assert pages == [[name] for name in (*blocks, witness)]
    asked.remove(blocks)
    assert forgetful.names == {witness}
    asked.dismiss(witness)
    assert not forgetful.names
    assert asked.notes == ()


def test_a_bucket_that_ends_every_connection_is_asked_once_more_and_then_left_alone(
    asked: Bucket, forgetful: Forgetful
) -> None:
    forgetful.most = 0
    before = forgetful.asked
    for _ in range(2):
        with pytest.raises(TierError) as raised:
            asked.has(NAME)
        assert raised.value.reason is TierReason.UNREACHABLE
    assert forgetful.asked - before == 2


def test_a_request_that_was_long_under_way_is_not_sent_again(
    asked: Bucket, forgetful: Forgetful, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it could take twice the time that it may, and its process would be taken for hung."""
    monkeypatch.setattr(module, "HUNG_UP_SECONDS", 0.0)
    before = forgetful.asked
    with pytest.raises(TierError, match="IncompleteMessage"):
        asked.has(NAME)
    assert forgetful.asked - before == 1


def test_however_many_connections_were_kept_and_are_ended_no_request_is_lost(
    asked: Bucket, forgetful: Forgetful
) -> None:
    forgetful.together = threading.Barrier(20)
    with ThreadPoolExecutor(20) as threads:
        assert not any(threads.map(asked.has, [NAME] * 20)), "20 are kept, of 16 threads"
    forgetful.together = None
    for _ in range(20):
        assert not asked.has(NAME)
    assert asked.notes == ()


def test_why_nothing_is_asked_is_said_though_another_request_was_answered_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 60.0)
    (port,) = free_ports(1)
    dead = bucket(port, tmp_path)
    with pytest.raises(TierError, match="ConnectionRefused"):
        dead.has(NAME)
    dead.note(None, 0.0)
    with pytest.raises(TierError, match=r"does not answer: .*ConnectionRefused"):
        dead.has(NAME)
