"""Tells a mover that comes of the rows that its namespace has, a few at a time.

Of rows that are granted or taken back meanwhile it hears as every mover of the namespace does.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np

from kvd.core.actions import StartTransfer
from kvd.core.keys import RowId
from kvd.core.machine import Machine
from kvd.runtime.fleet import AttachedMover, MoverFleet
from kvd.runtime.turns import FairQueue

ROWS_TOLD_AT_ONCE = 128  # about a millisecond of the event loop


class RowTeller:
    """Tells movers of the rows that are granted.

    Lives on the event loop. `refused` are rows that the core has and the pool can't have.
    """

    def __init__(
        self, machine: Machine, fleet: MoverFleet, turns: FairQueue, refused: AbstractSet[RowId]
    ) -> None:
        self._machine = machine
        self._fleet = fleet
        self._turns = turns
        self._refused = refused

    async def tell_all(self, mover: AttachedMover, user: int) -> None:
        """Tell it of the rows that there are, in turn with large calls; until it ends."""
        pieces = self._machine.granted_rows(mover.namespace, ROWS_TOLD_AT_ONCE)
        while True:
            await self._turns.let_others_in(user)
            if self._fleet.attached.get(mover.process.mover) is not mover:
                break
            some = next(pieces, None)
            if some is None:
                break
            mover.rows.tell(row for row in some if row.row not in self._refused)
        mover.rows.end()

    def tell_rows_of(self, order: StartTransfer) -> bool:
        """Have the mover know every row of the transfer, which may follow then.

        False: it would have to be told of more than may be at once. No engine that waits for its
        ranks to be ready asks for that.
        """
        if self._fleet.knows_rows(order.mover):
            return True
        rows = self._machine.rows_of(np.concatenate([part.slots for part in order.parts]))
        told = self._fleet.attached[order.mover].rows
        unknown = told.unknown(rows)
        if len(unknown) > ROWS_TOLD_AT_ONCE:
            return False
        told.tell(self._machine.granted_row(row) for row in unknown)
        return True
