"""A policy's ghosts by the native library, beside those by numpy: the same are remembered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd import native
from kvd.core.keys import U64
from kvd.core.policy.ghosts import Ghosts
from kvd.core.policy.slot_queue import Places
from kvd.native import ghost_table

pytestmark = pytest.mark.skipif(
    native.library() is None, reason=f"no native library: {native.why_not()}"
)
LISTS = 2
MARK = 1 << 63


def tags_of(numbers: list[int]) -> U64:
    """Few buckets among them, and pairs that differ in the highest bit alone."""
    return np.array([(n >> 1) << 8 | (n & 1) * MARK | 5 for n in numbers], dtype=np.uint64)


class BothGhosts:
    """The same is done to both, and the same must come of it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.by_numpy = Ghosts(lambda: self.capacity, LISTS)
        self.by_library = Ghosts(lambda: self.capacity, LISTS, ghost_table.maker())

    def agree(self) -> None:
        for which in range(LISTS):
            numpys, librarys = (
                ghosts._lists[which].first(1 << 20).tolist()
                for ghosts in (self.by_numpy, self.by_library)
            )
            assert numpys == librarys
        assert np.array_equal(self.by_numpy._tags, self.by_library._tags)

    def find(self, tags: U64) -> list[int]:
        found, numbers = self.by_library.find(tags)
        wanted, right = self.by_numpy.find(tags)
        assert found.tolist() == wanted.tolist()
        assert numbers.tolist() == right.tolist()
        return [int(number) for number in numbers]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "forget", "mark", "trim", "grow"]),
        st.integers(0, LISTS - 1),
        st.lists(st.integers(0, 400), max_size=90, unique=True),
    ),
    max_size=12,
)


@given(st.sampled_from([1, 8, 40, 300]), STEPS)
def test_what_is_remembered_by_either_is_remembered_by_both(
    capacity: int, steps: list[tuple[str, int, list[int]]]
) -> None:
    ghosts = BothGhosts(capacity)
    for does, which, numbers in steps:
        tags = tags_of(numbers)
        held = np.array(ghosts.find(tags), dtype=np.int64)
        for each in (ghosts.by_numpy, ghosts.by_library):
            match does:
                case "add":
                    each.add(which, tags)
                case "forget":
                    each.forget(held)
                case "mark":
                    each.mark(np.unique(held))
                case "trim":
                    each.trim(which, len(numbers))
        if does == "grow":
            ghosts.capacity = capacity * (1 + len(numbers))
        ghosts.agree()
        ghosts.find(tags_of(list(range(401)))[::-1])


def test_tags_that_are_read_only_or_lie_apart_are_sought_and_placed_alike() -> None:
    ghosts = BothGhosts(64)
    tags = tags_of(list(range(120)))
    tags.flags.writeable = False
    for each in (ghosts.by_numpy, ghosts.by_library):
        each.add(0, tags[::2])
    ghosts.agree()
    assert len(ghosts.find(tags[::-1])) > 0


def test_tables_that_can_not_be_ghosts_are_refused() -> None:
    library = native.library()
    assert library is not None
    table = Places(64).array
    right = ghost_table.GhostTable(library, table, 2)
    assert right.find(np.zeros(0, np.uint64)).size == right.place(np.zeros(0, np.uint64)).size == 0
    for wrong, bits in ((table, 0), (table, 1), (table, 3), (table[::2], 1)):
        with pytest.raises(AssertionError):
            ghost_table.GhostTable(library, wrong, bits)
    with pytest.raises(AssertionError):
        ghost_table.GhostTable(library, table.view(np.uint64), 2)
    for call in (right.find, right.place):
        with pytest.raises(AssertionError):
            call(np.zeros(3, np.int64))
