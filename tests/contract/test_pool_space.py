"""A pool that would not fit is refused at start, with the figures and the fix."""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvd.linux.control_groups import huge_limit, memory_limit
from kvd.linux.proc import filesystem_type, memory_bytes
from kvd.pool import Pool, PoolConfig, PoolError, capacity_check, extents
from kvd.pool.capacity_check import HugeFigures, SpaceFigures
from kvd.pool.reserve import have_all
from tests.contract import pool_orders as orders
from tests.small_tmpfs import fill, small_tmpfs

GIB = 1 << 30
CONFIG = PoolConfig(Path("/dev/shm/kvd"), 4 * GIB)
FILES = 4 * GIB + CONFIG.table_bytes + CONFIG.reserve_bytes
INDEX, PROCESSES = 4 * GIB // 64, 256 << 20
PLENTY = SpaceFigures(
    filesystem_free=8 * GIB,
    tables_held=0,
    extents_held=0,
    memory_available=8 * GIB,
    memory_limit=8 * GIB,
)
HUGE_PAGE = 2 << 20
# The extents on huge pages: 1 GiB of common memory is enough for the 128 MiB of slot table.
HUGE = replace(
    PLENTY,
    filesystem_free=GIB,
    memory_available=GIB,
    memory_limit=GIB,
    extents_free=4 * GIB,
    huge=HugeFigures(HUGE_PAGE, 4 * GIB, 4 * GIB),
)


def with_figures(**changed: Any) -> SpaceFigures:
    return replace(PLENTY, **changed)


def test_what_fits_is_taken() -> None:
    capacity_check.require_space(CONFIG, PLENTY)
    capacity_check.require_space(CONFIG, with_figures(memory_limit=None))
    capacity_check.require_space(CONFIG, with_figures(memory_limit=FILES + INDEX + PROCESSES))
    capacity_check.require_space(CONFIG, with_figures(memory_available=FILES + INDEX))
    capacity_check.require_space(CONFIG, with_figures(filesystem_free=FILES))


