"""What lies in a pool's place and is none: other things by its files' names."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

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
        orders.introduce(pool)
        pool.grant_row(orders.row([2]))
        first = 2 * orders.SLOTS_PER_EXTENT
        pool.write_ready(orders.ready(range(first, first + 8), orders.keys(8)))


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


def test_a_file_in_the_place_of_the_extents_directory_is_named_with_the_fix(
    shared_directory: Path,
) -> None:
    config = orders.config(shared_directory)
    fill(config)
    shutil.rmtree(config.extents_place)
    config.extents_place.touch(mode=0o600)
    with pytest.raises(PoolError, match=f"{config.extents_place} is no directory, .*: remove it"):
        is_warm(config)
