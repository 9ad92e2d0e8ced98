"""One owner at a time, and the last owner's movers end before its blocks are believed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.linux.proc import start_time_of, state_of
from kvd.pool import Pool, PoolConfig, PoolError, sealed_json
from kvd.pool.ownership import (
    MOST_MOVERS,
    MoverList,
    MoverRecord,
    end_movers,
    extents_mapped_by,
)
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import EXTENT_BYTES, opened

MAPPER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapping = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""

# Maps likewise, and then is left with a thread that is not its first.
HEADLESS_MAPPER = """
import ctypes, mmap, os, platform, sys, threading, time
with open(sys.argv[1], "r+b") as file:
    mapping = mmap.mmap(file.fileno(), 0)
threading.Thread(target=sys.stdin.read).start()
print("mapped", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""

StartMapper = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_mapper() -> Iterator[StartMapper]:
    """Starts processes that map a file until they are ended."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, program: str = MAPPER) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def start_time(process: subprocess.Popen[str]) -> int:
    found = start_time_of(process.pid)
    assert found is not None
    return found


def owned_by_two_rows(config: PoolConfig) -> None:
    """Row 0 and row 1 with one block each."""
    with opened(config) as pool:
        orders.introduce(pool)
        for extent in (0, 1):
            pool.grant_row(orders.row([extent]))
            pool.write_ready(orders.ready([extent * orders.SLOTS_PER_EXTENT], orders.keys(1)))


def test_a_second_owner_is_refused_and_told_the_first(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    with (
        opened(config),
        pytest.raises(PoolError, match=rf"owned by another kvd \(pid {os.getpid()}\)"),
    ):
        Pool.open(config, lambda _done, _total: None)
    with opened(config) as pool:
        assert pool.cold_reason == ""


def test_the_owner_holds_the_lock_that_every_release_knows(shared_directory: Path) -> None:
    """By its name: under another one two releases would own one pool, each with its own lock."""
    config = orders.config(shared_directory)
    with opened(config), (config.directory / "lock").open("rb") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = len(list(config.directory.glob("*lock*")))
    assert found == 1


def test_a_mover_that_outlived_its_daemon_is_killed(
    shared_directory: Path, start_mapper: StartMapper
) -> None:
    config = orders.config(shared_directory)
    owned_by_two_rows(config)
    with opened(config) as pool:
        mover = start_mapper(pool.extent_files.path(1))
        pool.record_mover(mover.pid, start_time(mover))
    with opened(config) as pool:
        assert mover.wait(20) == -signal.SIGKILL
        rows = orders.rows_of(list(pool.recovered()))
    assert [row.quarantined for row in rows.values()] == [False, False]


def test_a_copy_of_a_pool_leaves_the_living_ones_movers_and_extents_alone(
    shared_directory: Path, start_mapper: StartMapper
) -> None:
    config = orders.config(shared_directory)
    owned_by_two_rows(config)
    copy = replace(config, directory=shared_directory / "copy")
    with opened(config) as pool:
        extent = pool.extent_files.path(1)
        mover = start_mapper(extent)
        pool.record_mover(mover.pid, start_time(mover))
        shutil.copytree(config.directory, copy.directory)
        with opened(copy) as made:
            assert "the pool was made with extents_directory" in made.cold_reason
        assert mover.poll() is None
        assert extent.exists()
        pool.upkeep()
    with opened(config) as pool:
        assert pool.cold_reason == ""
        assert mover.wait(20) == -signal.SIGKILL


def test_movers_that_an_earlier_release_noted_are_known(shared_directory: Path) -> None:
    path = shared_directory / "movers"
    path.write_bytes(sealed_json.seal({"pid": 7, "start_time": 2}, 128))
    assert MoverList(path).read_last_owner() == [MoverRecord(7, 2)]


def test_a_killed_mover_has_ended_when_the_call_returns(
    shared_directory: Path, start_mapper: StartMapper
) -> None:
    with opened(orders.config(shared_directory)) as pool:
        movers = [start_mapper(pool.extent_files.path(0)) for _ in range(3)]
        records = [MoverRecord(mover.pid, start_time(mover)) for mover in movers]
        assert end_movers(records, deadline_s=5.0) == []
        assert [mover.poll() for mover in movers] == [-signal.SIGKILL] * 3
        assert end_movers(records, deadline_s=5.0) == []


def test_a_process_that_got_the_pid_of_a_mover_is_left_alone(
    shared_directory: Path, start_mapper: StartMapper
) -> None:
    config = orders.config(shared_directory)
    owned_by_two_rows(config)
    with opened(config) as pool:
        other = start_mapper(pool.extent_files.path(1))
        pool.record_mover(other.pid, start_time(other) - 1)
    with opened(config):
        assert other.poll() is None


def test_a_thread_that_got_the_number_of_a_mover_keeps_no_pool_from_its_next_owner(
    shared_directory: Path,
) -> None:
    config = orders.config(shared_directory)
    owned_by_two_rows(config)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        with opened(config) as pool:
            pool.record_mover(thread.native_id, start_time=1)
        with opened(config) as pool:
            assert len(orders.rows_of(list(pool.recovered()))) == 2
            assert not pool.orphans()
    finally:
        ended.set()
        thread.join()


WITHOUT_DESCRIPTORS = """
import os, resource
from kvd.linux.proc import start_time_of
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        os.open("/dev/null", os.O_RDONLY)
except OSError:
    pass
try:
    print(start_time_of(os.getpid()))
except OSError as error:
    print(error.strerror)
"""


def test_a_mover_is_not_taken_for_another_process_where_descriptors_are_too_short_to_ask() -> None:
    asked = [sys.executable, "-c", WITHOUT_DESCRIPTORS]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said == "Too many open files\n"


def test_a_mover_that_was_forgotten_is_left_alone(
    shared_directory: Path, start_mapper: StartMapper
) -> None:
    config = orders.config(shared_directory)
    owned_by_two_rows(config)
    with opened(config) as pool:
        gone, kept = (start_mapper(pool.extent_files.path(1)) for _ in range(2))
        for mover in (gone, kept):
            pool.record_mover(mover.pid, start_time(mover))
        pool.forget_mover(gone.pid)
    with opened(config):
        assert kept.wait(20) == -signal.SIGKILL
        assert gone.poll() is None


def test_movers_are_noted_and_forgotten_without_room_or_descriptors(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full file system must not keep the end of a mover from being handled."""
    config = orders.config(shared_directory)
    with opened(config) as pool, monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "open", full)
        patch.setattr(os, "write", full)
        size = (config.directory / "movers").stat().st_size
        for pid in range(MOST_MOVERS):
            pool.record_mover(5_000_000 + pid, 1)
        with pytest.raises(OSError, match=f"{MOST_MOVERS} movers"):
            pool.record_mover(6_000_000, 1)
        pool.forget_mover(5_000_007)
        pool.forget_mover(5_000_007)
        pool.record_mover(6_000_000, 99)
        assert (config.directory / "movers").stat().st_size == size
    noted = MoverList(config.directory / "movers").read_last_owner()
    assert len(noted) == MOST_MOVERS
    assert MoverRecord(6_000_000, 99) in noted
    assert MoverRecord(5_000_007, 1) not in noted
    with opened(config):
        assert MoverList(config.directory / "movers").read_last_owner() == []


