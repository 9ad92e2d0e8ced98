"""What lies in a pool's place and is none: other things by its files' names, and copies of it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.core.events import PoolRecovered
from kvd.pool import PoolConfig, PoolError
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import opened

NAMES = (
    "lock",
    "pool.header",
    "pool.header.new",
    "slots.table",
    "rows.table",
    "checksums.table",
    "generations.table",
    "registry.jsonl",
    "registry.jsonl.new",
    "movers",
    "movers.new",
    "reserve",
)


def directory(path: Path) -> None:
    path.mkdir(mode=0o700)


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    path.chmod(0o600)


def fill(config: PoolConfig) -> None:
    with opened(config) as pool:
        orders.fill_row(pool)


def is_warm(config: PoolConfig) -> bool:
    """Whether the blocks of `fill` are found."""
    with opened(config) as pool:
        return pool.cold_reason == "" and len(orders.rows_of(list(pool.recovered()))) == 1


@pytest.mark.parametrize("make", [directory, socket_file])
@pytest.mark.parametrize("name", NAMES)
def test_what_has_the_name_of_a_pools_file_and_is_none_is_named_with_the_fix(
    shared_directory: Path, name: str, make: Callable[[Path], None]
) -> None:
    config = orders.config(shared_directory)
    fill(config)
    path = config.directory / name
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(PoolError, match=f"{path} is no plain file, .*: remove it, or"):
        is_warm(config)


def test_a_directory_that_has_an_extents_name_is_named_with_the_fix(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    fill(config)
    path = config.extents_place / "70007.kv"
    path.mkdir()
    with pytest.raises(PoolError, match=f"{path} is no plain file, .*: remove it, or"):
        is_warm(config)
    path.rmdir()
    assert is_warm(config)


def test_a_file_in_the_place_of_the_extents_directory_is_named_with_the_fix(
    shared_directory: Path,
) -> None:
    config = orders.config(shared_directory)
    fill(config)
    shutil.rmtree(config.extents_place)
    config.extents_place.touch(mode=0o600)
    with pytest.raises(PoolError, match=f"{config.extents_place} is no directory, .*: remove it"):
        is_warm(config)


def copied(config: PoolConfig) -> None:
    """As of a daemon at work: a copy of all, of which nobody knows when each file was read."""
    old = config.directory.rename(config.directory.with_name("old"))
    shutil.copytree(old, config.directory)


def extents_copied(config: PoolConfig) -> None:
    old = config.extents_place.rename(config.directory.with_name("old"))
    shutil.copytree(old, config.extents_place)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("copy", [copied, extents_copied])
def test_a_copy_that_was_put_in_the_pools_place_is_cold(
    shared_directory: Path, copy: Callable[[PoolConfig], None], elsewhere: bool
) -> None:
    """Its records may say READY of bytes that were copied before they were stored."""
    config = orders.config(shared_directory)
    if elsewhere:
        config = replace(config, extents_directory=shared_directory / "far")
    fill(config)
    copy(config)
    with opened(config) as pool:
        assert "its files are a copy" in pool.cold_reason
        assert list(pool.recovered()) == [PoolRecovered()]
    fill(config)
    assert is_warm(config), "from now on it is a pool of its own"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_copy_that_is_started_takes_nothing_from_the_pool_that_it_was_copied_from(
    shared_directory: Path, elsewhere: bool
) -> None:
    config = orders.config(shared_directory)
    copy = replace(config, directory=shared_directory / "copy")
    if elsewhere:
        config = replace(config, extents_directory=shared_directory / "far")
        copy = replace(copy, extents_directory=shared_directory / "near")
    fill(config)
    shutil.copytree(config.directory, copy.directory)
    assert not is_warm(copy)
    assert is_warm(config)


def test_a_pool_that_was_moved_away_and_back_is_warm(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    fill(config)
    config.directory.rename(shared_directory / "away").rename(config.directory)
    assert is_warm(config)


def moved(config: PoolConfig) -> Path:
    return config.directory.rename(config.directory.with_name("other"))


def behind_a_link(config: PoolConfig) -> Path:
    link = config.directory.parent / "link"
    link.symlink_to(config.directory.parent)
    return link / config.directory.name


def by_a_way_round(config: PoolConfig) -> Path:
    return config.directory / ".." / config.directory.name


@pytest.mark.parametrize("rename", [moved, behind_a_link, by_a_way_round])
def test_a_pool_is_warm_under_another_name(
    shared_directory: Path, rename: Callable[[PoolConfig], Path]
) -> None:
    config = orders.config(shared_directory)
    fill(config)
    # Nobody says the extents' size: that of the pool counts, and not what would be chosen now.
    config = replace(config, extent_bytes_chosen=True, extent_bytes=config.extent_bytes * 2)
    renamed = replace(config, directory=rename(config))
    assert is_warm(renamed)
    assert is_warm(renamed)


def test_extents_are_found_and_given_back_where_they_were_moved_to(shared_directory: Path) -> None:
    config = replace(orders.config(shared_directory), extents_directory=shared_directory / "far")
    fill(config)
    there = replace(config, extents_directory=config.extents_place.rename(shared_directory / "on"))
    assert is_warm(there)
    assert not is_warm(replace(config, extents_directory=None))
    assert list(there.extents_place.iterdir()) == []


def test_a_pool_whose_lock_an_earlier_release_wrote_is_warm(shared_directory: Path) -> None:
    config = orders.config(shared_directory)
    fill(config)
    os.truncate(config.directory / "lock", 32)
    assert is_warm(config)
    assert is_warm(config)
