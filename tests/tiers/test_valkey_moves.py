"""A namespace is cleared while slots of a Valkey cluster are on their way, or were left so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.tiers.store import Outcome
from kvd.tiers.valkey.names import slot_of
from kvd.tiers.valkey.store import ValkeyStore
from tests.tiers.contract import ONE, keep, key, read, soon
from tests.tiers.valkey_rig import ValkeyCluster, ValkeyServer, server_binary

if server_binary() is None:
    pytest.skip("no Valkey server is here", allow_module_level=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ValkeyCluster]:
    made = ValkeyCluster(tmp_path, 2)
    yield made
    made.kill()


def test_a_block_that_moves_behind_the_back_of_a_look_is_deleted(
    cluster: ValkeyCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to a server that was looked through already, from one that was not yet."""
    store = ValkeyStore({"addresses": cluster.addresses})
    here, there = cluster.servers
    names = {n: store._book.record_name(key(n)) for n in range(8)}
    mine = next(n for n in names if store._servers.home_of(slot_of(names[n])) == here.address)
    keep(store, [mine])
    slots = [slot_of(names[mine])]
    cluster.begin_move(slots, giver=0, taker=1)
    sweep_all, looks = store._sweep_all, []

    def there_first(work: Any, begins: Any, deadline: float) -> None:
        homes = work.homes
        assert set(homes) == {here.address, there.address}
        looks.append(homes)
        for each in (there, here):
            work.homes = [each.address]
            sweep_all(work, begins, deadline)
            if each is there and len(looks) == 1:
                here.call("MIGRATE", there.host, there.port, names[mine].decode(), 0, 5000)
        work.homes = homes

    monkeypatch.setattr(store, "_sweep_all", there_first)
    store.delete_scopes([ONE], soon())
    monkeypatch.undo()
    cluster.end_move(slots, taker=1)
    store._servers.refresh()
    assert len(looks) > 1
    assert read(store, key(mine))[0] is Outcome.MISSING
    store.close()


@pytest.mark.parametrize("to_a_new_one", [False, True])
def test_blocks_of_a_slot_that_was_left_on_its_way_are_deleted(
    cluster: ValkeyCluster, tmp_path: Path, *, to_a_new_one: bool
) -> None:
    """Else the deletion never ends, and the namespace is hidden as long, or they are found again
    where they came to a server that had no slot before."""
    if to_a_new_one:
        new = ValkeyServer(tmp_path / "new", in_cluster=True)
        cluster.servers.insert(1, new)
        new.wait()
        new.call(
            "CLUSTER", "MEET", *(getattr(cluster.servers[0], n) for n in ("host", "port", "bus"))
        )
        cluster.wait()
    store = ValkeyStore({"addresses": cluster.addresses})
    keep(store, range(8))
    here, there = cluster.servers[:2]
    names = {n: store._book.record_name(key(n)) for n in range(8)}
    homes = {n: store._servers.home_of(slot_of(name)) for n, name in names.items()}
    moved = [n for n, home in homes.items() if home == here.address]
    assert moved
    slots = [slot_of(names[n]) for n in moved]
    cluster.begin_move(slots, giver=0, taker=1)
    here.call("MIGRATE", there.host, there.port, names[moved[0]].decode(), 0, 5000)
    store.delete_scopes([ONE], soon())
    cluster.end_move(slots, taker=1)
    store._servers.refresh()
    assert [read(store, key(n))[0] for n in range(8)] == [Outcome.MISSING] * 8
    assert "keys=" not in there.call("INFO", "keyspace")
    store.close()
