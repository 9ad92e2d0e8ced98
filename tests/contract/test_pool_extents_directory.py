"""Extents in a directory of their own: found again, never mixed up, and on real huge pages."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvd.core.actions import ZeroRow
from kvd.core.events import PoolRecovered
from kvd.core.keys import MoverId, RowId
from kvd.linux.calls import present_pages
from kvd.linux.proc import filesystem_type
from kvd.mover import frames
from kvd.mover.host_shm import HostSharedMemory
from kvd.mover.layout import FragmentSpec, GroupMap, MoverConfig, Region
from kvd.pool import Pool, PoolConfig, PoolError, capacity_check
from kvd.processes.mappings import ExtentFiles, map_extent
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import EXTENT_BYTES, opened
from tests.huge_pages import PAGE_BYTES, huge_pages

HUGE_EXTENTS = 4


def none(_done: int, _total: int) -> None:
    """Progress that nobody looks at."""


@pytest.fixture
def elsewhere(shared_directory: Path) -> PoolConfig:
    return replace(
        orders.config(shared_directory), extents_directory=shared_directory / "far" / "extents"
    )


def fill(config: PoolConfig) -> None:
    """A row of 8 blocks, with bytes that are not zeros."""
    with opened(config) as pool:
        orders.fill_row(pool)
        pool.extent_files.path(2).write_bytes(b"k" * EXTENT_BYTES)


def test_extents_lie_in_the_directory_named_and_are_found_there_again(
    elsewhere: PoolConfig,
) -> None:
    fill(elsewhere)
    assert not (elsewhere.directory / "extents").exists()
    with opened(elsewhere) as pool:
        assert pool.cold_reason == ""
        assert pool.extent_files.directory == elsewhere.extents_directory
        assert orders.rows_of(list(pool.recovered()))[2].ordinals.tolist() == list(range(8))
        assert pool.extent_files.path(2).read_bytes() == b"k" * EXTENT_BYTES


@pytest.mark.parametrize("to", ["there", "back"])
def test_a_pool_whose_extents_are_to_lie_elsewhere_starts_cold_and_leaves_none_behind(
    elsewhere: PoolConfig, to: str
) -> None:
    here = replace(elsewhere, extents_directory=None)
    before, after = (here, elsewhere) if to == "there" else (elsewhere, here)
    fill(before)
    with opened(after) as pool:
        assert pool.cold_reason == (
            f"the pool was made with extents_directory = {before.extents_place}, configured is"
            f" {after.extents_place}"
        )
        assert list(pool.recovered()) == [PoolRecovered()]
    assert list(before.extents_place.glob("*")) == []


def test_another_pools_extents_are_never_taken_for_ones_own(elsewhere: PoolConfig) -> None:
    fill(elsewhere)
    other = replace(elsewhere, directory=elsewhere.directory.with_name("other"))
    with opened(other) as pool:
        assert pool.cold_reason == "no pool was here before"
        assert not any(pool.extent_files.path(2).read_bytes())
    with opened(elsewhere) as pool:
        assert pool.cold_reason == f"the extents in {elsewhere.extents_place} are another pool's"
        assert list(pool.recovered()) == [PoolRecovered()]


def test_two_pools_at_once_can_not_share_a_directory_of_extents(elsewhere: PoolConfig) -> None:
    other = replace(elsewhere, directory=elsewhere.directory.with_name("other"))
    with opened(elsewhere):
        with pytest.raises(PoolError, match="in use by another kvd"):
            Pool.open(other, none)
        assert len(list(elsewhere.extents_place.glob("*.kv"))) == elsewhere.extents
    with opened(other) as pool:
        assert pool.extents == other.extents


@pytest.mark.parametrize("which", ["its extents", "its directory", "a directory in it"])
def test_a_pool_takes_no_place_in_another_ones_directory_whether_that_is_in_use_or_not(
    elsewhere: PoolConfig, which: str
) -> None:
    within = replace(elsewhere, extents_directory=None)
    fill(within)
    other = within.directory.with_name("other")
    thief = {
        "its extents": replace(within, directory=other, extents_directory=within.extents_place),
        "its directory": replace(within, directory=other, extents_directory=within.directory),
        "a directory in it": replace(within, directory=within.directory / "new" / "pool"),
    }[which]
    refused = pytest.raises(
        PoolError, match=f"in the directory of another pool, {within.directory}"
    )
    with opened(within) as pool:
        with refused:
            Pool.open(thief, none)
        assert not pool.cold_reason
    with refused:
        Pool.open(thief, none)
    assert not thief.directory.exists()
    with opened(within) as pool:
        assert not pool.cold_reason


def test_a_pool_is_not_put_where_another_ones_extents_are(elsewhere: PoolConfig) -> None:
    fill(elsewhere)
    thief = replace(elsewhere, directory=elsewhere.extents_place, extents_directory=None)
    with pytest.raises(PoolError, match=f"{thief.directory} has the extents of another pool"):
        Pool.open(thief, none)
    with opened(elsewhere) as pool:
        assert not pool.cold_reason


def test_a_pool_whose_directory_would_be_the_extents_of_another_is_not_removed(
    elsewhere: PoolConfig,
) -> None:
    around = replace(elsewhere, extents_directory=None)
    around.directory.mkdir(mode=0o700)
    within = replace(around, directory=around.extents_place)
    fill(within)
    with pytest.raises(PoolError, match=f"in the directory of another pool, {within.directory}"):
        Pool.open(around, none)
    with opened(within) as pool:
        assert not pool.cold_reason


@pytest.mark.parametrize("setting", ["directory", "extents_directory"])
def test_a_link_to_itself_is_named(elsewhere: PoolConfig, setting: str) -> None:
    loop = elsewhere.directory.with_name("loop")
    loop.symlink_to(loop)
    looped = (
        replace(elsewhere, directory=loop)
        if setting == "directory"
        else replace(elsewhere, extents_directory=loop)
    )
    with pytest.raises(PoolError, match=f"{loop} is a link"):
        Pool.open(looped, none)


def test_extents_right_beside_the_tables_are_counted_once(elsewhere: PoolConfig) -> None:
    beside = replace(elsewhere, extents_directory=elsewhere.directory)
    fill(beside)
    figures = capacity_check.measure(beside)
    assert figures.extents_held == beside.extents * EXTENT_BYTES
    assert figures.tables_held < 2 * EXTENT_BYTES
    with opened(beside) as pool:
        assert pool.cold_reason == ""


def test_a_directory_that_can_not_be_made_is_named_with_the_setting(
    elsewhere: PoolConfig, shared_directory: Path
) -> None:
    (shared_directory / "file").write_text("")
    blocked = replace(elsewhere, extents_directory=shared_directory / "file" / "extents")
    with pytest.raises(PoolError, match=r"extents_directory .* can't be used: Not a directory"):
        Pool.open(blocked, none)


def test_what_can_not_be_removed_is_named_with_the_way_out(
    elsewhere: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is immutable (chattr +i), which tmpfs knows nothing of."""
    blocked = elsewhere.extents_place / "00001.kv"
    blocked.parent.mkdir(parents=True)
    blocked.touch()
    unlink = Path.unlink

    def refused(path: Path, **terms: bool) -> None:
        if path == blocked:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        unlink(path, **terms)

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(PoolError, match=rf"{blocked} can't be removed: .* a directory of its own"):
        Pool.open(elsewhere, none)


