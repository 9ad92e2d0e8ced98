"""What operators and time do: quotas, terms, and all that is due."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import islice

from kvd.core.blocks.row_grants import grant_spare
from kvd.core.claims import advice, hand_off, lease
from kvd.core.errors import InvalidArgument
from kvd.core.events import QuotaSet, TermsChanged
from kvd.core.model.backlog import Shrink
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import State
from kvd.core.model.turn import Turn
from kvd.core.room import eviction, expiry
from kvd.core.tiers import promotion, search, writing
from kvd.core.upkeep import deadlines, recency, session

CLASSES_A_TICK = 512  # looked at for rows that they should have ahead of need
TENANTS_A_TICK = 256  # that no rule names any more, looked at whether they can be forgotten


def quota_set(turn: Turn, event: QuotaSet) -> None:
    """The tenant stores nothing beyond the quota from now on; what is there goes in pieces, and
    what is pinned when its pins end.
    """
    state = turn.state
    if event.quota_bytes < 0:
        raise InvalidArgument("a quota can't be negative", "quota_bytes")
    tenant = state.tenant(event.tenant)
    tenant.quota_bytes = event.quota_bytes
    if event.named:
        state.backlog.unnamed.pop(event.tenant, None)
    elif event.named is not None:
        state.backlog.unnamed[event.tenant] = None
    shrink = state.backlog.shrinks.setdefault(event.tenant, Shrink())
    shrink.answers.append((event.token, shrink.evicted))
    shrink.room_bytes = 0  # a store that still wants it asks again
    tenant.shrinking = tenant.excess(0) > 0
    if not tenant.shrinking:
        eviction.end_shrinking(turn, event.tenant)


def terms_changed(state: State, event: TermsChanged) -> None:
    """The settings that may change while the daemon runs are these from now on."""
    state.config = replace(state.config, **asdict(event))


def timer_ticked(turn: Turn) -> None:
    """Expire leases, revoke and kill what is late, and find what is due."""
    state = turn.state
    lease.expire_leases(turn)
    hand_off.expire(turn)
    advice.expire(state, turn.now_ns)
    deadlines.enforce(turn)
    session.end_lingering(turn)
    state.grant_pause.tick()
    expiry.prepare_room(state)
    expiry.look(turn)
    for tenant in state.tenants.values():
        if tenant.shrinking and (tenant.evictable or tenant.excess(0) <= 0):
            state.backlog.shrinks.setdefault(tenant.tenant, Shrink())
    _forget_unnamed(state)
    in_use = _next_in_use(state)
    grant_spare(turn, in_use)
    if state.below.tiers:
        search.expire(turn)
        promotion.give_up_late(turn)
        for tier in state.below.tiers:
            writing.catch_up(turn, tier)
        for owner in in_use:
            writing.write_ahead(turn, owner)
    recency.write_down(turn)
    state.gone.count()


def _forget_unnamed(state: State) -> None:
    """Tenants that no rule names any more are unknown again, once nothing is theirs."""
    for name in list(islice(state.backlog.unnamed, TENANTS_A_TICK)):
        tenant = state.tenants[name]
        del state.backlog.unnamed[name]
        is_left = tenant.namespaces or tenant.used_bytes or tenant.tally.capacity
        if is_left or name in state.backlog.shrinks:
            state.backlog.unnamed[name] = None  # to the end
        else:
            del state.tenants[name]
            state.gone.forget(name)
            for tier in state.below.tiers:
                tier.paces.pop(name, None)


def _next_in_use(state: State) -> list[SizeClass]:
    """Some classes of namespaces with a session, in turn; where there are few, all."""
    turns = state.spare_turns
    if not turns:
        for namespace in sorted({s.namespace for s in state.sessions.values()}):
            turns.extend(state.namespaces[namespace].classes)
    chosen = [turns.popleft() for _ in range(min(len(turns), CLASSES_A_TICK))]
    idle = state.expiring.namespaces
    return [c for c in chosen if state.is_there(c) and c.namespace not in idle]
