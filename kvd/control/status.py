"""The daemon's state as messages, cut to what the caller may see."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import kvd
from kvd.control.engines import Engines
from kvd.control.namespaces import Namespaces
from kvd.control.peers import Peer
from kvd.control.tenants import TenantPolicy
from kvd.control.verbs import Sessions
from kvd.core.events import JobKind
from kvd.core.keys import NamespaceId, SessionId
from kvd.core.statistics import NamespaceFigures, SessionFigures, Statistics
from kvd.driver import Driver
from kvd.fleet import AttachedMover
from kvd.mover.facts import MoverFacts
from kvd_proto.v1 import operator_pb2 as pb


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where the pool lies and how large it is."""

    directory: str
    bytes: int


class StatusReport:
    """Builds answers for the operator service."""

    def __init__(
        self, driver: Driver, engines: Engines, namespaces: Namespaces, sessions: Sessions
    ) -> None:
        self._driver = driver
        self._engines = engines
        self._namespaces = namespaces
        self._sessions = sessions
        self._began = time.monotonic()

    def status(self, peer: Peer, tenants: TenantPolicy, place: PoolPlace) -> pb.StatusResponse:
        """All that the caller may see. Operators see everything."""
        now = self._driver.machine.statistics()
        visible = set(self._namespaces.visible(peer))
        return pb.StatusResponse(
            version=kvd.__version__,
            incarnation=self._driver.incarnation,
            uptime_seconds=time.monotonic() - self._began,
            state="draining" if now.draining else "ready",
            pool=_pool(now, place, self._driver.pool.extent_bytes),
            sessions=[self._session(s) for s in now.sessions if s.namespace in visible],
            tenants=[
                pb.TenantStatus(
                    tenant=t.tenant,
                    bytes_used=t.used_bytes,
                    quota_bytes=t.quota_bytes,
                    bytes_leased=t.leased_bytes,
                    bytes_reserved=t.reserved_bytes,
                    bytes_evictable=t.evictable_bytes,
                )
                for t in now.tenants
                if tenants.may_see(peer, t.tenant)
            ],
            namespaces=self._namespace_statuses(peer, now),
            policy=self._driver.machine.config.policy,
            recovered_blocks=now.counters.recovered,
            process_id=os.getpid(),
            event_sequence=self._driver.event_log.sequence,
        )

    def namespaces(self, peer: Peer) -> list[pb.NamespaceStatus]:
        """Every namespace that the caller may see."""
        return self._namespace_statuses(peer, self._driver.machine.statistics())

    def _namespace_statuses(self, peer: Peer, now: Statistics) -> list[pb.NamespaceStatus]:
        families = self._namespaces.families(peer)
        visible = {namespace for family in families.values() for namespace in family}
        return [
            self._namespace(n, families[self._namespaces.family_of(n.namespace)])
            for n in now.namespaces
            if n.namespace in visible
        ]

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
            store_copier=facts.store.copier,
            load_copier=facts.load.copier,
            gpu=_gpu(facts),
        )


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
        calibrated_store_bytes_per_second=facts.store.bytes_per_second,
        calibrated_load_bytes_per_second=facts.load.bytes_per_second,
        numa_node=gpu.numa_node,
    )


def _rate(attached: AttachedMover, kind: JobKind) -> float:
    """Bytes a second while copying, since the rank was registered."""
    busy_ns = attached.busy_ns_by_kind[kind]
    return attached.bytes_by_kind[kind] / (busy_ns / 1e9) if busy_ns else 0.0


def _pool(now: Statistics, place: PoolPlace, extent_bytes: int) -> pb.PoolStatus:
    return pb.PoolStatus(
        directory=place.directory,
        bytes=place.bytes,
        extent_bytes=extent_bytes,
        extents=now.extents,
        extents_free=now.extents_free,
        slots_free=now.slots.free,
        slots_reserved=now.slots.reserved,
        slots_ready=now.slots.ready,
        slots_quarantined=now.slots.quarantined,
        bytes_ready=now.bytes.ready,
    )
