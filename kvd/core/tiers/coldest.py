"""Which blocks of a class are about to leave host memory."""

from __future__ import annotations

import math

from kvd.core.keys import Slots
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import State

WATERMARK = 0.1  # of a class: so many blocks next to their eviction shall be below
LOOKED_AT = 4096  # of those, in one tick


def is_nearly_full(state: State, owner: SizeClass) -> bool:
    """Whether the class has hardly any room left."""
    free = len(owner.free) + len(state.free_extents) // owner.shards * owner.slots_per_row
    return free < WATERMARK * owner.capacity


def next_to_go(owner: SizeClass) -> Slots:
    """Those of its slots that are evicted first."""
    return owner.policy.coldest(min(LOOKED_AT, math.ceil(WATERMARK * owner.capacity)))