def test_what_is_not_the_pools_stays_in_the_directory(elsewhere: PoolConfig) -> None:
    place = elsewhere.extents_place
    place.mkdir(parents=True)
    (place / "letters.txt").write_text("dear")
    (place / "00001.kv.old").write_text("kept")
    fill(elsewhere)
    smaller = replace(elsewhere, pool_bytes=2 * EXTENT_BYTES)
    with opened(smaller):
        kept = {path.name for path in place.iterdir() if path.suffix != ".pool"}
    assert kept == {"letters.txt", "00001.kv.old", "00000.kv", "00001.kv"}


def test_what_a_process_forks_does_not_map_its_extents(tmp_path: Path) -> None:
    """A tier's library may fork, and the pool waits for the tier's own process alone."""
    files = ExtentFiles(tmp_path, 0, EXTENT_BYTES)
    files.path(0).write_bytes(bytes(EXTENT_BYTES))
    mapping = map_extent(files, 0)
    answer = np.zeros(1, dtype=np.uint8)
    assert present_pages(mapping.address, 1, answer.ctypes.data)
    child = os.fork()
    if child == 0:
        os._exit(present_pages(mapping.address, 1, answer.ctypes.data))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "it is mapped there"
    mapping.close()


def test_a_mover_is_told_where_the_extents_lie(elsewhere: PoolConfig) -> None:
    group = GroupMap(1, 1, 4096, (FragmentSpec(0, 0, 4096, 4096),))
    files = ExtentFiles(elsewhere.extents_place, 7, EXTENT_BYTES)
    config = MoverConfig(MoverId(1), (Region(3, 0, 4096),), (group,), files)
    told, _ = frames.unpack_config(frames.pack_config(config, 4, 5, 6))
    assert told == config
    assert told.extents.path(7) == elsewhere.extents_place / "00007.kv"


# -- huge pages -----------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs with as many pages as a small pool and one extent more need."""
    with huge_pages(tmp_path / "huge", 2 * HUGE_EXTENTS + 2) as place:
        yield place


@pytest.fixture
def on_huge_pages(mount: Path, shared_directory: Path) -> PoolConfig:
    extent = 2 * PAGE_BYTES
    return PoolConfig(
        shared_directory / "pool",
        HUGE_EXTENTS * extent,
        extent_bytes=extent,
        extents_directory=mount / "extents",
    )


