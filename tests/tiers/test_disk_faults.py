"""A disk that refuses, does half, lies or fills up costs misses and never a wrong byte."""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvd.tiers.disk import disk as disk_module
from kvd.tiers.disk import rows as rows_module
from kvd.tiers.disk import wiping
from kvd.tiers.disk.files import Buffers
from kvd.tiers.disk.index_file import IndexFile
from kvd.tiers.disk.slab import HEADER_BYTES
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import Outcome, TierError, TierReason, TierTimeout, TierUnusable
from tests.small_tmpfs import fill, small_tmpfs
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
    target,
    write,
)
from tests.tiers.faulty_files import HALF, FaultyFiles
from tests.tiers.test_disk_contract import options_of
from tests.tiers.valkey_rig import until


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


each_write_fault = pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [
        (errno.EIO, Outcome.FAILED, TierReason.IO_ERROR),
        (errno.ENOSPC, Outcome.FULL, TierReason.NO_SPACE),
    ],
)


def opened(directory: Path, files: FaultyFiles | None = None, regions: int = 4) -> DiskStore:
    return DiskStore(options_of(directory, regions=regions), files)


@each_write_fault
def test_a_write_that_fails_is_not_kept_and_its_place_is_used_again(
    directory: Path, files: FaultyFiles, fault: int, outcome: Outcome, reason: TierReason
) -> None:
    store = opened(directory, files)
    files.fault = lambda call, offset: fault if call == "write" else None
    for _ in range(5):
        blocks = [source(key(n), content((n, ONE))) for n in range(32)]
        assert store.write(blocks, soon()) == [outcome] * 32
    assert store.usage().errors == {reason: 160}
    files.fault = lambda call, offset: None
    assert not any(has(store, n) for n in range(32))
    keep(store, range(32))
    assert all(has(store, n) for n in range(32))
    store.close()


