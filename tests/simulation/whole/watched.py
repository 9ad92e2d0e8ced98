"""The machine, watched: each event's orders are judged by the ledger and by what follows here.

Now and then all tables are compared; after rare events those that the event touches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.actions import Action
from kvd.core.machine import Machine
from kvd.core.model.row_claims import FIRST_NS, Claim
from kvd.core.model.state import MachineConfig, Session
from kvd.runtime.probes import native_probes
from tests.core import invariants
from tests.simulation.whole import mischief
from tests.simulation.whole.hazards import PowerCut

if TYPE_CHECKING:
    from tests.simulation.whole.world import World

CHECK_EVERY = 150  # events between two readings of every table; the ledger judges each event
PROMISED_NS = 3_000_000_000  # as long must a class have waited before blocks under lease may go
ZEROED_TICKS = 20  # without a shortage, within which a row is zeroed
JUMPED_S = 80.0  # after a stop of the whole daemon deadlines may pass without a word


class CheckedMachine(Machine):
    """The real machine, with somebody who looks at what it does."""

    def __init__(self, world: World, config: MachineConfig) -> None:
        super().__init__(config, native_probes())
        self._world = world
        self._emptying: set[int] = set()
        self._zeroing: dict[int, int] = {}  # ticks that each row's zeroing has taken

    def handle(self, event: ev.Event, now_ns: int) -> list[Action]:
        world = self._world
        if world.hazards.is_dead:
            raise PowerCut
        needy = list(self.state.claims.needy) if self.state.claims.needy else []
        longest = max((now_ns - claim.since_ns for claim in needy), default=0)
        waiting = [c for c in needy if now_ns - c.first_ns < FIRST_NS or not c.first_ns]
        orders = super().handle(event, now_ns)
        world.events += 1
        world.journal.event(type(event).__name__, now_ns, len(orders))
        ledger = world.ledger
        ledger.now_ns = world.loop.now_ns()
        if self.state.emptying or self.state.retiring:
            self._check_promises(longest)
        ledger.observe(event, orders)
        for row in self.state.emptying.values():
            if row.emptied_ns == now_ns and row.row not in self._emptying:
                mischief.interrupt(world, row)
        self._emptying = set(self.state.emptying)
        for order in orders:
            if isinstance(order, act.GrantRow):
                self._check_turn(order, needy, waiting)
            elif isinstance(order, act.KillMover):
                self._check_guilt(order)
            elif isinstance(order, act.ZeroRow):
                self._zeroing[order.row] = 0
            elif isinstance(order, act.ReleaseRow):
                self._zeroing.pop(order.row, None)
        if isinstance(event, ev.TimerTicked):
            self._check_zeroing()
        elif isinstance(event, ev.SessionClosed):
            self._check_waits(self.state.sessions.get(event.session))
        if world.events % CHECK_EVERY == 0:
            invariants.check(self)
        return orders

    def _check_promises(self, longest: int) -> None:
        """I3: rows with leases are emptied only for who has waited for long.

        With those, too, that were taken while a row was being emptied.
        """
        given_up = self._world.ledger.given_up
        for number, row in (*self.state.emptying.items(), *self.state.retiring.items()):
            if row.leases is not None and number not in given_up:
                assert longest >= PROMISED_NS, f"row {number} is emptied in spite of leases (I3)"
                given_up.add(number)

    def _check_turn(self, order: act.GrantRow, needy: list[Claim], waiting: list[Claim]) -> None:
        """What is free is for those who lack what is theirs by right, in their payers' turns.

        A payer whose claim has just been dropped has its turn yet, for another class of its own.
        """
        taker = (order.namespace, order.group)
        if any(claim.owner.name == taker for claim in needy):
            return
        claims = self.state.claims.needy
        payer = self.state.classes[taker].tenant
        gone = (claims.get(c.owner.name) is not c and c.owner.tenant is payer for c in needy)
        before = needy[: next((place for place, is_gone in enumerate(gone) if is_gone), None)]
        still = [c for c in before if claims.get(c.owner.name) is c]
        left = [c.owner.name for c in still if c in waiting]
        assert not left, f"row {order.row} is given to {taker}, and {left[0]} waits for one"

    def _check_guilt(self, order: act.KillMover) -> None:
        """Only a mover whose copy takes too long is ended for that; with its session all are."""
        world = self._world
        mover = world.daemon.movers.get(order.mover)
        if (
            "deadline" in order.reason
            and mover is not None
            and world.loop.now > world.jumped_s + JUMPED_S
        ):
            guilty = not mover.is_alive or mover.is_behind
            assert guilty, f"mover {order.mover} is ended as late, and copies nothing"

    def _check_zeroing(self) -> None:
        """Rows that are taken back are zeroed as soon as that is possible."""
        if self._world.hazards.short:
            return
        for row in self._zeroing:
            self._zeroing[row] += 1
            assert self._zeroing[row] <= ZEROED_TICKS, f"row {row} is never zeroed"

    def _check_waits(self, session: Session | None) -> None:
        """A closed session's jobs follow nobody's store any more."""
        left = () if session is None else session.waits
        assert not any(wait.leader is not None for wait in left), "a closed session's job waits"
