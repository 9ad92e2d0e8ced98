"""The size of extents that nobody set: by the pool's, by what is there, by what they lie on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.pool import PoolConfig
from kvd.pool.config import chosen_extent_bytes
from kvd.pool.header import standing_extent_bytes
from tests.contract.pool_orders import opened
from tests.huge_pages import PAGE_BYTES, huge_pages

MIB = 1 << 20


@pytest.mark.parametrize(
    ("pool", "extent"),
    [
        (1, 4),
        (128, 4),
        (255, 4),
        (256, 8),
        (1 << 10, 32),
        ((2 << 10) - 1, 32),
        (2 << 10, 64),
        (1 << 20, 64),
    ],
)
def test_a_pool_gets_32_extents_within_4_and_64_mib(pool: int, extent: int) -> None:
    assert chosen_extent_bytes(pool * MIB) == extent * MIB


def chosen(directory: Path, pool_bytes: int) -> PoolConfig:
    """As the daemon asks for it where extent_bytes is not set."""
    return PoolConfig(
        directory / "pool", pool_bytes, chosen_extent_bytes(pool_bytes), extent_bytes_chosen=True
    )


@pytest.mark.parametrize("before", [1, 2, 8])
def test_a_pool_that_is_there_keeps_its_size_and_is_warm(
    shared_directory: Path, before: int
) -> None:
    config = chosen(shared_directory, 8 * MIB)
    with opened(replace(config, extent_bytes=before * MIB, extent_bytes_chosen=False)):
        pass
    with opened(config) as pool:
        assert (pool.cold_reason, pool.extent_bytes) == ("", before * MIB)


def test_another_pool_size_is_warm_where_it_makes_as_many_extents(shared_directory: Path) -> None:
    with opened(replace(chosen(shared_directory, 8 * MIB), extent_bytes=3 * MIB)):
        pass
    with opened(chosen(shared_directory, 7 * MIB)) as pool:
        assert (pool.cold_reason, pool.extent_bytes, pool.extents) == ("", 3 * MIB, 2)
    with opened(chosen(shared_directory, 16 * MIB)) as pool:
        assert pool.cold_reason == (
            "the pool was made with 2 extents of 3 MiB;"
            " pool_bytes and extent_bytes give 4 extents of 4 MiB now"
        )
        assert pool.extent_bytes == 4 * MIB
    with opened(chosen(shared_directory, 5 * MIB)) as pool:
        assert pool.extents == 1


def test_a_size_that_is_set_counts_whatever_is_there(shared_directory: Path) -> None:
    config = chosen(shared_directory, 8 * MIB)
    with opened(config):
        pass
    with opened(replace(config, extent_bytes=MIB, extent_bytes_chosen=False)) as pool:
        assert pool.extent_bytes == MIB
        assert "made with 2 extents" in pool.cold_reason


@pytest.mark.parametrize("damage", ["nothing", "empty", "no header", "huge", "a pipe", "a link"])
def test_a_header_that_cannot_be_believed_says_no_size(shared_directory: Path, damage: str) -> None:
    config = replace(chosen(shared_directory, 8 * MIB), extent_bytes=2 * MIB)
    header = config.directory / "pool.header"
    with opened(replace(config, extent_bytes_chosen=False)):
        pass
    match damage:
        case "empty":
            header.write_bytes(b"")
        case "no header":
            header.unlink()
        case "huge":
            os.truncate(header, 1 << 40)
        case "a pipe":
            header.unlink()
            os.mkfifo(header)
        case "a link":
            elsewhere = header.rename(shared_directory / "elsewhere")
            header.symlink_to(elsewhere)
    if damage == "a link":
        with pytest.raises(OSError, match="symbolic links"):
            standing_extent_bytes(config)
        header.unlink()
    else:
        assert standing_extent_bytes(config) == (2 * MIB if damage == "nothing" else 0)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    with huge_pages(tmp_path / "huge", 8) as place:
        yield place


def test_on_huge_pages_an_extent_is_one_page_at_least(mount: Path, shared_directory: Path) -> None:
    config = PoolConfig(
        shared_directory / "pool",
        4 * PAGE_BYTES,
        PAGE_BYTES // 2,
        extents_directory=mount / "extents",
        extent_bytes_chosen=True,
    )
    for _ in range(2):
        with opened(config) as pool:
            assert (pool.extents, pool.extent_bytes) == (4, PAGE_BYTES)
