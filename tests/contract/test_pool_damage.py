"""What is torn or altered is left out and counted; it is never served and never stops a start."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd.core.actions import ClearScopes, ForgetScopes, OpenScope
from kvd.core.events import Event, PoolRecovered
from kvd.core.keys import ScopeId
from kvd.pool import Pool, PoolConfig, sealed_json
from kvd.pool.row_table import RowTable
from tests import leaks
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import EXTENT_BYTES, SLOTS_PER_EXTENT, opened
from tests.fuzz import pool_files

RECORD = 128
HEADER = 64


@contextmanager
def bytes_of(path: Path) -> Iterator[mmap.mmap]:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        yield mapping


@pytest.fixture
def filled(shared_directory: Path) -> PoolConfig:
    """A pool of two rows: extent 0 alone, and extents 2 and 1 as two shards; 8 blocks in each."""
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        orders.introduce(pool, orders.spec((8192, 4096)), namespace=2)
        pool.grant_row(orders.row([0]))
        pool.grant_row(orders.row([2, 1], (8192, 4096), namespace=2))
        pool.write_ready(orders.ready(range(8), orders.keys(8)))
        slots = range(2 * SLOTS_PER_EXTENT, 2 * SLOTS_PER_EXTENT + 8)
        pool.write_ready(orders.ready(slots, orders.keys(8, 1), scope=2))
        for extent in range(3):
            pool.extent_files.path(extent).write_bytes(b"k" * EXTENT_BYTES)
    return config


def reopened(config: PoolConfig) -> tuple[dict[int, orders.FoundRow], int]:
    """Rows, and how many records were dropped."""
    with opened(config) as pool:
        assert pool.cold_reason == ""
        rows = orders.rows_of(list(pool.recovered()))
        return rows, pool.dropped_records


@pytest.mark.parametrize("offset", [1, 8, 12, 16, 24, 32, 64, 95])
def test_a_record_with_one_altered_byte_is_dropped(filled: PoolConfig, offset: int) -> None:
    with bytes_of(filled.directory / "slots.table") as table:
        table[3 * RECORD + offset] ^= 0x40
    rows, dropped = reopened(filled)
    assert dropped == 1
    assert rows[0].ordinals.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert len(rows[2].ordinals) == 8
    again, dropped = reopened(filled)
    assert dropped == 0, "a dropped record was not made FREE"
    assert again[0].ordinals.tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_a_record_damaged_to_name_a_scope_of_a_namespace_without_rows_stops_no_start(
    filled: PoolConfig,
) -> None:
    with opened(filled) as pool:
        orders.introduce(pool)
        orders.introduce(pool, namespace=3)
    with bytes_of(filled.directory / "slots.table") as table:
        assert table[3 * RECORD + 8] == 1
        table[3 * RECORD + 8] = 3
    rows, dropped = reopened(filled)
    assert dropped == 1
    assert rows[0].ordinals.tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_a_record_damaged_to_name_an_older_scope_brings_no_name_back_twice(
    filled: PoolConfig,
) -> None:
    older, newer = ScopeId(5), ScopeId(6)
    with opened(filled) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        pool.open_scope(OpenScope(older, orders.NAMESPACE, "epoch 2", "", 0))
        pool.forget_scopes(ForgetScopes((older,)))  # its line stays
        pool.open_scope(OpenScope(newer, orders.NAMESPACE, "epoch 2", "", 0))
        pool.write_ready(orders.ready([9], orders.keys(1), scope=newer))
    with bytes_of(filled.directory / "slots.table") as table:
        table[3 * RECORD + 8] = older
    with opened(filled) as pool:
        found = orders.scopes_of(list(pool.recovered()))
        assert [scope.scope for scope in found if scope.epoch == "epoch 2"] == [newer]
        assert pool.dropped_records == 1


def test_a_record_copied_to_another_place_is_dropped(filled: PoolConfig) -> None:
    with bytes_of(filled.directory / "slots.table") as table:
        table[20 * RECORD : 21 * RECORD] = table[3 * RECORD : 4 * RECORD]
    rows, dropped = reopened(filled)
    assert dropped == 1
    assert rows[0].ordinals.tolist() == list(range(8))


def test_a_whole_record_of_another_namespaces_scope_is_dropped(filled: PoolConfig) -> None:
    with opened(filled) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready([9], orders.keys(1), scope=2))
        pool.write_ready(orders.ready([10], orders.keys(1), scope=77))
    rows, dropped = reopened(filled)
    assert dropped == 2
    assert rows[0].ordinals.tolist() == list(range(8))


@pytest.mark.parametrize("extent", [1, 2])
@pytest.mark.parametrize("offset", [0, 8, 16, 24, 32, 40])
def test_a_row_with_a_damaged_header_is_freed_whole(
    filled: PoolConfig, extent: int, offset: int
) -> None:
    with bytes_of(filled.directory / "rows.table") as table:
        table[extent * HEADER + offset] ^= 0x02
    with opened(filled) as pool:
        assert set(orders.rows_of(list(pool.recovered()))) == {0}
        for freed in (1, 2):
            assert not any(pool.extent_files.path(freed).read_bytes())
        assert set(pool.extent_files.path(0).read_bytes()) == {ord("k")}
        # Nothing of the old row may come back under the next one.
        orders.introduce(pool)
        pool.grant_row(orders.row([2]))
    rows, dropped = reopened(filled)
    assert dropped == 0
    assert len(rows[2].ordinals) == 0


@pytest.mark.parametrize("file", ["rows.table", "registry.jsonl"])
def test_blocks_of_a_row_that_is_nobodys_are_counted_among_the_dropped(
    filled: PoolConfig, file: str
) -> None:
    with bytes_of(filled.directory / file) as content:
        # Of the row with two shards, and of its namespace.
        at = HEADER + 16 if file == "rows.table" else content.rfind(b"fingerprint")
        content[at] ^= 0x02
    rows, dropped = reopened(filled)
    assert (set(rows), dropped) == ({0}, 8)
    assert reopened(filled)[1] == 0


@pytest.mark.parametrize("anew", [False, True])
def test_blocks_that_were_cleared_are_not_counted_among_the_dropped(
    filled: PoolConfig, anew: bool
) -> None:
    if anew:  # the next owner writes the registry anew, and dies before its clear is done
        with (filled.directory / "registry.jsonl").open("ab") as file:
            file.write(b"damaged\n")
    with opened(filled) as pool:
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        newer = ScopeId(9)
        pool.clear_scopes(ClearScopes(orders.NAMESPACE, below=newer))
        pool.open_scope(OpenScope(newer, orders.NAMESPACE, "", "", 0))
        for _ in range(4):
            pool.upkeep()
        with bytes_of(filled.directory / "slots.table") as table:
            table[3 * RECORD + 64] ^= 0x40
    rows, dropped = reopened(filled)
    assert len(rows[0].ordinals) == 0
    assert dropped == 1, "only the record that was damaged"


def test_a_row_whose_leading_header_was_not_written_is_freed(filled: PoolConfig) -> None:
    with bytes_of(filled.directory / "rows.table") as table:
        table[2 * HEADER : 3 * HEADER] = bytes(HEADER)
    rows, _ = reopened(filled)
    assert set(rows) == {0}


def test_records_of_a_row_whose_header_was_lost_are_in_nobodys_way(filled: PoolConfig) -> None:
    with bytes_of(filled.directory / "rows.table") as table:
        table[:HEADER] = bytes(HEADER)
    with opened(filled) as pool:
        assert set(orders.rows_of(list(pool.recovered()))) == {2}
        orders.introduce(pool)
        pool.grant_row(orders.row([0]))
        pool.write_ready(orders.ready([0, 1], orders.keys(2, 5)))
    rows, dropped = reopened(filled)
    assert dropped == 0
    assert rows[0].ordinals.tolist() == [0, 1]


def test_a_row_of_headers_from_two_grants_is_freed(filled: PoolConfig) -> None:
    path = filled.directory / "rows.table"
    with bytes_of(path) as table:
        older = table[HEADER : 2 * HEADER]
        table[:] = bytes(len(table))
    with opened(filled) as pool:
        orders.introduce(pool)
        orders.introduce(pool, orders.spec((8192, 4096)), namespace=3)
        pool.grant_row(orders.row([2, 1], (8192, 4096), namespace=3))
    with bytes_of(path) as table:
        table[HEADER : 2 * HEADER] = older
    rows, _ = reopened(filled)
    assert rows == {}


def test_a_torn_last_line_of_the_registry_is_ignored_and_mended(filled: PoolConfig) -> None:
    path = filled.directory / "registry.jsonl"
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole.splitlines(keepends=True)[0][:-9])
    with opened(filled) as pool:
        events = list(pool.recovered())
        orders.introduce(pool, namespace=3)
        pool.grant_row(orders.row([5], namespace=3))
    assert len(orders.scopes_of(events)) == 2
    with opened(filled) as pool:
        assert [s.namespace for s in orders.scopes_of(list(pool.recovered()))] == [1, 2, 3]


def test_rows_of_a_namespace_that_lost_its_line_are_freed(filled: PoolConfig) -> None:
    path = filled.directory / "registry.jsonl"
    kept = [line for line in path.read_bytes().splitlines() if b"c0ffee" not in line]
    named = [line for line in path.read_bytes().splitlines() if b'"namespace":1,' in line]
    path.write_bytes(b"\n".join([*named, *kept]) + b"\n")
    rows, _ = reopened(filled)
    assert set(rows) == {0}


def rewritten(name: str, value: object) -> Callable[[Path], None]:
    def rewrite(directory: Path) -> None:
        path = directory / "pool.header"
        record = sealed_json.unseal(path.read_bytes())
        assert record is not None
        path.write_bytes(sealed_json.seal({**record, name: value}))

    return rewrite


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (rewritten("layout_version", 99), "layout version 99"),
        (rewritten("boot_id", "another"), "started anew"),
        (rewritten("record_bytes", 64), "records of 64 bytes"),
        (lambda d: (d / "pool.header").write_bytes(b"{}"), "header is damaged"),
        (lambda d: (d / "pool.header").unlink(), "no pool was here"),
        (lambda d: (d / "rows.table").unlink(), "rows.table has 0 bytes of 512"),
        (lambda d: os.truncate(d / "rows.table", 511), "rows.table has 511 bytes of 512"),
        (lambda d: (d / "slots.table").unlink(), "slots.table has 0 bytes of "),
        (lambda d: os.truncate(d / "slots.table", 4096), "slots.table has 4096 bytes of "),
        (lambda d: (d / "extents" / "00003.kv").unlink(), "extent 3 is missing"),
        (lambda d: (d / "extents" / "00003.kv").write_bytes(b"1"), "extent 3 has 1 bytes"),
    ],
)
def test_a_pool_that_can_not_be_used_starts_cold_and_says_why(
    filled: PoolConfig, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(filled.directory)
    with opened(filled) as pool:
        assert said in pool.cold_reason
        assert list(pool.recovered()) == [PoolRecovered()]
        for extent in range(pool.extents):
            assert not any(pool.extent_files.path(extent).read_bytes())


def test_another_size_starts_cold_and_leaves_nothing_of_the_old(filled: PoolConfig) -> None:
    smaller = orders.config(filled.directory.parent, extents=3)
    with opened(smaller) as pool:
        assert pool.cold_reason.startswith("the pool was made with 8 extents of ")
        events: list[Event] = list(pool.recovered())
    assert events == [PoolRecovered()]
    assert len(list((smaller.directory / "extents").glob("*.kv"))) == 3


def test_a_start_that_was_interrupted_is_cold_again(shared_directory: Path) -> None:
    config = orders.config(shared_directory)

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pool.open(config, interrupt)
    with opened(config) as pool:
        assert pool.cold_reason == "no pool was here before"
        for extent in range(pool.extents):
            assert pool.extent_files.path(extent).stat().st_blocks * 512 == EXTENT_BYTES


def test_a_failed_start_lets_go_of_all_that_it_held(
    filled: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: object) -> None:
        raise OSError("the table can't be read")

    before = leaks.look()
    with monkeypatch.context() as patch:
        patch.setattr(RowTable, "touched", fail)
        with pytest.raises(OSError, match="can't be read"):
            Pool.open(filled, lambda _done, _total: None)
    assert leaks.look().since(before) == {}
    rows, _ = reopened(filled)
    assert set(rows) == {0, 2}


def test_a_pool_may_be_closed_twice(filled: PoolConfig) -> None:
    pool = Pool.open(filled, lambda _done, _total: None)
    pool.close()
    pool.close()
    with opened(filled) as pool:
        assert pool.cold_reason == ""


def test_the_header_is_one_sealed_line_that_others_can_not_read(filled: PoolConfig) -> None:
    path = filled.directory / "pool.header"
    assert path.stat().st_mode & 0o077 == 0
    _, _, body = path.read_bytes().partition(b" ")
    assert json.loads(body)["layout_version"] == 2


def seal_again(config: PoolConfig, extent: int, word: int, value: int) -> None:
    """Give a row's header another word, and the checksum that it would have with it."""
    with bytes_of(config.directory / "rows.table") as table:
        at = HEADER * extent + 8 * word
        table[at : at + 8] = value.to_bytes(8, "little")
    pool_files.seal(config.directory / "rows.table")


def test_a_row_that_two_extents_say_they_lead_is_nobodys(filled: PoolConfig) -> None:
    with bytes_of(filled.directory / "rows.table") as table:
        table[5 * HEADER : 6 * HEADER] = table[:HEADER]
    pool_files.seal(filled.directory / "rows.table")
    rows, _ = reopened(filled)
    assert set(rows) == {2}


@pytest.mark.parametrize("shards", [0, 2, 3, 2**32 - 1])
def test_a_row_of_other_shards_than_its_headers_is_left_out_at_once(
    filled: PoolConfig, shards: int
) -> None:
    seal_again(filled, 0, 2, shards << 32)
    rows, _ = reopened(filled)
    assert set(rows) == {2}
