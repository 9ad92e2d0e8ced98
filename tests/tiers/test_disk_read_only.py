"""A disk's file system that is read-only for a while costs no block at the next start."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from kvd.tiers.disk import rows as rows_module
from kvd.tiers.disk.index_file import IndexFile
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import TierError
from tests.tiers.contract import has, keep, key, soon
from tests.tiers.test_disk_contract import options_of
from tests.tiers.valkey_rig import until


def opened(place: Path) -> DiskStore:
    return DiskStore(options_of(place / "disk", regions=64))


def test_an_index_that_could_not_be_set_aside_is_written_anew_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "GIVE_UP_S", 0.3)
    monkeypatch.setattr(rows_module, "ANEW_S", 0.2)
    store = opened(tmp_path)
    keep(store, range(4))

    def refuse(self: IndexFile, *arguments: object, **more: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    def is_read_only(self: IndexFile) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patched:
        patched.setattr(IndexFile, "commit", refuse)
        patched.setattr(IndexFile, "set_aside", is_read_only)
        keep(store, range(4, 8))
        until(lambda: store.usage().notes != ())
        with pytest.raises(TierError, match="set aside"):
            store.delete([key(1)], soon())
        assert "given up" in store.usage().notes[0]
    until(lambda: not store.usage().notes)
    keep(store, [8])
    store.close()
    store = opened(tmp_path)
    assert store.usage().errors == {}
    assert [n for n in range(9) if not has(store, n)] == [1]
    store.close()
