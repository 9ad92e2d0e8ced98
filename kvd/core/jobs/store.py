"""Stores: which of the offered blocks are copied, into which slots, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvd.core.actions import Reply, Verdict
from kvd.core.blocks import namespaces, slot_lifecycle
from kvd.core.blocks.row_grants import grant_spare
from kvd.core.claims import prefix
from kvd.core.errors import (
    COPY_FAILED,
    DRAINING,
    RANKS_MISSING,
    DuplicateJob,
    InvalidArgument,
    KvdError,
    LimitExceeded,
)
from kvd.core.events import JobKind, JobStatus, LoadRequested, StoreRequested
from kvd.core.jobs import transfer, waits
from kvd.core.jobs.offer import read_storable
from kvd.core.keys import Bools, ScopeId, Slots
from kvd.core.model.gone import Fate, WhyGone
from kvd.core.model.index import NOWHERE
from kvd.core.model.job import Job, JobState, Offer, Part, Prefix
from kvd.core.model.size_class import SizeClass
from kvd.core.model.slots import ABSENT, READY, RESERVED
from kvd.core.model.state import Session, State
from kvd.core.model.turn import Turn
from kvd.core.room.eviction import make_room
from kvd.core.tiers import writing
from kvd_proto.limits import MAX_JOBS_IN_FLIGHT


@dataclass(slots=True, eq=False)
class Plan:
    """An offer, divided. `fresh` will be copied; `ready` and `followed` are slots."""

    offer: Offer
    fresh: Offer
    ready: Slots
    ready_blocks: Slots  # their places in the prompt
    followed: Offer
    blocked: bool  # some must be stored, but their engine block is being copied already
    left: int  # neither copied, nor followed, nor there


def store(turn: Turn, event: StoreRequested) -> None:
    """Start copying what is neither readable nor being stored; all of it or nothing.

    A later piece that breaks a rule is no error: its job's first pieces are under way, so the
    job fails, and ends.
    """
    state = turn.state
    session = state.require_session(event.session)
    job = session.jobs.get(event.job)
    if job is not None and (job.kind is not JobKind.STORE or not job.is_open):
        raise DuplicateJob(f"job {event.job} is in flight", "job_id")
    reason = message = ""
    offers: list[Offer] = []
    broken = 0
    try:
        namespaces.check_name(event.context.account, "account")
        offers, broken = read_storable(state, session, event.context.account, event.runs)
    except KvdError as error:
        if job is None:
            raise
        reason, message = error.reason, str(error)
    if job is None:
        check_new_job(session, event)
        job = Job(session.session, event.job, JobKind.STORE, event.context.request)
        job.prefix = prefix.of_context(state, session, event.context)
        session.jobs[event.job] = job
    reason = job.reason or reason or _refusal(state, session, event.context.account, offers)
    blocks = 0
    if not reason:
        job.left += broken
        for offer in offers:
            state.reuse.use(offer.tags, offer.size_class.spec.block_bytes, turn.now_ns)
        plans = [_divide(turn, job, offer, event.request_level) for offer in offers]
        reason, blocks = _admit(turn, session, job, plans, event.context.account)
        offers = [plan.fresh for plan in plans]
    if reason and not job.reason:
        began = job.pieces_begun or job.followed
        job.will_end_as(JobStatus.FAILED if began else JobStatus.REFUSED, reason)
        for offer in offers:
            _note_unstored(turn, offer, slice(None), WhyGone(Fate.REFUSED, reason))
    turn.orders.append(
        Reply(Verdict(event.job, JobKind.STORE, not reason, reason, blocks, message))
    )
    if event.last:
        job.move(JobState.WHOLE)
    transfer.end_job_when_done(turn, job)


def check_new_job(session: Session, event: StoreRequested | LoadRequested) -> None:
    """Raise unless the session may start a job of this number."""
    if event.job <= 0:
        raise InvalidArgument("job ids start at 1", "job_id")
    if event.job in session.jobs:
        raise DuplicateJob(f"job {event.job} is in flight", "job_id")
    if len(session.jobs) >= MAX_JOBS_IN_FLIGHT:
        raise LimitExceeded(
            f"{MAX_JOBS_IN_FLIGHT} jobs are in flight: wait for the end of some", "job_id"
        )


def _refusal(state: State, session: Session, account: str, offers: list[Offer]) -> str:
    if state.draining:
        return DRAINING
    if not can_store(state, session):
        return RANKS_MISSING
    return "" if scopes_fit(state, session, account, offers) else LimitExceeded.reason


def scopes_fit(state: State, session: Session, account: str, offers: Iterable[Offer]) -> bool:
    """Whether the scopes of these offers are open, or may be opened."""
    if all(offer.scope is not None for offer in offers):
        return True
    spec = state.namespace_of(session).spec
    return namespaces.scopes_fit(state, spec, session.payer, session.epoch, account)


def can_store(state: State, session: Session) -> bool:
    """Every rank stands, and every shard has its writer."""
    shards = state.namespace_of(session).classes[0].shards
    writing = {mover.shard for mover in session.movers.values() if mover.writer}
    return session.usable() and len(writing) == shards


def _admit(
    turn: Turn, session: Session, job: Job, plans: list[Plan], account: str
) -> tuple[str, int]:
    """Make room, start. Answers why not ("" = started) and the blocks that will go."""
    state = turn.state
    followed = [plan.followed for plan in plans if len(plan.followed.tags)]
    if followed and not waits.waits_fit(state, session, followed):
        return LimitExceeded.reason, 0
    needs = [(p.offer.size_class, len(p.fresh.tags)) for p in plans if len(p.fresh.tags)]
    reason = make_room(turn, needs, lambda: [_kept(state, job, plan) for plan in plans])
    for plan in plans:
        if len(plan.ready):
            slot_lifecycle.touch(turn, plan.offer.size_class, plan.ready, job.prefix.number)
            prefix.note(state, session, job.prefix, plan.ready, plan.ready_blocks)
        if state.below.tiers:
            writing.stored(turn, plan.offer.size_class, plan.ready)
    if reason:
        return reason, 0
    parts = _start(turn, session, job, plans, account)
    return "", sum(len(part.slots) for part in parts)


def _kept(state: State, job: Job, plan: Plan) -> tuple[SizeClass, Slots]:
    """Blocks of the plan's group that the store may not evict; distinct.

    Neither what was just offered nor what the request used before it makes room for the rest: a
    tail is worth nothing without its head.
    """
    offer = plan.offer
    if offer.scope is None:
        return offer.size_class, plan.ready
    held = prefix.held(state, job.prefix, offer.scope)
    if not len(plan.ready):
        return offer.size_class, held
    return offer.size_class, state.slots.distinct(np.concatenate([plan.ready, held]))


def _start(turn: Turn, session: Session, job: Job, plans: list[Plan], account: str) -> list[Part]:
    parts = []
    for plan in plans:
        if len(plan.fresh.tags):
            scope = open_scope(turn, session, account, plan.offer)
            parts.append(reserve_part(turn, plan.fresh, scope, job.prefix))
            prefix.grow(turn, session, job.prefix, parts[-1], plan.fresh.blocks)
        if len(plan.followed.tags):
            waits.follow(turn.state, job, plan.followed)
        if plan.blocked:
            transfer.fail_job(job, COPY_FAILED)
        job.left += plan.left
    if parts:
        transfer.start_piece(turn, job, tuple(parts))
        grant_spare(turn, [part.size_class for part in parts])
    return parts


def open_scope(turn: Turn, session: Session, account: str, offer: Offer) -> ScopeId:
    """The offer's, unless making room took its last block, and opening another forgot it."""
    if offer.scope is not None and offer.scope in turn.state.scopes:
        return offer.scope
    return namespaces.open_scope(turn, session, account, offer.size_class.group).scope


