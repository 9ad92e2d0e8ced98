"""What a tier holds of a request's blocks is brought up into host memory.

It begins at the end of the engine's step, or at once where a hint sought it: all that one tier was
found to hold of one request's group by then is one copy. Some of it may fail; what has come is
readable. However much is asked for, promotions take a part of the pool only, of which each tenant
leaves as much to others as it has, and an event begins a few of them. What has no room yet waits
for the end of others. No block takes the room of one that its own request has found or brought up
before.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from kvd.core.actions import ReadFromTier
from kvd.core.blocks import namespaces, slot_lifecycle
from kvd.core.claims import hand_off, prefix
from kvd.core.keys import NO_SLOTS, Bools, KeyBatch, ScopeId, Slots
from kvd.core.model.index import NOWHERE
from kvd.core.model.job import Offer, Part
from kvd.core.model.size_class import SizeClass
from kvd.core.model.state import Session, State
from kvd.core.model.tiers import Belief, Below, CopyKind, Search, Sought, Tier, TierCopy
from kvd.core.model.turn import Turn
from kvd.core.policy.base import Sight
from kvd.core.room.eviction import make_room
from kvd.core.tiers import copies, pace, search
from kvd_proto.tags import tags_of

PROMOTED_AT_ONCE = 256  # blocks, in one event
WOKEN_AT_ONCE = 4  # requests that wait for room
LATE_AT_ONCE = 8  # reads that are given up, in one tick
GIVEN_UP_NS = 5_000_000_000  # after the deadline


def step_ended(state: State, session: Session) -> None:
    """What was found for the session's requests is due to be brought up."""
    state.below.due.extend(session.found_below)
    session.found_below.clear()


def go_on(turn: Turn) -> None:
    """Bring up some of what is due; the rest with the next piece of work."""
    below = turn.state.below
    sought = below.due.popleft()
    if sought.is_over or turn.now_ns >= sought.until_ns:
        return
    match _begin_some(turn, sought):
        case Left.MORE:
            below.due.append(sought)
        case Left.NO_ROOM:
            below.stalled.add(sought)


class Left(enum.Enum):
    """What is left of a request's promotions after some were begun."""

    NOTHING = "all that was found is on its way"
    MORE = "the next piece of work goes on"
    NO_ROOM = "as much is on its way as may be: the next promotion's end lets it go on"


def _begin_some(turn: Turn, sought: Sought) -> Left:
    left = PROMOTED_AT_ONCE
    for found in sorted(sought.searches, key=lambda each: int(each.places[0])):
        rows = np.flatnonzero(found.beliefs == Belief.HELD)
        if sought.is_prefix and sought.cut is not None:
            rows = rows[found.places[rows] < sought.cut]
        if not len(rows):
            continue
        if not left:
            return Left.MORE
        for number in np.unique(found.holders[rows]).tolist():
            of_tier = rows[found.holders[rows] == number]
            some = of_tier[:left]
            left -= len(some)
            tier = turn.state.below.tiers[number]
            if len(some) and not _promote(turn, found, tier, some):
                return Left.NO_ROOM
            if len(some) < len(of_tier):
                return Left.MORE
    return Left.NOTHING


def _promote(turn: Turn, found: Search, tier: Tier, rows: Slots) -> bool:
    """Read these blocks of the search; those that can't be are misses.

    False: some are left for when promotions under way have ended.
    """
    state, sought = turn.state, found.sought
    fresh = _not_there(state, found, rows)
    if not len(fresh):
        return True
    spec = state.namespaces[sought.name.namespace].spec
    if not tier.serves(spec.fingerprint) or state.draining:
        _give_up(tier, found, fresh)
        return True
    if not pace.may_read(tier, found, turn.now_ns):
        tier.counters.too_slow += len(fresh)
        search.absent(sought, found, fresh)
        return True
    fits = _room(state, sought)
    if not fits and not state.below.promoting.whole:  # nor would there ever be
        _give_up(tier, found, fresh)
        return True
    wanted, fresh = fresh, fresh[:fits]
    if not len(fresh):
        return False
    scope = _scope_with_room(turn, sought, len(fresh))
    if scope is None:
        _give_up(tier, found, wanted)  # the end of no promotion would give them room
        return True
    _begin_read(turn, found, tier, fresh, scope)
    return len(fresh) == len(wanted)


