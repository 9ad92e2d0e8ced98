"""What was cleared stays cleared, whatever is forgotten meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.pool import generations
from kvd.pool.generations import Generations


def test_a_clear_is_known_to_the_next_owner(tmp_path: Path) -> None:
    table = Generations(tmp_path / "table")
    before = table.of("one"), table.of("two")
    table.clear("one")
    after = table.of("one")
    assert after != before[0]
    table.clear("one")
    assert table.of("one") not in (before[0], after)
    last = table.of("one")
    table.close()
    again = Generations(tmp_path / "table")
    assert (again.of("one"), again.of("two")) == (last, before[1])
    again.close()


@pytest.mark.parametrize("more", [0, 1])
def test_where_no_record_is_left_every_namespace_is_cleared(tmp_path: Path, more: int) -> None:
    count = generations.MAX_CLEARED_FINGERPRINTS
    table = Generations(tmp_path / "table")
    names = [str(number) for number in range(count + more)]
    for name in names:
        table.clear(name)
    assert all(table.of(name) != (0, 0) for name in names)
    assert (table.of("another") == (0, 0)) == (not more)
    table.clear(names[0])
    assert len({table.of(name) for name in names}) == (2 if more else count)
    table.close()
