"""The disk tier's store keeps what every store promises."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvd.core.policy import POLICY_NAMES
from kvd.tiers.disk.store import CALLS_AT_ONCE, DiskStore
from kvd.tiers.store import OptionValue, Outcome, TierStore
from tests.tiers.contract import (
    BLOCK_BYTES,
    ROOM_BLOCKS,
    Opened,
    TierStoreContract,
    has,
    keep,
    key,
    soon,
    target,
)
from tests.tiers.faulty_files import FaultyFiles

REGION_BYTES = 8 * BLOCK_BYTES


def options_of(*directories: Path, regions: int, **others: OptionValue) -> dict[str, OptionValue]:
    region_bytes = int(others.get("region_bytes", REGION_BYTES))  # type: ignore[arg-type]
    return {
        "directories": [str(each) for each in directories],
        "directory_bytes": regions * region_bytes,
        "region_bytes": region_bytes,
        **others,
    }


class TestOneDisk(TierStoreContract):
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Opened:
        options = options_of(tmp_path / "a", regions=12, region_bytes=4 << 20)
        return lambda: DiskStore(options)

    @pytest.fixture(params=POLICY_NAMES)
    def small(self, tmp_path: Path, request: pytest.FixtureRequest) -> Opened:
        regions = ROOM_BLOCKS * BLOCK_BYTES // REGION_BYTES
        options = options_of(tmp_path / "small", regions=regions, policy=request.param)
        return lambda: DiskStore(options)


class TestThreeDisks(TierStoreContract):
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Opened:
        places = [tmp_path / name for name in "abc"]
        return lambda: DiskStore(options_of(*places, regions=8, region_bytes=4 << 20))

    @pytest.fixture
    def small(self) -> Opened:
        pytest.skip("room is the disks' own: no batch fills all of them alike")


class TestWithoutDirect(TierStoreContract):
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Opened:
        options = options_of(tmp_path / "a", regions=12, region_bytes=4 << 20)
        return lambda: DiskStore(options, FaultyFiles(refuses_direct=True))

    @pytest.fixture
    def small(self, tmp_path: Path) -> Opened:
        regions = ROOM_BLOCKS * BLOCK_BYTES // REGION_BYTES
        return lambda: DiskStore(options_of(tmp_path / "small", regions=regions, direct=False))

    def test_that_it_reads_through_the_page_cache_is_said(self, store: TierStore) -> None:
        assert "without O_DIRECT" in store.usage().notes[0]


def test_store_takes_as_many_calls_at_once_as_it_says(tmp_path: Path) -> None:
    files, together = FaultyFiles(), threading.Barrier(CALLS_AT_ONCE)
    options = options_of(tmp_path / "a", regions=4, threads=CALLS_AT_ONCE)
    store = DiskStore(options, files)
    files.fault = lambda call, offset: together.wait(20) * 0 or None if call == "write" else None
    assert store.concurrency == CALLS_AT_ONCE
    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        list(pool.map(lambda n: keep(store, [n]), range(CALLS_AT_ONCE)))
    files.fault = lambda call, offset: None
    assert all(has(store, n) for n in range(CALLS_AT_ONCE))
    store.close()


def test_a_few_neighbours_keep_every_thread_busy(tmp_path: Path) -> None:
    """A MiB of them could go in one call; the disk would have nothing else to do meanwhile."""
    files, together = FaultyFiles(), threading.Barrier(4)
    store = DiskStore(options_of(tmp_path / "a", regions=2, region_bytes=4 << 20), files)
    keep(store, range(16))
    files.fault = lambda call, offset: together.wait(20) * 0 or None if call == "read" else None
    blocks = [target(key(number), BLOCK_BYTES) for number in range(16)]
    assert store.read(blocks, soon()) == [Outcome.DONE] * 16
    store.close()
