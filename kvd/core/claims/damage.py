"""Blocks whose bytes are not those that were stored."""

from __future__ import annotations

import numpy as np

from kvd.core.blocks import slot_lifecycle
from kvd.core.claims import hand_off
from kvd.core.keys import Slots
from kvd.core.model.gone import Fate, WhyGone
from kvd.core.model.job import Part
from kvd.core.model.slots import READY
from kvd.core.model.turn import Turn


def remove(turn: Turn, part: Part, damaged: Slots) -> None:
    """Nobody finds these blocks of a copy any more; their slots are free once no copy uses them.

    The copy that found them still pins them, so each holds what it held when it was read.
    """
    state = turn.state
    found = part.pinned[np.isin(part.pinned, damaged)]
    found = found[state.slots.state[found] == READY]
    if len(found):
        state.counters.damaged += len(found)
        part.size_class.policy.remove(found)
        hand_off.blocks_lost(state, part.size_class, found)
        slot_lifecycle.quarantine_ready(turn, part.size_class, found, WhyGone(Fate.DAMAGED))
