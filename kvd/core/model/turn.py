"""A turn: what the handling of one event carries from function to function."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.core.actions import Action
from kvd.core.model.state import State


@dataclass(slots=True, eq=False)
class Turn:
    """The state, the time of the event, and the orders so far.

    Who gives orders or needs the time takes the turn; who only reads or changes tables takes the
    state.
    """

    state: State
    now_ns: int
    orders: list[Action] = field(default_factory=list)  # to be carried out in this order
