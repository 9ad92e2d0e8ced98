"""A pool that would not fit is refused at start, with the figures and the fix."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.pool import Pool, PoolConfig, PoolError, extents, space
from kvd.pool.space import SpaceFigures
from tests.contract import pool_orders as orders

GIB = 1 << 30
CONFIG = PoolConfig(Path("/dev/shm/kvd"), 4 * GIB)
PLENTY = SpaceFigures(
    filesystem_free=8 * GIB, held=0, memory_available=8 * GIB, memory_limit=8 * GIB
)


def with_figures(**changed: int | None) -> SpaceFigures:
    values = {name: getattr(PLENTY, name) for name in PLENTY.__slots__}
    return SpaceFigures(**{**values, **changed})


def test_what_fits_is_taken() -> None:
    space.require_space(CONFIG, PLENTY)
    space.require_space(CONFIG, with_figures(memory_limit=None))


def test_what_the_pool_holds_already_counts_as_room() -> None:
    little = GIB // 4
    figures = with_figures(filesystem_free=little, held=4 * GIB, memory_available=little)
    space.require_space(CONFIG, figures)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        # 4 GiB of extents and 128 MiB of slot table: the pool's size alone is not enough.
        ({"filesystem_free": 4 * GIB}, r"needs 4\.13 GiB .*has 4\.00 GiB .*remount"),
        ({"filesystem_free": GIB, "held": GIB}, r"has 2\.00 GiB \(1\.00 GiB of it held"),
        ({"memory_limit": 4 * GIB}, r"limit of this control group is 4\.00 GiB: raise"),
        ({"memory_limit": 4 * GIB + GIB // 8}, "for its processes"),
        ({"memory_available": 2 * GIB}, r"only 2\.00 GiB of memory are available"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, int], said: str) -> None:
    with pytest.raises(PoolError, match=said):
        space.require_space(CONFIG, with_figures(**changed))


def test_a_pool_larger_than_its_file_system_is_refused_before_a_byte_is_taken(
    shared_directory: Path,
) -> None:
    fs = space.measure(shared_directory, 0)
    config = PoolConfig(shared_directory / "pool", fs.filesystem_free + GIB)
    with pytest.raises(PoolError, match="remount"):
        Pool.open(config, lambda _done, _total: None)
    assert not (config.directory / "extents").exists()


def test_a_directory_on_disk_is_refused_unless_allowed() -> None:
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir=Path(__file__).parent) as name:
        if space.filesystem_type(Path(name)) == "tmpfs":
            pytest.skip("the sources lie on tmpfs")
        refused = PoolConfig(Path(name), 1 << 20, extent_bytes=1 << 18)
        with pytest.raises(PoolError, match="not on tmpfs"):
            Pool.open(refused, lambda _done, _total: None)
        allowed = PoolConfig(Path(name), 1 << 20, extent_bytes=1 << 18, any_filesystem=True)
        Pool.open(allowed, lambda _done, _total: None).close()


def cgroup_tree(root: Path, version: int, path: str, limits: dict[str, str]) -> Path:
    """A /proc that points at a control group tree under `root`."""
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    mount = root / "cgroup"
    for group, limit in limits.items():
        (mount / group).mkdir(parents=True, exist_ok=True)
        (mount / group / name).write_text(limit + "\n")
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    line = f"0::{path}\n" if version == 2 else f"5:devices:/x\n4:memory:{path}\n"
    (proc / "self" / "cgroup").write_text(line)
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
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
    assert space.memory_limit(cgroup_tree(tmp_path, version, "/a/b", limits)) == tightest


def test_a_container_that_sees_only_its_own_group_finds_its_limit(tmp_path: Path) -> None:
    proc = cgroup_tree(tmp_path, 2, "/kubepods/pod7", {"": "900"})
    assert space.memory_limit(proc) == 900


def test_this_machine_tells_what_it_has() -> None:
    assert space.memory_available() > 0
    limit = space.memory_limit()
    assert limit is None or limit > 0
    assert space.filesystem_type(Path("/dev/shm")) == "tmpfs"


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
    assert not (config.directory / "extents").exists()


def test_a_kernel_without_the_advice_gets_its_extents_written(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "populate", failing_with(errno.EINVAL))
    with orders.opened(orders.config(shared_directory)) as pool:
        for extent in range(pool.extents):
            assert pool.extent_path(extent).stat().st_blocks * 512 == pool.extent_bytes


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