def reserve_part(turn: Turn, fresh: Offer, scope: ScopeId, used: Prefix) -> Part:
    """Slots for these blocks of a request; there is room for them."""
    sight = prefix.sight(turn, used, scope, int(fresh.blocks[0]))
    slots = slot_lifecycle.reserve(turn, fresh, scope, sight)
    return Part(fresh.size_class, (scope,), slots, slots, fresh.engine_blocks)


def _note_unstored(turn: Turn, offer: Offer, rows: Slots | slice, why: WhyGone) -> None:
    """Remember why these blocks will not be there."""
    tenant = offer.size_class.tenant.tenant
    turn.state.gone.note(tenant, offer.tags[rows], None, why, turn.now_ns)


def _divide(turn: Turn, job: Job, offer: Offer, whole: bool) -> Plan:
    """What to copy, what is there, and (where all must be stored) what others are storing.

    What an earlier piece of the job itself is storing is none of these.
    """
    state = turn.state
    session = state.sessions[job.session]
    unknown = offer.slots == NOWHERE
    if np.count_nonzero(unknown) == len(unknown):
        states = np.zeros(len(offer.slots), dtype=np.uint8)
        pending, fresh = offer.slots[:0], np.arange(len(offer.slots))
    else:
        states = state.slots.state[offer.slots]
        states[unknown] = ABSENT
        pending = np.flatnonzero(states == RESERVED)
        fresh = np.flatnonzero(states == ABSENT)
    blocked = in_flight(session, offer, fresh)
    is_blocked = bool(np.count_nonzero(blocked))
    if is_blocked:
        fresh = fresh[~blocked]
    if len(fresh):
        is_all = len(fresh) == len(offer.tags)
        admitted = state.admission.offer(offer.tags if is_all else offer.tags[fresh])
        filtered = len(fresh) - int(np.count_nonzero(admitted))
        if not whole and filtered:
            state.counters.filtered += filtered
            _note_unstored(turn, offer, fresh[~admitted], WhyGone(Fate.FILTERED))
            fresh = fresh[admitted]
    is_ready = states == READY
    ready = offer.slots[is_ready]
    state.counters.deduplicated += len(ready) + len(pending)
    others = pending
    if len(pending):
        others = pending[~waits.stored_by(state, offer.slots[pending], job)]
    own = len(pending) - len(others)
    followed = others if whole else others[:0]
    return Plan(
        offer=offer,
        fresh=offer if len(fresh) == len(offer.tags) else offer.rows(fresh),
        ready=ready,
        ready_blocks=offer.blocks[is_ready],
        followed=offer.rows(followed),
        blocked=whole and is_blocked,
        left=len(offer.tags) - len(fresh) - len(ready) - len(followed) - own,
    )


def in_flight(session: Session, offer: Offer, rows: Slots) -> Bools:
    """Which of these rows name an engine block that an earlier store is still copying."""
    counts = session.busy.get(offer.size_class.group)
    if counts is None or not len(rows):
        return np.zeros(len(rows), dtype=np.bool_)
    blocks = offer.engine_blocks
    if len(rows) < len(blocks):
        blocks = blocks.take(rows, axis=0)
    if int(blocks.max(initial=0)) < len(counts):
        busy = counts.take(blocks) > 0
    else:
        known = blocks < len(counts)  # so that a null engine block is never looked up
        busy = known & (counts[np.where(known, blocks, 0)] > 0)
    return np.asarray(busy.ravel() if busy.shape[1] == 1 else busy.any(axis=1))
