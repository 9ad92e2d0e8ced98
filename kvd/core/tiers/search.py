"""What a request misses in host memory is sought in the tiers below, one after the other.

The first lookup that misses a block asks, and the answer to it is PENDING. Later ones of the same
request are answered by what the tiers have said. What no tier has said by the deadline is a miss,
and so is a block that could not be brought up: nobody waits twice. All of it is forgotten with the
request, or some seconds after the deadline.

Where only a whole prefix is of use, no block behind the first one that is nowhere is sought.

What a prefill engine on another node computes may come later than the request that goes on with it:
for such a request the tiers that nodes share are asked again, less and less often, until its
deadline. It is the request's lookups that ask; one that nobody looks up costs nothing.

A hint may have blocks sought that nobody looks up yet. Nobody waits for such a search, and it takes
half of each bound only, so it is in no lookup's way. A lookup of the same request goes on with it,
but for one that found less than there may be by now: then it asks anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import numpy as np
import numpy.typing as npt

from kvd.core.actions import AskTier
from kvd.core.blocks import namespaces
from kvd.core.claims import advice
from kvd.core.events import Hint, LeaseMode, Query, TierAnswered, Touched
from kvd.core.keys import U64, KeyBatch, RequestId, ScopeName, SearchId, Slots
from kvd.core.model.index import NOWHERE
from kvd.core.model.slots import RESERVED
from kvd.core.model.state import Session, State
from kvd.core.model.tiers import (
    MAX_SEARCHES,
    MAX_SOUGHT_BLOCKS,
    MAX_TENANT_SOUGHT_BLOCKS,
    SEARCH_BLOCKS,
    Belief,
    Reach,
    Search,
    Sought,
    Tier,
    TierCopy,
)
from kvd.core.model.turn import Turn
from kvd.core.tiers import pace, residence
from kvd_proto.groups import GroupKind
from kvd_proto.key_status import PENDING
from kvd_proto.tags import tags_of

BELIEVED_NS = 5_000_000_000  # after the deadline, what tiers said of a request's blocks stands
ENDED_SOUGHT_AT_ONCE = 256  # of what ended requests sought, by group and account, in one event
EXPIRED_REQUESTS_AT_ONCE = 64  # requests' groups of one patience, in one tick
UNANSWERED_AT_ONCE = 64  # searches of a tier that has gone, in one event
AWAITED_AGAIN_NS = 20_000_000  # then twice as long each time: for a block of another node's
PREFETCH_PART = 0.5  # of each bound, for what nobody looks up yet

_ABSENT = int(Belief.ABSENT)  # to compare with an enum's member takes ten times as long


def look(
    turn: Turn, session: Session, query: Query, tags: U64, missed: Slots
) -> npt.NDArray[np.uint8]:
    """MISS or PENDING for those of the query's keys that host memory lacks, ascending."""
    found = _sought_of(session, query)
    if found is not None and found.is_prefetch:
        _take_over(turn, session, query, found)
    return _look(turn, session, query, tags, missed)


def prefetch(turn: Turn, session: Session, event: Touched, tags: U64, missed: Slots) -> None:
    """Seek those of the keys that host memory lacks, for nobody yet; what is there comes up."""
    state = turn.state
    is_prefix = (
        state.namespace_of(session).classes[event.group].spec.kind is GroupKind.FULL_ATTENTION
    )
    mode = LeaseMode.PREFIX if is_prefix else LeaseMode.ALL
    query = Query(event.context, event.group, event.keys, mode, first_block=event.first_block)
    lacking, beyond = len(missed), 0
    if _readable(state, session, query):
        found = _sought_of(session, query)
        if found is not None and found.is_prefetch and _is_late(turn, session, query):
            _drop(state, session, found)
        _look(turn, session, query, tags, missed, is_prefetch=True)
        lacking, beyond = 0, _beyond(turn, session, query, tags, missed)
    advice.count(state, Hint.PREFETCH, advice.NO_TIER, lacking)
    advice.count(state, Hint.PREFETCH, advice.BEYOND, beyond)
    advice.count(state, Hint.PREFETCH, advice.FOLLOWED, len(tags) - lacking - beyond)