def _scope_with_room(turn: Turn, sought: Sought, count: int) -> ScopeId | None:
    """The scope to read so many blocks into; None: it may not be opened, or there is no room."""
    state = turn.state
    scope = _scope(turn, sought)
    kept = _kept(state, sought, scope)
    if scope is None or make_room(turn, [(sought.owner, count)], lambda: [kept]):
        return None
    if scope not in state.scopes:  # making room took the last block that it had
        scope = _scope(turn, sought)
        assert scope is not None, "it could be opened a moment ago"
    return scope


def _begin_read(turn: Turn, found: Search, tier: Tier, rows: Slots, scope: ScopeId) -> None:
    """There is room for these blocks of the search: the tier is asked for their bytes."""
    state, sought = turn.state, found.sought
    offer = _offer(sought, found, rows)
    used = state.sessions[sought.session].prefixes.get(sought.request)
    sight = Sight(turn.now_ns)
    if used is not None:
        sight = prefix.sight(turn, used, scope, int(offer.blocks[0]))
    slots = slot_lifecycle.reserve(turn, offer, scope, sight)
    state.slots.below[slots] = tier.bit
    state.slots.sources[slots] = tier.terms.reach
    part = Part(sought.owner, (scope,), slots, slots, copies.NO_BLOCKS)
    copy = copies.begin(turn.state, tier, CopyKind.READ, part)
    copy.sought, copy.places = sought, found.places[rows]
    pace.read_began(copy, turn.now_ns)
    state.add_filling(copy)
    state.below.reading.add(copy, copy.until_ns)
    found.beliefs[rows] = Belief.ON_ITS_WAY
    state.below.promoting.count(sought.owner.tenant.tenant, copy.nbytes)
    keys = KeyBatch(offer.words, state.namespaces[sought.name.namespace].spec.hash_bytes)
    turn.orders.append(ReadFromTier(tier.tier, copy.copy, sought.name, keys, slots))


def _not_there(state: State, found: Search, rows: Slots) -> Slots:
    """Those that nobody has stored, or is bringing up, since they were sought."""
    sought = found.sought
    scope = namespaces.find_named(state, sought.name.scope)
    if scope is None:
        return rows
    tags = tags_of(found.words[rows], sought.seed)
    slots = state.index.find(tags, found.words[rows], scope.scope)
    there = slots != NOWHERE
    search.arrived(state, sought, tags[there])
    found.beliefs[rows[there]] = Belief.ON_ITS_WAY  # the index says what becomes of them
    rest: Slots = rows[~there]
    return rest


def _kept(state: State, sought: Sought, scope: ScopeId | None) -> tuple[SizeClass, Slots]:
    """What the request has found of this group so far, above or below."""
    used = state.sessions[sought.session].prefixes.get(sought.request)
    if used is None or scope is None:
        return sought.owner, NO_SLOTS
    return sought.owner, prefix.held(state, used, scope)


def _note(state: State, copy: TierCopy, done: Bools) -> None:
    """The request has found these blocks, if it is still there."""
    sought = copy.sought
    if sought is None or sought.is_over or not done.any():
        return
    session = state.sessions[sought.session]
    if sought.is_prefetch and sought.request not in session.prefixes:
        return  # it may have ended, or never begin
    used = prefix.of(state, session, sought.request)
    (part,) = copy.parts
    prefix.note(state, session, used, part.slots[done], copy.places[done])


def _scope(turn: Turn, sought: Sought) -> ScopeId | None:
    """The scope, opened if it has to be and may."""
    state = turn.state
    session = state.sessions[sought.session]
    namespace = state.namespaces[sought.name.namespace]
    if session.epoch != sought.name.epoch or namespace.cleared_below != sought.name.generation:
        return None  # the engine's cache was reset, or the namespace cleared
    spec, account = namespace.spec, sought.name.account
    if not namespaces.scopes_fit(state, spec, session.payer, session.epoch, account):
        return None
    return namespaces.open_scope(turn, session, account, sought.name.group).scope


