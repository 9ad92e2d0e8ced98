"""Free slots come back last in, first out, whatever was dropped between."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.model.size_class import STACK_PIECE, FreeSlots

ROW = 3000  # slots, so that rows and pieces overlap in every way
PUT, TAKE, DROP = range(3)


@given(
    st.lists(
        st.tuples(st.sampled_from([PUT, PUT, TAKE, DROP]), st.integers(0, 11), st.integers(1, 9)),
        max_size=30,
    )
)
def test_stack_of_free_slots_is_one_however_it_is_stored(steps: list[tuple[int, int, int]]) -> None:
    free, stack = FreeSlots(), list[int]()
    for kind, row, share in steps:
        mine = range(row * ROW, (row + 1) * ROW)
        if kind == PUT:
            held = set(stack)
            slots = [slot for slot in mine if slot not in held and slot % 9 < share]
            free.put(np.array(slots, dtype=np.int64))
            stack += slots[::-1]
        elif kind == TAKE:
            count = len(stack) * share // 9
            assert free.take(count).tolist() == [stack.pop() for _ in range(count)]
        else:
            dropped = free.drop(mine.start, ROW)
            assert sorted(dropped.tolist()) == sorted(set(stack) & set(mine))
            stack = [slot for slot in stack if slot not in mine]
        assert len(free) == len(stack)
    assert free.all().tolist() == stack


def test_no_call_moves_all_that_is_free() -> None:
    free = FreeSlots()
    for first in range(0, 64 * STACK_PIECE, STACK_PIECE):
        free.put(np.arange(first, first + STACK_PIECE, dtype=np.int64))
    pieces = [piece for _, _, piece in free._full]
    free.drop(0, STACK_PIECE)
    assert [piece for _, _, piece in free._full if all(piece is not c for c in pieces)] == []
    assert len(free) == 63 * STACK_PIECE


def test_more_than_a_piece_is_taken_from_several() -> None:
    free, slots = FreeSlots(), np.arange(3 * STACK_PIECE, dtype=np.int64)
    free.put(slots)
    assert free.take(5).tolist() == slots[:5].tolist()
    assert free.take(2 * STACK_PIECE).tolist() == slots[5 : 5 + 2 * STACK_PIECE].tolist()
    assert len(free) == STACK_PIECE - 5
    assert free.take(STACK_PIECE - 5).tolist() == slots[5 + 2 * STACK_PIECE :].tolist()
    assert len(free) == 0
