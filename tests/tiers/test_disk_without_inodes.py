"""A file system that takes no more files at a start costs none of what a disk has."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from kvd.tiers.disk import index_file
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import TierUnusable
from tests.small_tmpfs import small_tmpfs
from tests.tiers.contract import has, keep
from tests.tiers.test_disk_contract import options_of


def test_a_start_without_inodes_loses_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_file, "REFUSED_S", 0.1)
    with small_tmpfs(tmp_path / "mount", 32 << 20, ",nr_inodes=16") as mount:
        options = options_of(mount / "disk", regions=8)
        store = DiskStore(options)
        keep(store, range(8))
        store.close()
        others = []
        with contextlib.suppress(OSError):
            for number in range(16):
                (mount / str(number)).touch()
                others.append(mount / str(number))
        with pytest.raises(TierUnusable, match=r"index\.sqlite can't be opened"):
            DiskStore(options)
        for other in others:
            other.unlink()
        store = DiskStore(options)
        assert all(has(store, n) for n in range(8))
        store.close()


@pytest.mark.parametrize("files", [3, 4, 5])
def test_a_first_start_without_inodes_says_what_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    monkeypatch.setattr(index_file, "REFUSED_S", 0.1)
    with small_tmpfs(tmp_path / "mount", 32 << 20, f",nr_inodes={files}") as mount:
        with pytest.raises(TierUnusable) as refused:
            DiskStore(options_of(mount / "disk", regions=8))
        assert re.search(r"df -i|No space left", str(refused.value))
        assert "remove" not in str(refused.value)