def test_a_list_of_movers_with_a_damaged_line_gives_the_others(shared_directory: Path) -> None:
    path = shared_directory / "movers"
    movers = MoverList(path)
    movers.replace([MoverRecord(5_000_000 + n, n) for n in range(3)])
    with path.open("r+b") as file:
        file.seek(128 + 20)
        file.write(b"\xff")
    assert MoverList(path).read_last_owner() == [
        MoverRecord(5_000_000, 0),
        MoverRecord(5_000_002, 2),
    ]
    movers.close()


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "scope", "namespace": 1},
        {"pid": "1", "start_time": 2},
        {"pid": 1 << 31, "start_time": 2},
        {"pid": -1, "start_time": 2},
        {"pid": 5_000_000},
    ],
    ids=str,
)
def test_a_whole_line_that_names_no_process_is_nobodys(
    shared_directory: Path, record: dict[str, object]
) -> None:
    path = shared_directory / "movers"
    path.write_bytes(sealed_json.seal(record) + sealed_json.seal({"pid": 7, "start_time": 2}))
    assert MoverList(path).read_last_owner() == [MoverRecord(7, 2)]


def test_rows_of_a_mover_that_can_not_be_killed_are_quarantined(
    shared_directory: Path, start_mapper: StartMapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = orders.config(shared_directory)
    impatient = PoolConfig(
        config.directory, config.pool_bytes, config.extent_bytes, mover_kill_deadline_s=0.05
    )
    owned_by_two_rows(config)
    with opened(config) as pool:
        mover = start_mapper(pool.extent_files.path(1))
        pool.record_mover(mover.pid, start_time(mover))
    with monkeypatch.context() as patch:
        # As if it hung in the kernel: the signal is sent and nothing comes of it.
        patch.setattr(signal, "pidfd_send_signal", lambda _fd, _signal: None)
        with opened(impatient) as pool:
            rows = orders.rows_of(list(pool.recovered()))
            [orphan] = pool.orphans()
    assert (orphan.pid, orphan.extents) == (mover.pid, 1)
    assert orphan.slots == orders.row([1]).slots - 1
    assert orphan.slot_bytes == orphan.slots * sum(orders.row([1]).part_bytes)
    assert {row: event.quarantined for row, event in rows.items()} == {0: False, 1: True}
    assert rows[1].ordinals.tolist() == [0]
    with opened(config):
        assert mover.wait(20) == -signal.SIGKILL, "the orphaned mover was not kept in the list"


def test_what_is_left_of_a_process_whose_first_thread_has_ended_still_maps(
    shared_directory: Path, start_mapper: StartMapper
) -> None:
    """Killed while one of its threads waits for a disk, a tier's process looks like this."""
    with opened(orders.config(shared_directory)) as pool:
        orphan = start_mapper(pool.extent_files.path(1), HEADLESS_MAPPER)
        while state_of(orphan.pid) != "Z":
            time.sleep(0.01)
        assert extents_mapped_by(orphan.pid, pool._files) == {1}
        assert extents_mapped_by(5_000_000, pool._files) == frozenset()


def test_an_extent_that_an_orphaned_mover_maps_is_replaced_before_it_is_free(
    shared_directory: Path, start_mapper: StartMapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = orders.config(shared_directory)
    impatient = PoolConfig(
        config.directory, config.pool_bytes, config.extent_bytes, mover_kill_deadline_s=0.05
    )
    owned_by_two_rows(config)
    with opened(config) as pool:
        path = pool.extent_files.path(1)
        mover = start_mapper(path)
        pool.record_mover(mover.pid, start_time(mover))
    with (config.directory / "rows.table").open("r+b") as table:
        table.seek(64 + 8)
        table.write(b"\xff")
    before = path.stat().st_ino
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda _fd, _signal: None)
    with opened(impatient) as pool:
        assert set(orders.rows_of(list(pool.recovered()))) == {0}
    assert path.stat().st_ino != before
    assert path.stat().st_blocks * 512 == EXTENT_BYTES


def test_start_time_is_that_of_the_process_and_not_of_its_name() -> None:
    assert start_time_of(os.getpid()) == start_time_of(os.getpid())
    assert start_time_of(2**22 + 1) is None