def _beyond(turn: Turn, session: Session, query: Query, tags: U64, missed: Slots) -> int:
    """How many of these were not sought since there was no room."""
    sought = _sought_of(session, query)
    if sought is None:
        return len(missed)
    if turn.now_ns >= sought.until_ns:
        return 0
    places = query.first_block + missed
    if sought.cut is not None:
        missed = missed[places < sought.cut]
    return sum(tag not in sought.blocks for tag in tags[missed].tolist())


def _take_over(turn: Turn, session: Session, query: Query, sought: Sought) -> None:
    """The lookups of a request go on with what was sought for it before."""
    is_prefix = query.lease is not LeaseMode.ALL
    lacks = any((each.beliefs == Belief.ABSENT).any() for each in sought.searches)
    is_late = turn.now_ns >= sought.until_ns
    if lacks or is_late or query.context.awaits or sought.is_prefix is not is_prefix:
        _drop(turn.state, session, sought)
        return
    sought.is_prefetch = False
    found(turn.state, sought)  # what had no room may have it now


def _look(
    turn: Turn,
    session: Session,
    query: Query,
    tags: U64,
    missed: Slots,
    *,
    is_prefetch: bool = False,
) -> npt.NDArray[np.uint8]:
    state = turn.state
    statuses = np.zeros(len(missed), dtype=np.uint8)
    tiers = _readable(state, session, query)
    if not tiers or not len(missed):
        return statuses
    found = _sought_of(session, query)
    places = query.first_block + missed
    is_prefix = query.lease is not LeaseMode.ALL
    end = len(missed)
    if found is not None and is_prefix and found.cut is not None:
        end = int(np.searchsorted(places, found.cut))
    late = _is_late(turn, session, query)
    if found is not None and found.waiting and turn.now_ns >= found.again_ns and not late:
        _ask_again(turn, found)
    if found is None:  # a request's first question: most of those that are nowhere ask no more
        unknown = np.arange(end)
    else:
        unknown = _not_sought(found, tags[missed[:end]], statuses, late=late, is_prefix=is_prefix)
    if len(unknown) and not late:
        of_them = tags[missed[unknown]]
        # A query may name a block twice: it is sought once.
        _, firsts = np.unique(of_them, return_index=True)
        part = PREFETCH_PART if is_prefetch else 1.0
        firsts = np.sort(firsts)[: _sought_room(state, session, found, part)]
        if len(firsts):
            rows = unknown[firsts]
            sought = found or _begin(turn, session, query, tiers, is_prefetch=is_prefetch)
            if query.context.prefetch and not is_prefetch:  # as early as it could be
                advice.count(state, Hint.PREFETCH, advice.FOLLOWED, len(firsts))
            words = query.keys.words[missed[rows]]
            if _seek(turn, sought, words, of_them[firsts], places[rows], tiers):
                all_are = len(firsts) == len(unknown)
                asked = unknown if all_are else unknown[np.isin(of_them, of_them[firsts])]
                statuses[asked] = PENDING
    return statuses


def _not_sought(
    found: Sought, tags: U64, statuses: npt.NDArray[np.uint8], *, late: bool, is_prefix: bool
) -> npt.NDArray[np.int64]:
    """Rows of these tags that the request does not seek yet; PENDING is noted of those it does."""
    fresh: list[int] = []
    for row, tag in enumerate(tags.tolist()):
        known = found.blocks.get(tag)
        if known is None:
            fresh.append(row)
        elif late or known[0].beliefs.item(known[1]) == _ABSENT:
            if is_prefix:
                break
        else:
            statuses[row] = PENDING
    return np.array(fresh, dtype=np.int64)


