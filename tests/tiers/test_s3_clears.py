"""A clear of a bucket is over once that lists nothing of it, and leaves nothing of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="obstore is not here")

from kvd.tiers.s3 import bucket
from kvd.tiers.s3.store import S3Store
from kvd.tiers.store import TierError, TierReason
from tests.tiers.contract import ONE, soon
from tests.tiers.http_stand import serving
from tests.tiers.test_s3_answers import Alike, Answering, Page, options_of


class Unlisting(Alike):
    """Takes and removes what it is given; each list is an error that is answered with 200."""

    def _answer(self) -> None:
        self._take_all()
        is_list = self.command == "GET"
        said = b"<Error><Code>InternalError</Code><Message>Sorry.</Message></Error>"
        said = said if is_list else b"<DeleteResult></DeleteResult>" * (self.command == "POST")
        self.send_response(200)
        self.send_header("ETag", "1")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


class Keeping(Alike):
    """Keeps names alone and lists them; removes them only while the server's status is 200."""

    def _answer(self) -> None:
        assert isinstance(self.server, Answering)
        assert self.server.statuses is not None
        self._take_all()
        names, said, status = self.server.statuses, "", 200
        if self.command == "PUT":
            names[self.path.removeprefix("/blocks/")] = 200
        elif self.command == "POST" and self.server.status == 200:
            names.clear()
            said = "<DeleteResult><Deleted><Key>all</Key></Deleted></DeleteResult>"
        elif self.command == "POST":
            status = self.server.status
        else:
            some = "<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>1</ETag><Size>3</Size>"
            listed = "".join(f"<Contents><Key>{name}</Key>{some}</Contents>" for name in names)
            said = f"<ListBucketResult>{listed}</ListBucketResult>"
        self.send_response(status)
        self.send_header("ETag", "1")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    """Deletions wait for no write of a process before."""
    monkeypatch.setattr(bucket, "UNANSWERED_S", 0.0)
    with serving(Answering(("127.0.0.1", 0), Alike)) as server:
        yield server


@pytest.mark.parametrize(("answers", "said"), [(Page, "ETag"), (Unlisting, "is no bucket")])
@pytest.mark.parametrize("of", [ONE, ONE[:8], b""], ids=["a scope", "a namespace", "all"])
def test_nothing_is_cleared_where_what_answers_to_a_list_is_none(
    answering: Answering, tmp_path: Path, of: bytes, answers: type[Alike], said: str
) -> None:
    """To the client it lists nothing, and a clear would be over before it began."""
    answering.RequestHandlerClass = answers
    store = S3Store(options_of(answering.server_port, tmp_path))
    with pytest.raises(TierError, match=said):
        store.delete_scopes([of], soon())
    store.close()


def test_no_more_stays_in_a_bucket_with_each_clear_that_it_takes_no_removal_for(
    answering: Answering, tmp_path: Path
) -> None:
    """Nobody would remove them, and each try again, one a second, would list them all."""
    answering.RequestHandlerClass, answering.statuses, answering.status = Keeping, {}, 403
    store = S3Store(options_of(answering.server_port, tmp_path))
    store.delete_scopes([ONE], soon())  # there is nothing
    for _ in range(3):
        with pytest.raises(TierError) as raised:
            store.delete_scopes([ONE], soon())
        assert raised.value.reason is TierReason.REFUSED
    assert len(answering.statuses) == 1
    answering.status = 200
    store.delete_scopes([ONE], soon())
    assert not answering.statuses
    store.close()


class Forbidding(Keeping):
    """Takes what it is given, and answers that it does not."""

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(403 if self.command == "PUT" else code, message)


def test_what_a_bucket_took_though_it_said_no_is_removed_by_the_next_try(
    answering: Answering, tmp_path: Path
) -> None:
    answering.RequestHandlerClass, answering.statuses, answering.status = Forbidding, {}, 200
    store = S3Store(options_of(answering.server_port, tmp_path))
    for _ in range(3):
        with pytest.raises(TierError):
            store.delete_scopes([ONE], soon())
        assert len(answering.statuses) == 1
    answering.RequestHandlerClass = Keeping
    store.delete_scopes([ONE], soon())
    assert not answering.statuses
    store.close()
