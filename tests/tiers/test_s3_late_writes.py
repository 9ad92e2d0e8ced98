"""A bucket that takes a write which was given up: nothing of it is there after a deletion."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

pytest.importorskip("obstore", reason="obstore is not here")

from kvd.tiers.s3 import bucket as module
from kvd.tiers.s3.store import S3Store
from kvd.tiers.store import NAMESPACE_BYTES, OptionValue, Outcome, TierTimeout
from tests.tiers.contract import ONE, OTHER, key, soon, source, write
from tests.tiers.http_stand import serving
from tests.tiers.valkey_rig import until

LIST = (
    "<?xml version='1.0'?><ListBucketResult>{}<IsTruncated>false</IsTruncated></ListBucketResult>"
)
OBJECT = (
    "<Contents><Key>{}</Key><Size>1</Size><ETag>1</ETag>"
    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
)


class LateBucket(ThreadingHTTPServer):
    """Names alone. What is put while it is late is there once it is not, whoever waits."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.names: set[str] = set()
        self.lists = 0
        self.in_time = threading.Event()
        self.in_time.set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LateBucket

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.in_time.wait(60.0)
        self.server.names.add(unquote(urlsplit(self.path).path).removeprefix("/blocks/"))
        self._say(200)

    def do_HEAD(self) -> None:
        self._say(404)

    def do_GET(self) -> None:
        self.server.lists += 1
        below = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        found = [OBJECT.format(name) for name in self.server.names if name.startswith(below)]
        self._say(200, LIST.format("".join(found)).encode())

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        names = re.findall("<Key>(.*?)</Key>", asked)
        self.server.names.difference_update(names)
        told = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self._say(200, f"<?xml version='1.0'?><DeleteResult>{told}</DeleteResult>".encode())

    def _say(self, status: int, content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("ETag", "1")
        self.send_header("Content-Length", str(len(content)))
        with contextlib.suppress(OSError):  # nobody waits any more
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_words: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def server() -> Iterator[LateBucket]:
    with serving(LateBucket()) as server:
        yield server
        server.in_time.set()


@pytest.fixture
def options(server: LateBucket, tmp_path: Path) -> dict[str, OptionValue]:
    (tmp_path / "key").write_text("none")
    return {
        "bucket": "blocks",
        "endpoint": f"http://127.0.0.1:{server.server_port}",
        "allow_http": True,
        "access_key_file": str(tmp_path / "key"),
        "secret_key_file": str(tmp_path / "key"),
        "request_timeout_seconds": 0.5,
    }


@pytest.fixture
def store(options: dict[str, OptionValue]) -> Iterator[S3Store]:
    store = S3Store(options)
    a_minute_later(store)
    yield store
    store.close()


def a_minute_later(store: S3Store) -> None:
    store._bucket._unanswered = dict.fromkeys(store._bucket._unanswered, 0.0)


@pytest.mark.parametrize("of", [ONE, ONE[:NAMESPACE_BYTES], b""], ids=["scope", "namespace", "all"])
def test_a_deletion_waits_for_writes_that_had_no_answer(
    server: LateBucket, store: S3Store, monkeypatch: pytest.MonkeyPatch, of: bytes
) -> None:
    """They may happen when all that is there was listed: what was cleared would be found again."""
    assert module.UNANSWERED_S == 60.0
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    server.in_time.clear()
    assert write(store, source(key(1), b"1" * 4096)) == [Outcome.FAILED]
    lists = server.lists
    with pytest.raises(TierTimeout, match="may happen yet"):
        store.delete_scopes([of], soon())
    assert server.lists == lists, "a bucket is paid for what is listed"
    server.in_time.set()
    until(lambda: bool(server.names))
    store.delete_scopes([OTHER], soon())
    a_minute_later(store)
    store.delete_scopes([of], soon())
    assert not server.names


@pytest.mark.parametrize("of", [ONE, ONE[:NAMESPACE_BYTES], b""], ids=["scope", "namespace", "all"])
def test_a_deletion_waits_for_writes_of_the_process_before(
    server: LateBucket, store: S3Store, options: dict[str, OptionValue], of: bytes
) -> None:
    """What it had no answer to is known to nobody once it was killed."""
    server.in_time.clear()
    assert write(store, source(key(1), b"1" * 4096)) == [Outcome.FAILED]
    with closing(S3Store(options)) as another:
        with pytest.raises(TierTimeout, match="may happen yet"):
            another.delete_scopes([of], soon())
        server.in_time.set()
        until(lambda: bool(server.names))
        a_minute_later(another)
        another.delete_scopes([of], soon())
        assert not server.names


@pytest.mark.parametrize("below", ["", f"{ONE[:NAMESPACE_BYTES].hex()}/", "one/two/"])
def test_a_folder_that_somebody_made_keeps_no_deletion_from_its_end(
    server: LateBucket, store: S3Store, below: str
) -> None:
    assert write(store, source(key(1), b"1" * 4096)) == [Outcome.DONE]
    folder = f"kvd/{below}"
    server.names.add(folder)
    store.delete_scopes([b""], time.monotonic() + 5.0)
    assert server.names == {folder}
