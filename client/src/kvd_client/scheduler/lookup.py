"""Lookups: probe the page at arrival, ask what it shows, wait at most once in a step.

Where a tier below may hold blocks that the page does not show, every request asks: first for what
follows what the page shows, since behind a miss there most often nothing is of use.

A request's lookup leaves when the request arrives and nobody waits for it. The first request
of a step that needs an answer which has not come waits for all unanswered lookups together,
once, for milliseconds; whoever is still without an answer is asked again in the next step. A
request waits for its answer while computing what the page shows of it would take longer.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np

from kvd_client.draft import BlockRun, QueryDraft
from kvd_client.identity import NamespaceFields
from kvd_client.scheduler import hits, shown
from kvd_client.scheduler.pace import TokenPace
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.scheduler.request import GivenUp, Knowledge, Lookup, LookupState, Request
from kvd_client.session import Lookups, SessionView
from kvd_proto.groups import GroupKind
from kvd_proto.key_status import ADMITTED_BIT, DOUBT_BIT, HIT, MISS, PENDING, RETRY, STATUS_BITS
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE

KEYS_PER_CALL = MAX_KEYS_PER_MESSAGE // 2
LEASE_MARGIN = 0.7  # of the daemon's time: both clocks start at different moments
UNMEASURED_S = 1.0  # what a hit is worth waiting for before anything was computed
ASK_AGAIN_SHARE = 1 / 8  # of the time that a request has been deferred
ASK_AGAIN_MAX_S = 0.05
HEARD_WITHIN_S = 0.5  # who trusts the page must have heard the daemon so lately


class LookupQueue:
    """Asks the daemon which tokens of requests can be loaded, with few calls."""

    def __init__(
        self,
        connection: Lookups,
        namespace: NamespaceFields,
        options: SchedulerOptions,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._groups = namespace.groups
        self._widths = [group.tokens_per_block for group in namespace.groups]
        self._boundary_tokens = namespace.boundary_tokens
        # Groups of which a hit takes every block: number, width, tokens beyond the boundary.
        self._unbroken = [
            (number, group.tokens_per_block, int(group.drafter))
            for number, group in enumerate(namespace.groups)
            if group.kind is GroupKind.FULL_ATTENTION
        ]
        self._options = options
        self._clock = clock
        self._unanswered: dict[int, Request] = {}  # by call id
        self._waited = False
        self._is_busy = False  # the last step computed something: others wait behind a lookup
        self._stake_s: float | None = None  # of this step, once somebody had to know
        self.pace = TokenPace()
        self.spare_tokens = 1  # at a prompt's end, that the engine does not load
        self._renewed_s = 0.0
        self._renewed_generation = 0
        self.released_leases: list[int] = []  # to go with the next step
        self._released: list[Request] = []  # before all of their answers had come
        self.given_up: collections.Counter[str] = collections.Counter()  # lookups, by `GivenUp`

    # -- for the scheduler ------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Probe for the request's blocks and ask for what seems to be there. Never waits."""
        if request.lookup.state is LookupState.NEW and not request.params.skip_lookup:
            session = self._connection.session
            if session is not None:
                self._begin(request, session, computed_tokens=0)

    def hit_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens from the prompt's start that device and daemon have together.

        None: ask again in the next step. May wait, once in a step.
        """
        cap = self._cap_tokens(request, computed_tokens)
        if request.max_hit_tokens is not None:
            cap = min(cap, request.max_hit_tokens)
        if cap <= computed_tokens or request.params.skip_lookup:
            return computed_tokens
        match self.resolve(request, computed_tokens):
            case Knowledge.NOTHING:
                return computed_tokens
            case Knowledge.UNANSWERED:
                return None
            case Knowledge.STATUSES:
                return self._decide(request, computed_tokens, cap)

    def resolve(self, request: Request, computed_tokens: int) -> Knowledge:
        """Bring `request.lookup.statuses` up to date. May wait, once in a step."""
        session = self._connection.session
        lookup = request.lookup
        if lookup.state is LookupState.CLOSED:
            return Knowledge.NOTHING
        if session is None:
            self.forget(request)
            self.give_up(request, GivenUp.NO_SESSION)
            return Knowledge.NOTHING
        if lookup.is_shown and lookup.calls:
            self._take(request)  # before it is too old: the answer may have come
        if lookup.state is not LookupState.NEW and not self._is_fresh(lookup, session):
            self._outdate(request)
        known = self._ask_or_take(request, session, computed_tokens)
        if (
            known is Knowledge.STATUSES
            and session.store_threshold <= 1  # or it was asked for all, for admission verdicts
            and request.lookup.was_asked_elsewhere(self._unbroken, computed_tokens)
        ):
            self._outdate(request)
            known = self._ask_or_take(request, session, computed_tokens)
        return known

    def _ask_or_take(
        self, request: Request, session: SessionView, computed_tokens: int
    ) -> Knowledge:
        lookup = request.lookup
        if lookup.state is LookupState.NEW:
            self._begin(request, session, computed_tokens)
            if lookup.state is LookupState.NEW:
                self._know_miss(request)
        elif lookup.state is LookupState.KNOWN and lookup.calls:
            self._take(request)
        if not self._is_known(request) or (
            self._wants_rest(request, computed_tokens) and not self._is_known(request)
        ):
            closed = request.lookup.state is LookupState.CLOSED
            return Knowledge.NOTHING if closed else Knowledge.UNANSWERED
        lookup = request.lookup  # a new one where the session went before the rest was asked for
        missed = not lookup.statuses or (lookup.missed_page and not lookup.answered)
        return Knowledge.NOTHING if missed else Knowledge.STATUSES

    def step_ended(self, was_sent: bool, *, has_run: bool = True) -> None:
        """The step's message was sent: the daemon renews this session's leases.

        `has_run`: the step computes something.
        """
        self._waited = False
        self._stake_s = None
        self._is_busy = has_run
        session = self._connection.session
        if session is not None and self._released:
            self._released = [each for each in self._released if self._lacks_answers(each)]
        if was_sent and session is not None:
            self._renewed_s = self._clock()
            self._renewed_generation = session.generation

    def give_up(self, request: Request, why: GivenUp) -> None:
        """It is computed, whatever the daemon may have of it."""
        self.given_up[why] += 1
        request.gave_up = why

    def forget(self, request: Request) -> None:
        """Give up what was asked and leased; the request may look up again."""
        lookup = request.lookup
        self._give_up_calls(lookup)
        self.released_leases += lookup.leases
        is_closed = lookup.state is LookupState.CLOSED
        request.lookup = Lookup(LookupState.CLOSED if is_closed else LookupState.NEW)

    def _give_up_calls(self, lookup: Lookup, *, keeps_grid: bool = False) -> None:
        """`keeps_grid`: but for those of the request's own blocks."""
        for call_id in (*(() if keeps_grid else lookup.calls), *lookup.alone.values()):
            self._unanswered.pop(call_id, None)
            self._connection.give_up(call_id)
        lookup.calls, lookup.alone = lookup.calls if keeps_grid else {}, {}

    def _outdate(self, request: Request) -> None:
        """Give up answers that are too old. For how long they deferred it still counts."""
        before = request.lookup
        self.forget(request)
        request.lookup.doubts, request.lookup.looks = before.doubts, before.looks
        request.lookup.alone_doubts = before.alone_doubts

    def release(self, request: Request) -> None:
        """It loads: its leases are needed no more, and what was learned about admission stays."""
        lookup = request.lookup
        request.shown_load_s = self._clock() if lookup.is_shown else None
        self._give_up_calls(lookup, keeps_grid=not lookup.is_shown)
        self.released_leases += lookup.leases
        lookup.leases = []
        lookup.asked_s = float("-inf")  # asked again, it looks up again
        lookup.is_released = True
        if lookup.calls:
            self._released.append(request)

    def _lacks_answers(self, request: Request) -> bool:
        """Whether some are due whose leases nobody needs; those that have come are taken."""
        lookup = request.lookup
        return lookup.is_released and bool(lookup.calls) and not self._take(request)

    def load_failed(self, request: Request) -> None:
        """It misses from now on, or it would fail for ever; once, a wrong page is asked about."""
        self.forget(request)
        if not request.was_refused(self._clock()):
            request.lookup.state = LookupState.CLOSED

    def session_lost(self) -> None:
        """Leases of a session that is gone need no release."""
        self.released_leases.clear()

    # -- asking -----------------------------------------------------------------------------

    def _begin(self, request: Request, session: SessionView, computed_tokens: int) -> None:
        """Probe; where the page shows a usable hit ask for the whole prompt, else it's a miss.

        Where tiers may hold what the page doesn't show, the question is asked anyway; and with a
        reuse filter, for the admission verdicts.
        """
        request.gave_up = None
        lookup = request.lookup
        lookup.generation = session.generation
        lookup.asked_s = lookup.first_asked_s = self._clock()
        # With a reuse filter all are asked for: stores need the others' admission verdicts, too.
        lookup.asked_tokens = 0 if session.store_threshold > 1 else computed_tokens
        if session.page_hides_some:
            lookup.first_tokens = shown.first_tokens(
                request, session, self._unbroken, self._known_counts(request), computed_tokens
            )
            self._ask(request)
            return
        cap = self._cap_tokens(request, computed_tokens)
        next_boundary = (computed_tokens // self._boundary_tokens + 1) * self._boundary_tokens
        nothing_there = False
        if shown.reaches(
            request, session, self._unbroken, range(computed_tokens, min(cap, next_boundary))
        ):
            if next_boundary <= cap and len(self._unbroken) == len(self._groups):
                self._ask(request)
                return
            present = shown.present(request, session, self._widths)
            if self._longest_hit(present, computed_tokens, cap) > computed_tokens:
                self._ask(request)
                return
            nothing_there = not any(flags.any() for flags in present)
        if session.store_threshold > 1:
            self._ask(request)  # nobody waits for these answers
            self._know_miss(request)
        elif computed_tokens or nothing_there:
            self._know_miss(request)
        # Else the device's own prefix may make a hit of what lies beyond it: ask when known.

    def _wants_rest(self, request: Request, computed_tokens: int) -> bool:
        """Ask for all blocks where the first ones end no hit. What is only sought yet may."""
        lookup = request.lookup
        if lookup.first_tokens is None or lookup.state is not LookupState.KNOWN:
            return False
        for group, width, _ in self._unbroken:
            first = lookup.statuses[group][: -(-lookup.first_tokens // width)]
            first = first[computed_tokens // width :] & np.uint8(STATUS_BITS)
            if (first == MISS).any() or (lookup.looks < 2 and (first != HIT).any()):
                return False
        lookup.first_tokens, lookup.asked_tokens = None, computed_tokens
        self._ask_anew(request, self._clock())
        return True

    def _ask_anew(self, request: Request, now: float) -> None:
        lookup = request.lookup
        self.released_leases += lookup.leases
        lookup.leases = []
        lookup.statuses = []
        lookup.sources = {}
        lookup.answered = False
        lookup.first_asked_s = now
        self._ask(request)

    def _ask(self, request: Request) -> None:
        """Ask for all blocks beyond what the device has, up to where it was decided to ask."""
        lookup = request.lookup
        lookup.looks += 1
        asked = [
            (group, first, max(0, count - first))
            for group, count in enumerate(self._asked_counts(request))
            for first in [self._first_asked(request, group)]
        ]
        # Each call has as large a part of every group: what may be leased is shared by them.
        parts = -(-sum(count for _, _, count in asked) // KEYS_PER_CALL)
        calls: list[list[QueryDraft]] = []
        for part in range(parts):
            cuts = [(g, n + c * part // parts, n + c * (part + 1) // parts) for g, n, c in asked]
            calls.append([self._query(request, g, n, end - n) for g, n, end in cuts if n < end])
        lookup.asked_s = self._clock()
        for queries in calls:
            call_id = self._connection.start_lookup(queries)
            if call_id == 0:
                self.forget(request)
                return
            lookup.calls[call_id] = [(query.run.group, query.run.first_block) for query in queries]
            self._unanswered[call_id] = request
        lookup.state = LookupState.ASKED if lookup.calls else LookupState.KNOWN
        if not lookup.calls:
            lookup.statuses = self._nothing_known(request)

    def _query(self, request: Request, group: int, first: int, count: int) -> QueryDraft:
        keys = request.hashes[group][first : first + count]
        lease_all = self._groups[group].kind is not GroupKind.FULL_ATTENTION
        return QueryDraft(request.context, BlockRun(group, first, keys), lease_all)

    def _know_miss(self, request: Request) -> None:
        request.lookup.statuses = request.empty_statuses(self._widths)
        request.lookup.state = LookupState.KNOWN
        request.lookup.missed_page = True

    # -- answers ----------------------------------------------------------------------------

    def _is_known(self, request: Request) -> bool:
        return request.lookup.state is not LookupState.ASKED or self._collect(request)

    def _collect(self, request: Request) -> bool:
        """Take this request's answers, waiting if this step has not waited yet."""
        if self._take(request) or self._take_shown(request):
            return True
        if self._wait() and self._take(request):
            return True
        if self.is_too_late(request.lookup.first_asked_s, self._options.lookup_give_up_s):
            self.forget(request)
            request.lookup.state = LookupState.CLOSED
            self.give_up(request, GivenUp.UNANSWERED)
        return False

    def _take_shown(self, request: Request) -> bool:
        """Take the page's word, where it shows all: the answer that is due can't find more."""
        lookup, session, options = request.lookup, self._connection.session, self._options
        may_trust = options.trusts_page and not request.page_was_wrong
        if not may_trust or session is None or session.store_threshold > 1:
            return False  # a reuse filter's verdicts are wanted, too
        is_prompt = self._connection.is_prompt(HEARD_WITHIN_S, options.lookup_deadline_s)
        if lookup.first_tokens is not None or lookup.doubts or not is_prompt:
            return False  # who was told to wait wants to know what for: it comes from a tier
        asked = [
            (group, range(self._first_asked(request, group), count))
            for group, count in enumerate(self._asked_counts(request))
        ]
        is_begun = len(lookup.calls) * KEYS_PER_CALL < sum(len(blocks) for _, blocks in asked)
        if is_begun or not shown.is_whole(request, session, asked):
            return False  # what is answered in part counts before the page
        lookup.state, lookup.statuses = LookupState.KNOWN, self._nothing_known(request)
        for group, blocks in asked:
            lookup.statuses[group][blocks.start : blocks.stop] = HIT
        lookup.answered = lookup.is_shown = True
        return True

    def _wait(self) -> bool:
        """Wait for all that is unanswered, once in a step. False: this step has waited already.

        While the engine has other work, a lookup is waited for once and then only looked at:
        a slow daemon doesn't slow every step.
        """
        if self._waited:
            return False
        self._waited = True
        waiting, is_new = [], False
        for call_id, asker in self._unanswered.items():
            lookup = asker.lookup
            if lookup.state is LookupState.ASKED or lookup.alone:
                waiting.append(call_id)
                is_new |= not lookup.was_waited_for
                lookup.was_waited_for = True
        if is_new or not self._is_busy:
            self._connection.gather(waiting, self._options.lookup_deadline_s)
        self._connection.doubt(waiting, self._at_stake_s)
        return True

    def is_too_late(self, since_s: float, least_s: float) -> bool:
        """Whether it has waited since then for longer than what it waits for is worth."""
        waited_s = self._clock() - since_s
        if waited_s < least_s or waited_s >= self._options.patience_s:
            return waited_s >= least_s
        return waited_s >= self._at_stake_s()

    def is_doubt_too_late(self, request: Request, computed_tokens: int, doubtful: int) -> bool:
        """The same for doubtful statuses: only what they would add to the sure hit is at stake."""
        options = self._options
        is_retry = doubtful == RETRY
        least_s = options.retry_deadline_s if is_retry else options.pending_deadline_s
        waited_s = self._clock() - request.lookup.doubts[doubtful]
        if waited_s < least_s:
            return False
        statuses = [row & np.uint8(STATUS_BITS) for row in request.lookup.statuses]
        cap = self._cap_tokens(request, computed_tokens)
        sure = self._longest_hit([row == HIT for row in statuses], computed_tokens, cap)
        hoped = self._longest_hit([row != MISS for row in statuses], computed_tokens, cap)
        return waited_s >= min(self.pace.seconds_for(hoped - sure) or 0.0, options.patience_s)

    def _at_stake_s(self) -> float:
        """What computing would take of what all who wait may be told, within `patience_s`.

        Of all together: the daemon answers them together, and the engine would compute them one
        after the other.
        """
        if self._stake_s is None:
            askers = {id(asker): asker for asker in self._unanswered.values()}
            tokens = 0
            for asker in askers.values():
                lookup = asker.lookup
                if lookup.state is LookupState.ASKED or lookup.alone:
                    if lookup.worth_tokens is None:
                        lookup.worth_tokens = self._worth_tokens(asker)
                    tokens += lookup.worth_tokens
            seconds = self.pace.seconds_for(tokens)
            if seconds is None:
                seconds = UNMEASURED_S if tokens else 0.0
            self._stake_s = min(seconds, self._options.patience_s)
        return self._stake_s

    def _worth_tokens(self, request: Request) -> int:
        """Those that the page shows; where it hides what tiers hold, half of the others too."""
        session = self._connection.session
        if session is None:
            return 0
        present, cap = shown.present(request, session, self._widths), self._cap_tokens(request, 0)
        computed = request.computed_tokens
        visible = self._longest_hit(present, computed, cap) - computed
        if not session.page_hides_some:
            return visible
        hoped = self._longest_hit([np.ones_like(row) for row in present], computed, cap) - computed
        return visible + (hoped - visible) // 2

    def _take(self, request: Request) -> bool:
        lookup = request.lookup
        statuses = lookup.statuses or self._nothing_known(request)
        leases: list[int] = []
        for call_id, queries in list(lookup.calls.items()):
            answers = self._connection.take_answers(call_id)
            if answers is None:
                lookup.statuses = statuses
                self._hold(lookup, leases)
                return False
            del lookup.calls[call_id]
            self._unanswered.pop(call_id, None)
            # No answers: the call was refused or lost; its keys stay a miss.
            for (group, first), answer in zip(queries, answers, strict=False):
                row = np.frombuffer(answer.statuses, dtype=np.uint8)
                statuses[group][first : first + len(row)] = row
                if len(answer.sources) == len(row):
                    of_group = lookup.sources.setdefault(group, np.zeros_like(statuses[group]))
                    of_group[first : first + len(row)] = np.frombuffer(answer.sources, np.uint8)
                if answer.lease_id:
                    leases.append(answer.lease_id)
        lookup.state = LookupState.KNOWN
        lookup.statuses = statuses
        self._hold(lookup, leases)
        lookup.answered, lookup.is_shown = True, False
        return True

    def _hold(self, lookup: Lookup, leases: list[int]) -> None:
        """Keep what an answer leased; of a request that needs none any more it ends."""
        (self.released_leases if lookup.is_released else lookup.leases).extend(leases)

    def admitted(self, request: Request, group: int, block: int, unknown: bool = True) -> bool:
        """Whether a store of this block would get past the reuse filter; not said: `unknown`."""
        lookup = request.lookup
        if lookup.calls and lookup.state is LookupState.KNOWN:
            self._take(request)
        if not lookup.answered:
            return unknown
        row = lookup.statuses[group]
        if block >= len(row):
            return unknown
        status = int(row[block])
        return status & STATUS_BITS != MISS or bool(status & ADMITTED_BIT)

    # -- deciding ---------------------------------------------------------------------------

    def _decide(self, request: Request, computed_tokens: int, cap: int) -> int | None:
        lookup = request.lookup
        statuses = [row & np.uint8(STATUS_BITS) for row in lookup.statuses]
        if not any((row & np.uint8(DOUBT_BIT)).any() for row in statuses):
            lookup.doubts.clear()
            return self._longest_hit([row == HIT for row in statuses], computed_tokens, cap)
        now = self._clock()
        for doubtful in (RETRY, PENDING):
            found = self._longest_hit([row != MISS for row in statuses], computed_tokens, cap)
            if not hits.uses(self._groups, statuses, doubtful, range(computed_tokens, found)):
                lookup.doubts.pop(doubtful, None)
                continue
            lookup.doubts.setdefault(doubtful, now)
            if not self.is_doubt_too_late(request, computed_tokens, doubtful):
                self.ask_again(request, now)
                return None
            self.give_up_doubtful(request, statuses, doubtful)  # too late: the run is cut before it
        return self._longest_hit([row == HIT for row in statuses], computed_tokens, cap)

    def _longest_hit(self, usable: list[hits.Flags], computed_tokens: int, cap: int) -> int:
        boundaries = hits.boundaries_between(computed_tokens, cap, self._boundary_tokens)
        return hits.longest_hit(self._groups, usable, computed_tokens, boundaries)

    def give_up_doubtful(
        self, request: Request, statuses: list[hits.Statuses], doubtful: int
    ) -> None:
        """Take as a miss what has been doubtful in this way for too long."""
        if hits.make_misses(statuses, doubtful):
            self.give_up(request, GivenUp.RETRY if doubtful == RETRY else GivenUp.PENDING)

    def ask_alone(self, request: Request, run: BlockRun) -> int:
        """The status of one block that is none of the request's; RETRY while it is not answered.

        Waits only if its step has not waited yet, and then for all that is unanswered. What it
        leases is the request's.
        """
        lookup, key = request.lookup, (run.group, run.block_hashes[0])
        known = lookup.alone_known.get(key)
        if known is not None:
            return known
        call_id = lookup.alone.get(key)
        if call_id is None:
            query = QueryDraft(request.context, run, lease_all=True)
            call_id = self._connection.start_lookup([query])
            if call_id == 0:
                return MISS
            if not lookup.alone:
                lookup.alone_since_s = self._clock()
                lookup.was_waited_for = False
            lookup.alone[key] = call_id
            self._unanswered[call_id] = request
        answers = self._connection.take_answers(call_id)
        if answers is None and self._wait():
            answers = self._connection.take_answers(call_id)
        if answers is None:
            if not self.is_too_late(lookup.alone_since_s, self._options.lookup_give_up_s):
                return RETRY
            self._connection.give_up(call_id)
            self.given_up[GivenUp.UNANSWERED] += 1
            answers = ()
        del lookup.alone[key]
        self._unanswered.pop(call_id, None)
        status = MISS
        for answer in answers:
            lookup.leases += [answer.lease_id] if answer.lease_id else []
            status = answer.statuses[0] & STATUS_BITS
        if status & DOUBT_BIT and self._is_doubt_alone_too_late(lookup, status):
            self.give_up(request, GivenUp.RETRY if status == RETRY else GivenUp.PENDING)
            status = MISS
        if not status & DOUBT_BIT:
            lookup.alone_known[key] = status
        return status

    def _is_doubt_alone_too_late(self, lookup: Lookup, status: int) -> bool:
        """Whether single blocks were doubtful for as long as they may defer their request."""
        now, options = self._clock(), self._options
        least_s = options.retry_deadline_s if status == RETRY else options.pending_deadline_s
        return now - lookup.alone_doubts.setdefault(status, now) >= least_s

    def ask_again(self, request: Request, now: float) -> None:
        """Ask anew for all of a deferred request, unless it is asked or was just now."""
        lookup = request.lookup
        since = min(lookup.doubts.values(), default=now)
        pause_s = min((now - since) * ASK_AGAIN_SHARE, ASK_AGAIN_MAX_S)
        if lookup.calls or now - lookup.asked_s < max(self._options.ask_again_s, pause_s):
            return
        self._ask_anew(request, now)

    def _is_fresh(self, lookup: Lookup, session: SessionView) -> bool:
        if lookup.generation != session.generation:
            return False
        if lookup.state is LookupState.ASKED:
            return True
        if not lookup.leases:
            return self._clock() - lookup.asked_s < self._options.miss_ttl_s
        renewed = self._renewed_s if self._renewed_generation == session.generation else 0.0
        age_s = self._clock() - max(lookup.asked_s, renewed)
        return age_s < session.lease_ttl_s * LEASE_MARGIN

    def _cap_tokens(self, request: Request, computed_tokens: int) -> int:
        """At least one token stays to be computed, unless the engine sees to that itself."""
        cap = request.num_tokens - self.spare_tokens
        if request.params.max_load_tokens is not None:
            cap = min(cap, computed_tokens + max(0, request.params.max_load_tokens))
        return cap

    def _nothing_known(self, request: Request) -> list[hits.Statuses]:
        """What is not asked for is no hit, and may be stored."""
        statuses = request.empty_statuses(self._widths)
        for group, count in enumerate(self._asked_counts(request)):
            statuses[group][: self._first_asked(request, group)] = ADMITTED_BIT
            statuses[group][count:] = ADMITTED_BIT
        return statuses

    def _first_asked(self, request: Request, group: int) -> int:
        """A window or a state may need blocks that lie before what the device has."""
        is_full = self._groups[group].kind is GroupKind.FULL_ATTENTION
        return request.lookup.asked_tokens // self._widths[group] if is_full else 0

    def _asked_counts(self, request: Request) -> list[int]:
        first, counts = request.lookup.first_tokens, self._known_counts(request)
        if first is None:
            return counts
        return [min(c, -(-first // width)) for c, width in zip(counts, self._widths, strict=True)]

    def _known_counts(self, request: Request) -> list[int]:
        return [request.known_blocks(group, width) for group, width in enumerate(self._widths)]