def _is_late(turn: Turn, session: Session, query: Query) -> bool:
    """Whether the request has waited for tiers as long as it may."""
    sought = _sought_of(session, query)
    return sought is not None and turn.now_ns >= sought.until_ns


def _sought_of(session: Session, query: Query) -> Sought | None:
    """What the query's request seeks in its group."""
    of_request = session.sought.get(query.context.request, {})
    return of_request.get((query.context.account, query.group))


def waited_for_enough(turn: Turn, session: Session, query: Query, slots: Slots) -> Slots:
    """Places among these slots of blocks that a tier brings up, and for which nobody waits longer.

    The request has waited as long as it may, or whoever began the copy has: a tier that is late
    once is late for all.
    """
    state = turn.state
    rows = np.flatnonzero(slots != NOWHERE)
    if not state.below.promoting.whole:
        return rows[:0]
    rows = rows[state.slots.state[slots[rows]] == RESERVED]
    numbers = state.slots.fillings[slots[rows]]
    is_late = _is_late(turn, session, query)
    over = [
        number
        for number in np.unique(numbers).tolist()
        if isinstance(copy := state.fillings[number], TierCopy)
        and (is_late or turn.now_ns >= copy.until_ns)
    ]
    found: Slots = rows[np.isin(numbers, over)]
    return found


def _readable(state: State, session: Session, query: Query) -> list[Tier]:
    """Tiers that may be asked for this request, in order."""
    allowed = query.context.tiers_allowed
    fingerprint = state.namespace_of(session).spec.fingerprint
    return [
        tier
        for tier in state.below.tiers
        if tier.serves(fingerprint) and (not allowed or tier.terms.reach in allowed)
    ]


def _sought_room(state: State, session: Session, sought: Sought | None, part: float) -> int:
    """Blocks that the session may still seek, for this request, of this part of the bounds.

    The search that begins with them counts, too: it outlives those that have come.
    """
    if sought is not None and len(sought.searches) >= MAX_SEARCHES:
        return 0
    tenant = state.namespace_of(session).tenant.tenant
    return max(
        0,
        min(
            int(MAX_SOUGHT_BLOCKS * part) - session.sought_blocks,
            int(MAX_TENANT_SOUGHT_BLOCKS * part) - state.below.sought_of.get(tenant, 0),
        )
        - SEARCH_BLOCKS,
    )


def _count(state: State, sought: Sought, change: int) -> None:
    """What is sought takes more of the bounds, or less."""
    tenant = sought.owner.tenant.tenant
    session = state.sessions.get(sought.session)
    if session is not None:
        session.sought_blocks += change
    has = state.below.sought_of.get(tenant, 0) + change
    if has:
        state.below.sought_of[tenant] = has
    else:
        state.below.sought_of.pop(tenant, None)


def scope_name(state: State, session: Session, account: str, group: int) -> ScopeName:
    """By which name tiers know what this session's keys of a group mean."""
    generation = state.namespaces[session.namespace].cleared_below
    return ScopeName(session.namespace, session.epoch, account, group, generation)


def _begin(
    turn: Turn, session: Session, query: Query, tiers: list[Tier], *, is_prefetch: bool
) -> Sought:
    state = turn.state
    account, group = query.context.account, query.group
    namespace = state.namespace_of(session)
    patience_ns = max(tier.terms.seek_ns for tier in tiers)
    sought = Sought(
        session.session,
        query.context.request,
        namespace.classes[group],
        scope_name(state, session, account, group),
        namespaces.scope_seed(state, namespace, session.epoch, account, group),
        query.lease is not LeaseMode.ALL,
        patience_ns,
        turn.now_ns + patience_ns,
        is_prefetch=is_prefetch,
    )
    if query.context.awaits and not is_prefetch:  # it is lookups that ask again
        shared = [tier.tier for tier in tiers if tier.terms.reach is Reach.CLUSTER]
        sought.shared, sought.wait_ns = tuple(shared), AWAITED_AGAIN_NS
    session.sought.setdefault(sought.request, {})[account, group] = sought
    state.below.expiring.add(sought, patience_ns)
    return sought