def test_what_the_pool_holds_already_counts_as_room() -> None:
    little = GIB // 4
    figures = with_figures(filesystem_free=little, extents_held=4 * GIB, memory_available=little)
    capacity_check.require_space(CONFIG, figures)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        # 4 GiB of extents, 128 MiB of tables, 16 MiB of reserve: the pool's size is not enough.
        ({"filesystem_free": 4 * GIB}, r"needs 4\.14 GiB .*has 4\.00 GiB .*remount"),
        ({"filesystem_free": GIB, "extents_held": GIB}, r"has 2\.00 GiB \(1\.00 GiB of it held"),
        ({"memory_limit": 4 * GIB}, r"limit of this control group is 4\.00 GiB: raise"),
        ({"memory_limit": 4 * GIB + GIB // 8}, "for its processes"),
        # 64 MiB of index pages and 256 MiB for the processes beside the files.
        ({"memory_limit": FILES + INDEX + PROCESSES - 1}, r"up to 64\.0 MiB for index pages"),
        ({"memory_limit": FILES + PROCESSES}, r"raise the limit to 4\.45 GiB .*lower pool_bytes"),
        ({"memory_available": FILES + INDEX - 1}, r"index pages, of which .*lower pool_bytes"),
        ({"memory_available": 2 * GIB}, r"only 2\.00 GiB of memory are available"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, int], said: str) -> None:
    with pytest.raises(PoolError, match=said):
        capacity_check.require_space(CONFIG, with_figures(**changed))


@pytest.mark.parametrize("standing", [False, True])
def test_the_size_to_mount_has_room_for_all_that_the_pool_may_want(standing: bool) -> None:
    """Also for what a start does without: the reserve of a standing pool, and checksums."""
    chosen = replace(CONFIG, checksums_chosen=True, checksums_reason="there is no room for them")
    figures = with_figures(filesystem_free=GIB, standing=standing)
    with pytest.raises(PoolError) as refused:
        capacity_check.require_space(chosen, figures)
    (advised,) = re.findall(r"remount,size=(\d+)m", str(refused.value))
    enlarged = replace(figures, filesystem_free=int(advised) << 20, standing=False)
    capacity_check.require_space(replace(chosen, payload_checksums=True), enlarged)


def test_extents_on_huge_pages_are_no_common_memory() -> None:
    capacity_check.require_space(CONFIG, HUGE)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"filesystem_free": GIB // 16}, r"has 64\.0 MiB .* for its 144\.3 MiB of tables"),
        ({"extents_free": 3 * GIB}, r"has 3\.00 GiB .*2048 huge pages of 2\.0 MiB: sysctl"),
        ({"extents_free": 2 * GIB, "extents_held": GIB}, r"has 3\.00 GiB \(1\.00 GiB of it held"),
        ({"huge": HugeFigures(HUGE_PAGE, 4 * GIB, GIB)}, r"may have 1\.00 GiB of huge pages"),
        ({"huge": HugeFigures(HUGE_PAGE, 4 * GIB, None, in_memory_limit=True)}, "memory limit"),
        ({"memory_limit": GIB // 4}, "memory limit"),
        ({"memory_available": GIB // 16}, r"only 64\.0 MiB of memory"),
        ({"extents_free": 3 * GIB, "huge": None}, r"has 3\.00 GiB .*remount,size=4096m"),
    ],
)
def test_extents_elsewhere_that_do_not_fit_are_refused(changed: dict[str, Any], said: str) -> None:
    config = replace(CONFIG, extents_directory=Path("/mnt/huge/kvd"))
    with pytest.raises(PoolError, match=said):
        capacity_check.require_space(config, replace(HUGE, **changed))


def test_a_pool_larger_than_its_file_system_is_refused_before_a_byte_is_taken(
    shared_directory: Path,
) -> None:
    fs = os.statvfs(shared_directory)
    config = PoolConfig(shared_directory / "pool", fs.f_bavail * fs.f_frsize + GIB)
    with pytest.raises(PoolError, match="remount"):
        Pool.open(config, lambda _done, _total: None)
    assert not (config.directory / "extents").exists()


def test_a_directory_on_disk_is_refused_unless_allowed() -> None:
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir=Path(__file__).parent) as name:
        if filesystem_type(Path(name)) == "tmpfs":
            pytest.skip("the sources lie on tmpfs")
        refused = PoolConfig(Path(name), 1 << 20, extent_bytes=1 << 18)
        with pytest.raises(PoolError, match="not on tmpfs"):
            Pool.open(refused, lambda _done, _total: None)
        allowed = PoolConfig(Path(name), 1 << 20, extent_bytes=1 << 18, any_filesystem=True)
        Pool.open(allowed, lambda _done, _total: None).close()


def cgroup_tree(
    root: Path, version: int, path: str, limits: dict[str, str], controller: str = "memory"
) -> Path:
    """A /proc that points at a control group tree under `root`."""
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    mount = root / "cgroup"
    for group, limit in limits.items():
        (mount / group).mkdir(parents=True, exist_ok=True)
        (mount / group / name).write_text(limit + "\n")
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    line = f"0::{path}\n" if version == 2 else f"5:devices:/x\n4:{controller}:{path}\n"
    (proc / "self" / "cgroup").write_text(line)
    kind = "cgroup2 cgroup2 rw" if version == 2 else f"cgroup cgroup rw,{controller}"
    (proc / "self" / "mountinfo").write_text(
        f"30 1 0:30 / {mount}/elsewhere rw - cgroup cgroup rw,cpu\n"
        f"31 1 0:31 / {mount} rw shared:1 - {kind}\n"
    )
    return proc


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limits", "tightest"),
    [
        ({"": "max", "a": "max", "a/b": "700"}, 700),
        ({"": "max", "a": "500", "a/b": "700"}, 500),
        ({"": "300", "a": "500", "a/b": "700"}, 300),
        ({"": str((1 << 63) - 4096)}, None),
        ({"": "max"}, None),
    ],
)
def test_the_tightest_limit_up_the_tree_counts(
    tmp_path: Path, version: int, limits: dict[str, str], tightest: int | None
) -> None:
    assert memory_limit(cgroup_tree(tmp_path, version, "/a/b", limits)) == tightest


def test_a_container_that_sees_only_its_own_group_finds_its_limit(tmp_path: Path) -> None:
    proc = cgroup_tree(tmp_path, 2, "/kubepods/pod7", {"": "900"})
    assert memory_limit(proc) == 900


def huge_pages(root: Path, free: int, reserved: int, more: int, made: int) -> Path:
    folder = root / "hugepages-2048kB"
    folder.mkdir(parents=True)
    names = ("free_hugepages", "resv_hugepages", "nr_overcommit_hugepages", "surplus_hugepages")
    for name, count in zip(names, (free, reserved, more, made), strict=True):
        (folder / name).write_text(f"{count}\n")
    return root


def test_free_huge_pages_are_those_that_nobody_was_promised(tmp_path: Path) -> None:
    root = huge_pages(tmp_path, free=100, reserved=30, more=8, made=3)
    assert capacity_check.huge_pages_free(HUGE_PAGE, root) == (100 - 30 + 8 - 3) * HUGE_PAGE
    assert capacity_check.huge_pages_free(HUGE_PAGE, root, promised=True) == (100 + 5) * HUGE_PAGE


def test_a_size_of_huge_pages_that_the_kernel_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"no huge pages of 1\.00 GiB"):
        capacity_check.huge_pages_free(GIB, tmp_path)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_on_huge_pages_is_that_of_their_size(tmp_path: Path, version: int) -> None:
    proc = cgroup_tree(tmp_path, version, "/a", {"": "max", "a": "max"}, "hugetlb")
    group = tmp_path / "cgroup" / "a"
    end = "max" if version == 2 else "limit_in_bytes"
    (group / f"hugetlb.2MB.{end}").write_text("600\n")
    (group / f"hugetlb.2MB.rsvd.{end}").write_text("500\n")
    assert huge_limit(HUGE_PAGE, proc) == 500
    assert huge_limit(GIB, proc) is None