def test_the_kernels_word_is_said_and_noted_until_it_goes_well_again(
    directory: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """As where it has made the file system read-only: reads go on, and every write fails."""
    store = opened(directory, files)
    keep(store, range(8))
    files.fault = lambda call, offset: errno.EROFS if call == "write" else None
    for size in (BLOCK_BYTES, 5000):  # whole pages and none
        blocks = [source(key(n), content(n, size)) for n in range(8, 16)]
        assert store.write(blocks, soon()) == [Outcome.FAILED] * 8
        assert read(store, key(1))[0] is Outcome.DONE
        word = f"{directory}: writes fail: Read-only file system"
        assert [note for note in store.usage().notes if "fail" in note] == [word]
    assert f"{directory}: IO_ERROR (1 so far): Read-only file system" in caplog.messages
    files.fault = lambda call, offset: None
    keep(store, range(8, 16))
    assert not any("fail" in note for note in store.usage().notes)
    store.close()


@each_write_fault
def test_a_write_that_fails_of_a_block_that_is_no_whole_pages_is_told_too(
    directory: Path, files: FaultyFiles, fault: int, outcome: Outcome, reason: TierReason
) -> None:
    """Such a block is copied to a buffer first."""
    store = opened(directory, files)
    blocks = [source(key(n), content(n, 5000)) for n in range(8)]
    files.fault = lambda call, offset: fault if call == "write" else None
    assert store.write(blocks, soon()) == [outcome] * 8
    assert store.usage().errors == {reason: 8}
    files.fault = lambda call, offset: None
    assert store.exists([key(n) for n in range(8)], soon()) == [False] * 8
    assert store.write(blocks, soon()) == [Outcome.DONE] * 8
    assert read(store, key(3), 5000) == (Outcome.DONE, content(3, 5000))
    store.close()


def test_one_bad_place_costs_one_block_of_its_neighbours(
    directory: Path, files: FaultyFiles
) -> None:
    store = opened(directory, files)
    keep(store, range(16))
    offsets: set[int] = set()

    def fault(call: str, offset: int) -> int | None:
        offsets.add(offset)
        whole_run = offset <= min(offsets)
        return errno.EIO if call == "read" and whole_run else None

    files.fault = fault
    blocks = [target(key(n), BLOCK_BYTES) for n in range(16)]
    outcomes = store.read(blocks, soon())
    assert 1 <= outcomes.count(Outcome.FAILED) <= 2
    for n, (block, outcome) in enumerate(zip(blocks, outcomes, strict=True)):
        assert outcome is Outcome.FAILED or bytes(block.parts[0]) == content((n, ONE))
    store.close()


def test_a_read_that_fails_is_a_miss_from_then_on(directory: Path, files: FaultyFiles) -> None:
    store = opened(directory, files)
    keep(store, [1])
    files.fault = lambda call, offset: errno.EIO if call == "read" else None
    outcome, found = read(store, key(1))
    assert outcome is Outcome.FAILED
    assert not any(found)
    assert store.exists([key(1)], soon()) == [False]
    assert read(store, key(1))[0] is Outcome.MISSING
    assert store.usage().errors == {TierReason.IO_ERROR: 1}
    store.close()


def test_short_reads_and_writes_are_gone_on_with(directory: Path, files: FaultyFiles) -> None:
    store = opened(directory, files)
    files.fault = lambda call, offset: HALF
    keep(store, range(16))
    odd = (content("a", 8200), content("b", 16))
    assert write(store, source(key(99), *odd)) == [Outcome.DONE]
    assert all(has(store, n) for n in range(16))
    assert read(store, key(99), 8200, 16) == (Outcome.DONE, b"".join(odd))
    store.close()


@pytest.mark.parametrize("fault", [errno.EINVAL, errno.EFAULT])
def test_memory_that_cannot_be_written_past_the_cache_is_copied_first(
    directory: Path, files: FaultyFiles, fault: int
) -> None:
    store = opened(directory, files)
    failed = set()

    def once_a_place(call: str, offset: int) -> int | None:
        if call not in ("read", "write") or (call, offset) in failed:
            return None
        failed.add((call, offset))
        return fault

    files.fault = once_a_place
    keep(store, [1])
    assert has(store, 1)
    assert store.usage().errors == {}
    store.close()


def test_a_write_that_the_disk_swallowed_is_no_wrong_byte(
    directory: Path, files: FaultyFiles
) -> None:
    class Swallowing(FaultyFiles):
        def write(self, fd: int, buffers: Buffers, offset: int) -> int:
            return sum(part.nbytes for part in buffers)

    opened(directory).close()
    store = opened(directory, Swallowing())
    keep(store, range(8))
    blocks = [target(key(n), BLOCK_BYTES) for n in range(8)]
    assert store.read(blocks, soon()) == [Outcome.FAILED] * 8
    assert not any(any(block.parts[0]) for block in blocks)
    assert store.usage().errors == {TierReason.CHECKSUM_MISMATCH: 8}
    assert store.usage().blocks == 0
    store.close()


@pytest.mark.parametrize("call", ["zero", "sync"])
def test_a_deletion_that_fails_is_not_told_as_done_and_done_when_called_again(
    directory: Path, files: FaultyFiles, call: str
) -> None:
    store = opened(directory, files, regions=1)
    keep(store, range(8))
    files.fault = lambda name, offset: errno.EIO if name == call else None
    with pytest.raises(TierError) as raised:
        store.delete_scopes([ONE], soon())
    assert raised.value.reason is TierReason.IO_ERROR
    assert not any(has(store, n) for n in range(8))
    assert set(write(store, source(key(99), content(1)))) == {Outcome.FULL}
    files.fault = lambda name, offset: None
    store.delete_scopes([ONE], soon())
    slab = (directory / "slab").read_bytes()
    assert not any(slab[1 << 20 :])
    keep(store, range(8))
    store.close()


def test_a_file_system_that_zeroes_no_range_is_written_zeros(
    directory: Path, files: FaultyFiles
) -> None:
    store = opened(directory, files)
    keep(store, range(32))
    files.fault = lambda call, offset: errno.EOPNOTSUPP if call == "zero" else None
    store.delete_scopes([ONE], soon())
    store.close()
    assert not any((directory / "slab").read_bytes()[1 << 20 :])


def test_a_deletion_that_takes_longer_than_its_deadline_goes_on_where_it_was(
    directory: Path, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(directory, files)
    keep(store, range(8))
    later_s, wiped = [0.0], list[int]()

    def slow(call: str, offset: int) -> None:
        if call == "zero":  # ten seconds, by the disk's clock
            later_s[0] += 10.0
            wiped.append(offset)

    files.fault = slow
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + later_s[0], time=time.time, sleep=time.sleep
    )
    monkeypatch.setattr(disk_module, "time", clock)
    monkeypatch.setattr(wiping, "STEP_BYTES", BLOCK_BYTES)
    calls = 1
    while calls < 20:
        later_s[0] = 0.0
        try:
            store.delete_scopes([ONE], soon())
            break
        except TierTimeout:
            calls += 1
            assert not any(has(store, n) for n in range(8))
    assert calls == 4
    assert len(wiped) == len(set(wiped)) == 8
    assert store.usage().blocks == 0
    later_s[0] = 0.0
    keep(store, range(8))
    store.close()


def test_a_deletion_waits_for_who_reads_until_its_deadline(
    directory: Path, files: FaultyFiles
) -> None:
    store = opened(directory, files)
    keep(store, [1, 2])
    begun, go_on = threading.Event(), threading.Event()

    def hang(call: str, offset: int) -> None:
        if call == "read":
            begun.set()
            assert go_on.wait(20)

    files.fault = hang
    blocks = [target(key(1), BLOCK_BYTES)]
    reading = threading.Thread(target=lambda: store.read(blocks, soon()))
    reading.start()
    assert begun.wait(10)
    began = time.monotonic()
    with pytest.raises(TierTimeout):
        store.delete_scopes([ONE], began + 0.2)
    assert time.monotonic() - began < 2
    assert store.exists([key(1)], soon()) == [False]
    go_on.set()
    reading.join()
    assert bytes(blocks[0].parts[0]) == content((1, ONE))
    store.delete_scopes([ONE], soon())
    store.close()


def test_what_is_deleted_while_it_is_written_is_not_kept(
    directory: Path, files: FaultyFiles
) -> None:
    store = opened(directory, files)
    begun, go_on = threading.Event(), threading.Event()

    def hang(call: str, offset: int) -> None:
        if call == "write":
            begun.set()
            assert go_on.wait(20)

    files.fault = hang
    writing = threading.Thread(target=keep, args=(store, [1, 2]))
    writing.start()
    assert begun.wait(10)
    deleting = threading.Thread(target=store.delete_scopes, args=([ONE], soon()))
    deleting.start()
    time.sleep(0.1)
    go_on.set()
    writing.join()
    deleting.join()
    assert not has(store, 1)
    assert store.usage().blocks == 0
    store.close()
    assert not any((directory / "slab").read_bytes()[1 << 20 :])


def test_a_hung_disk_costs_the_deadline_of_what_waits_and_no_more_is_begun(
    directory: Path, files: FaultyFiles
) -> None:
    store = opened(directory, files, regions=16)
    keep(store, range(64))
    reads: list[int] = []

    def slow(call: str, offset: int) -> None:
        reads.append(offset)
        time.sleep(0.3)

    files.fault = slow
    blocks = [target(key(n), BLOCK_BYTES) for n in range(0, 64, 2)]
    began = time.monotonic()
    outcomes = store.read(blocks, began + 0.2)
    assert time.monotonic() - began < 2
    assert set(outcomes) == {Outcome.DONE, Outcome.FAILED}
    assert len(reads) <= 4
    assert store.usage().errors == {TierReason.TIMEOUT: outcomes.count(Outcome.FAILED)}
    files.fault = lambda call, offset: None
    assert all(has(store, n) for n in range(64))  # late is not lost
    store.close()


# -- the index ---------------------------------------------------------------------------------


def test_an_index_that_cannot_be_written_is_given_up_and_blocks_stay(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "GIVE_UP_S", 0.3)
    store = opened(directory)
    keep(store, range(4))
    commit = IndexFile.commit

    def refuse(self: IndexFile, *arguments: object, **more: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(IndexFile, "commit", refuse)
    keep(store, range(4, 8))
    end = time.monotonic() + 10
    while not any("given up" in note for note in store.usage().notes):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert all(has(store, n) for n in range(8))
    store.delete_scopes([ONE], soon())  # no later start can find it
    store.close()
    monkeypatch.setattr(IndexFile, "commit", commit)
    store = opened(directory)
    assert store.usage().blocks == 0
    keep(store, range(4))
    store.close()


def test_an_index_that_was_given_up_is_written_anew_where_it_can_be(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "GIVE_UP_S", 0.3)
    monkeypatch.setattr(rows_module, "ANEW_S", 0.2)
    monkeypatch.setattr(disk_module, "PLACES_AT_ONCE", 3)
    store = opened(directory, regions=64)
    keep(store, range(30))
    keep(store, range(10), OTHER)
    for scope in (b"4" * 32, b"5" * 32):
        keep(store, [1, 2], scope)

    def refuse(self: IndexFile, *arguments: object, **more: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(IndexFile, "commit", refuse)
        keep(store, [30])
        until(lambda: store.usage().notes != ())
        store.delete_scopes([OTHER], soon())
        store.delete_scopes([b"4" * 32], soon())
        keep(store, [1], b"3" * 32)
        time.sleep(0.5)  # it is tried, and fails yet
        assert "given up" in store.usage().notes[0]
    until(lambda: not store.usage().notes)
    keep(store, [5], OTHER)
    store.delete_scopes([b"5" * 32], soon())
    store.close()
    store = opened(directory, regions=64)
    assert store.usage().errors == {}
    assert all(has(store, n) for n in range(31))
    assert not any(has(store, n, scope) for n in (1, 2) for scope in (b"4" * 32, b"5" * 32))
    assert [n for n in range(10) if has(store, n, OTHER)] == [5]
    assert has(store, 1, b"3" * 32)
    store.close()


def test_writes_wait_while_too_many_rows_are_not_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MAX_ROWS_BEHIND", 8)
    go_on = threading.Event()
    commit = IndexFile.commit

    def wait(self: IndexFile, *arguments: object, **more: object) -> None:
        assert go_on.wait(20)
        commit(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(IndexFile, "commit", wait)
    store = opened(directory)
    keep(store, range(8))
    time.sleep(0.3)  # the thread has taken these and hangs
    keep(store, range(8, 16))
    keep(store, [16])
    late = store.write([source(key(17), content((17, ONE)))], time.monotonic() + 0.1)
    assert late == [Outcome.FAILED]
    go_on.set()
    keep(store, [17])
    store.close()


# -- file systems ------------------------------------------------------------------------------


def test_no_room_for_the_slab_is_said_with_what_to_change(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "mount", 16 << 20) as mount:
        with pytest.raises(TierUnusable, match="lower directory_bytes"):
            opened(mount / "disk", regions=64)
        store = opened(mount / "disk", regions=8)
        keep(store, range(8))
        store.close()


class CountingFiles(FaultyFiles):
    """Notes what is to be reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.reserved: list[int] = []

    def reserve(self, fd: int, size: int) -> None:
        self.reserved.append(size)
        super().reserve(fd, size)


def test_what_there_is_no_room_for_does_not_fill_the_file_system_first(tmp_path: Path) -> None:
    """Each try would: a neighbour finds no room meanwhile, and a disk may not be mounted."""
    files = CountingFiles()
    with small_tmpfs(tmp_path / "mount", 16 << 20) as mount:
        with pytest.raises(TierUnusable, match="lower directory_bytes: No space left"):
            opened(mount / "disk", files, regions=64)
        assert files.reserved == [HEADER_BYTES]
        opened(mount / "disk", files).close()
        filler = fill(mount)
        filler.write_bytes(bytes(filler.stat().st_size - (256 << 10)))  # the index needs a little
        store = opened(mount / "disk", files)  # it has its room
        keep(store, range(8))
        store.close()


def test_a_full_file_system_costs_no_block(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "mount", 16 << 20) as mount:
        store = opened(mount / "disk", regions=8)
        keep(store, range(8))
        filler = fill(mount)
        for first in range(8, 200, 8):
            keep(store, range(first, first + 8))
        assert has(store, 199)
        filler.unlink()
        store.close()
        store = opened(mount / "disk", regions=8)
        blocks = [target(key(n), BLOCK_BYTES) for n in range(200)]
        for n, (block, outcome) in enumerate(zip(blocks, store.read(blocks, soon()), strict=True)):
            assert outcome is not Outcome.DONE or bytes(block.parts[0]) == content((n, ONE))
        store.close()


def test_what_a_deletion_zeroes_is_no_room_for_others(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "mount", 16 << 20) as mount:
        store = opened(mount / "disk", regions=8)
        keep(store, range(32))
        before = (mount / "disk" / "slab").stat().st_blocks
        store.delete_scopes([ONE], soon())
        assert (mount / "disk" / "slab").stat().st_blocks == before
        store.close()


def test_a_file_system_that_reserves_nothing_is_used_and_said(
    directory: Path, files: FaultyFiles
) -> None:
    files.fault = lambda call, offset: errno.EOPNOTSUPP if call == "reserve" else None
    store = opened(directory, files)
    assert "can't reserve room" in store.usage().notes[0]
    keep(store, range(8))
    assert all(has(store, n) for n in range(8))
    store.close()


def test_random_faults_give_no_wrong_byte(directory: Path, files: FaultyFiles) -> None:
    draw = np.random.default_rng(7)
    faults = [None] * 12 + [HALF, HALF, errno.EIO, errno.ENOSPC]
    for _ in range(4):
        files.fault = lambda call, offset: None
        store = opened(directory, files)
        files.fault = lambda call, offset: faults[int(draw.integers(len(faults)))]
        for _ in range(60):
            some = [int(n) for n in draw.choice(80, 6, replace=False)]
            store.write([source(key(n), content((n, ONE))) for n in some], soon())
            some = [int(n) for n in draw.choice(80, 6, replace=False)]
            blocks = [target(key(n), BLOCK_BYTES) for n in some]
            for n, block, outcome in zip(some, blocks, store.read(blocks, soon()), strict=True):
                assert outcome is not Outcome.DONE or bytes(block.parts[0]) == content((n, ONE))
        store.close()


def test_others_are_served_between_the_steps_of_a_large_deletion(
    directory: Path, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.tiers.disk.disk.PLACES_AT_ONCE", 4)
    monkeypatch.setattr("kvd.tiers.disk.disk.BREATH_S", 0.1)
    store = opened(directory, files, regions=32)
    keep(store, range(40))
    keep(store, [1], OTHER)
    begun, go_on = threading.Event(), threading.Event()

    def hang(call: str, offset: int) -> None:
        if call == "write" and not begun.is_set():
            begun.set()
            assert go_on.wait(20)

    files.fault = hang
    writing = threading.Thread(target=keep, args=(store, [90]))
    writing.start()
    assert begun.wait(10)
    deleting = threading.Thread(target=store.delete_scopes, args=([ONE], soon()))
    deleting.start()
    time.sleep(0.15)
    go_on.set()  # it is kept before the deletion has come to its place
    writing.join()
    assert has(store, 1, OTHER)
    assert not any(has(store, n) for n in range(40))
    keep(store, [2], OTHER)
    keep(store, [3])
    assert deleting.is_alive()
    deleting.join()
    assert has(store, 1, OTHER)
    assert has(store, 2, OTHER)
    assert has(store, 3)
    assert store.usage().blocks == 3
    store.close()
    store = opened(directory, regions=32)
    assert [has(store, n) for n in (1, 3, 90)] == [False, True, False]
    store.close()


def test_a_deleted_scope_is_not_named_in_the_index_any_more(directory: Path) -> None:
    """Rows of it that a crash left over would lead somewhere."""
    store = opened(directory)
    keep(store, [1])
    keep(store, [1], OTHER)
    store.delete_scopes([ONE], soon())
    store.close()
    with closing(sqlite3.connect(directory / "index.sqlite")) as index:
        assert index.execute("SELECT scope FROM scopes").fetchall() == [(OTHER,)]
