"""Lifecycles: states as an enum, and a table of the only steps between them."""

from __future__ import annotations

import enum
from typing import TypeVar

SESSION_ENDED = "its session has ended"  # why a mover ends

Stage = TypeVar("Stage", bound=enum.Enum)


def step(steps: frozenset[tuple[Stage, Stage]], old: Stage, new: Stage) -> Stage:
    """The new state. A step that the table lacks is our own fault."""
    assert (old, new) in steps, f"no step from {old} to {new}"
    return new