def test_this_machine_tells_what_it_has() -> None:
    assert memory_bytes("MemAvailable")
    limit = memory_limit()
    assert limit is None or limit > 0
    assert filesystem_type(Path("/dev/shm")) == "tmpfs"


def failing_with(number: int) -> Callable[..., None]:
    def fail(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_memory_that_runs_out_while_extents_are_made_is_given_back(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = orders.config(shared_directory)
    monkeypatch.setattr(extents, "populate", failing_with(errno.EFAULT))
    with pytest.raises(PoolError, match=r"no memory for extent \d of 8"):
        Pool.open(config, lambda _done, _total: None)
    assert not list((config.directory / "extents").iterdir())


def test_a_kernel_without_the_advice_gets_its_extents_written(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "populate", failing_with(errno.EINVAL))
    with orders.opened(orders.config(shared_directory)) as pool:
        for extent in range(pool.extents):
            assert pool.extent_files.path(extent).stat().st_blocks * 512 == pool.extent_bytes


def test_a_slot_table_that_can_not_grow_refuses_the_row(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = orders.config(shared_directory)
    with orders.opened(config) as pool:
        orders.introduce(pool)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", failing_with(errno.ENOSPC))
            with pytest.raises(PoolError, match="slot table of extent 3"):
                pool.grant_row(orders.row([3]))
        pool.grant_row(orders.row([3]))
    with orders.opened(config) as pool:
        assert set(orders.rows_of(list(pool.recovered()))) == {3}


def test_a_pool_is_had_again_though_a_neighbour_takes_whatever_it_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_tmpfs(tmp_path / "mount", 24 << 20) as mount:
        config = orders.config(mount / "pool")
        with orders.opened(config) as pool:
            orders.fill_row(pool)
        monkeypatch.setattr(os, "ftruncate", greedily(os.ftruncate, mount))
        fill(mount)
        for _ in range(3):
            with orders.opened(config) as pool:
                assert pool.cold_reason == ""
                assert len(orders.blocks_of(orders.rows_of(list(pool.recovered()))[2])) == 8


def greedily(truncate: Callable[[int, int], None], mount: Path) -> Callable[[int, int], None]:
    """As it is, but what came free is somebody else's before it returns."""
    names = itertools.count()

    def shorten(fd: int, size: int) -> None:
        truncate(fd, size)
        while free := os.statvfs(mount).f_bavail:
            with (mount / f"a neighbour's {next(names)}").open("wb") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, free * os.statvfs(mount).f_frsize)
                except OSError:
                    return

    return shorten


def test_a_limit_of_the_process_is_not_taken_for_a_full_file_system(
    shared_directory: Path,
) -> None:
    table = shared_directory / "table"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (orders.EXTENT_BYTES // 2, before[1]))
    try:
        with pytest.raises(PoolError, match=r"00000\.kv .*raise LimitFSIZE") as of_extents:
            Pool.open(orders.config(shared_directory), lambda _done, _total: None)
        with table.open("wb") as file, pytest.raises(PoolError, match="raise LimitFSIZE") as of_one:
            have_all(file.fileno(), orders.EXTENT_BYTES, table)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "full" not in f"{of_extents.value} {of_one.value}"


def test_too_few_inodes_are_named_with_the_fix_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_tmpfs(tmp_path / "mount", 24 << 20, ",nr_inodes=12") as mount:
        config = orders.config(mount, extents=16)
        with pytest.raises(PoolError, match=r"takes \d+ more files, .* 16 extents .*nr_inodes="):
            Pool.open(config, lambda _done, _total: None)
        assert list(config.directory.iterdir()) == []
        # As where others take them meanwhile.
        monkeypatch.setattr(capacity_check, "require_new_files", lambda _config: None)
        with pytest.raises(PoolError, match=r"takes no more files, .* 16 extents; .*nr_inodes="):
            Pool.open(config, lambda _done, _total: None)
        assert not list(config.extents_place.iterdir())


@pytest.mark.parametrize("lacking", ["inodes", "size of files"])
def test_a_pool_is_not_given_up_for_one_whose_files_can_not_be_made(
    tmp_path: Path, lacking: str
) -> None:
    with small_tmpfs(tmp_path / "mount", 48 << 20, ",nr_inodes=30") as mount:
        small = orders.config(mount)
        with orders.opened(small) as pool:
            orders.fill_row(pool)
        large = replace(small, pool_bytes=small.pool_bytes * 4)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if lacking == "size of files":
            large = replace(small, extent_bytes=small.extent_bytes * 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (small.extent_bytes, before[1]))
        try:
            with pytest.raises(PoolError, match=r"nr_inodes=|LimitFSIZE="):
                Pool.open(large, lambda _done, _total: None)
            with orders.opened(small) as pool:
                assert pool.cold_reason == ""
                assert len(orders.rows_of(list(pool.recovered()))) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
