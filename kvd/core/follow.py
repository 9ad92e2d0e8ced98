"""Followers whose leader failed: one of them copies its own bytes, the others follow it."""

from __future__ import annotations

import numpy as np

from kvd.core import prefix, transfer
from kvd.core.actions import Action
from kvd.core.block import SlotState
from kvd.core.errors import RANKS_MISSING, SESSION_CLOSED
from kvd.core.events import JobStatus
from kvd.core.index import NOWHERE
from kvd.core.job import Follow, Job, Offer
from kvd.core.keys import ScopeId
from kvd.core.room import make_room
from kvd.core.state import Session, State
from kvd.core.store import can_store, reserve_part

# Keys of one job in one scope whose copies start together, each with those who wait for it.
_Batch = list[list[Follow]]


def lead_orphans(state: State, now_ns: int, actions: list[Action]) -> None:
    """Give every key in `state.orphans` a new leader, or fail all that waited for it.

    Each round ends at least one wait of each key, so it ends.
    """
    while state.orphans:
        orphans, state.orphans = state.orphans, []
        batches: dict[tuple[int, ScopeId], _Batch] = {}
        for follows in orphans:
            waiting = [f for f in follows if not _given_up(state, f, actions)]
            if waiting and not _led_already(state, waiting, actions):
                leader = waiting[0]
                batches.setdefault((id(leader.job), leader.scope), []).append(waiting)
        for batch in batches.values():
            _lead(state, batch, now_ns, actions)


def drop_followers(state: State, session: Session, actions: list[Action]) -> None:
    """The session is gone: its jobs wait for nobody's store any more."""
    for slot, follows in list(state.followers.items()):
        kept = []
        for follow in follows:
            if follow.job.session == session.session:
                _fail(state, follow, SESSION_CLOSED, actions)
            else:
                kept.append(follow)
        if kept:
            state.followers[slot] = kept
        else:
            del state.followers[slot]


def _given_up(state: State, follow: Follow, actions: list[Action]) -> bool:
    """A job that failed already has no use for the copy."""
    if follow.job.status is JobStatus.DONE:
        return False
    _fail(state, follow, follow.job.reason, actions)
    return True


def _led_already(state: State, waiting: list[Follow], actions: list[Action]) -> bool:
    """Another job took the key up meanwhile: wait for that, or be content."""
    offer = waiting[0].offer
    slot = int(state.index.find(offer.tags, offer.words, waiting[0].scope)[0])
    if slot == NOWHERE:
        return False
    if state.slots.state[slot] == SlotState.RESERVED:
        state.followers.setdefault(slot, []).extend(waiting)
        return True
    for follow in waiting:
        transfer.unfollow(state, follow)
        transfer.end_job_when_done(state, follow.job, actions)
    return True


def _lead(state: State, batch: _Batch, now_ns: int, actions: list[Action]) -> None:
    leaders = [waiting[0] for waiting in batch]
    job = leaders[0].job
    offer = _joined(leaders)
    reason = "" if can_store(state, state.sessions[job.session]) else RANKS_MISSING
    reason = reason or make_room(state, [(offer.size_class, len(leaders))], now_ns, actions)
    if reason:
        for waiting in batch:
            _fail(state, waiting[0], reason, actions)
            if waiting[1:]:
                state.orphans.append(waiting[1:])
        return
    part = reserve_part(state, offer, leaders[0].scope, now_ns)
    prefix.grow(state, job.prefix, part.slots, offer.blocks, now_ns)
    transfer.start_piece(state, job, (part,), now_ns, actions)
    for waiting, slot in zip(batch, part.slots.tolist(), strict=True):
        transfer.unfollow(state, waiting[0])
        if waiting[1:]:
            state.followers[slot] = waiting[1:]


def _joined(leaders: list[Follow]) -> Offer:
    offers = [follow.offer for follow in leaders]
    return Offer(
        offers[0].size_class,
        np.concatenate([offer.words for offer in offers]),
        np.concatenate([offer.tags for offer in offers]),
        np.concatenate([offer.engine_blocks for offer in offers]),
        np.concatenate([offer.blocks for offer in offers]),
        np.concatenate([offer.slots for offer in offers]),
    )


def _fail(state: State, follow: Follow, reason: str, actions: list[Action]) -> None:
    job: Job = follow.job
    transfer.fail_job(job, reason)
    transfer.unfollow(state, follow)
    transfer.end_job_when_done(state, job, actions)
