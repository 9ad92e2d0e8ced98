"""What was cleared stays cleared, whatever is forgotten meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.pool import generations
from kvd.pool.generations import EVERY, NAME_BYTES, Generations


def named(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "big")


ONE, TWO, THREE = map(named, (1, 2, 3))


def test_a_clear_is_known_to_the_next_owner(tmp_path: Path) -> None:
    table = Generations(tmp_path / "table")
    before = table.of(ONE), table.of(TWO)
    table.clear(ONE, unsettled=False)
    after = table.of(ONE)
    assert after != before[0]
    table.clear(ONE, unsettled=False)
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
        assert table.clear(name, unsettled=False) == name
    assert all(table.of(name) != (0, 0) for name in names)
    assert (table.of(named(0)) == (0, 0)) == (not more)
    table.clear(names[0], unsettled=False)
    assert len({table.of(name) for name in names}) == (3 if more else count)
    table.close()


def test_what_is_not_deleted_yet_is_known_to_the_next_owner(tmp_path: Path) -> None:
    table = Generations(tmp_path / "table")
    for name in (ONE, TWO, THREE):
        table.clear(name, unsettled=name != THREE)
    table.settle(ONE)
    table.settle(named(9))  # never cleared
    table.close()
    again = Generations(tmp_path / "table")
    assert again.unsettled() == [TWO]
    again.clear_all(unsettled=True)
    assert again.unsettled() == [EVERY]
    again.clear(TWO, unsettled=True)
    again.settle(EVERY)
    assert again.unsettled() == [TWO]
    again.settle(TWO)
    assert again.unsettled() == []
    again.close()


def test_where_no_record_is_left_what_is_not_deleted_stays_known(tmp_path: Path) -> None:
    count = generations.MAX_CLEARED_NAMESPACES
    table = Generations(tmp_path / "table")
    names = [named(number) for number in range(1, 1 + count)]
    for name in names:
        table.clear(name, unsettled=name in (names[0], names[7]))
    assert table.clear(named(9000), unsettled=True) == named(9000)
    assert set(table.unsettled()) == {names[0], names[7], named(9000)}
    for name in names[1:]:
        table.clear(name, unsettled=True)
    table.close()
    again = Generations(tmp_path / "table")
    assert again.unsettled() == [EVERY]  # one too many: all is to be deleted
    again.close()
