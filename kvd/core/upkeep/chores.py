"""A piece of what waits in the backlog."""

from __future__ import annotations

from kvd.core.claims import lease, prefix
from kvd.core.jobs import transfer
from kvd.core.model import backlog
from kvd.core.model.state import State
from kvd.core.model.turn import Turn
from kvd.core.room import eviction, expiry, reclaim
from kvd.core.tiers import promotion, residence, search, service
from kvd.core.upkeep import clear, deadlines, session


def waiting(state: State) -> bool:
    """Whether there is anything that could go on now."""
    expiring = state.expiring
    if state.backlog or state.released or expiring.sweep is not None or expiring.turn:
        return True
    below = state.below
    if below.due or below.lost or below.unanswered or below.in_doubt:
        return True
    return reclaim.first_filled(state) is not None


def go_on(turn: Turn) -> None:
    """Do a piece of what has waited longest of its kind: a few milliseconds at most.

    Kinds take turns: what takes a thousand pieces holds up nothing that takes one.
    """
    state = turn.state
    todo = (  # in the order of their turns
        (bool(state.backlog.transfers), _call_off),
        (bool(state.backlog.leases), _unclaim),
        (bool(state.backlog.forgotten), prefix.let_some_go),
        (state.backlog.has_expired, lease.expire_leases),
        (state.backlog.has_late, deadlines.enforce),
        (state.backlog.has_lingering, session.end_lingering),
        (bool(state.backlog.clears), clear.go_on),
        (bool(state.backlog.shrinks), eviction.shrink_some),
        (reclaim.first_filled(state) is not None, reclaim.empty_some),
        (state.expiring.sweep is not None, expiry.sweep_some),
        (bool(state.expiring.turn), expiry.take_back_some),
        (bool(state.below.due), promotion.go_on),
        (bool(state.below.lost), service.end_some_lost),
        (bool(state.below.unanswered), search.ask_some_others),
        (state.below.in_doubt, residence.forget_some_doubted),
    )
    for step in range(1, len(todo) + 1):
        place = (state.backlog.turn + step) % len(todo)
        is_due, work = todo[place]
        if is_due:
            state.backlog.turn = place
            work(turn)
            return


def _unclaim(turn: Turn) -> None:
    for each in lease.unclaim_ended(turn.state):
        session.wind_up(turn, each)


def _call_off(turn: Turn) -> None:
    state = turn.state
    queue, parts = state.backlog.transfers, 0
    while queue and parts < backlog.PARTS_AT_ONCE:
        some, how, reason = queue[0]
        each = some.popleft()
        if not some:
            queue.popleft()
        if state.transfers.get(each.transfer) is not each:
            parts += 1  # it has ended by itself
            continue
        parts += each.piece.work
        owner = state.sessions[each.piece.session]
        transfer.call_off(turn, each, how, reason)
        session.wind_up(turn, owner)
