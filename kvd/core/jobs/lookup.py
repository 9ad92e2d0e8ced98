"""Lookups and touches."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvd.core.actions import Answer, Reply
from kvd.core.blocks import slot_lifecycle
from kvd.core.blocks.reading import check_keys, locate
from kvd.core.claims import lease, prefix
from kvd.core.events import LeaseMode, LookupRequested, Query, Touched
from kvd.core.keys import NO_SLOTS, U64, Bools, LeaseId, Slots, each_once
from kvd.core.model.index import NOWHERE
from kvd.core.model.size_class import SizeClass
from kvd.core.model.slots import READY, SlotState
from kvd.core.model.state import Session, State
from kvd.core.model.turn import Turn
from kvd.core.tiers import search, writing
from kvd_proto.key_status import ADMITTED_BIT, HIT, MISS, PENDING, RETRY

ADMIT = MISS | ADMITTED_BIT


class _Found(NamedTuple):
    """What is there of a query's keys, and what a lease would hold of that."""

    statuses: npt.NDArray[np.uint8]
    slots: Slots
    run: Slots  # places of the keys to be claimed
    claimed: Slots  # ... and their slots


_STATUS_OF_STATE = np.zeros(len(SlotState), dtype=np.uint8)
_STATUS_OF_STATE[SlotState.READY] = HIT
_STATUS_OF_STATE[SlotState.RESERVED] = PENDING


def lookup(turn: Turn, event: LookupRequested) -> None:
    """Answer every query; take leases where asked."""
    state = turn.state
    session = state.require_session(event.session)
    owners = check_keys(state, session, [(query.group, query.keys) for query in event.queries])
    asked = zip(event.queries, owners, strict=True)
    answers: list[Answer] = []
    for _, of_request in groupby(asked, key=lambda each: each[0].context.request):
        answers += _answer(turn, session, list(of_request))
    if event.counted:
        count(state, [answer.statuses for answer in answers])
    turn.orders.append(Reply(tuple(answers)))


def count(state: State, statuses: Iterable[bytes]) -> None:
    """Clients are given these answers."""
    counters = state.counters
    for said in statuses:
        hits = said.count(HIT)
        counters.hits += hits
        if hits < len(said):
            counters.pending += said.count(PENDING)
            counters.retries += said.count(RETRY)
            counters.misses += said.count(MISS) + said.count(ADMIT)


def _answer(turn: Turn, session: Session, asked: list[tuple[Query, SizeClass]]) -> list[Answer]:
    """Answers to queries of one request, that share what it may lease."""
    state = turn.state
    found = [_find(turn, session, query, owner) for query, owner in asked]
    wanted = [(owner, each.claimed) for (_, owner), each in zip(asked, found, strict=True)]
    rooms = lease.rooms(state, wanted)
    answers = []
    for (query, owner), each, room in zip(asked, found, rooms, strict=True):
        statuses, slots, run, claimed = each
        leased = lease.leasable(state, session, owner, claimed, room) if len(run) else 0
        if leased < len(run):
            statuses[run[leased:]] = RETRY
            claimed = claimed[:leased].copy()  # a lease keeps it, and nothing more than it
        held = _lease(turn, session, query, owner, claimed, run) if leased else None
        sources = _sources(state, statuses, slots) if state.below.tiers else b""
        answers.append(Answer(statuses.tobytes(), held, sources))
    return answers


def _find(turn: Turn, session: Session, query: Query, owner: SizeClass) -> _Found:
    state = turn.state
    account, words = query.context.account, query.keys.words
    _, tags, slots = locate(state, session, account, query.group, words)
    known = slots != NOWHERE
    if np.count_nonzero(known) == len(slots):
        statuses = _STATUS_OF_STATE.take(state.slots.state.take(slots))
    else:
        statuses = _statuses(state, owner, tags, slots, known)
        if state.below.tiers:
            missed = np.flatnonzero(~known)
            sought = search.look(turn, session, query, tags, missed)
            statuses[missed] = np.where(sought == PENDING, sought, statuses[missed])
    if state.below.tiers:
        statuses[search.waited_for_enough(turn, session, query, slots)] = MISS
    if query.lease is LeaseMode.NONE:
        return _Found(statuses, slots, NO_SLOTS, NO_SLOTS)
    run = _claimed(statuses, query.lease)
    return _Found(statuses, slots, run, slots if len(run) == len(slots) else slots.take(run))


def _lease(
    turn: Turn, session: Session, query: Query, owner: SizeClass, claimed: Slots, run: Slots
) -> LeaseId:
    """Hold the claimed slots, which stand at the first places of `run`; they were used now."""
    state = turn.state
    places = query.first_block + run[: len(claimed)]
    firsts = state.slots.firsts(claimed)
    if np.count_nonzero(firsts) == len(claimed):
        distinct = claimed
    else:
        distinct, places = claimed[firsts], places[firsts]
    held = lease.hold(turn, session, query, owner, distinct)
    used = prefix.of_context(state, session, query.context)
    slot_lifecycle.touch_each(turn, owner, distinct, used.number)
    if state.below.tiers:
        writing.used(turn, owner, claimed)
    prefix.note_each(state, session, used, distinct, places)
    return held


def _sources(state: State, statuses: npt.NDArray[np.uint8], slots: Slots) -> bytes:
    """From where the hits were brought up; nothing where none was."""
    hit = np.flatnonzero(statuses == HIT)
    of_hits = state.slots.sources[slots[hit]]
    if not of_hits.any():
        return b""
    sources = np.zeros(len(statuses), dtype=np.uint8)
    sources[hit] = of_hits
    return sources.tobytes()


def _statuses(
    state: State, owner: SizeClass, tags: U64, slots: Slots, known: Bools
) -> npt.NDArray[np.uint8]:
    """Statuses of keys of which some are not in the index; the policy hears which."""
    statuses = np.zeros(len(slots), dtype=np.uint8)
    statuses[known] = _STATUS_OF_STATE.take(state.slots.state.take(slots[known]))
    missed = ~known
    owner.policy.missed(tags[missed])
    if not state.draining:
        statuses[missed] = np.where(state.admission.would_admit(tags[missed]), ADMIT, MISS)
    return statuses


def _claimed(statuses: npt.NDArray[np.uint8], mode: LeaseMode) -> Slots:
    """Places of the keys that a lease of this mode would hold."""
    hit = statuses == HIT
    hits = int(np.count_nonzero(hit))
    if hits == len(hit):
        return np.arange(hits)
    return hit.nonzero()[0] if mode is LeaseMode.ALL else np.arange(int(np.argmin(hit)))


def touch(turn: Turn, event: Touched) -> None:
    """Readable blocks among these were used; the unknown were sighted, for the reuse filter.

    What is still being stored is no hit, but it becomes as young as the others.
    """
    state = turn.state
    session = state.require_session(event.session)
    (owner,) = check_keys(state, session, [(event.group, event.keys)])
    words = event.keys.words
    _, tags, slots = locate(state, session, event.context.account, event.group, words)
    unknown = slots == NOWHERE
    if unknown.any():
        state.admission.offer(each_once(tags[unknown]))
    if event.context.prefetch:
        search.prefetch(turn, session, event, tags, np.flatnonzero(unknown))
    slots = slots[~unknown]
    ready = state.slots.state[slots] == READY
    request = prefix.number_of(session, event.context.request)
    slot_lifecycle.touch(turn, owner, slots[ready], request)
    state.reuse.use(tags[~unknown], owner.spec.block_bytes, turn.now_ns)
    if not ready.all():
        slot_lifecycle.touch(turn, owner, slots, request, as_use=False)