def _seek(
    turn: Turn, sought: Sought, words: U64, tags: U64, places: Slots, tiers: list[Tier]
) -> bool:
    """Ask for these blocks. False: no tier could bring them in time."""
    state = turn.state
    count = len(tags)
    search = Search(
        SearchId(state.below.next_search),
        sought,
        words,
        places,
        np.full(count, Belief.ASKED, dtype=np.uint8),
        np.zeros(count, dtype=np.uint8),
        np.arange(count),
        [tier.tier for tier in tiers],
    )
    state.below.next_search += 1
    sought.searches.append(search)
    sought.blocks.update(zip(tags.tolist(), zip(repeat(search), range(count)), strict=True))
    _count(state, sought, count + SEARCH_BLOCKS)
    _ask_next(turn, search)
    return bool(len(search.asked))


def _ask_next(turn: Turn, search: Search) -> None:
    """Ask the next tier for what is still unknown; what no tier is left for is nowhere."""
    state, sought = turn.state, search.sought
    while search.to_ask and len(search.asked):
        tier = state.below.tiers[search.to_ask.pop(0)]
        may_wait = bool(search.to_ask) and not search.deferred & tier.bit
        if may_wait and pace.is_silent(tier, turn.now_ns):
            search.deferred |= tier.bit
            search.to_ask.append(tier.tier)
            continue
        spec = state.namespaces[sought.name.namespace].spec
        if not tier.serves(spec.fingerprint):
            continue
        if not pace.may_ask(tier, search, turn.now_ns):
            tier.counters.too_slow += len(search.asked)
        else:
            pace.asked(search, turn.now_ns)
            tier.searches[search.search] = search
            keys = KeyBatch(search.words[search.asked], spec.hash_bytes)
            turn.orders.append(AskTier(tier.tier, search.search, sought.name, keys))
            return
    if sought.shared and len(search.asked) and turn.now_ns < sought.until_ns:
        if not sought.waiting:
            sought.again_ns = turn.now_ns + sought.wait_ns
        sought.waiting.append(search)
        return
    absent(sought, search, search.asked)
    search.asked = search.asked[:0]


def _ask_again(turn: Turn, sought: Sought) -> None:
    """Ask the tiers that nodes share for what no tier held when it was asked last."""
    searches, sought.waiting = sought.waiting, []
    sought.wait_ns *= 2
    for search in searches:
        search.to_ask = list(sought.shared)
        _ask_next(turn, search)


def absent(sought: Sought, search: Search, rows: Slots) -> None:
    """These blocks are misses for this request from now on."""
    if not len(rows):
        return
    search.beliefs[rows] = Belief.ABSENT
    if sought.is_prefix:
        first = int(search.places[rows].min())
        sought.cut = first if sought.cut is None else min(sought.cut, first)


def answered(turn: Turn, event: TierAnswered) -> None:
    """What a tier holds can be brought up; for the rest the next tier is asked."""
    tier = turn.state.below.tiers[event.tier]
    search = tier.searches.pop(event.search, None)
    if search is None:
        return
    if not event.refused:
        pace.answered(tier, search, turn.now_ns)
    if search.sought.is_over:
        return
    asked = search.asked
    held = event.held
    failed = event.failed or len(held) != len(asked)  # a tier of a site's own may say anything
    if failed or event.refused:
        held = np.zeros(len(asked), dtype=np.bool_)
    there = asked[held]
    if event.refused:
        tier.counters.refused += len(asked)
    elif failed:
        tier.counters.unanswered += len(asked)
    else:
        _count_answer(turn, tier, search, event)
    search.beliefs[there] = Belief.HELD
    search.holders[there] = tier.tier
    if len(there):
        found(turn.state, search.sought)
    search.asked = asked[~held]
    _ask_next(turn, search)


