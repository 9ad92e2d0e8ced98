"""What is deleted from a disk is wiped, though the process that wipes it is killed half-way."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvd.tiers.disk import disk as disk_module
from kvd.tiers.disk import rows as rows_module
from kvd.tiers.disk import wiping
from kvd.tiers.disk.files import SystemFiles
from kvd.tiers.disk.index_file import IndexFile
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import Outcome, TierError
from tests.tiers.contract import (
    BLOCK_BYTES,
    ONE,
    OTHER,
    content,
    has,
    keep,
    key,
    read,
    soon,
    source,
    write,
)
from tests.tiers.test_disk_contract import options_of

ROOT = Path(__file__).parents[2]
BLOCKS = 8
WIPED = 3  # by the process that is killed then


class Killed(SystemFiles):
    """Kills its process before it zeroes one more; the index is written meanwhile."""

    left = WIPED

    def zero(self, fd: int, offset: int, size: int) -> None:
        if not self.left:
            time.sleep(5 * rows_module.BEHIND_S)
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        super().zero(fd, offset, size)


def delete_and_be_killed(directory: str) -> None:
    wiping.STEP_BYTES = BLOCK_BYTES
    store = DiskStore(options_of(Path(directory), regions=4), Killed())
    keep(store, range(BLOCKS))
    keep(store, range(BLOCKS), OTHER)
    store.delete_scopes([ONE], soon())


def killed(directory: Path) -> None:
    program = f"from {__name__} import *; delete_and_be_killed({str(directory)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


def blocks_in(directory: Path) -> int:
    """Places of the slab in which anything is written."""
    slab = (directory / "slab").read_bytes()[1 << 20 :]
    places = [slab[at : at + BLOCK_BYTES] for at in range(0, len(slab), BLOCK_BYTES)]
    return sum(any(place) for place in places)


def by_scope(store: DiskStore) -> None:
    store.delete_scopes([ONE], soon())


def by_another(store: DiskStore) -> None:
    store.delete_scopes([b"\xff" * len(ONE)], soon())


@pytest.mark.parametrize("delete", [by_scope, by_another])
def test_what_a_killed_process_left_of_a_deletion_is_wiped_by_the_next_one(
    tmp_path: Path, delete: Callable[[DiskStore], None]
) -> None:
    directory = tmp_path / "disk"
    killed(directory)
    assert blocks_in(directory) == 2 * BLOCKS - WIPED
    store = DiskStore(options_of(directory, regions=4))
    assert not any(has(store, n) for n in range(BLOCKS))
    delete(store)
    assert all(has(store, n, OTHER) for n in range(BLOCKS))
    assert store.usage().blocks == BLOCKS
    store.close()
    assert blocks_in(directory) == BLOCKS
    with closing(sqlite3.connect(directory / "index.sqlite")) as index:
        assert index.execute("SELECT scope FROM scopes").fetchall() == [(OTHER,)]
        assert index.execute("SELECT count(*) FROM blocks").fetchone() == (BLOCKS,)


def test_blocks_of_a_deletion_that_nobody_goes_on_with_give_way_to_others(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    killed(directory)
    store = DiskStore(options_of(directory, regions=4))
    places = store.usage().capacity_bytes // BLOCK_BYTES
    keep(store, range(100, 100 + places))
    store.close()


def test_a_scope_that_is_written_to_while_it_is_deleted_keeps_what_is_new(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    killed(directory)
    store = DiskStore(options_of(directory, regions=4))
    keep(store, [1])
    by_another(store)
    assert has(store, 1)
    store.close()
    store = DiskStore(options_of(directory, regions=4))
    assert has(store, 1)
    assert store.usage().blocks == BLOCKS + 1
    store.close()


def test_more_rows_than_may_wait_go_with_a_deletion_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MAX_ROWS_BEHIND", 4)
    monkeypatch.setattr("kvd.tiers.disk.disk.PLACES_AT_ONCE", 2)
    store = DiskStore(options_of(tmp_path / "disk", regions=4))
    keep(store, range(3 * BLOCKS))
    store.delete_scopes([ONE], soon())
    assert store.usage().blocks == 0
    store.close()
    assert not blocks_in(tmp_path / "disk")


def test_a_deletion_that_no_index_keeps_is_not_told_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(options_of(tmp_path, regions=4))
    keep(store, range(4))
    keep(store, range(4), OTHER)

    def refuse(self: IndexFile, *arguments: object, **more: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patched:
        patched.setattr(IndexFile, "commit", refuse)
        with pytest.raises(TierError):
            store.delete_scopes([OTHER], soon())
    store.delete_scopes([OTHER], soon())
    store.close()
    store = DiskStore(options_of(tmp_path, regions=4))
    assert all(has(store, n) for n in range(4))
    assert not any(has(store, n, OTHER) for n in range(4))
    store.close()


def test_a_deletion_wipes_nothing_of_a_size_that_took_the_place_of_another_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.tiers.disk.space.MAX_SIZES", 2)
    store = DiskStore(options_of(tmp_path, regions=2))
    write(store, *(source(key(n, OTHER), content(n, 4096)) for n in range(2)))
    write(store, source(key(10), content(10, 8192)))
    written: list[list[Outcome]] = []
    sleep = time.sleep

    def breathe(seconds: float) -> None:
        if seconds == disk_module.BREATH_S and not written:  # between the sizes
            written.append(write(store, source(key(20, OTHER), content(20, 12288))))
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", breathe)
    store.delete_scopes([ONE], soon())
    monkeypatch.undo()
    assert written == [[Outcome.DONE]]
    assert read(store, key(20, OTHER), 12288)[0] is Outcome.DONE
    assert store.usage().errors == {}
    store.close()
    store = DiskStore(options_of(tmp_path, regions=2))
    assert read(store, key(20, OTHER), 12288)[0] is Outcome.DONE
    store.close()
