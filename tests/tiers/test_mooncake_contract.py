"""The Mooncake tier's store keeps what every store promises, over a real master and node."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from examples.cluster.mooncake import MooncakeCluster
from kvd.tiers.mooncake.store import MooncakeStore
from kvd.tiers.store import Outcome, TierBlock
from tests.tiers import mooncake_cluster
from tests.tiers.contract import (
    BLOCK_BYTES,
    ONE,
    Opened,
    TierStoreContract,
    content,
    has,
    key,
    soon,
    source,
)

pytest.importorskip("mooncake.store", reason="needs the mooncake extra", exc_type=ImportError)
CLUSTER_BYTES = 64 << 20
IN_ALL = CLUSTER_BYTES // BLOCK_BYTES


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    logs = tmp_path_factory.mktemp("mooncake")
    with mooncake_cluster.mooncake_cluster(logs, megabytes=CLUSTER_BYTES >> 20) as running:
        yield running


@pytest.fixture(scope="module")
def lasting(cluster: MooncakeCluster) -> Iterator[MooncakeStore]:
    store = mooncake_cluster.opened(cluster)
    yield store
    store.close()


@pytest.fixture
def emptied(lasting: MooncakeStore) -> MooncakeStore:
    lasting.delete_scopes([b""], soon())
    lasting._errors.clear()
    return lasting


def range_of(first: int) -> list[TierBlock]:
    return [source(key(n), content((n, ONE))) for n in range(first, first + 64)]


class TestMooncake(TierStoreContract):
    counts_blocks = False

    @pytest.fixture
    def store(self, emptied: MooncakeStore) -> MooncakeStore:
        """One for all tests: to open one takes Mooncake a second, and to close it another."""
        return emptied

    @pytest.fixture
    def opened(self, cluster: MooncakeCluster, emptied: MooncakeStore) -> Opened:
        return lambda: mooncake_cluster.opened(cluster)

    @pytest.fixture
    def small(self, opened: Opened) -> Opened:
        return opened

    def test_a_full_store_makes_room_and_answers_what_it_can(self, small: Opened) -> None:
        store = small()
        for first in range(0, 2 * IN_ALL, 64):
            left, until = range_of(first), soon()
            while left:  # Mooncake makes room by a thread of its own, late on a busy machine
                assert time.monotonic() < until
                outcomes = store.write(left, until)
                assert set(outcomes) <= {Outcome.DONE, Outcome.FULL}
                left = [b for b, o in zip(left, outcomes, strict=True) if o is Outcome.FULL]
        assert all(has(store, n) for n in range(2 * IN_ALL - 64, 2 * IN_ALL))
        assert not any(has(store, n) for n in range(64))
        store.close()

    def test_more_than_fits_at_once_is_full_in_part(self, small: Opened) -> None:
        store = small()
        memory = source(key(0), content(0)).parts
        keys = [key(n) for n in range(2 * IN_ALL)]
        assert not any(store.exists(keys, soon()))
        blocks = [source(each, content(0))._replace(parts=memory) for each in keys]
        outcomes = store.write(blocks, soon())
        assert set(outcomes) <= {Outcome.DONE, Outcome.FULL}
        there = store.exists(keys, soon())
        assert 0 < sum(there) <= IN_ALL
        for outcome, is_there in zip(outcomes, there, strict=True):
            assert outcome is Outcome.DONE or not is_there
        time.sleep(mooncake_cluster.LEASE_MS / 1000)  # what was looked for can't be evicted
        store.close()
