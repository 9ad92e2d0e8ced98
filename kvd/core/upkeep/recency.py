"""When blocks were last used, written down now and then for the next incarnation of the pool.

A record has the stamp of its store. Uses since then are noted row by row, a few at each tick, for
those blocks alone that were used since they were last noted: what is lost with the daemon is the
order of the last turn through all rows.
"""

from __future__ import annotations

import numpy as np

from kvd.core.actions import WriteStamps
from kvd.core.keys import NO_SLOTS, Slots
from kvd.core.model.slots import READY, STAMP_SHIFT
from kvd.core.model.turn import Turn

ROWS_LOOKED_AT = 64  # in one tick
SLOTS_LOOKED_AT = 65536  # but for the rest of the last row
STAMPS_WRITTEN = 8192  # in one tick


def write_down(turn: Turn) -> None:
    """Note the last uses in some rows; the next call goes on behind them."""
    state = turn.state
    rows, table = state.unnoted, state.slots
    if not rows:
        rows.extend(state.rows)
    found: list[Slots] = []
    looked_at, left = 0, STAMPS_WRITTEN
    for _ in range(min(ROWS_LOOKED_AT, len(rows))):
        number = rows.pop()
        row = state.rows.get(number)
        if row is None:
            continue
        span = row.span
        used = (table.stamps[span] != table.noted[span]) & (table.state[span] == READY)
        slots = row.first_slot + np.flatnonzero(used)
        if len(slots) > left:
            slots = slots[:left]
            rows.append(number)
        found.append(slots)
        left -= len(slots)
        looked_at += row.slots
        if not left or looked_at >= SLOTS_LOOKED_AT:
            break
    slots = np.concatenate([NO_SLOTS, *found])
    if len(slots):
        stamps = table.noted[slots] = table.stamps[slots]
        turn.orders.append(WriteStamps(slots, stamps.astype(np.uint64) << np.uint64(STAMP_SHIFT)))
