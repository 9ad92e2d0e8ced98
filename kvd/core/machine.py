"""The machine: every decision of the daemon, as a pure function of events and time.

Only `handle` changes anything. It delegates to one module for each kind of event; this file
says which, and answers questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import assert_never

import numpy as np

from kvd.core import events as ev
from kvd.core.actions import Action, GrantRow, Reply
from kvd.core.blocks import namespaces
from kvd.core.blocks.slot_lifecycle import by_scope, keys_of
from kvd.core.claims import hand_off, lease, prefix
from kvd.core.jobs import load, lookup, store, together, transfer, waiters
from kvd.core.keys import (
    U64,
    KeyBatch,
    LeaseId,
    NamespaceId,
    RequestId,
    RowId,
    SessionId,
    Slots,
    TenantId,
    TierId,
    each_once,
)
from kvd.core.model.gone import Recalled
from kvd.core.model.probes import BY_NUMPY, Probes
from kvd.core.model.size_class import Row, SizeClass
from kvd.core.model.slots import READY, SlotState
from kvd.core.model.state import MachineConfig, Session, State
from kvd.core.model.story import BrokenSlots, JobName
from kvd.core.model.tiers import TierTerms
from kvd.core.model.turn import Turn
from kvd.core.policy import POLICY_NAMES
from kvd.core.room import eviction, expiry, reclaim
from kvd.core.spec import NamespaceSpec
from kvd.core.tiers import promotion, residence, search, service, writing
from kvd.core.upkeep import chores, clear, misses, operator, recovery, session
from kvd.core.upkeep.statistics import (
    Statistics,
    TenantFigures,
    WhichTenants,
    all_tenants,
    figures_of,
    gather,
)

# Looked at in one go for a snapshot: each may be of another account.
RESIDENT_SLOTS = 256
TAGGED_SLOTS = 1024  # looked at in one go for their tags
SLOTS_TOLD = 16  # of a broken invariant
# Epoch, account, group, keys, and the tier that holds them, or None: host memory.
ResidentBlocks = tuple[str, str, int, KeyBatch, TierId | None]

__all__ = ["Machine", "MachineConfig", "Statistics"]


class Machine:
    """Holds the state; one writer, no clock, no IO."""

    def __init__(self, config: MachineConfig, probes: Probes = BY_NUMPY) -> None:
        assert config.policy in POLICY_NAMES, f"no policy is named {config.policy}"
        self.state = State(config, probes)

    @property
    def config(self) -> MachineConfig:
        """The settings in force."""
        return self.state.config

    def handle(self, event: ev.Event, now_ns: int) -> list[Action]:
        """Apply one event. A KvdError means that nothing was changed."""
        state = self.state
        turn = Turn(state, now_ns)
        state.story.begin(now_ns, type(event).__name__, _job_of(state, event))
        _apply(turn, event)
        if state.released:
            for each in waiters.go_on(turn):
                session.wind_up(turn, each)
        if state.claims or state.emptying:
            reclaim.serve(turn)
        return turn.orders

    def story(self, error: Exception) -> list[str]:
        """What lately became of the slots and the job with which an event broke an invariant."""
        state = self.state
        slots = error.slots if isinstance(error, BrokenSlots) else state.story.touched_now()
        slots = slots[:SLOTS_TOLD]
        table = state.slots
        facts = [
            f"slot {slot} now: {SlotState(int(table.state[slot])).name}, pins {table.pins[slot]}"
            f" (leases {table.leases[slot]}), scope {table.scopes[slot]}"
            for slot in slots.tolist()
        ]
        return facts + state.story.tell(slots)

    def room(self, namespace: NamespaceId) -> tuple[int, ...]:
        """Blocks that a store could get now, by group."""
        return eviction.storable(self.state, namespace)

    def namespaces(self) -> list[NamespaceId]:
        """Every namespace that is known, with or without sessions or blocks."""
        return list(self.state.namespaces)

    def knows(self, namespace: NamespaceId) -> bool:
        """Whether it is known, with or without sessions or blocks."""
        return namespace in self.state.namespaces

    def knows_tenant(self, tenant: TenantId) -> bool:
        """Whether a rule names it, or it has a namespace, or bytes."""
        return tenant in self.state.tenants

    def blocks_of_new(self, spec: NamespaceSpec) -> int | None:
        """Most blocks of the namespace that a session of this spec would make; None: it is known.

        KvdError where the spec can't be served.
        """
        if spec.fingerprint in self.state.by_fingerprint:
            return None
        namespaces.check_spec(self.state, spec)
        return namespaces.most_blocks(self.state, spec)

    def fingerprint_of(self, namespace: NamespaceId) -> str:
        """Of a namespace that is known."""
        return self.state.namespaces[namespace].spec.fingerprint

    def tenant_of(self, namespace: NamespaceId) -> TenantId | None:
        """None where the namespace is not known (any more)."""
        known = self.state.namespaces.get(namespace)
        return None if known is None else known.spec.tenant

    def quota_of(self, tenant: TenantId) -> int | None:
        """Bytes of its hard quota, 0 for none; None where nothing is known of the tenant."""
        known = self.state.tenants.get(tenant)
        return None if known is None else known.quota_bytes

    def epoch_of(self, session: SessionId) -> str:
        """That an open session is in."""
        return self.state.require_session(session).epoch

    def leases_of(self, session: SessionId, request: RequestId) -> tuple[LeaseId, ...]:
        """Leases that are held for a request of an open session."""
        return tuple(self.state.require_session(session).by_request.get(request, ()))

    def has_work(self) -> bool:
        """Whether long work waits for its next piece."""
        return chores.waiting(self.state)

    def has_ends_to_come(self, session: SessionId) -> bool:
        """Whether copies of the session's former movers have not ended yet, in pieces.

        A rank that is attached meanwhile has them all end in its own event.
        """
        return self.state.backlog.has_ends_of(session)

    def granted_rows(self, namespace: NamespaceId, count: int) -> Iterator[list[GrantRow]]:
        """The rows that a mover of this namespace maps, so many at a time.

        Each piece is as things are when it is taken: no row is in it that was taken back before,
        and every one that was there from the first piece to the last is in one of them.
        """
        known = self.state.namespaces.get(namespace)
        for owner in known.classes if known is not None else ():
            rows = list(owner.rows.values())
            for start in range(0, len(rows), count):
                some = rows[start : start + count]
                yield [row.grant() for row in some if owner.rows.get(row.row) is row]

    def rows_of(self, slots: Slots) -> list[RowId]:
        """The granted rows in which these slots lie."""
        numbers = each_once(slots // self.state.slots_per_extent)
        return [RowId(number) for number in numbers.tolist()]

    def granted_row(self, row: RowId) -> GrantRow:
        """One that is granted now."""
        return self.state.rows[row].grant()

    def resident(
        self, namespace: NamespaceId, *, with_tiers: bool = False
    ) -> Iterator[list[ResidentBlocks]]:
        """Every readable block, in pieces of RESIDENT_SLOTS slots, of which none may be readable.

        `with_tiers`: also which of them tiers hold, as far as watchers were told.

        Each piece is as things are when it is taken, and the state may change between them: what
        came to a place that was read before, or left one that was not yet, is not named.
        """
        for owner, slots in self._readable(namespace, RESIDENT_SLOTS):
            yield self._named(owner, slots, None) + [
                named
                for tier in (self.state.below.tiers if with_tiers else ())
                for named in self._named(owner, residence.told(self.state, tier, slots), tier.tier)
            ]

    def terms_of(self, tier: TierId) -> TierTerms:
        """What is settled of a tier."""
        return self.state.below.tiers[tier].terms

    def readable_tags(self, namespace: NamespaceId) -> Iterator[U64]:
        """Tag of every readable block, in pieces of TAGGED_SLOTS slots; as for `resident`."""
        for _owner, slots in self._readable(namespace, TAGGED_SLOTS):
            yield self.state.slots.tags[slots]

    def _readable(self, namespace: NamespaceId, count: int) -> Iterator[tuple[SizeClass, Slots]]:
        """Readable blocks among so many slots after the other, those of each row by themselves."""
        known = self.state.namespaces.get(namespace)
        for owner in known.classes if known is not None else ():
            for row in list(owner.rows.values()):
                for start in range(0, row.slots, count):
                    if owner.rows.get(row.row) is not row:
                        break
                    yield owner, self._readable_in(row, start, count)

    def _readable_in(self, row: Row, start: int, count: int) -> Slots:
        state, first = self.state, row.first_slot + start
        span = slice(first, min(first + count, row.first_slot + row.slots))
        slots: Slots = first + np.flatnonzero(state.slots.state[span] == READY)
        cleared_below = state.namespaces[row.size_class.namespace].cleared_below
        return slots[state.slots.scopes[slots] >= cleared_below]

    def _named(self, owner: SizeClass, slots: Slots, tier: TierId | None) -> list[ResidentBlocks]:
        return [
            (scope.epoch, scope.account, scope.group, keys_of(self.state, owner, inside), tier)
            for scope, inside in by_scope(self.state, slots)
        ]

    def explain(self, request: str, may_see: Callable[[TenantId], bool]) -> list[misses.Explained]:
        """Why requests missed: those whose names begin so, the last first; "": all that did."""
        return misses.explain(self.state, request, may_see)

    def elsewhere(
        self, request: Recalled, family: Iterable[NamespaceId]
    ) -> tuple[misses.Elsewhere, ...]:
        """Where the block that the request missed lies now, in its namespace or in these."""
        return misses.elsewhere(self.state, request, family)

    def statistics(
        self, *, by_namespace: bool = True, which_tenants: WhichTenants = all_tenants
    ) -> Statistics:
        """All figures as they are now; of namespaces and tenants those that are asked for."""
        return gather(self.state, by_namespace=by_namespace, which_tenants=which_tenants)

    def tenants(self) -> Iterator[TenantFigures]:
        """The figures of every tenant, each as it is when it is taken, if it is still there."""
        for name in list(self.state.tenants):
            if self.knows_tenant(name):
                yield figures_of(self.state.tenants[name])


def _job_of(state: State, event: ev.Event) -> JobName | None:
    match event:
        case ev.StoreRequested() | ev.LoadRequested():
            return event.session, event.job
        case ev.StoresRequested():
            return event.session, event.stores[0].job
        case ev.TransferFinished():
            running = state.transfers.get(event.transfer)
            if running is not None:
                return running.piece.session, running.piece.shares[0].job.job
    return None


def _apply(turn: Turn, event: ev.Event) -> None:
    match event:
        case ev.LookupRequested():
            lookup.lookup(turn, event)
        case ev.LookupAnswered():
            lookup.count(turn.state, event.statuses)
        case ev.StoreRequested():
            store.store(turn, event)
        case ev.StoresRequested():
            together.store_together(turn, event)
        case ev.LoadRequested():
            load.load(turn, event)
        case ev.Touched():
            lookup.touch(turn, event)
        case ev.HandOffRequested():
            writing.handed_off(turn, *hand_off.hand_off(turn, event))
        case ev.LeasesReleased() | ev.RequestsEnded() | ev.StepEnded():
            _apply_step(turn, event)
        case ev.TransferFinished():
            _finish(turn, event)
        case ev.SessionOpened():
            session.session_opened(turn, event)
        case ev.SessionClosed():
            session.session_closed(turn, event)
        case ev.RankAttached():
            session.rank_attached(turn, event)
        case ev.RankEnding():
            session.rank_ending(turn, event)
        case ev.MoverGone():
            session.mover_gone(turn, event)
        case ev.EpochChanged():
            session.epoch_changed(turn, event)
        case ev.RequestsTold():
            misses.requests_told(turn, event)
        case (
            ev.TierStarted()
            | ev.TierGone()
            | ev.TierAnswered()
            | ev.TierCopyEnded()
            | ev.TierForgot()
            | ev.TierDoubted()
            | ev.TierCleared()
        ):
            service.handle(turn, event)
        case _:
            _apply_upkeep(turn, event)


def _apply_step(turn: Turn, event: ev.LeasesReleased | ev.RequestsEnded | ev.StepEnded) -> None:
    state = turn.state
    found = state.require_session(event.session)
    match event:
        case ev.LeasesReleased():
            lease.end_leases(state, found, event.leases)
        case ev.RequestsEnded():
            _end_requests(turn, found, event.requests)
        case ev.StepEnded():
            found.renewed_ns = turn.now_ns
            promotion.step_ended(state, found)
        case _:
            assert_never(event)


def _end_requests(turn: Turn, found: Session, requests: tuple[RequestId, ...]) -> None:
    """Where they hold, have used or seek much some are left, which the reply names."""
    ended = requests[: lease.end_leases_of(turn.state, found, requests)]
    ended = ended[: prefix.end(turn, found, ended)]
    ended = ended[: search.end(turn.state, found, ended)]
    if len(ended) < len(requests):
        turn.orders.append(Reply(requests[len(ended) :]))


def _finish(turn: Turn, event: ev.TransferFinished) -> None:
    state = turn.state
    running = state.transfers.get(event.transfer)
    transfer.transfer_finished(turn, event)
    if running is not None:
        session.wind_up(turn, state.sessions[running.piece.session])


def _apply_upkeep(
    turn: Turn,
    event: ev.ScopesRecovered
    | ev.RowsRecovered
    | ev.PoolRecovered
    | ev.RowUnmapped
    | ev.RowRefused
    | ev.RowZeroed
    | ev.NamespaceCleared
    | ev.QuotaSet
    | ev.TermsChanged
    | ev.DrainStarted
    | ev.DrainEnded
    | ev.TimerTicked
    | ev.WorkContinued,
) -> None:
    match event:
        case ev.ScopesRecovered():
            recovery.scopes_recovered(turn, event)
        case ev.RowsRecovered():
            recovery.rows_recovered(turn, event)
        case ev.PoolRecovered():
            expiry.begin(turn)
            recovery.pool_recovered(turn, event)
        case ev.RowUnmapped():
            reclaim.row_unmapped(turn, event.row, event.mover)
        case ev.RowRefused():
            reclaim.row_refused(turn, event)
        case ev.RowZeroed():
            reclaim.row_zeroed(turn, event.row)
            expiry.look(turn)
        case ev.NamespaceCleared():
            clear.namespace_cleared(turn, event)
        case ev.QuotaSet():
            operator.quota_set(turn, event)
        case ev.TermsChanged():
            operator.terms_changed(turn.state, event)
        case ev.DrainStarted():
            turn.state.draining = True
        case ev.DrainEnded():
            turn.state.draining = False
        case ev.WorkContinued():
            chores.go_on(turn)
        case ev.TimerTicked():
            operator.timer_ticked(turn)
        case _:
            assert_never(event)
