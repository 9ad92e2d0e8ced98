"""Waits: keys of a request-level job that a piece of another job is storing for it."""

from __future__ import annotations

import numpy as np

from kvd.core.errors import SESSION_CLOSED
from kvd.core.jobs import transfer
from kvd.core.keys import Bools, Slots
from kvd.core.model.job import WAIT_BYTES, Filling, Job, Offer, Piece, Wait
from kvd.core.model.size_class import Tenant
from kvd.core.model.state import Session, State

MAX_WAITING_BYTES = 4 * 2**20  # of one session: 65,536 keys of common length, or 4,096 waits
MAX_TENANT_WAITING_BYTES = 16 * 2**20  # of all sessions of a tenant


def stored_by(state: State, slots: Slots, job: Job) -> Bools:
    """Which of these RESERVED slots the job itself is storing."""
    numbers = state.slots.fillings[slots]
    own = [n for n in set(numbers.tolist()) if _is_of(state.fillings[n], job)]
    return np.isin(numbers, own)


def _is_of(filling: Filling, job: Job) -> bool:
    return isinstance(filling, Piece) and filling.has(job)


def waits_fit(state: State, session: Session, offers: list[Offer]) -> bool:
    """Whether the session may wait for these keys, too."""
    needed = 0
    for offer in offers:
        leaders = len(set(state.slots.fillings[offer.slots].tolist()))
        needed += offer.nbytes + leaders * WAIT_BYTES
    tenant = state.namespace_of(session).tenant
    return not needed or (
        session.waiting_bytes + needed <= MAX_WAITING_BYTES
        and tenant.waiting_bytes + needed <= MAX_TENANT_WAITING_BYTES
    )


def follow(state: State, job: Job, offer: Offer) -> None:
    """Wait for the stores of these keys; the engine blocks stay in use meanwhile."""
    session = state.sessions[job.session]
    numbers = state.slots.fillings[offer.slots]
    for number in dict.fromkeys(numbers.tolist()):
        some = offer.rows(np.flatnonzero(numbers == number))
        leader = state.fillings[number]
        wait = Wait(job, some, state.scope_of(int(some.slots[0])), leader)
        leader.waits[wait] = None
        session.waits[wait] = None
        state.count_in_flight((wait.scope,), +1)
        job.followed += len(some.slots)
        _count(session, state.namespace_of(session).tenant, wait.nbytes)
        transfer.mark_busy(session, some.size_class.group, some.engine_blocks, +1)


def drop(state: State, session: Session) -> None:
    """The session is gone: its jobs wait for nobody's store any more."""
    for wait in session.waits:
        transfer.fail_job(wait.job, SESSION_CLOSED)
        if wait.leader is not None:
            del wait.leader.waits[wait]
            wait.leader = None
            state.released.append(wait)


def leave(state: State, session: Session, wait: Wait) -> None:
    """The job waits for these keys no longer."""
    del session.waits[wait]
    state.count_in_flight((wait.scope,), -1)
    wait.job.followed -= len(wait.offer.slots)
    _count(session, state.namespace_of(session).tenant, -wait.nbytes)
    group = wait.offer.size_class.group
    transfer.mark_busy(session, group, wait.offer.engine_blocks, -1)


def _count(session: Session, tenant: Tenant, size: int) -> None:
    session.waiting_bytes += size
    tenant.waiting_bytes += size
