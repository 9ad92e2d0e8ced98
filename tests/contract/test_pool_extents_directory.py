"""Extents in a directory of their own: found again, never mixed up, and on real huge pages."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.core.actions import ZeroRow
from kvd.core.events import PoolRecovered
from kvd.core.keys import MoverId, RowId
from kvd.mover import frames
from kvd.mover.host_shm import HostSharedMemory
from kvd.mover.layout import FragmentSpec, GroupMap, MoverConfig, Region
from kvd.pool import Pool, PoolConfig, PoolError, space
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import EXTENT_BYTES, opened

HUGE_PAGE = 2 << 20
HUGE_EXTENTS = 4
_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
_libc = ctypes.CDLL(None, use_errno=True)


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
        orders.introduce(pool)
        pool.grant_row(orders.row([2]))
        first = 2 * orders.SLOTS_PER_EXTENT
        pool.write_ready(orders.ready(range(first, first + 8), orders.keys(8)))
        pool.extent_path(2).write_bytes(b"k" * EXTENT_BYTES)


def test_extents_lie_in_the_directory_named_and_are_found_there_again(
    elsewhere: PoolConfig,
) -> None:
    fill(elsewhere)
    assert not (elsewhere.directory / "extents").exists()
    with opened(elsewhere) as pool:
        assert pool.cold_reason == ""
        assert pool.extents_directory == elsewhere.extents_directory
        assert orders.rows_of(list(pool.recovered()))[2].ordinals.tolist() == list(range(8))
        assert pool.extent_path(2).read_bytes() == b"k" * EXTENT_BYTES


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
        assert not any(pool.extent_path(2).read_bytes())
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


def test_a_mover_is_told_where_the_extents_lie(elsewhere: PoolConfig) -> None:
    group = GroupMap(1, 1, 4096, (FragmentSpec(0, 0, 4096, 4096),))
    for place in (None, elsewhere.extents_place):
        config = MoverConfig(
            MoverId(1), (Region(3, 0, 4096),), (group,), elsewhere.directory, EXTENT_BYTES
        )
        config = replace(config, extents_directory=place)
        told, _ = frames.unpack_config(frames.pack_config(config, 4, 5, 6))
        assert told == config
        assert told.extent_path(7) == (place or elsewhere.directory / "extents") / "00007.kv"


# -- huge pages -----------------------------------------------------------------------------------


@pytest.fixture
def huge_pages(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs with as many pages of 2 MiB as a small pool and one extent more need."""
    wanted = 2 * HUGE_EXTENTS + 2
    if os.geteuid() != 0 or not _PAGES.exists():
        pytest.skip("only root can mount a hugetlbfs, on a kernel with pages of 2 MiB")
    before = int(_PAGES.read_text())
    mount = tmp_path / "huge"
    mount.mkdir()
    try:
        _PAGES.write_text(f"{before + wanted}\n")
    except OSError as error:
        pytest.skip(f"the number of huge pages can't be set: {error}")
    try:
        if int(_PAGES.read_text()) < before + wanted:
            pytest.skip("the machine has no memory for huge pages")
        options = b"pagesize=2M"
        if _libc.mount(b"none", str(mount).encode(), b"hugetlbfs", 0, options) != 0:
            pytest.skip(f"no hugetlbfs can be mounted: {os.strerror(ctypes.get_errno())}")
        try:
            yield mount
        finally:
            assert _libc.umount2(str(mount).encode(), 0) == 0, "something still maps huge pages"
    finally:
        _PAGES.write_text(f"{before}\n")


@pytest.fixture
def on_huge_pages(huge_pages: Path, shared_directory: Path) -> PoolConfig:
    extent = 2 * HUGE_PAGE
    return PoolConfig(
        shared_directory / "pool",
        HUGE_EXTENTS * extent,
        extent_bytes=extent,
        extents_directory=huge_pages / "extents",
    )


def test_a_pool_on_huge_pages_is_populated_and_warm_the_next_time(
    on_huge_pages: PoolConfig,
) -> None:
    row = orders.row([1])
    with opened(on_huge_pages) as pool:
        taken = [pool.extent_path(e).stat().st_blocks * 512 for e in range(pool.extents)]
        assert taken == [on_huge_pages.extent_bytes] * HUGE_EXTENTS
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
    os.ftruncate(fd, HUGE_PAGE)
    group = GroupMap(1, 1, 4096, (FragmentSpec(0, 0, 4096, 4096),))
    with opened(on_huge_pages) as pool:
        mover = HostSharedMemory(
            MoverConfig(
                MoverId(1),
                (Region(fd, 0, HUGE_PAGE),),
                (group,),
                on_huge_pages.directory,
                on_huge_pages.extent_bytes,
                extents_directory=pool.extents_directory,
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
    monkeypatch.setattr(space, "require_space", lambda _config, _figures: None)
    with pytest.raises(PoolError, match="there are no more huge pages"):
        Pool.open(larger, none)
    assert list(on_huge_pages.extents_place.iterdir()) == []


def test_an_extent_that_is_no_whole_number_of_huge_pages_is_refused(
    on_huge_pages: PoolConfig,
) -> None:
    odd = replace(on_huge_pages, extent_bytes=HUGE_PAGE + 4096)
    with pytest.raises(PoolError, match=r"extent_bytes is 2101248, .* have 2097152 bytes each"):
        Pool.open(odd, none)


def test_tables_on_huge_pages_are_refused_with_the_place_for_them(huge_pages: Path) -> None:
    config = PoolConfig(huge_pages / "pool", 4 * HUGE_PAGE, extent_bytes=HUGE_PAGE)
    for allowed in (False, True):
        with pytest.raises(PoolError, match="name this one as extents_directory"):
            Pool.open(replace(config, any_filesystem=allowed), none)


def test_extents_on_a_disk_are_refused_unless_allowed(
    shared_directory: Path, tmp_path: Path
) -> None:
    if space.filesystem_type(tmp_path) in {"tmpfs", "hugetlbfs"}:
        pytest.skip("temporary files lie in memory here")
    config = replace(orders.config(shared_directory), extents_directory=tmp_path / "extents")
    with pytest.raises(PoolError, match="not on tmpfs or hugetlbfs"):
        Pool.open(config, none)
    with opened(replace(config, any_filesystem=True)) as pool:
        assert pool.extents == orders.EXTENTS
