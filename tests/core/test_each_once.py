"""Numbers without repeats, as numpy's slower `unique` gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.keys import each_once


@given(st.lists(st.integers(0, 6), max_size=12), st.sampled_from([np.int64, np.uint64]))
def test_each_number_stands_once_in_rising_order(numbers: list[int], kind: Any) -> None:
    given_numbers: npt.NDArray[Any] = np.array(numbers, dtype=kind)
    found = each_once(given_numbers)
    assert found.tolist() == sorted(set(numbers))
    assert found.dtype == kind
    assert given_numbers.tolist() == numbers, "what was given stays as it is"
