"""A copy of a tier while it runs, whichever way it goes: it has a number, and pins its blocks."""

from __future__ import annotations

import numpy as np

from kvd.core.blocks import slot_lifecycle
from kvd.core.keys import U32, CopyId
from kvd.core.model.job import Part
from kvd.core.model.state import State
from kvd.core.model.tiers import CopyKind, Tier, TierCopy

NO_BLOCKS: U32 = np.empty((0, 0), dtype=np.uint32)  # of an engine: no rank takes part


def begin(state: State, tier: Tier, kind: CopyKind, part: Part) -> TierCopy:
    """A copy of these blocks, that pins them until it ends."""
    copy = TierCopy(parts=(part,), copy=CopyId(state.below.next_copy), tier=tier, kind=kind)
    state.below.next_copy += 1
    state.below.copies[copy.copy] = tier.copies[copy.copy] = copy
    state.namespaces[part.size_class.namespace].copies_below += 1
    slot_lifecycle.pin(state, part.size_class, part.pinned)
    state.count_in_flight(part.scopes, +1)
    return copy


def forget(state: State, copy: TierCopy) -> None:
    """The copy has ended: its pins go. (Its tier has forgotten it before.)"""
    (part,) = copy.parts
    del state.below.copies[copy.copy]
    slot_lifecycle.unpin(state, part.size_class, part.pinned)
    state.namespaces[part.size_class.namespace].copies_below -= 1
    state.count_in_flight(part.scopes, -1)
