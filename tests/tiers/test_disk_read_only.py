"""A disk that refuses for a while costs no block, and is told from a wrong option."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvd.tiers.disk import index_file
from kvd.tiers.disk import rows as rows_module
from kvd.tiers.disk import store as store_module
from kvd.tiers.disk.index_file import IndexFile, Known
from kvd.tiers.disk.owner import owned
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import TierError, TierUnusable
from tests.small_tmpfs import remount_read_only, small_tmpfs
from tests.tiers.contract import OTHER, has, keep, soon
from tests.tiers.faulty_files import FaultyFiles
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
    keep(store, [1], OTHER)

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
            store.delete_scopes([OTHER], soon())
        assert "given up" in store.usage().notes[0]
    until(lambda: not store.usage().notes)
    keep(store, [8])
    store.close()
    store = opened(tmp_path)
    assert store.usage().errors == {}
    assert all(has(store, n) for n in range(9))
    assert not has(store, 1, OTHER)
    store.close()


@pytest.mark.parametrize(
    ("place", "call", "said"),
    [
        (os, "ftruncate", "slab can't have .* bytes: Read-only file system"),
        (Path, "chmod", "index.sqlite can't be opened: Read-only file system"),
    ],
)
def test_what_can_not_be_opened_is_named_and_no_option_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: object, call: str, said: str
) -> None:
    def refuse(*_given: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    opened(tmp_path).close()
    with monkeypatch.context() as patched:
        patched.setattr(place, call, refuse)
        with pytest.raises(TierUnusable, match=said):
            DiskStore(options_of(tmp_path / "disk", regions=32))
    opened(tmp_path).close()


def test_a_disk_that_is_ill_is_not_called_too_small(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.fault = lambda call, _offset: errno.EIO if call == "reserve" else None
    with pytest.raises(TierUnusable, match=r"slab can't have .* bytes: Input/output error"):
        DiskStore(options_of(tmp_path / "disk", regions=4), files)


def test_a_limit_of_the_size_of_files_is_named(tmp_path: Path) -> None:
    options = options_of(tmp_path / "disk", regions=4)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # Python ignores the signal
    try:
        with pytest.raises(TierUnusable, match=r"raise LimitFSIZE= .*, which is 1048576 bytes"):
            DiskStore(options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    DiskStore(options).close()


class Refused(sqlite3.OperationalError):
    sqlite_errorcode = sqlite3.SQLITE_IOERR_READ


@pytest.mark.parametrize("refusals", [2, 99])
def test_an_index_that_the_disk_refuses_to_read_is_lost_only_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    store = opened(tmp_path)
    keep(store, range(4))
    store.close()
    real, left = index_file._numbered, [refusals]

    def refuse(found: Iterable[tuple[int, object]]) -> dict[int, bytes]:
        if left[0] and is_the_old_one(tmp_path / "disk"):
            left[0] -= 1
            raise Refused("disk I/O error")
        return real(found)

    monkeypatch.setattr(index_file, "_numbered", refuse)
    monkeypatch.setattr(index_file, "AGAIN_S", 0.01)
    monkeypatch.setattr(index_file, "REFUSED_S", 30.0 if refusals == 2 else 0.1)
    store = opened(tmp_path)
    assert store.usage().blocks == (4 if refusals == 2 else 0)
    assert is_the_old_one(tmp_path / "disk") is (refusals == 2)
    store.close()


def test_a_directory_of_a_read_only_file_system_is_refused_with_the_fix(tmp_path: Path) -> None:
    """As under systemd where a disk is not mounted, or ReadWritePaths= does not name it."""
    said = r"Read-only file system; mount .*ReadWritePaths="
    with small_tmpfs(tmp_path / "data1", 1 << 20) as mount:
        (mount / "there").mkdir(mode=0o700)
        remount_read_only(mount)
        for name in ("there", "missing"):
            with pytest.raises(TierUnusable, match=said):
                owned(mount / name)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_many_disks_that_refuse_keep_no_tier_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has a minute for it, and would be ended and begin again, for ever."""
    options = options_of(*(tmp_path / f"disk {n}" for n in range(8)), regions=8)
    DiskStore(options).close()
    clock, real = Clock(), IndexFile._read

    def refuse(self: IndexFile) -> Known:
        if is_the_old_one(self.path.parent):
            raise Refused("disk I/O error")
        return real(self)

    monkeypatch.setattr(IndexFile, "_read", refuse)
    monkeypatch.setattr(index_file, "time", clock)
    monkeypatch.setattr(store_module, "time", clock, raising=False)
    DiskStore(options).close()
    assert clock.now <= index_file.REFUSED_S + index_file.AGAIN_S


def is_the_old_one(directory: Path) -> bool:
    return not (directory / "index.sqlite.set-aside").exists()
