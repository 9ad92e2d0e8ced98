"""What operators and time do: clear, quotas, drain, deadlines."""

from __future__ import annotations

import numpy as np

from kvd.core import chores, disuse, hand_off, lease, recency, residency, room, session, transfer
from kvd.core.actions import Action, AnnounceCleared, Reply
from kvd.core.block import SlotState
from kvd.core.errors import EXPIRED, RESET, InvalidArgument
from kvd.core.events import JobKind, NamespaceCleared, QuotaSet
from kvd.core.keys import Slots
from kvd.core.rows import SizeClass, grant_spare
from kvd.core.state import State

CLASSES_A_TICK = 512  # looked at for rows that they should have ahead of need


def namespace_cleared(state: State, event: NamespaceCleared) -> list[Action]:
    """No block of the namespace is found any more; running stores into it come to nothing, and
    nothing of it is handed off.

    Pinned blocks keep their slots, unseen, until their pins end.
    """
    namespace = state.require_namespace(event.namespace)
    actions: list[Action] = [AnnounceCleared(event.namespace)]
    removed = 0
    hand_off.end_of_namespace(state, event.namespace)
    for owner in namespace.classes:
        removed += _clear_class(state, owner, actions)
    for piece in list({id(t.piece): t.piece for t in state.transfers.values()}.values()):
        storing = piece.job.kind is JobKind.STORE
        if storing and piece.parts[0].size_class.namespace == event.namespace:
            transfer.fail_piece(state, piece, RESET, actions)
    for owner in namespace.classes:
        assert not owner.policy.coldest(1).size, "the policy of a cleared class knows a block"
        owner.policy.forget_gone()  # without what it learned of blocks that are gone
    for wait in state.released:
        if wait.offer.size_class.namespace == event.namespace and not wait.done:
            transfer.fail_job(wait.job, RESET)
    state.counters.cleared += removed
    actions.append(Reply(event.token, removed))
    return actions


def _clear_class(state: State, owner: SizeClass, actions: list[Action]) -> int:
    ready = ready_slots(state, owner)
    if not len(ready):
        return 0
    owner.policy.remove(ready)
    pinned = state.slots.pins[ready] > 0
    if not pinned.all():
        residency.forget_ready(state, owner, ready[~pinned], actions, announce=False)
    if pinned.any():
        residency.quarantine_ready(state, owner, ready[pinned], actions, announce=False)
    return len(ready)


def ready_slots(state: State, owner: SizeClass) -> Slots:
    """Every READY slot of the class, row by row. Reads all its rows."""
    found = [
        row.first_slot + np.flatnonzero(state.slots.state[row.span] == SlotState.READY)
        for row in owner.rows.values()
    ]
    return np.concatenate([np.empty(0, dtype=np.int64), *found])


def quota_set(state: State, event: QuotaSet) -> list[Action]:
    """The tenant keeps the quota from now on; what is pinned goes when its pins end."""
    if event.quota_bytes < 0:
        raise InvalidArgument("a quota can't be negative", "quota_bytes")
    actions: list[Action] = []
    tenant = state.tenant(event.tenant)
    tenant.quota_bytes = event.quota_bytes
    evicted = room.shrink_to_quota(state, tenant, actions)
    actions.append(Reply(event.token, evicted))
    return actions


def timer_ticked(state: State, now_ns: int) -> list[Action]:
    """Expire leases, revoke and kill what is late, and do what had to wait."""
    actions: list[Action] = []
    lease.expire_leases(state, now_ns)
    hand_off.expire(state, now_ns)
    _enforce_deadlines(state, now_ns, actions)
    state.grant_pause.tick()
    disuse.prepare_room(state)
    disuse.go_on(state, now_ns, actions)
    chores.go_on(state, now_ns, actions)
    for tenant in state.tenants.values():
        if tenant.shrinking:
            room.shrink_to_quota(state, tenant, actions)
    grant_spare(state, _next_in_use(state), actions)
    recency.write_down(state, actions)
    return actions


def _next_in_use(state: State) -> list[SizeClass]:
    """Some classes of namespaces with a session, in turn; where there are few, all."""
    turns = state.spare_turns
    if not turns:
        for namespace in sorted({s.namespace for s in state.sessions.values()}):
            turns.extend(state.namespaces[namespace].classes)
    chosen = [turns.popleft() for _ in range(min(len(turns), CLASSES_A_TICK))]
    idle = state.disuse.namespaces
    known = (c for c in chosen if state.classes.get((c.namespace, c.group)) is c)
    return [c for c in known if c.namespace not in idle]


def _enforce_deadlines(state: State, now_ns: int, actions: list[Action]) -> None:
    config = state.config
    submitted_by = now_ns - config.submit_deadline_ns
    copied_by = submitted_by - config.copy_deadline_ns
    for running in list(state.transfers.values()):
        if running.submitted_ns > submitted_by:
            break  # the dict is in the order of submission
        mover = state.movers.get(running.mover)
        if mover is None:
            continue  # that it ends stands in the backlog
        if running.submitted_ns <= copied_by:
            if not mover.ending:
                session.kill_mover(state, mover, "a copy passed its deadline", actions)
        else:
            transfer.revoke(state, [running], EXPIRED, actions)
