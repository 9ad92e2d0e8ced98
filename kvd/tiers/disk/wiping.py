"""In which steps places of a slab are zeroed: neighbours together, and none takes long."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvd.core.keys import Slots

STEP_BYTES = 64 << 20  # where a file system zeroes nothing by itself, so much is written at once


def steps_of(offsets: Slots, stride: int) -> Iterator[tuple[int, int, int]]:
    """Where each step begins, how many bytes it takes, and how many places are done by then."""
    most = max(1, STEP_BYTES // stride)
    begin = 0
    for end in [*(np.flatnonzero(np.diff(offsets) != stride) + 1).tolist(), len(offsets)]:
        while begin < end:
            count = min(most, end - begin)
            yield int(offsets[begin]), count * stride, begin + count
            begin += count
