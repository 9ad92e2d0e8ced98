"""What was used last is known after a restart, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvd.core.keys import U64
from kvd.core.policy import POLICY_NAMES
from kvd.tiers.disk import rows as rows_module
from kvd.tiers.disk import stamps as stamps_module
from kvd.tiers.disk.disk import USE_NOTED_S
from kvd.tiers.disk.rows import RowWriter
from kvd.tiers.disk.size_class import DiskSizeClass, PlaceState
from kvd.tiers.disk.store import DiskStore
from tests.tiers.contract import (
    BLOCK_BYTES,
    ONE,
    ROOM_BLOCKS,
    content,
    has,
    keep,
    key,
    soon,
    source,
    write,
)
from tests.tiers.test_disk_contract import REGION_BYTES, options_of

REGIONS = ROOM_BLOCKS * BLOCK_BYTES // REGION_BYTES
YEAR_S = 365 * 24 * 3600
BEYOND_STAMPS_S = 1 << 33  # the year 2242


class Clock:
    """Seconds, as the disk stamps them; the system's clock is `set_s` ahead of where it began."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.set_s = 1_000 * USE_NOTED_S, 0
        clocks = SimpleNamespace(time=lambda: self.now + self.set_s, monotonic=lambda: self.now)
        monkeypatch.setattr(stamps_module, "time", clocks)


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


@pytest.mark.parametrize("set_s", [3600, 10 * YEAR_S])
def test_a_clock_that_is_put_back_makes_nothing_the_last_used_one(
    tmp_path: Path, clock: Clock, set_s: int
) -> None:
    clock.set_s = set_s
    store = opened(tmp_path / "a")
    keep(store, range(8))
    clock.set_s = 0
    clock.now += 1
    keep(store, range(8, 16))
    store.close()
    store = opened(tmp_path / "a")
    clock.now += 1
    keep(store, range(16, ROOM_BLOCKS))
    store.close()
    store = opened(tmp_path / "a")
    keep(store, range(100, 108))
    assert there(store, *range(8)) == []
    assert there(store, *range(8, 16)) == list(range(8, 16))
    store.close()


@pytest.mark.parametrize("set_s", [10 * YEAR_S, BEYOND_STAMPS_S])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_blocks_of_another_size_have_the_room_of_those_before_a_clock_was_put_back(
    tmp_path: Path, clock: Clock, is_restarted: bool, set_s: int
) -> None:
    clock.set_s = set_s
    store = opened(tmp_path / "a")
    keep(store, range(ROOM_BLOCKS))
    clock.set_s = 0
    if is_restarted:
        store.close()
        store = opened(tmp_path / "a")
    clock.now += 1
    keep_larger(store, range(100, 100 + ROOM_BLOCKS))
    assert store.usage().blocks == ROOM_BLOCKS // 2
    assert there(store, *range(ROOM_BLOCKS)) == []
    store.close()


@pytest.mark.parametrize("set_s", [BEYOND_STAMPS_S, -10000 * USE_NOTED_S])
def test_a_clock_in_a_year_that_no_stamp_has_costs_no_block(
    tmp_path: Path, clock: Clock, set_s: int
) -> None:
    clock.set_s = set_s
    store = opened(tmp_path / "a")
    keep(store, range(8))
    store.close()
    store = opened(tmp_path / "a")
    assert there(store, *range(8)) == list(range(8))
    store.close()


def keep_larger(store: DiskStore, numbers: Sequence[int]) -> None:
    """One after the other, of twice the size."""
    for number in numbers:
        write(store, source(key(number), content(number, 2 * BLOCK_BYTES)))


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
