"""Checksums of the blocks' bytes in the pool's books: kept over restarts, never misread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvd.core.actions import ReleaseRow
from kvd.core.keys import U64, RowId
from kvd.pool import Pool, PoolConfig, PoolError, capacity_check, sealed_json
from kvd.pool.capacity_check import SpaceFigures
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import SLOTS_PER_EXTENT, opened
from tests.contract.test_pool_damage import bytes_of
from tests.small_tmpfs import fill as fill_tmpfs
from tests.small_tmpfs import small_tmpfs

PARTS = (8192, 4096, 4096)
ROW = [3, 0, 5]
FIRST = 3 * SLOTS_PER_EXTENT
SLOTS = [FIRST + ordinal for ordinal in (0, 4, 2, 9)]


@pytest.fixture
def checked(shared_directory: Path) -> PoolConfig:
    return replace(orders.config(shared_directory), payload_checksums=True)


def sums(shard: int, count: int = 4) -> U64:
    return np.random.default_rng(shard).integers(0, 1 << 63, count, dtype=np.uint64)


def note(pool: Pool, slots: list[int] = SLOTS) -> None:
    for shard in range(len(PARTS)):
        pool.note_checksums(np.array(slots), shard, sums(shard, len(slots)))


def fill(config: PoolConfig) -> None:
    """Four blocks of three shards; with checksums where the pool wants them."""
    with opened(config) as pool:
        list(pool.recovered())
        orders.introduce(pool, orders.spec(PARTS))
        pool.grant_row(orders.row(ROW, PARTS))
        if config.payload_checksums:
            note(pool)
        pool.write_ready(orders.ready(SLOTS, orders.keys(4)))


def recovered(config: PoolConfig) -> tuple[list[int], int, int]:
    """Ordinals found, records dropped, and how many of those for want of checksums."""
    with opened(config) as pool:
        assert pool.cold_reason == ""
        found = orders.rows_of(list(pool.recovered()))[3].ordinals.tolist()
        return found, pool.dropped_records, pool.unchecked_records


def test_checksums_of_every_shard_come_back_with_the_blocks(checked: PoolConfig) -> None:
    fill(checked)
    with opened(checked) as pool:
        found = orders.rows_of(list(pool.recovered()))[3]
        assert found.ordinals.tolist() == [0, 2, 4, 9]
        pool.grant_row(orders.row(ROW, PARTS))
        for shard in range(3):
            said = pool.checksums(np.array(SLOTS), shard)
            assert said is not None
            assert said.tolist() == sums(shard).tolist()


def test_a_pool_that_wants_none_keeps_none_and_serves_what_has_them(checked: PoolConfig) -> None:
    fill(checked)
    unchecked = replace(checked, payload_checksums=False)
    assert recovered(unchecked) == ([0, 2, 4, 9], 0, 0)
    with opened(unchecked) as pool:
        list(pool.recovered())
        pool.grant_row(orders.row(ROW, PARTS))
        assert pool.checksums(np.array(SLOTS), 0) is None


def test_blocks_stored_without_checksums_are_not_served_with_them(checked: PoolConfig) -> None:
    unchecked = replace(checked, payload_checksums=False)
    fill(unchecked)
    assert not (checked.directory / "checksums.table").exists()
    assert recovered(checked) == ([], 4, 4)
    assert recovered(checked) == ([], 0, 0), "a dropped record was not made FREE"


def test_slot_that_was_stored_anew_without_checksums_is_told_from_its_neighbours(
    checked: PoolConfig,
) -> None:
    fill(checked)
    with opened(replace(checked, payload_checksums=False)) as pool:
        list(pool.recovered())
        pool.grant_row(orders.row(ROW, PARTS))
        pool.write_free(orders.free([FIRST + 2]))
        pool.write_ready(orders.ready([FIRST + 2], orders.keys(1, 7)))
    assert recovered(checked) == ([0, 4, 9], 1, 1)


@pytest.mark.parametrize("extent", ROW)
def test_an_altered_checksum_of_any_shard_drops_its_block_alone(
    checked: PoolConfig, extent: int
) -> None:
    fill(checked)
    with bytes_of(checked.directory / "checksums.table") as table:
        table[(extent * SLOTS_PER_EXTENT + 4) * 8 + 3] ^= 1
    assert recovered(checked) == ([0, 2, 9], 1, 1)


def test_a_lost_table_of_checksums_serves_nothing_of_before(checked: PoolConfig) -> None:
    fill(checked)
    (checked.directory / "checksums.table").unlink()
    assert recovered(checked) == ([], 4, 4)


def test_a_cold_start_forgets_the_checksums_of_the_old_pool(checked: PoolConfig) -> None:
    fill(checked)
    header = checked.directory / "pool.header"
    written = sealed_json.unseal(header.read_bytes())
    assert written is not None
    header.write_bytes(sealed_json.seal({**written, "layout_version": 99}))
    with opened(checked) as pool:
        assert "layout version 99" in pool.cold_reason
    assert not any((checked.directory / "checksums.table").read_bytes())


def test_slots_of_a_row_that_was_given_anew_have_the_new_checksums(checked: PoolConfig) -> None:
    fill(checked)
    with opened(checked) as pool:
        list(pool.recovered())
        pool.grant_row(orders.row(ROW, PARTS))
        pool.write_free(orders.free(SLOTS))
        pool.release_row(ReleaseRow(RowId(3)))
        orders.introduce(pool, orders.spec((4096,)), namespace=2)
        pool.grant_row(orders.row([3], (4096,), namespace=2))
        pool.note_checksums(np.array(SLOTS[:2]), 0, np.array([11, 12], dtype=np.uint64))
        pool.write_ready(orders.ready(SLOTS[:2], orders.keys(2), scope=2))
    with opened(checked) as pool:
        found = orders.rows_of(list(pool.recovered()))[3]
        assert (found.ordinals.tolist(), pool.dropped_records) == ([0, 4], 0)
        pool.grant_row(orders.row([3], (4096,), namespace=2))
        said = pool.checksums(np.array(SLOTS[:2]), 0)
        assert said is not None
        assert said.tolist() == [11, 12]


def test_the_books_grow_by_eight_bytes_a_slot(checked: PoolConfig) -> None:
    unchecked = replace(checked, payload_checksums=False)
    assert checked.table_bytes - unchecked.table_bytes == 8 * checked.extents * SLOTS_PER_EXTENT


# -- left to the daemon ------------------------------------------------------------------------


def chosen(config: PoolConfig, *, wanted: bool = True) -> PoolConfig:
    """As `auto` gives it; wanted: where they cost almost nothing."""
    reason = "" if wanted else "they cost"
    return replace(config, payload_checksums=wanted, checksums_chosen=True, checksums_reason=reason)


@pytest.mark.parametrize("wanted", [True, False], ids=["cheap", "costly"])
def test_new_pool_has_checksums_where_they_cost_nothing(
    shared_directory: Path, *, wanted: bool
) -> None:
    config = chosen(orders.config(shared_directory), wanted=wanted)
    with opened(config) as pool:
        assert pool.payload_checksums is wanted
        assert pool.checksums_reason == ("" if wanted else "they cost")
    assert (config.directory / "checksums.table").exists() is wanted


def test_pool_with_checksums_goes_on_with_them_whatever_they_cost(checked: PoolConfig) -> None:
    fill(checked)
    config = chosen(checked, wanted=False)
    assert recovered(config) == ([0, 2, 4, 9], 0, 0)
    with opened(config) as pool:
        assert pool.payload_checksums
        assert pool.checksums_reason == "the pool that is there has them"


def test_pool_without_checksums_gets_them_and_loses_no_block(checked: PoolConfig) -> None:
    fill(replace(checked, payload_checksums=False))
    config = chosen(checked)
    for unsummed in (4, 3):  # the second time beside one that has them
        with opened(config) as pool:
            assert pool.payload_checksums
            found = orders.rows_of(list(pool.recovered()))[3]
            assert found.ordinals.tolist() == [0, 2, 4, 9]
            assert (pool.dropped_records, pool.unsummed_records) == (0, unsummed)
            pool.grant_row(orders.row(ROW, PARTS))
            said = pool.checksums(np.array(SLOTS), 1)
            assert said is not None
            assert said.tolist() == ([0] * 4 if unsummed == 4 else [0, 0, int(sums(1, 1)[0]), 0])
            if unsummed == 4:
                pool.write_free(orders.free([FIRST + 2]))
                note(pool, [FIRST + 2])
                pool.write_ready(orders.ready([FIRST + 2], orders.keys(1, 7)))


def test_checksums_of_before_a_time_without_are_not_compared_with_what_came_then(
    checked: PoolConfig,
) -> None:
    fill(checked)
    with opened(replace(checked, payload_checksums=False)) as pool:  # an earlier kvd, say
        list(pool.recovered())
        pool.grant_row(orders.row(ROW, PARTS))
        pool.write_free(orders.free([FIRST + 2]))
        pool.write_ready(orders.ready([FIRST + 2], orders.keys(1, 7)))
    with opened(chosen(checked)) as pool:
        assert orders.rows_of(list(pool.recovered()))[3].ordinals.tolist() == [0, 2, 4, 9]
        pool.grant_row(orders.row(ROW, PARTS))
        for shard in range(len(PARTS)):
            said = pool.checksums(np.array(SLOTS), shard)
            assert said is not None
            kept = sums(shard)
            assert said.tolist() == [kept[0], kept[1], 0, kept[3]]


def test_altered_checksum_drops_its_block_where_they_were_chosen_too(checked: PoolConfig) -> None:
    fill(checked)
    with bytes_of(checked.directory / "checksums.table") as table:
        table[(ROW[0] * SLOTS_PER_EXTENT + 4) * 8 + 3] ^= 1
    assert recovered(chosen(checked)) == ([0, 2, 9], 1, 1)


def test_pool_that_has_none_keeps_having_none_where_they_cost(checked: PoolConfig) -> None:
    unchecked = replace(checked, payload_checksums=False)
    fill(unchecked)
    assert recovered(chosen(checked, wanted=False)) == ([0, 2, 4, 9], 0, 0)
    assert not (checked.directory / "checksums.table").exists()


def test_a_cold_pool_is_a_new_one_whatever_the_old_one_had(checked: PoolConfig) -> None:
    fill(checked)
    with opened(replace(chosen(checked, wanted=False), pool_bytes=checked.pool_bytes // 2)) as pool:
        assert pool.cold_reason
        assert not pool.payload_checksums
    assert not (checked.directory / "checksums.table").exists()


@pytest.mark.parametrize("stands", [True, False], ids=["warm", "new"])
def test_no_start_fails_for_want_of_room_for_checksums(
    checked: PoolConfig, monkeypatch: pytest.MonkeyPatch, *, stands: bool
) -> None:
    unchecked = replace(checked, payload_checksums=False)
    if stands:
        fill(unchecked)
    real = capacity_check.measure

    def tight(config: PoolConfig) -> SpaceFigures:
        figures = real(config)
        need = unchecked.table_bytes + (0 if figures.standing else unchecked.reserve_bytes)
        need += unchecked.extents * unchecked.extent_bytes
        return replace(figures, filesystem_free=need - figures.held)

    monkeypatch.setattr(capacity_check, "measure", tight)
    with opened(chosen(checked)) as pool:
        assert (pool.cold_reason == "") is stands
        assert not pool.payload_checksums
        assert pool.checksums_reason == "there is no room for their table"
    if not stands:
        with pytest.raises(PoolError, match="the file system"):
            Pool.open(checked, lambda _done, _total: None)


@pytest.mark.parametrize("is_there", [False, True], ids=["no table", "an empty table"])
def test_pool_on_a_full_file_system_starts_without_the_checksums_that_it_would_have(
    tmp_path: Path, *, is_there: bool
) -> None:
    with small_tmpfs(tmp_path / "mount", 24 << 20) as mount:
        unchecked = orders.config(mount / "pool")
        fill(unchecked)
        # What it holds beside its tables is no room for one more.
        table = unchecked.directory / "checksums.table"
        if is_there:  # as a daemon leaves it that dies as it makes one
            table.touch()
        taken = fill_tmpfs(mount)
        for _ in range(2):
            with opened(chosen(unchecked)) as pool:
                assert pool.cold_reason == ""
                assert not pool.payload_checksums
                assert pool.checksums_reason == "there is no room for their table"
                found = orders.rows_of(list(pool.recovered()))[3]
                assert found.ordinals.tolist() == [0, 2, 4, 9]
        with pytest.raises(PoolError, match=r"no memory for the \d+ bytes of .*checksums.table"):
            Pool.open(replace(unchecked, payload_checksums=True), lambda _done, _total: None)
        assert table.exists() is is_there
        taken.unlink()
        with opened(chosen(unchecked)) as pool:
            assert pool.payload_checksums