def _count_answer(turn: Turn, tier: Tier, search: Search, event: TierAnswered) -> None:
    """Of a tier that has said which it holds, and maybe of some nothing."""
    held, unsaid = event.held, np.zeros(len(event.held), dtype=np.bool_)
    if len(event.unknown) == len(held):
        unsaid = event.unknown & ~held
    lacked = search.asked[~held & ~unsaid]
    _tell_watchers(turn, tier, search, search.asked[held], lacked)
    tier.counters.hits += int(held.sum())
    tier.counters.misses += len(lacked)
    tier.counters.unanswered += int(unsaid.sum())


def _tell_watchers(turn: Turn, tier: Tier, search: Search, held: Slots, lacked: Slots) -> None:
    name, seed = search.sought.name, search.sought.seed
    for tell, rows in ((residence.found, held), (residence.lacking, lacked)):
        if len(rows):
            words = search.words[rows]
            tell(turn, tier, name, words, tags_of(words, seed))


def found(state: State, sought: Sought) -> None:
    """Some of it is held below: it is brought up from the step's end on.

    For a hint at once: its engine may have no step to take.
    """
    if sought.is_prefetch:
        state.below.due.append(sought)
    else:
        state.sessions[sought.session].found_below[sought] = None


def tier_gone(turn: Turn, tier: Tier) -> None:
    """What it was asked, the next tier is asked, some an event; what it held is nowhere."""
    turn.state.below.unanswered.extend(tier.searches.values())
    tier.searches = {}


def ask_some_others(turn: Turn) -> None:
    """A few of the searches whose tier has gone."""
    unanswered = turn.state.below.unanswered
    for _ in range(min(len(unanswered), UNANSWERED_AT_ONCE)):
        search = unanswered.popleft()
        if not search.sought.is_over:
            _ask_next(turn, search)


def end(state: State, session: Session, requests: Iterable[RequestId]) -> int:
    """These requests seek nothing any more; a hint may be for those that come after them.

    How many of them, from the first on; the others, where they seek much, are for another event.
    """
    dropped = whole = 0
    for request in requests:
        for sought in list(session.sought.get(request, {}).values()):
            if sought.is_prefetch:
                continue
            if dropped >= ENDED_SOUGHT_AT_ONCE:
                return whole
            _drop(state, session, sought)
            dropped += 1
        whole += 1
    return whole


def end_all(state: State, session: Session) -> None:
    """Nothing of the session is sought any more."""
    for of_request in session.sought.values():
        for sought in of_request.values():
            _forget(state, sought)
    session.sought.clear()


def expire(turn: Turn) -> None:
    """Forget what tiers said long ago: it is sought anew when it is asked for again."""
    state, last_ns = turn.state, turn.now_ns - BELIEVED_NS
    due = state.below.expiring.due(lambda s: s.until_ns <= last_ns, EXPIRED_REQUESTS_AT_ONCE)
    for sought in due:
        _drop(state, state.sessions[sought.session], sought)


def _drop(state: State, session: Session, sought: Sought) -> None:
    """Its request seeks it no longer."""
    of_request = session.sought[sought.request]
    del of_request[sought.name.account, sought.name.group]
    if not of_request:
        del session.sought[sought.request]
    _forget(state, sought)


def _forget(state: State, sought: Sought) -> None:
    sought.is_over = True
    state.below.expiring.remove(sought, sought.patience_ns)
    state.below.stalled.discard(sought)
    if (session := state.sessions.get(sought.session)) is not None:
        session.found_below.pop(sought, None)
    _count(state, sought, -len(sought.blocks) - len(sought.searches) * SEARCH_BLOCKS)
    sought.blocks = {}
    sought.searches = []
    sought.waiting = []


def arrived(state: State, sought: Sought, tags: U64) -> None:
    """These blocks are in host memory now, and sought no longer."""
    if sought.is_over:
        return
    for tag in tags.tolist():
        if sought.blocks.pop(tag, None) is not None:
            _count(state, sought, -1)
