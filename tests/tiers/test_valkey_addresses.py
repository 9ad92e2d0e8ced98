"""A Valkey server whose name comes to mean another one, as after a failover."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvd.tiers.store import Outcome
from kvd.tiers.valkey.store import ValkeyStore
from tests.tiers.contract import OTHER, content, keep, key, soon, source
from tests.tiers.valkey_rig import ValkeyServer, server_binary, until

if server_binary() is None:
    pytest.skip("no Valkey server is here", allow_module_level=True)

NAME = "valkey.test"


class Names:
    """What a name means now."""

    def __init__(self, first: ValkeyServer, second: ValkeyServer) -> None:
        self.first, self.second = first, second
        self.now = first
        self.in_turn = False
        self.connections = 0
        self._connect = socket.create_connection

    def connect(self, where: tuple[str, int], *more: Any) -> socket.socket:
        host, port = where
        self.connections += 1
        if self.in_turn:
            self.now = self.second if self.now is self.first else self.first
        place = (self.now.host, self.now.port) if host == NAME else (host, port)
        return self._connect(place, *more)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    servers = [ValkeyServer(tmp_path / name, in_cluster=False) for name in ("a", "b")]
    for server in servers:
        server.wait()
    made = Names(*servers)
    monkeypatch.setattr(socket, "create_connection", made.connect)
    yield made
    for server in servers:
        server.kill()


def _store() -> ValkeyStore:
    return ValkeyStore({"addresses": [f"{NAME}:6379"], "threads": 1})


def test_a_server_that_became_a_replica_is_left_for_the_one_that_has_its_name(
    names: Names,
) -> None:
    store = _store()
    keep(store, [1])
    names.first.call("REPLICAOF", names.second.host, names.second.port)
    until(lambda: "master_link_status:up" in names.first.call("INFO", "replication"))
    names.now = names.second

    writes = (store.write([source(key(2), content(2))], soon()) for _ in range(5))
    assert [Outcome.DONE] in list(writes)
    store.delete_scopes([OTHER], soon())
    assert "keys=1" in names.second.call("INFO", "keyspace")
    store.close()


def test_no_thread_goes_on_with_a_server_that_lost_its_name(names: Names) -> None:
    """Else one clears at the one server, and another finds at the other."""
    store = _store()
    servers, home = store._servers, f"{NAME}:6379"
    before = servers.run_of(home, soon())
    names.now = names.second
    with ThreadPoolExecutor(1) as another:  # has a connection of its own
        after = another.submit(servers.run_of, home, soon()).result()
    assert after != before
    assert servers.run_of(home, soon()) == after
    store.close()


def test_a_look_that_another_server_went_on_with_begins_anew(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cursor of the one says nothing of where the other has its names."""
    store = _store()
    servers = store._servers
    for server in (names.first, names.second):
        server.call("DEBUG", "POPULATE", 4000, "filler")
    run, scans = servers.run, []

    def replaced(home: str, commands: Any, *more: Any, **options: Any) -> Any:
        answers = run(home, commands, *more, **options)
        if commands[0][0] == "SCAN":
            scans.append(commands[0][1])
            if len(scans) == 3:
                names.now = names.second
                servers._own.lines[home].say_no_more()
        return answers

    monkeypatch.setattr(servers, "run", replaced)
    store.delete_scopes([OTHER], soon())
    assert scans.count(b"0") == 2
    store.close()


def test_a_name_of_several_addresses_in_turn_costs_few_connections(names: Names) -> None:
    """As of a proxy in several places: threads at either of them stay there."""
    names.in_turn = True
    store = _store()
    servers, home = store._servers, f"{NAME}:6379"
    with ThreadPoolExecutor(1) as another:
        for _ in range(20):
            servers.run_of(home, soon())
            another.submit(servers.run_of, home, soon()).result()
    assert names.connections <= 6
    store.close()
