"""Request-level jobs that wait for the stores of others: until those end, and what they do then.

A wait is for one piece of another job, with all of its keys that the piece stores. When that is
done the wait is over; when it failed, the job copies its own bytes of what nobody has stored or is
storing by then, and waits for who is. However many wait for one piece, an event carries on with a
few of them only: its work is bounded, and the next event takes up the rest.
"""

from __future__ import annotations

import numpy as np

from kvd.core.blocks import namespaces
from kvd.core.claims import prefix
from kvd.core.errors import COPY_FAILED, RANKS_MISSING, RESET
from kvd.core.events import JobStatus
from kvd.core.jobs import store, transfer, waits
from kvd.core.model.index import NOWHERE
from kvd.core.model.job import Wait
from kvd.core.model.slots import ABSENT, RESERVED
from kvd.core.model.state import Session
from kvd.core.model.turn import Turn
from kvd.core.room.eviction import make_room

WAITS_AT_ONCE = 32  # in one event
KEYS_AT_ONCE = 256  # newly copied in one event, but for those of its last wait


def go_on(turn: Turn) -> list[Session]:
    """Carry on with some of those whose leader has ended. Their sessions, which may be over now."""
    state = turn.state
    seen: dict[Session, None] = {}
    keys = 0
    for _ in range(min(WAITS_AT_ONCE, len(state.released))):
        if keys >= KEYS_AT_ONCE:
            break
        wait = state.released.popleft()
        job = wait.job
        session = state.sessions[job.session]
        seen[session] = None
        waits.leave(state, session, wait)
        if job.status is JobStatus.DONE and not wait.done:
            keys += _take_over(turn, session, wait)
        transfer.end_job_when_done(turn, job)
    return list(seen)


def _take_over(turn: Turn, session: Session, wait: Wait) -> int:
    """Copy what nobody stores, wait for who stores the rest. How many keys are copied."""
    state = turn.state
    job, offer = wait.job, wait.offer
    if wait.scope not in state.scopes:
        transfer.fail_job(job, COPY_FAILED)
        return 0
    if namespaces.is_cleared(state, session.namespace, wait.scope):
        transfer.fail_job(job, RESET)
        return 0
    offer.slots = state.index.find(offer.tags, offer.words, wait.scope)
    states = state.slots.state[offer.slots]
    states[offer.slots == NOWHERE] = ABSENT
    absent = np.flatnonzero(states == ABSENT)
    if len(absent):
        reason = "" if store.can_store(state, session) else RANKS_MISSING
        needs = [(offer.size_class, len(absent))]
        reason = reason or make_room(turn, needs)
        if reason:
            transfer.fail_job(job, reason)
            return 0
        part = store.reserve_part(turn, offer.rows(absent), wait.scope, job.prefix)
        prefix.grow(turn, session, job.prefix, part, offer.blocks[absent])
        transfer.start_piece(turn, job, (part,))
    pending = np.flatnonzero(states == RESERVED)
    pending = pending[~waits.stored_by(state, offer.slots[pending], job)]
    if len(pending):
        waits.follow(state, job, offer.rows(pending))
    return len(absent)
