"""What was cleared stays cleared, whatever is forgotten meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.pool import generations
from kvd.pool.generations import EVERY, NAME_BYTES, Generations, bits_of


def named(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "big")


ONE, TWO, THREE = map(named, (1, 2, 3))
HERE, THERE = bits_of("here", "a store"), bits_of("there", "another")
STORES = named(17)


def test_a_clear_is_known_to_the_next_owner(tmp_path: Path) -> None:
    table = Generations(tmp_path / "table")
    before = table.of(ONE), table.of(TWO)
    table.clear(ONE, unsettled=0)
    after = table.of(ONE)
    assert after != before[0]
    table.clear(ONE, unsettled=0)
    assert table.of(ONE) not in (before[0], after)
    last = table.of(ONE)
    table.close()
    again = Generations(tmp_path / "table")
    assert (again.of(ONE), again.of(TWO)) == (last, before[1])
    again.close()


@pytest.mark.parametrize("more", [0, 1])
def test_where_no_record_is_left_every_namespace_is_cleared(tmp_path: Path, more: int) -> None:
    count = generations.MAX_CLEARED_NAMESPACES
    table = Generations(tmp_path / "table")
    names = [named(number) for number in range(1, 1 + count + more)]
    for name in names:
        assert table.clear(name, unsettled=0) == name
    assert all(table.of(name) != (0, 0) for name in names)
    assert (table.of(named(0)) == (0, 0)) == (not more)
    table.clear(names[0], unsettled=0)
    assert len({table.of(name) for name in names}) == (3 if more else count)
    table.close()


def test_what_is_not_deleted_yet_is_known_to_the_next_owner(tmp_path: Path) -> None:
    table = Generations(tmp_path / "table")
    for name in (ONE, TWO, THREE):
        table.clear(name, unsettled=HERE if name != THREE else 0)
    table.settle(ONE, HERE)
    table.settle(named(9), HERE)  # never cleared
    table.close()
    again = Generations(tmp_path / "table")
    assert again.unsettled() == [(TWO, HERE)]
    again.clear_all(unsettled=HERE)
    assert again.unsettled() == [(EVERY, HERE)]
    again.clear(TWO, unsettled=HERE)
    again.settle(EVERY, HERE)
    assert again.unsettled() == [(TWO, HERE)]
    again.settle(TWO, HERE)
    assert again.unsettled() == []
    again.close()


def test_where_no_record_is_left_what_is_not_deleted_stays_known(tmp_path: Path) -> None:
    count = generations.MAX_CLEARED_NAMESPACES
    table = Generations(tmp_path / "table")
    names = [named(number) for number in range(1, 1 + count)]
    for name in names:
        table.clear(name, unsettled=HERE if name in (names[0], names[7]) else 0)
    assert table.clear(named(9000), unsettled=HERE) == named(9000)
    assert dict(table.unsettled()) == dict.fromkeys((names[0], names[7], named(9000)), HERE)
    for name in names[1:]:
        table.clear(name, unsettled=HERE)
    table.close()
    again = Generations(tmp_path / "table")
    assert again.unsettled() == [(EVERY, HERE)]  # one too many: all is to be deleted
    again.close()


def test_each_store_settles_for_itself(tmp_path: Path) -> None:
    table = Generations(tmp_path / "table")
    table.begin(THERE, STORES)
    table.clear(ONE, unsettled=THERE)
    table.clear(TWO, unsettled=THERE)
    table.settle(TWO, THERE)
    table.close()
    again = Generations(tmp_path / "table")
    again.begin(HERE, STORES)
    again.clear(TWO, unsettled=HERE)
    for name in (ONE, TWO):
        again.settle(name, HERE)
    assert again.unsettled() == [(ONE, THERE)], "that is not here now"
    again.clear_all(unsettled=HERE)
    again.settle(EVERY, HERE)
    assert again.unsettled() == [(EVERY, THERE)]
    again.close()


def test_what_a_store_that_is_away_has_yet_to_delete_takes_no_record_for_ever(
    tmp_path: Path,
) -> None:
    count = generations.MAX_CLEARED_NAMESPACES
    table = Generations(tmp_path / "table")
    table.begin(HERE, STORES)
    for number in range(1, 1 + count):
        table.clear(named(number), unsettled=THERE)
    assert table.clear(named(9000), unsettled=HERE) == named(9000), "not all is to be deleted here"
    assert dict(table.unsettled()) == {EVERY: THERE, named(9000): HERE}
    table.close()


def test_what_an_earlier_release_left_unsettled_is_left_to_every_store_that_is_here(
    tmp_path: Path,
) -> None:
    table = Generations(tmp_path / "table")
    table.clear(ONE, unsettled=1)
    table.begin(0, STORES)
    assert table.unsettled() == [(ONE, 1)]
    table.begin(HERE | THERE, STORES)
    table.settle(ONE, HERE & ~THERE)
    assert table.unsettled() == [(ONE, THERE)]
    table.close()


def test_a_store_under_another_name_deletes_what_one_with_its_bit_has_settled(
    tmp_path: Path,
) -> None:
    name, place, other = 2, 4, 8  # `place` is both stores'
    table = Generations(tmp_path / "table")
    table.begin(name | place | other, named(1))
    table.clear(ONE, unsettled=name | place | other)
    for _ in range(2):  # the other one alone
        table.close()
        table = Generations(tmp_path / "table")
        table.begin(place | other, named(2))
        table.settle(ONE, place | other)
        assert table.unsettled() == [(ONE, name)], "the other one has no more to delete"
    table.close()
    table = Generations(tmp_path / "table")
    renamed = 16
    table.begin(place | renamed, named(3))
    assert table.unsettled() == [(ONE, name | place | renamed)]
    table.settle(ONE, place | renamed)
    table.begin(place | renamed, named(3))
    assert table.unsettled() == [(ONE, name)], "but once"
    table.close()


COPY = (generations.MAX_CLEARED_NAMESPACES + 1) * 32  # bytes; two of them, then a seal a record
SEAL = 8
AT = Path("table")


def answers(table: Generations) -> object:
    return [table.of(name) for name in (ONE, TWO, THREE)], table.of_all, table.unsettled()


def cleared(directory: Path) -> tuple[bytes, object]:
    """The file of a table with clears of every kind, and what it says."""
    table = Generations(directory / AT)
    table.clear_all(unsettled=0)
    table.clear(ONE, unsettled=True)
    table.clear(TWO, unsettled=0)
    said = answers(table)
    table.close()
    return (directory / AT).read_bytes(), said


def reread(directory: Path, content: bytes) -> object:
    (directory / AT).write_bytes(content)
    table = Generations(directory / AT)
    said = answers(table)
    table.close()
    return said


def test_any_one_bit_of_the_table_may_be_another(tmp_path: Path) -> None:
    content, said = cleared(tmp_path)
    areas = [(0, 4 * 32), (COPY, 4 * 32), (2 * COPY, 4 * SEAL)]  # of all, two used, one free
    for begin, size in areas:
        for bit in range(8 * size):
            altered = bytearray(content)
            altered[begin + bit // 8] ^= 1 << bit % 8
            assert reread(tmp_path, bytes(altered)) == said, (begin, bit)
            assert (tmp_path / AT).read_bytes() == content


def test_a_clear_that_a_kill_cut_off_stands_there_wholly_or_not_at_all(tmp_path: Path) -> None:
    before, said = cleared(tmp_path)
    table = Generations(tmp_path / AT)
    table.clear(ONE, unsettled=0)
    later = answers(table)
    table.close()
    after = (tmp_path / AT).read_bytes()
    row = next(at for at in range(0, COPY, 32) if before[at : at + 16] == ONE)
    steps = [
        (COPY + row, 16, said),
        (COPY + row + 16, 16, said),
        (2 * COPY + row // 32 * SEAL, SEAL, later),
        (row + 24, 8, later),
        (row + 16, 8, later),
    ]
    content = bytearray(before)
    for begin, size, expected in steps:
        content[begin : begin + size] = after[begin : begin + size]
        assert reread(tmp_path, bytes(content)) == expected
    assert content == after


def test_the_table_of_an_earlier_release_is_read_and_written_as_it_does(tmp_path: Path) -> None:
    content, said = cleared(tmp_path)
    assert reread(tmp_path, content[:COPY]) == said
    assert (tmp_path / AT).read_bytes() == content
    unsealed = content[:COPY] + bytes(len(content) - COPY)  # as a kill in the first start leaves it
    assert reread(tmp_path, unsealed) == said


@pytest.mark.parametrize(
    ("left", "is_lost"), [(None, True), (0, True), (2 * COPY + COPY // 4, True), (COPY, False)]
)
def test_a_table_that_was_here_and_says_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int | None, is_lost: bool
) -> None:
    """Long and empty it is after a start that made it and found no room for it."""
    if left is not None:
        (tmp_path / AT).write_bytes(bytes(left))
    table = Generations(tmp_path / AT, was_here=True)
    assert (table.of(ONE) != (0, 0)) == is_lost, "an earlier release's may be empty"
    last = answers(table)
    table.close()
    assert ("is lost" in caplog.text) == is_lost
    again = Generations(tmp_path / AT, was_here=True)
    assert answers(again) == last
    again.close()


@pytest.mark.parametrize("damage", ["both copies", "cut off"])
def test_what_no_copy_proves_renames_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    content, _ = cleared(tmp_path)
    altered = bytearray(content)
    row = next(at for at in range(0, COPY, 32) if content[at : at + 16] == TWO)
    for begin, bit in ((row, 1), (COPY + row, 2)):
        altered[begin] ^= bit
    table = Generations(tmp_path / AT)
    names = {table.of(name) for name in (ONE, TWO, THREE)} | {(0, 0)}
    table.close()
    (tmp_path / AT).write_bytes(altered if damage == "both copies" else content[: COPY // 2])
    table = Generations(tmp_path / AT)
    assert names.isdisjoint({table.of(name) for name in (ONE, TWO, THREE)})
    assert "is damaged: what tiers of this node hold" in caplog.text
    last = answers(table)
    table.close()
    assert reread(tmp_path, (tmp_path / AT).read_bytes()) == last
