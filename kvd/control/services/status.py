"""The daemon's state as messages, cut to what the caller may see."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

import kvd
from kvd.control.access.peers import Peer
from kvd.control.namespaces import Namespaces
from kvd.control.registration.rendezvous import Rendezvous
from kvd.control.services.figures import RecentFigures
from kvd.control.sessions.session import SessionContext
from kvd.core.events import JobKind
from kvd.core.keys import NamespaceId, SessionId
from kvd.core.upkeep.statistics import (
    NamespaceFigures,
    SessionFigures,
    Statistics,
    TenantFigures,
    no_tenants,
)
from kvd.mover.facts import MoverFacts
from kvd.pool.pool import Pool
from kvd.runtime.driver import Driver
from kvd.runtime.fleet import AttachedMover
from kvd.runtime.told_lookups import LookupFigures
from kvd.runtime.turns import Pace
from kvd_proto.v1 import operator_pb2 as pb

MAX_PAGE = 256  # sessions, and namespaces, in one answer
TENANT_UNITS, SESSION_UNITS, NAMESPACE_UNITS = 1, 16, 64  # of a pace
MAX_PAGE_BYTES = 1 << 20  # of either; the last one may pass it
Figures = TypeVar("Figures", SessionFigures, NamespaceFigures)
Told = TypeVar("Told", pb.SessionStatus, pb.NamespaceStatus)


async def _page(
    figures: Sequence[Figures], tell: Callable[[Figures], Told], pace: Pace, units: int
) -> tuple[list[Told], bool]:
    """The first of them, as many as an answer may name, and whether there are more."""
    told: list[Told] = []
    size = 0
    for each in figures:
        if len(told) == MAX_PAGE or size > MAX_PAGE_BYTES:
            return told, True
        await pace.spend(units)
        told.append(tell(each))
        size += told[-1].ByteSize()
    return told, False


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where the pool is and how large it is."""

    directory: str
    bytes: int


class StatusReport:
    """Builds answers for the operator service."""

    def __init__(
        self, driver: Driver, engines: Rendezvous, namespaces: Namespaces, common: SessionContext
    ) -> None:
        self._driver = driver
        self._recent = RecentFigures(partial(driver.statistics, which_tenants=no_tenants))
        self._engines = engines
        self._namespaces = namespaces
        self._sessions = common.sessions
        self._told = common.told_lookups
        self._began = time.monotonic()

    def _tiers(self, now: Statistics) -> list[pb.TierStatus]:
        return [
            pb.TierStatus(
                name=tier.name,
                serving=tier.is_serving,
                problem=said.problem,
                blocks=said.usage.blocks,
                bytes=said.usage.bytes,
                capacity_bytes=said.usage.capacity_bytes,
                hits=tier.counters.hits,
                misses=tier.counters.misses,
                blocks_promoted=tier.counters.promoted,
                blocks_failed=tier.counters.failed_reads,
                blocks_given_up=tier.counters.unpromoted,
                blocks_written=tier.counters.written,
                blocks_unwritten=tier.counters.failed_writes,
                blocks_dropped=tier.counters.dropped,
                bytes_down=tier.bytes_down,
                bytes_up=tier.bytes_up,
                notes=said.usage.notes,
                blocks_too_slow=tier.counters.too_slow,
                blocks_refused=tier.counters.refused,
                answer_seconds=tier.answer_seconds,
                read_seconds=tier.read_seconds,
                short_lives=said.short_lives,
                namespaces_undeleted=said.undeleted,
                all_undeleted=said.is_hidden,
            )
            for tier, said in zip(now.tiers, self._driver.tiers.told(), strict=True)
        ]

    async def status(
        self, peer: Peer, place: PoolPlace, request: pb.StatusRequest
    ) -> pb.StatusResponse:
        """All that the caller may see, a page of it. Operators see everything."""
        now = self._recent.get()
        pace = Pace(self._driver.turns, peer.uid)
        operates = self._namespaces.operates(peer)
        sessions = [
            s
            for s in now.sessions
            if s.session > request.after_session_id and self._namespaces.may_see(peer, s.namespace)
        ]
        status = pb.StatusResponse(
            version=kvd.__version__,
            incarnation=self._driver.incarnation,
            uptime_seconds=time.monotonic() - self._began,
            state="draining" if now.draining else "ready",
            pool=_pool(now, place, self._driver.pool),
            policy=_policy(self._driver.machine.config.policy, now.policies),
            recovered_blocks=now.counters.recovered,
            process_id=os.getpid(),
            event_sequence=self._driver.event_log.sequence,
            tiers=self._tiers(now) if operates else [],
            blocks_evicted=now.counters.evicted,
            blocks_stored=now.counters.stored,
            blocks_loaded=now.counters.loaded,
            blocks_not_leased=now.counters.retries,
            curve=_curve(now) if operates else None,
        )
        status.tenants.extend(await self._tenants(peer, self._driver.machine.tenants(), pace))
        sessions.sort(key=lambda s: s.session)
        page_of_sessions, status.more_sessions = await _page(
            sessions, self._session, pace, SESSION_UNITS
        )
        status.sessions.extend(page_of_sessions)
        page, status.more_namespaces = await self._namespace_statuses(
            peer, now, request.after_namespace_id, pace
        )
        status.namespaces.extend(page)
        return status

    async def _tenants(
        self, peer: Peer, figures: Iterable[TenantFigures], pace: Pace
    ) -> list[pb.TenantStatus]:
        told = []
        for each in figures:
            await pace.spend(TENANT_UNITS)
            if self._namespaces.may_see_of(peer, each.tenant):
                told.append(self._tenant(each))
        return told

    def _tenant(self, figures: TenantFigures) -> pb.TenantStatus:
        return pb.TenantStatus(
            tenant=figures.tenant,
            bytes_used=figures.used_bytes,
            quota_bytes=figures.quota_bytes,
            bytes_leased=figures.leased_bytes,
            bytes_reserved=figures.reserved_bytes,
            bytes_evictable=figures.evictable_bytes,
            lookups=_lookups(self._told.of_tenant(figures.tenant)),
        )

    async def namespaces(self, peer: Peer, after: int) -> tuple[list[pb.NamespaceStatus], bool]:
        """A page of the namespaces that the caller may see, and whether there are more."""
        now = self._recent.get()
        pace = Pace(self._driver.turns, peer.uid)
        return await self._namespace_statuses(peer, now, after, pace)

    async def _namespace_statuses(
        self, peer: Peer, now: Statistics, after: int, pace: Pace
    ) -> tuple[list[pb.NamespaceStatus], bool]:
        families = self._namespaces.families(peer)
        behind = [
            n
            for n in now.namespaces
            if n.namespace > after and self._namespaces.may_see(peer, n.namespace)
        ]
        behind.sort(key=lambda n: n.namespace)

        def tell(figures: NamespaceFigures) -> pb.NamespaceStatus:
            family = families.get(self._namespaces.family_of(figures.namespace), ())
            return self._namespace(figures, family)

        return await _page(behind, tell, pace, NAMESPACE_UNITS)

    def _namespace(
        self, figures: NamespaceFigures, family: Sequence[NamespaceId]
    ) -> pb.NamespaceStatus:
        return pb.NamespaceStatus(
            namespace_id=figures.namespace,
            fingerprint=figures.fingerprint,
            tenant=figures.tenant,
            fields=self._namespaces.fields(figures.namespace),
            blocks=figures.blocks,
            bytes=figures.bytes,
            sessions=figures.sessions,
            differs=self._namespaces.differences(figures.namespace, family),
            wasted_shares=figures.wasted_shares,
            lookups=_lookups(self._told.of_namespace(figures.namespace)),
        )

    def _session(self, figures: SessionFigures) -> pb.SessionStatus:
        status = pb.SessionStatus(
            session_id=figures.session,
            namespace_id=figures.namespace,
            ranks=self._ranks(figures.session),
            jobs_in_flight=figures.jobs,
            leases=figures.leases,
            usable=figures.usable,
        )
        live = self._sessions.by_id.get(figures.session)
        if live is not None:
            status.engine_id = live.engine_id
            status.uid = live.peer.uid
            status.world_size = live.world_size
        return status

    def _ranks(self, session: SessionId) -> list[pb.RankStatus]:
        fleet = self._driver.fleet
        attached = [fleet.attached[mover] for mover in fleet.of_session(session)]
        return [self._rank(a) for a in sorted(attached, key=lambda a: a.placement.rank)]

    def _rank(self, attached: AttachedMover) -> pb.RankStatus:
        facts = attached.process.facts
        return pb.RankStatus(
            rank=attached.placement.rank,
            mover_pid=attached.process.pid,
            worker_pid=self._engines.worker_pid(attached.process.mover),
            transport=facts.transport,
            bytes_stored=attached.bytes_by_kind[JobKind.STORE],
            bytes_loaded=attached.bytes_by_kind[JobKind.LOAD],
            store_bytes_per_second=_rate(attached, JobKind.STORE),
            load_bytes_per_second=_rate(attached, JobKind.LOAD),
            copier=facts.copier,
            gpu=_gpu(facts),
            copier_note=facts.note,
        )


