"""What was used last is known after a restart, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvd.core.keys import U64
from kvd.core.policy import POLICY_NAMES
from kvd.tiers.disk import disk as disk_module
from kvd.tiers.disk import rows as rows_module
from kvd.tiers.disk.disk import USE_NOTED_S
from kvd.tiers.disk.rows import RowWriter
from kvd.tiers.disk.size_class import DiskSizeClass, PlaceState
from kvd.tiers.disk.store import DiskStore
from tests.tiers.contract import ONE, ROOM_BLOCKS, has, keep, soon
from tests.tiers.test_disk_contract import REGION_BYTES, options_of

REGIONS = ROOM_BLOCKS * 65536 // REGION_BYTES


class Clock:
    """Seconds, as the disk stamps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000 * USE_NOTED_S
        monkeypatch.setattr(disk_module, "_now", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def opened(place: Path) -> DiskStore:
    return DiskStore(options_of(place, regions=REGIONS, policy="lru"))


def filled(place: Path, clock: Clock) -> DiskStore:
    """A full disk; the first eight blocks are the oldest."""
    store = opened(place)
    keep(store, range(8))
    clock.now += 1
    keep(store, range(8, ROOM_BLOCKS))
    return store


def there(store: DiskStore, *numbers: int) -> list[int]:
    return [number for number in numbers if has(store, number)]


@pytest.mark.parametrize("how", ["read", "offered again"])
def test_what_was_used_before_a_restart_does_not_leave_first(
    tmp_path: Path, clock: Clock, how: str
) -> None:
    store = filled(tmp_path / "a", clock)
    clock.now += USE_NOTED_S
    if how == "read":
        assert there(store, *range(8)) == list(range(8))
    else:
        keep(store, range(8))
    store.close()
    store = opened(tmp_path / "a")
    keep(store, range(100, 108))
    assert there(store, *range(8)) == list(range(8))
    assert there(store, *range(8, 16)) == []
    store.close()


def count_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    written: list[int] = []
    put = RowWriter.put

    def counted(self: RowWriter, rows: U64) -> None:
        written.append(len(rows))
        put(self, rows)

    monkeypatch.setattr(RowWriter, "put", counted)
    return written


def test_a_use_is_noted_once_in_a_while(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "a", clock)
    written = count_rows(monkeypatch)
    for _ in range(5):
        there(store, 1, 2)
    assert sum(written) == 0
    clock.now += USE_NOTED_S
    for _ in range(5):
        there(store, 1, 2)
    assert sum(written) == 2
    store.close()


def test_a_use_is_not_noted_while_too_many_rows_wait(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "a", clock)
    written = count_rows(monkeypatch)
    clock.now += USE_NOTED_S
    monkeypatch.setattr(rows_module, "MAX_ROWS_BEHIND", -2)
    assert there(store, 1, 2) == [1, 2]
    assert sum(written) == 0
    monkeypatch.undo()
    store.close()


def test_a_block_that_was_used_and_deleted_is_not_found_again(tmp_path: Path, clock: Clock) -> None:
    store = filled(tmp_path / "a", clock)
    clock.now += USE_NOTED_S
    there(store, *range(8))
    store.delete_scopes([ONE], soon())
    store.close()
    store = opened(tmp_path / "a")
    assert there(store, *range(ROOM_BLOCKS)) == []
    store.close()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_blocks_that_are_read_stay_and_all_others_leave_where_all_are_wanted(policy: str) -> None:
    of = DiskSizeClass(stride=4096, region_bytes=8 * 4096, regions=1, policy=policy)
    of.add_region(0)
    places = of.take(8)
    of.digests[places] = np.arange(16, dtype=np.uint64).reshape(8, 2)
    of.keep(places)
    of.pins[places] = 0
    read = places[[1, 4, 5]]
    of.pins[read] = 1
    left = of.evict(8)
    assert sorted(left.tolist()) == sorted(set(places.tolist()) - set(read.tolist()))
    assert (of.states[read] == PlaceState.READY).all()
    assert not of.evict(1).size
    assert len(of) == len(read)
