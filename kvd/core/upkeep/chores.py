"""A piece of what waits in the backlog."""

from __future__ import annotations

from kvd.core.actions import Action
from kvd.core.claims import lease
from kvd.core.jobs import transfer
from kvd.core.model import backlog
from kvd.core.model.state import State
from kvd.core.room import eviction, expiry, reclaim
from kvd.core.upkeep import clear, session

# In the order of their turns.
KINDS = ("copies", "leases", "clears", "quotas", "rows", "epochs", "namespaces")


def waiting(state: State) -> bool:
    """Whether there is anything that could go on now."""
    expiring = state.expiring
    if state.backlog or state.released or expiring.sweep is not None or expiring.turn:
        return True
    return reclaim.first_filled(state) is not None


def go_on(state: State, now_ns: int, actions: list[Action]) -> None:
    """Do a piece of what has waited longest of its kind: a few milliseconds at most.

    Kinds take turns: what takes a thousand pieces holds up nothing that takes one.
    """
    todo = (
        (bool(state.backlog.transfers), _call_off),
        (bool(state.backlog.leases), _unclaim),
        (bool(state.backlog.clears), _clear),
        (bool(state.backlog.shrinks), _shrink),
        (reclaim.first_filled(state) is not None, _empty),
        (state.expiring.sweep is not None, _sweep),
        (bool(state.expiring.turn), _take_back),
    )
    for step in range(1, len(todo) + 1):
        turn = (state.backlog.turn + step) % len(todo)
        is_due, work = todo[turn]
        if is_due:
            state.backlog.turn = turn
            work(state, now_ns, actions)
            return


def _clear(state: State, _now_ns: int, actions: list[Action]) -> None:
    clear.go_on(state, actions)


def _shrink(state: State, _now_ns: int, actions: list[Action]) -> None:
    eviction.shrink_some(state, actions)


def _empty(state: State, _now_ns: int, actions: list[Action]) -> None:
    reclaim.empty_some(state, actions)


def _take_back(state: State, _now_ns: int, actions: list[Action]) -> None:
    expiry.take_back_some(state, backlog.DROPPED_AT_ONCE, actions)


def _sweep(state: State, _now_ns: int, actions: list[Action]) -> None:
    expiry.sweep_some(state, backlog.DROPPED_AT_ONCE, actions)


def _unclaim(state: State, now_ns: int, _actions: list[Action]) -> None:
    for each in lease.unclaim_ended(state):
        session.forget_session(state, each, now_ns)


def _call_off(state: State, now_ns: int, actions: list[Action]) -> None:
    queue, parts = state.backlog.transfers, 0
    while queue and parts < backlog.PARTS_AT_ONCE:
        item = queue.popleft()
        if state.transfers.get(item.transfer.transfer) is not item.transfer:
            parts += 1  # it has ended by itself
            continue
        parts += len(item.transfer.piece.parts)
        owner = state.sessions[item.transfer.piece.job.session]
        transfer.call_off(state, item, now_ns, actions)
        session.forget_session(state, owner, now_ns)
