"""Loads: all of the blocks or none, pinned until every rank's copy is known to have ended."""

from __future__ import annotations

from kvd.core.actions import Reply, Verdict
from kvd.core.blocks import slot_lifecycle
from kvd.core.claims import prefix
from kvd.core.errors import KEY_MISSING, RANKS_MISSING
from kvd.core.events import JobKind, JobStatus, LoadRequested
from kvd.core.jobs import transfer
from kvd.core.jobs.offer import check_loaded_places, read_offers
from kvd.core.jobs.store import check_new_job
from kvd.core.keys import ScopeId, Slots
from kvd.core.model.index import NOWHERE
from kvd.core.model.job import Job, JobState, Offer, Part
from kvd.core.model.slots import READY
from kvd.core.model.state import State
from kvd.core.model.turn import Turn


def load(turn: Turn, event: LoadRequested) -> None:
    """Start a transfer of every block to every rank, or refuse the job."""
    state = turn.state
    session = state.require_session(event.session)
    offers = read_offers(state, session, event.context.account, event.runs)
    check_loaded_places(state, session, event.runs)
    check_new_job(session, event)
    job = Job(session.session, event.job, JobKind.LOAD, event.context.request)
    job.move(JobState.WHOLE)  # never in pieces
    session.jobs[event.job] = job
    reason = "" if session.usable() else RANKS_MISSING
    if not reason and not all(_readable(state, offer) for offer in offers):
        reason = KEY_MISSING
    blocks = 0 if reason else sum(len(offer.slots) for offer in offers)
    if reason:
        job.will_end_as(JobStatus.REFUSED, reason)
    elif blocks:
        request = prefix.number_of(session, event.context.request)
        for offer in offers:
            state.reuse.use(offer.tags, offer.size_class.spec.block_bytes, turn.now_ns)
            slot_lifecycle.touch(turn, offer.size_class, _unclaimed(state, offer), request)
            if state.below.tiers:
                state.slots.sources[offer.slots] = 0  # the next one finds it in host memory
        parts = tuple(_part(state, offer) for offer in offers)
        transfer.start_piece(turn, job, parts)
    turn.orders.append(Reply(Verdict(event.job, JobKind.LOAD, not reason, reason, blocks)))
    transfer.end_job_when_done(turn, job)


def _readable(state: State, offer: Offer) -> bool:
    known = bool((offer.slots != NOWHERE).all())
    return known and bool((state.slots.state[offer.slots] == READY).all())


def _unclaimed(state: State, offer: Offer) -> Slots:
    """Blocks without a lease: taking the lease of the others was their use already."""
    unclaimed: Slots = offer.slots[state.slots.leases[offer.slots] == 0]
    return unclaimed


def _part(state: State, offer: Offer) -> Part:
    scope = ScopeId(int(state.slots.scopes[offer.slots[0]]))
    pinned = state.slots.distinct(offer.slots)
    return Part(offer.size_class, (scope,), offer.slots, pinned, offer.engine_blocks)
