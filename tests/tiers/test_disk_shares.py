"""Several disks of one tier: each takes its share of the blocks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvd.tiers.store import TierUnusable
from tests.tiers.contract import has, keep
from tests.tiers.test_disk_damage import opened


def test_another_disk_takes_its_share_and_no_more(tmp_path: Path) -> None:
    disks = [tmp_path / name for name in "abc"]
    store = opened(*disks[:2], regions=40)
    keep(store, range(300))
    store.close()
    store = opened(*disks, regions=40)
    assert 150 <= sum(has(store, n) for n in range(300)) <= 250
    store.close()
    store = opened(*disks[:2], regions=40)
    assert sum(has(store, n) for n in range(300)) >= 150
    store.close()


def test_a_disk_that_was_begun_with_a_copy_of_another_takes_its_share(tmp_path: Path) -> None:
    one, copy = tmp_path / "one", tmp_path / "copy"
    store = opened(one, regions=16)
    keep(store, range(8))
    store.close()
    shutil.copytree(one, copy)
    store = opened(one, copy, regions=16)
    keep(store, range(100, 260))  # more than one alone has room for
    store.close()
    store = opened(one, copy, regions=16)
    assert all(has(store, n) for n in range(100, 260))
    store.close()


def test_one_directory_by_two_paths_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    disk, link = tmp_path / "real" / "disk", tmp_path / "link"
    store = opened(disk)
    keep(store, range(8))
    store.close()
    link.symlink_to(disk.parent)
    with pytest.raises(TierUnusable, match=r"directories: .*are one directory: name it once"):
        opened(disk, link / "disk")
    store = opened(disk)
    assert all(has(store, n) for n in range(8))
    store.close()