def _curve(now: Statistics) -> pb.ReuseCurve | None:
    if now.curve is None:
        return None
    points = [pb.CurvePoint(pools=pools, hit_ratio=ratio) for pools, ratio in now.curve.points]
    return pb.ReuseCurve(points=points, uses=now.curve.uses, sampled_share=now.curve.share)


def _lookups(figures: LookupFigures | None) -> pb.LookupFigures | None:
    return None if figures is None else pb.LookupFigures(**asdict(figures))


def _gpu(facts: MoverFacts) -> pb.GpuStatus | None:
    gpu = facts.gpu
    if gpu is None:
        return None
    return pb.GpuStatus(
        uuid=gpu.uuid,
        name=gpu.name,
        driver_version=gpu.driver_version,
        context_bytes=gpu.context_bytes,
        registered_bytes=gpu.registered_bytes,
        unregistered_extents=gpu.unregistered_extents,
        staged_bytes=gpu.staged_bytes,
        numa_node=gpu.numa_node,
    )


def _rate(attached: AttachedMover, kind: JobKind) -> float:
    """Bytes a second while copying, since the rank was registered."""
    busy_ns = attached.busy_ns_by_kind[kind]
    return attached.bytes_by_kind[kind] / (busy_ns / 1e9) if busy_ns else 0.0


def _policy(name: str, chosen: dict[str, int]) -> str:
    """The policy that was configured; for auto, how many classes evict by which."""
    if not chosen:
        return name
    return f"{name} ({', '.join(f'{each} {count}' for each, count in sorted(chosen.items()))})"


def _pool(now: Statistics, place: PoolPlace, pool: Pool) -> pb.PoolStatus:
    return pb.PoolStatus(
        directory=place.directory,
        bytes=place.bytes,
        extent_bytes=pool.extent_bytes,
        extents=now.extents,
        extents_free=now.extents_free,
        slots_free=now.slots.free,
        slots_reserved=now.slots.reserved,
        slots_ready=now.slots.ready,
        slots_quarantined=now.slots.quarantined,
        bytes_ready=now.bytes.ready,
        checksums=pool.payload_checksums,
        checksums_reason=pool.checksums_reason,
    )
