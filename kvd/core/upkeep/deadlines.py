"""Transfers that take too long.

Past its first deadline a transfer is called off if its mover has not started it; past the second
one its mover is ended. Nothing is done twice about one, so those that hang cost no tick anything.
"""

from __future__ import annotations

from collections import OrderedDict

from kvd.core.errors import EXPIRED
from kvd.core.jobs import transfer
from kvd.core.keys import TransferId
from kvd.core.model import backlog
from kvd.core.model.job import Transfer
from kvd.core.model.turn import Turn
from kvd.core.upkeep import session

MOVER_COST = 32  # of LATE_AT_ONCE: one that is ended, with all that it had


def enforce(turn: Turn) -> None:
    """Some of what is late; what is left has its turn with the next piece of long work."""
    state, left = turn.state, backlog.LATE_AT_ONCE
    submitted_by = turn.now_ns - state.config.submit_deadline_ns
    copied_by = submitted_by - state.config.copy_deadline_ns
    while left > 0 and (late := _first(state.in_time, submitted_by)) is not None:
        del state.in_time[late.transfer]
        state.late[late.transfer] = late
        if late.submitted_ns > copied_by:
            transfer.revoke(turn, [late], EXPIRED)
        left -= 1
    while left > 0 and (late := _first(state.late, copied_by)) is not None:
        del state.late[late.transfer]
        mover = state.movers.get(late.mover)
        left -= 1
        if mover is not None and mover.is_serving:
            state.counters.movers_killed += 1
            session.end_mover(turn, mover, "a copy passed its deadline", is_late=True)
            left -= MOVER_COST
    state.backlog.has_late = left <= 0


def _first(transfers: OrderedDict[TransferId, Transfer], submitted_by: int) -> Transfer | None:
    """The oldest of them, where it was submitted by then."""
    oldest = next(iter(transfers.values()), None)
    return None if oldest is None or oldest.submitted_ns > submitted_by else oldest
