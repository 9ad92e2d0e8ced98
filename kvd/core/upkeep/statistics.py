"""Figures for status and metrics, gathered from the counts that the state keeps anyway."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from kvd.core.keys import NamespaceId, SessionId, TenantId
from kvd.core.model.reuse import ReuseCurve
from kvd.core.model.size_class import Tally, Tenant
from kvd.core.model.state import Counters, State
from kvd.core.model.tiers import CopyKind, TierCounters


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Slots, or bytes, by state. `capacity` is their sum."""

    capacity: int
    free: int
    reserved: int
    ready: int
    quarantined: int


class TenantFigures(NamedTuple):  # there may be thousands
    """What is shown of one tenant."""

    tenant: TenantId
    used_bytes: int
    quota_bytes: int  # 0 = no quota
    leased_bytes: int
    reserved_bytes: int
    evictable_bytes: int


class NamespaceFigures(NamedTuple):  # there may be thousands
    """What is shown of one namespace."""

    namespace: NamespaceId
    fingerprint: str
    tenant: TenantId
    blocks: int  # readable
    bytes: int
    sessions: int
    wasted_shares: tuple[float, ...]  # of the extents of each group's rows


class SessionFigures(NamedTuple):  # there may be thousands
    """What is shown of one session."""

    session: SessionId
    namespace: NamespaceId
    jobs: int
    leases: int
    usable: bool


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What is shown of one tier."""

    name: str
    is_serving: bool
    bytes_down: int  # on their way to it
    bytes_up: int  # on their way from it
    answer_seconds: float  # that a question takes now
    read_seconds: float  # that a copy from it takes
    counters: TierCounters
    # What its store calls failures, by reason, since its process began: the core does not know.
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What is shown of the whole machine, for status and metrics."""

    slots: Occupancy
    bytes: Occupancy
    extents: int
    extent_bytes: int
    extents_free: int
    rows: int
    rows_retiring: int
    transfers: int
    leases: int
    hand_offs: int
    handed_off_blocks: int  # that hand-offs hold now; each counts once
    followed_keys: int
    draining: bool
    tenants_known: int
    tenants: tuple[TenantFigures, ...]  # those that were asked for
    namespaces_known: int
    namespaces: tuple[NamespaceFigures, ...]  # none where they were not asked for
    sessions: tuple[SessionFigures, ...]
    tiers: tuple[TierFigures, ...]
    counters: Counters
    curve: ReuseCurve | None  # None while nothing was used
    ages: tuple[int, ...]  # evicted blocks by how long they were unused, up to AGES_OF_EVICTION
    age_sum_s: float
    regrets: tuple[float, ...]  # evicted and used again so soon, by REGRETTED_WITHIN; an estimate
    policies: dict[str, int]  # size classes that evict by each, where auto chooses


WhichTenants = Callable[[Iterable[Tenant]], Iterable[Tenant]]


def all_tenants(tenants: Iterable[Tenant]) -> Iterable[Tenant]:
    """For `gather`: the figures of every tenant, some milliseconds where there are thousands."""
    return tenants


def no_tenants(_tenants: Iterable[Tenant]) -> Iterable[Tenant]:
    """For `gather`: the figures of none."""
    return ()


def first_tenants(count: int) -> WhichTenants:
    """For `gather`: so many, those first that were known first."""
    return lambda tenants: islice(tenants, count)


def largest_tenants(count: int) -> WhichTenants:
    """For `gather`: so many, those first that use most."""
    return partial(heapq.nlargest, count, key=attrgetter("used_bytes"))


def gather(
    state: State, *, by_namespace: bool = True, which_tenants: WhichTenants = all_tenants
) -> Statistics:
    """A snapshot; shares nothing with the state. Most of it is for namespaces and tenants."""
    sessions = tuple(
        SessionFigures(s.session, s.namespace, len(s.jobs), len(s.leases), s.usable())
        for s in state.sessions.values()
    )
    return Statistics(
        slots=_of_slots(state.tally),
        bytes=_of_bytes(state.tally),
        extents=state.config.extents,
        extent_bytes=state.config.extent_bytes,
        extents_free=len(state.free_extents),
        rows=len(state.rows),
        rows_retiring=len(state.retiring),
        transfers=len(state.transfers),
        leases=sum(s.leases for s in sessions),
        hand_offs=len(state.hand_offs),
        handed_off_blocks=len(state.handed_off),
        followed_keys=sum(
            len(wait.offer.slots) for s in state.sessions.values() for wait in s.waits
        ),
        draining=state.draining,
        tenants_known=len(state.tenants),
        tenants=tuple(map(figures_of, which_tenants(state.tenants.values()))),
        namespaces_known=len(state.namespaces),
        namespaces=_namespaces(state) if by_namespace else (),
        sessions=sessions,
        tiers=_tiers(state),
        counters=replace(
            state.counters,
            refused=dict(state.counters.refused),
            hinted=dict(state.counters.hinted),
        ),
        curve=state.reuse.curve(),
        ages=tuple(state.gone.ages.tolist()),
        age_sum_s=state.gone.age_sum_s,
        regrets=tuple(state.reuse.regrets),
        policies=dict(+state.live_policies),
    )


def figures_of(tenant: Tenant) -> TenantFigures:
    """Of one tenant."""
    return TenantFigures(
        tenant.tenant,
        tenant.used_bytes,
        tenant.quota_bytes,
        tenant.leased_bytes,
        tenant.tally.reserved_bytes,
        tenant.tally.evictable_bytes,
    )


def _tiers(state: State) -> tuple[TierFigures, ...]:
    return tuple(
        TierFigures(
            tier.terms.name,
            tier.is_serving,
            tier.writing.whole,
            sum(c.nbytes for c in tier.copies.values() if c.kind is CopyKind.READ),
            tier.pace.answer_ns / 1e9,
            tier.pace.read_ns / 1e9,
            replace(tier.counters),
        )
        for tier in state.below.tiers
    )


def _of_slots(tally: Tally) -> Occupancy:
    return Occupancy(tally.capacity, tally.free, tally.reserved, tally.ready, tally.quarantined)


def _of_bytes(tally: Tally) -> Occupancy:
    return Occupancy(
        tally.capacity_bytes,
        tally.free_bytes,
        tally.reserved_bytes,
        tally.ready_bytes,
        tally.quarantined_bytes,
    )


def _namespaces(state: State) -> tuple[NamespaceFigures, ...]:
    sessions: dict[NamespaceId, int] = {}
    for session in state.sessions.values():
        sessions[session.namespace] = sessions.get(session.namespace, 0) + 1
    return tuple(
        NamespaceFigures(
            namespace.namespace,
            namespace.spec.fingerprint,
            namespace.spec.tenant,
            namespace.tally.ready,
            namespace.tally.ready_bytes,
            sessions.get(namespace.namespace, 0),
            namespace.wasted_shares,
        )
        for namespace in state.namespaces.values()
    )