def test_a_pool_on_huge_pages_is_populated_and_warm_the_next_time(
    on_huge_pages: PoolConfig,
) -> None:
    row = orders.row([1])
    with opened(on_huge_pages) as pool:
        taken = [pool.extent_files.path(e).stat().st_blocks * 512 for e in range(pool.extents)]
        assert taken == [on_huge_pages.extent_bytes] * HUGE_EXTENTS
        assert pool.place == f"{on_huge_pages.extents_place}; huge pages of 2048 KiB"
        orders.introduce(pool)
        per_extent = on_huge_pages.slots_per_extent
        pool.grant_row(replace(row, first_slot=per_extent))
        pool.write_ready(orders.ready(range(per_extent, per_extent + 3), orders.keys(3)))
    with opened(on_huge_pages) as pool:
        assert pool.cold_reason == ""
        assert orders.rows_of(list(pool.recovered()))[1].ordinals.tolist() == [0, 1, 2]


def test_an_extent_on_huge_pages_is_written_by_a_mover_and_zeroed(
    on_huge_pages: PoolConfig,
) -> None:
    fd = os.memfd_create("kvd-test-engine")
    os.ftruncate(fd, PAGE_BYTES)
    group = GroupMap(1, 1, 4096, (FragmentSpec(0, 0, 4096, 4096),))
    with opened(on_huge_pages) as pool:
        mover = HostSharedMemory(
            MoverConfig(
                MoverId(1),
                (Region(fd, 0, PAGE_BYTES),),
                (group,),
                pool.extent_files,
            )
        )
        view = mover.open_extent(1)
        mover.warm_extent(1, lambda: True)
        view[:] = 7
        orders.introduce(pool)
        pool.grant_row(replace(orders.row([1]), first_slot=on_huge_pages.slots_per_extent))
        assert (view == 7).all()
        pool.zero_row(ZeroRow(RowId(1)))
        assert not view.any()
        del view
        mover.close()
    os.close(fd)


def test_a_pool_of_more_than_the_free_huge_pages_is_refused(on_huge_pages: PoolConfig) -> None:
    larger = replace(on_huge_pages, pool_bytes=1 << 30)
    with pytest.raises(PoolError, match=r"sysctl vm\.nr_hugepages"):
        Pool.open(larger, none)
    assert list(on_huge_pages.extents_place.iterdir()) == []


def test_huge_pages_that_run_out_while_extents_are_made_are_given_back(
    on_huge_pages: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    larger = replace(on_huge_pages, pool_bytes=1 << 30)
    monkeypatch.setattr(capacity_check, "require_space", lambda _config, _figures: None)
    with pytest.raises(PoolError, match="there are no more huge pages"):
        Pool.open(larger, none)
    assert list(on_huge_pages.extents_place.iterdir()) == []


def test_an_extent_that_is_no_whole_number_of_huge_pages_is_refused(
    on_huge_pages: PoolConfig,
) -> None:
    odd = replace(on_huge_pages, extent_bytes=PAGE_BYTES + 4096)
    with pytest.raises(PoolError, match=r"extent_bytes is 2101248, .* have 2097152 bytes each"):
        Pool.open(odd, none)


def test_tables_on_huge_pages_are_refused_with_the_place_for_them(mount: Path) -> None:
    config = PoolConfig(mount / "pool", 4 * PAGE_BYTES, extent_bytes=PAGE_BYTES)
    for allowed in (False, True):
        with pytest.raises(PoolError, match="name this one as extents_directory"):
            Pool.open(replace(config, any_filesystem=allowed), none)


def test_extents_on_a_disk_are_refused_unless_allowed(
    shared_directory: Path, tmp_path: Path
) -> None:
    if filesystem_type(tmp_path) in {"tmpfs", "hugetlbfs"}:
        pytest.skip("temporary files lie in memory here")
    config = replace(orders.config(shared_directory), extents_directory=tmp_path / "extents")
    with pytest.raises(PoolError, match="not on tmpfs or hugetlbfs"):
        Pool.open(config, none)
    with opened(replace(config, any_filesystem=True)) as pool:
        assert pool.extents == orders.EXTENTS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_pool_whose_place_is_below_what_another_user_made_is_taken(
    shared_directory: Path,
) -> None:
    """Anyone may put a file of that name in /dev/shm, say."""
    header = shared_directory / "pool.header"
    header.touch()
    config = PoolConfig(shared_directory / "pool", 2 * EXTENT_BYTES, EXTENT_BYTES)
    with pytest.raises(PoolError, match="in the directory of another pool"):
        Pool.open(config, none)
    os.chown(header, 65534, 65534)
    with opened(config) as pool:
        assert pool.extents == 2


def test_an_extent_of_another_pool_in_the_same_place_is_not_mapped(tmp_path: Path) -> None:
    ours = tmp_path / "extents"
    ours.mkdir()
    (ours / "00000.kv").write_bytes(bytes(4096))
    inode = ours.stat().st_ino
    files = ExtentFiles(ours, inode, 4096)
    map_extent(files, 0).close()
    ours.rename(tmp_path / "removed")
    ours.mkdir()
    (ours / "00000.kv").write_bytes(bytes(4096))
    with pytest.raises(OSError, match="another pool's by now"):
        map_extent(files, 0)
