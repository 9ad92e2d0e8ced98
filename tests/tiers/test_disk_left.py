"""The disk says which blocks left it by themselves, and by which hash engines know them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.tiers.disk import disk as disk_module
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import Outcome, TierKey
from tests.tiers.contract import (
    BLOCK_BYTES,
    ONE,
    OTHER,
    ROOM_BLOCKS,
    content,
    has,
    keep,
    key,
    read,
    soon,
    source,
    write,
)
from tests.tiers.test_disk_contract import REGION_BYTES, options_of

REGIONS = ROOM_BLOCKS * BLOCK_BYTES // REGION_BYTES


def opened(place: Path) -> DiskStore:
    return DiskStore(options_of(place, regions=REGIONS, policy="lru"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    made = opened(tmp_path / "a")
    yield made
    made.close()


def test_hashes_of_every_length_are_named(store: DiskStore) -> None:
    names = [TierKey(ONE, bytes([n]) * n) for n in range(1, ROOM_BLOCKS + 1)]
    names += [TierKey(OTHER, bytes([n]) * (97 - n)) for n in range(ROOM_BLOCKS + 1, 97)]
    names = [name for name in names if len(name.block) <= 64]
    for name in names:
        assert write(store, source(name, content(name))) == [Outcome.DONE]
    assert store.take_left() == names[:-ROOM_BLOCKS]


def test_after_a_restart_those_are_named_that_were_asked_for_since(tmp_path: Path) -> None:
    store = opened(tmp_path / "a")
    keep(store, range(ROOM_BLOCKS))
    store.close()
    store = opened(tmp_path / "a")
    assert store.exists([key(3), key(99)], soon()) == [True, False]
    assert has(store, 5)
    keep(store, [7])  # offered once more
    keep(store, range(100, 100 + ROOM_BLOCKS))
    assert sorted(store.take_left() or []) == [key(3), key(5), key(7)]
    store.close()


def test_a_block_that_proves_wrong_is_named(tmp_path: Path, store: DiskStore) -> None:
    keep(store, range(4))
    slab = tmp_path / "a" / "slab"
    raw = bytearray(slab.read_bytes())
    at = raw.index(content((2, ONE))[:512])
    raw[at] ^= 1
    slab.write_bytes(raw)
    assert read(store, key(2))[0] is Outcome.FAILED
    assert store.take_left() == [key(2)]
    assert read(store, key(2))[0] is Outcome.MISSING
    assert store.take_left() == []


def test_blocks_of_a_region_that_another_size_takes_are_named(store: DiskStore) -> None:
    keep(store, range(ROOM_BLOCKS))
    half = BLOCK_BYTES // 2
    blocks = [source(key(200 + n), content(n, half)) for n in range(4)]
    assert write(store, *blocks) == [Outcome.DONE] * 4
    left = store.take_left()
    assert left
    assert not any(store.exists(left, soon()))


def test_more_than_a_disk_remembers_is_doubt(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "MAX_LEFT", 8)
    for first in range(0, 3 * ROOM_BLOCKS, 8):
        keep(store, range(first, first + 8))
    assert store.take_left() is None
    keep(store, range(900, 904))
    left = store.take_left()
    assert left is not None
    assert len(left) == 4