def _offer(sought: Sought, found: Search, rows: Slots) -> Offer:
    words = found.words[rows]
    return Offer(
        sought.owner,
        None,
        words,
        tags_of(words, sought.seed),
        np.empty((len(rows), 0), dtype=np.uint32),
        found.places[rows],
        np.full(len(rows), NOWHERE, dtype=np.int64),
    )


def _room(state: State, sought: Sought) -> int:
    """Blocks that the tenant may still have on their way up."""
    most = int(state.pool_bytes * state.config.promotion_share)
    if sought.is_prefetch:  # the rest is left to requests that wait
        most = int(most * search.PREFETCH_PART)
    owner = sought.owner
    return state.below.promoting.fits(owner.tenant.tenant, most, owner.block_bytes)


def _give_up(tier: Tier, found: Search, rows: Slots) -> None:
    tier.counters.unpromoted += len(rows)
    search.absent(found.sought, found, rows)


def ended(turn: Turn, copy: TierCopy, done: Bools) -> None:
    """What has come is readable; the rest is a miss for who sought it."""
    state, sought = turn.state, copy.sought
    assert sought is not None, "a read is for somebody"
    (part,) = copy.parts
    owner = part.size_class
    _give_back_share(state, copy)
    cleared = namespaces.is_cleared(state, owner.namespace, part.scope)
    good = part.slots[done] if not (copy.failed or cleared) else part.slots[:0]
    bad = part.slots[~done] if not cleared else part.slots
    tags = state.slots.tags[part.slots]
    counters = copy.tier.counters
    counters.promoted += len(good)
    counters.promoted_bytes += len(good) * owner.block_bytes
    counters.failed_reads += len(part.slots) - len(good)
    if len(bad) and not copy.failed:
        hand_off.blocks_lost(state, owner, bad)
        slot_lifecycle.quarantine_reserved(state, owner, bad)
    copies.forget(state, copy)
    del state.fillings[copy.number]
    if len(good):
        slot_lifecycle.make_ready(turn, owner, good)
        _note(state, copy, done)
    state.released.extend(copy.end_waits(done=len(good) == len(part.slots)))
    _tell_seeker(state, sought, tags, np.isin(part.slots, good))


def _give_back_share(state: State, copy: TierCopy) -> None:
    """Others may bring up as much instead; once for each read."""
    if state.below.reading.remove(copy):
        (part,) = copy.parts
        tenant = part.size_class.tenant.tenant
        state.below.promoting.count(tenant, -copy.nbytes)
        _wake_some(state.below, tenant)


def _wake_some(below: Below, tenant: str) -> None:
    """Of those who found no room, as many as one promotion's end may help: of its tenant, to whom
    it gives the most, and of others. The tenant's last one wakes all of its, the last one all."""
    promoting, stalled = below.promoting, below.stalled
    own = WOKEN_AT_ONCE if tenant in promoting.taken else None
    others = WOKEN_AT_ONCE if promoting.whole else None
    below.due.extend(stalled.take_of(tenant, own))
    below.due.extend(stalled.take_of_others(tenant, others))


def _tell_seeker(state: State, sought: Sought, tags: npt.NDArray[np.uint64], come: Bools) -> None:
    for tag in tags[~come].tolist():
        known = sought.blocks.get(tag)
        if known is not None:
            search.absent(sought, known[0], np.array([known[1]]))
    search.arrived(state, sought, tags[come])


def fail(state: State, copy: TierCopy) -> None:
    """Nobody will find what it brings up; its slots are free once it has ended."""
    if copy.failed or copy.kind is not CopyKind.READ:
        return
    copy.failed = True
    (part,) = copy.parts
    hand_off.blocks_lost(state, part.size_class, part.slots)
    slot_lifecycle.quarantine_reserved(state, part.size_class, part.slots)
    state.released.extend(copy.end_waits(done=False))


def give_up_late(turn: Turn) -> None:
    """Have nobody wait for reads that should have ended long ago.

    A process that waits for a disk can't be ended, and its slots can't be used. But their blocks
    may be stored into others, and other tiers may bring up theirs: this one is given no more, for
    its process was told to end.
    """
    state, last_ns = turn.state, turn.now_ns - GIVEN_UP_NS
    for copy in state.below.reading.late(last_ns, LATE_AT_ONCE):
        fail(state, copy)
        _give_back_share(state, copy)
