"""Every metric of the daemon, with those of tier_metrics. No other file declares one.

What the core counts anyway is read at scrape time; what passes by once (durations, refusals)
is observed as it happens. Label values come from closed sets of ours, except `tenant`, which
the operator's policy names, `namespace`, of which so many are named, `reason`, which
docs/errors.md lists, and those that name a registered rank: `session` and `rank`, with the `gpu`
that its memory lies on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, islice

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvd.core.actions import EndJob
from kvd.core.events import JobKind, JobStatus, TransferOutcome
from kvd.core.model.gone import AGES_OF_EVICTION
from kvd.core.model.reuse import REGRETTED_WITHIN
from kvd.core.upkeep.statistics import Occupancy, Statistics
from kvd.linux import proc
from kvd.observability.tier_metrics import tier_families
from kvd.runtime.fleet import AttachedMover
from kvd.runtime.threads import apart
from kvd.runtime.told_lookups import ToldLookups

# A series more for each label of some metrics, which tells nothing of use.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_TENANTS_SHOWN = 256
MAX_RANKS_SHOWN = 1024
GATHER_SECONDS = 0.001  # of reading figures between two turns of the event loop
_RPC_BUCKETS = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 5, 30,
)  # fmt: skip
_LINED_UP = "Calls that waited in line: their user sends more than are taken up as they come."
_COPY_BUCKETS = (2.5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 10, 30)
_MESSAGES = ("step", "lookup", "reset_cache")
_SLOT_STATES = ("free", "reserved", "ready", "quarantined")

# Name, help, and where in the core's Counters it stands.
_COUNTERS = (
    (
        "kvd_lookup_hits",
        "Blocks that calls asked for and found; most misses are no call: kvd_found_blocks_total.",
        "hits",
    ),
    ("kvd_lookup_misses", "Blocks that a call asked for and that were not there.", "misses"),
    ("kvd_lookup_pending", "Blocks looked up while stored, or sought in tiers.", "pending"),
    (
        "kvd_lookup_retries",
        "Blocks found while leases had their share (lease_share): ask again.",
        "retries",
    ),
    ("kvd_stored_blocks", "Blocks that became readable.", "stored"),
    ("kvd_stored_bytes", "Bytes of the blocks that became readable.", "store_bytes"),
    ("kvd_loaded_blocks", "Blocks copied back to engines.", "loaded"),
    ("kvd_loaded_bytes", "Bytes of the blocks copied back to engines.", "load_bytes"),
    ("kvd_evicted_blocks", "Blocks evicted to make room.", "evicted"),
    ("kvd_policy_switches", "Switches of a class whose policy is auto.", "policy_switches"),
    ("kvd_deduplicated_blocks", "Stores of blocks already readable or in flight.", "deduplicated"),
    ("kvd_filtered_blocks", "Stores kept out by the reuse filter.", "filtered"),
    ("kvd_failed_blocks", "Blocks whose copy failed and was not called off.", "failed"),
    (
        "kvd_checksum_failures",
        "Blocks removed because their bytes were not those that were stored.",
        "damaged",
    ),
    ("kvd_recovered_blocks", "Blocks found readable in the pool at start.", "recovered"),
    ("kvd_cleared_blocks", "Blocks removed by an operator.", "cleared"),
    ("kvd_dropped_blocks", "Blocks removed because no engine could use them.", "dropped"),
    (
        "kvd_namespaces_forgotten",
        "Namespaces forgotten because no engine used them.",
        "namespaces_forgotten",
    ),
    ("kvd_rows_granted", "Extent rows given to a size class.", "rows_granted"),
    ("kvd_rows_taken_back", "Extent rows taken from a size class for another.", "rows_taken_back"),
    ("kvd_rows_refused", "Rows that there was no memory for.", "rows_refused"),
    ("kvd_leases_expired", "Leases that no step renewed in time.", "leases_expired"),
    ("kvd_handed_off_blocks", "Blocks left for another engine and held for it.", "handed_off"),
    (
        "kvd_hand_off_taken_blocks",
        "Handed-off blocks that another engine loaded, or a tier that nodes share has taken.",
        "hand_off_taken",
    ),
    ("kvd_hand_off_expired_blocks", "Handed-off blocks nobody took in time.", "hand_off_expired"),
    (
        "kvd_hand_off_unheld_blocks",
        "Handed-off blocks not there or over a cap, or lost later, as by a clear.",
        "hand_off_unheld",
    ),
    ("kvd_movers_killed", "Movers that ended amid a copy, as a late one.", "movers_killed"),
)


class StateCollector(Collector):
    """Reads the core's figures when somebody scrapes."""

    def __init__(self, statistics: Callable[[], Statistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges of this moment."""
        now = self._statistics()
        for name, meaning, field in _COUNTERS:
            yield CounterMetricFamily(name, meaning, value=getattr(now.counters, field))
        refused = CounterMetricFamily(
            "kvd_jobs_refused", "Jobs refused, by reason.", labels=["reason"]
        )
        for reason, count in sorted(now.counters.refused.items()):
            refused.add_metric([reason], count)
        yield refused
        hinted = CounterMetricFamily(
            "kvd_hinted_blocks",
            "Blocks with a hint, by hint, and whether it was followed, went beyond the tenant's"
            " share, met what another retains, or found no tier.",
            labels=["hint", "outcome"],
        )
        for (hint, outcome), blocks in sorted(now.counters.hinted.items()):
            hinted.add_metric([hint, outcome], blocks)
        yield hinted
        meaning = "Slots of the granted rows, by state; what no row has yet is kvd_extents_free."
        yield _by_state("kvd_slots", meaning, now.slots)
        yield _by_state("kvd_slot_bytes", "Bytes of the granted rows' slots, by state.", now.bytes)
        yield from self._gauges(now)
        meaning = "Size classes by the policy that auto chose for them."
        policies = GaugeMetricFamily("kvd_policy_classes", meaning, labels=["policy"])
        for policy, classes in sorted(now.policies.items()):
            policies.add_metric([policy], classes)
        yield policies
        yield from _tenant_gauges(now)
        yield _curve(now)
        yield from _evictions(now)
        yield from tier_families(now)

    def _gauges(self, now: Statistics) -> Iterator[Metric]:
        jobs = sum(session.jobs for session in now.sessions)
        ready = sum(session.usable for session in now.sessions)
        for name, meaning, value in (
            ("kvd_pool_bytes", "Bytes of all extents.", now.extents * now.extent_bytes),
            ("kvd_extent_bytes", "Bytes of one extent.", now.extent_bytes),
            ("kvd_extents", "Extents of the pool.", now.extents),
            ("kvd_extents_free", "Extents that no row holds.", now.extents_free),
            ("kvd_rows", "Extent rows granted to size classes.", now.rows),
            ("kvd_rows_retiring", "Extent rows on their way back.", now.rows_retiring),
            ("kvd_transfers_in_flight", "Copies given to movers and not ended.", now.transfers),
            ("kvd_jobs_in_flight", "Jobs that have not ended.", jobs),
            ("kvd_leases", "Leases that engines hold.", now.leases),
            ("kvd_hand_offs", "Ended requests whose blocks are held.", now.hand_offs),
            ("kvd_hand_off_blocks", "Blocks that hand-offs hold.", now.handed_off_blocks),
            ("kvd_followed_keys", "Keys whose store waits for another's.", now.followed_keys),
            ("kvd_sessions", "Open sessions.", len(now.sessions)),
            ("kvd_sessions_usable", "Open sessions whose ranks are all registered.", ready),
            ("kvd_namespaces", "Namespaces known.", now.namespaces_known),
            ("kvd_draining", "1 while the daemon takes no stores.", int(now.draining)),
        ):
            yield GaugeMetricFamily(name, meaning, value=value)


def _curve(now: Statistics) -> Metric:
    family = GaugeMetricFamily(
        "kvd_estimated_hit_ratio",
        "What a pool of so many sizes of this one would find, by a sample of the blocks used.",
        labels=["pools"],
    )
    for pools, ratio in () if now.curve is None else now.curve.points:
        family.add_metric([f"{pools:g}"], ratio)
    return family


def _evictions(now: Statistics) -> Iterator[Metric]:
    """Whether what is evicted would have been of use."""
    ages = HistogramMetricFamily(
        "kvd_evicted_unused_seconds", "How long evicted blocks had not been used; one in 8 is seen."
    )
    bounds = [*(str(float(bound)) for bound in AGES_OF_EVICTION), "+Inf"]
    ages.add_metric([], list(zip(bounds, accumulate(now.ages), strict=True)), now.age_sum_s)
    yield ages
    again = CounterMetricFamily(
        "kvd_evicted_used_again_blocks",
        "Evicted blocks that were used again so many minutes later at most; by a sample.",
        labels=["minutes"],
    )
    for within_s, blocks in zip(REGRETTED_WITHIN, now.regrets, strict=True):
        again.add_metric([f"{within_s // 60}"], blocks)
    yield again


def _by_state(name: str, meaning: str, occupancy: Occupancy) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=["state"])
    for state in _SLOT_STATES:
        family.add_metric([state], getattr(occupancy, state))
    return family


def _tenant_gauges(now: Statistics) -> Iterator[Metric]:
    used = GaugeMetricFamily("kvd_tenant_bytes", "Bytes that a tenant uses.", labels=["tenant"])
    quota = GaugeMetricFamily(
        "kvd_tenant_quota_bytes", "A tenant's hard quota; 0 = none.", labels=["tenant"]
    )
    leased = GaugeMetricFamily(
        "kvd_tenant_leased_bytes", "Bytes that a tenant's leases hold.", labels=["tenant"]
    )
    for tenant in now.tenants[:MAX_TENANTS_SHOWN]:
        used.add_metric([tenant.tenant], tenant.used_bytes)
        quota.add_metric([tenant.tenant], tenant.quota_bytes)
        leased.add_metric([tenant.tenant], tenant.leased_bytes)
    yield from (used, quota, leased)


# Name, help, and where it stands in what engines tell.
_LOOKUPS = (
    ("kvd_offered_requests", "Requests that engines looked up.", "requests", ""),
    ("kvd_found_requests", "Requests looked up that found a block to load.", "requests_found", ""),
    ("kvd_missed_requests", "Requests looked up that found none.", "requests", "requests_found"),
    (
        "kvd_offered_blocks",
        "Whole blocks of the prompts that engines looked up, without what the device had.",
        "blocks",
        "",
    ),
    ("kvd_found_blocks", "Blocks looked up that were loaded from kvd.", "blocks_found", ""),
    ("kvd_missed_blocks", "Blocks looked up that the engine computed.", "blocks", "blocks_found"),
    (
        "kvd_offered_tokens",
        "Tokens of the prompts that engines looked up, without what the device had.",
        "tokens",
        "",
    ),
    ("kvd_found_tokens", "Tokens looked up that were loaded from kvd.", "tokens_found", ""),
)


class LookupCollector(Collector):
    """What engines tell of their lookups: a client answers most misses without a call."""

    def __init__(self, told: ToldLookups) -> None:
        self._told = told

    def collect(self) -> Iterator[Metric]:
        """Counters by tenant and namespace; without a namespace: of those beyond the bound."""
        waited = CounterMetricFamily(
            "kvd_unserved_seconds",
            "How long engines computed without a session, told when they have one again.",
            labels=["tenant"],
        )
        for tenant, seconds in islice(self._told.unserved(), MAX_TENANTS_SHOWN):
            waited.add_metric([tenant], seconds)
        yield waited
        told = list(self._told.rows())
        rows = [row for row in told if row.namespace is not None]
        rows += islice((row for row in told if row.namespace is None), MAX_TENANTS_SHOWN)
        for name, meaning, whole, without in _LOOKUPS:
            family = CounterMetricFamily(name, meaning, labels=["tenant", "namespace"])
            for row in rows:
                count = getattr(row.figures, whole)
                count -= getattr(row.figures, without) if without else 0
                namespace = "" if row.namespace is None else str(row.namespace)
                family.add_metric([row.tenant, namespace], count)
            yield family


class RankCollector(Collector):
    """What the movers of the registered ranks last said of themselves."""

    def __init__(self, ranks: Callable[[], Iterable[AttachedMover]]) -> None:
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        """How each rank's bytes move, and what its mover takes of a GPU."""
        ranks = list(islice(self._ranks(), MAX_RANKS_SHOWN))
        transports = GaugeMetricFamily(
            "kvd_rank_transport_info",
            "1; the labels say how a rank's memory is reached and by what its bytes are moved.",
            labels=[*_RANK, "transport", "copier"],
        )
        for attached in ranks:
            facts = attached.process.facts
            copiers = [facts.copier]
            transports.add_metric([*_rank_labels(attached), facts.transport, *copiers], 1)
        yield transports
        yield from _gpu_families(ranks)


_RANK = ("session", "rank", "gpu")


def _rank_labels(attached: AttachedMover) -> list[str]:
    gpu = attached.process.facts.gpu
    rank = str(attached.placement.rank)
    return [str(attached.session), rank, gpu.uuid if gpu is not None else ""]


def _gpu_families(ranks: Iterable[AttachedMover]) -> Iterator[Metric]:
    context = GaugeMetricFamily(
        "kvd_mover_context_bytes", "GPU memory that a rank's mover takes; 0: unknown.", labels=_RANK
    )
    registered = GaugeMetricFamily(
        "kvd_mover_registered_bytes", "Bytes of extents pinned for a rank's GPU.", labels=_RANK
    )
    unregistered = GaugeMetricFamily(
        "kvd_mover_unregistered_extents",
        "Extents that could not be pinned: copies there go through a buffer.",
        labels=_RANK,
    )
    staged = CounterMetricFamily(
        "kvd_mover_staged_bytes",
        "Bytes copied through the buffer, for their extents were not pinned.",
        labels=_RANK,
    )
    for attached in ranks:
        facts, labels = attached.process.facts, _rank_labels(attached)
        if facts.gpu is not None:
            context.add_metric(labels, facts.gpu.context_bytes)
            registered.add_metric(labels, facts.gpu.registered_bytes)
            unregistered.add_metric(labels, facts.gpu.unregistered_extents)
            staged.add_metric(labels, facts.gpu.staged_bytes)
    yield from (context, registered, unregistered, staged)


class ProcessCollector(Collector):
    """What this process takes; movers are processes of their own."""

    def __init__(self) -> None:
        self._start = time.time()

    def collect(self) -> Iterator[Metric]:
        """CPU, memory and descriptors of control."""
        used = proc.own_use()
        yield CounterMetricFamily(
            "process_cpu_seconds", "CPU time of the control process.", value=used.cpu_seconds
        )
        yield GaugeMetricFamily(
            "process_resident_memory_bytes",
            "Resident memory of the control process, with the pool's pages that it touched.",
            value=used.resident_bytes,
        )
        yield GaugeMetricFamily(
            "process_open_fds",
            "Open descriptors of the control process.",
            value=proc.count_own_descriptors(),
        )
        yield GaugeMetricFamily(
            "process_start_time_seconds", "When the process began, since 1970.", value=self._start
        )


class Metrics:
    """Observes calls and copies; the driver's observer and the interceptor's."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(ProcessCollector())
        build = GaugeMetricFamily(
            "kvd_build_info", "1; the version is a label.", labels=["version"]
        )
        build.add_metric([version], 1)
        self.registry.register(_Constant(build))
        self._rpc_seconds = Histogram(
            "kvd_rpc_seconds",
            "Time from a call's arrival to its answer; a stream's life.",
            ["method", "code"],
            buckets=_RPC_BUCKETS,
            registry=self.registry,
        )
        self._message_seconds = Histogram(
            "kvd_session_message_seconds",
            "Time in which a message of a session's stream was worked off, by kind.",
            ["kind"],
            buckets=_RPC_BUCKETS,
            registry=self.registry,
        )
        self._refused = Counter(
            "kvd_requests_refused",
            "Calls and stream messages that broke a rule, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._lined_up = Counter("kvd_calls_lined_up", _LINED_UP, registry=self.registry)
        self._copy_seconds = Histogram(
            "kvd_transfer_seconds",
            "Time of one rank's copy of one job, by kind.",
            ["kind"],
            buckets=_COPY_BUCKETS,
            registry=self.registry,
        )
        self._copy_bytes = Counter(
            "kvd_transfer_bytes",
            "Bytes that movers copied, all ranks together, by kind.",
            ["kind"],
            registry=self.registry,
        )
        self._copies = Counter(
            "kvd_transfers",
            "Copies that ended, by kind and outcome.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self._jobs = Counter(
            "kvd_jobs_ended", "Jobs that ended, by kind and status.", ["kind", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._spilled = Counter(
            "kvd_index_page_spilled_tags",
            "Tags for which an index page had no place: found by a call only.",
            registry=self.registry,
        )
        self._touch_label_sets()

    def _touch_label_sets(self) -> None:
        """Let every series with a closed label set start at 0, so that rates see its first rise."""
        for message in _MESSAGES:
            self._message_seconds.labels(message)
        for kind in JobKind:
            self._copy_seconds.labels(kind.name.lower())
            self._copy_bytes.labels(kind.name.lower())
            for outcome in TransferOutcome:
                self._copies.labels(kind.name.lower(), outcome.value)
            for status in JobStatus:
                self._jobs.labels(kind.name.lower(), status.name.lower())

    def watch(self, statistics: Callable[[], Statistics]) -> None:
        """From now on a scrape reads these figures too."""
        self.registry.register(StateCollector(statistics))

    def watch_ranks(self, ranks: Callable[[], Iterable[AttachedMover]]) -> None:
        """From now on a scrape reads what these movers say, too."""
        self.registry.register(RankCollector(ranks))

    def watch_lookups(self, told: ToldLookups) -> None:
        """From now on a scrape reads what engines tell of their lookups, too."""
        self.registry.register(LookupCollector(told))

    def watch_registry(self, unwritten: Callable[[], int]) -> None:
        """From now on a scrape reads how much a restart would not know."""
        Gauge(
            "kvd_registry_unwritten",
            "Namespaces and scopes that wait for room in the registry.",
            registry=self.registry,
        ).set_function(unwritten)

    def watch_sockets(self, lost: Callable[[], object]) -> None:
        """From now on a scrape reads whether a socket was lost: None where each is there."""
        Gauge(
            "kvd_socket_lost",
            "1 while a socket's file is not the daemon's any more: no engine can connect.",
            registry=self.registry,
        ).set_function(lambda: lost() is not None)

    def tell_checksums(self, *, are_kept: bool) -> None:
        """From now on a scrape reads whether blocks' bytes are compared."""
        Gauge(
            "kvd_pool_checksums",
            "1 where checksums of the blocks' bytes are kept and compared at each load.",
            registry=self.registry,
        ).set(are_kept)

    async def exposition(self) -> bytes:
        """All metrics in Prometheus's text format.

        With turns of the event loop for others; what takes longest is done beside it. Figures of
        one name are of one moment.
        """
        families = []
        others_had_their_turn = time.perf_counter()
        for family in self.registry.collect():
            families.append(family)
            if time.perf_counter() - others_had_their_turn >= GATHER_SECONDS:
                await asyncio.sleep(0)
                others_had_their_turn = time.perf_counter()
        return await apart(lambda: generate_latest(_Gathered(families)))

    # -- what is observed -------------------------------------------------------------------

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        """A call was answered."""
        self._rpc_seconds.labels(method, code).observe(seconds)

    def message_answered(self, kind: str, seconds: float) -> None:
        """A message of a session's stream was worked off."""
        self._message_seconds.labels(kind).observe(seconds)

    def refused(self, reason: str) -> None:
        """A call or a message broke a rule."""
        self._refused.labels(reason).inc()

    def lined_up(self) -> None:
        """A call waits in line: its user sends more than are taken up as they come."""
        self._lined_up.inc()

    def transfer_finished(
        self, kind: JobKind, outcome: TransferOutcome, bytes_copied: int, duration_ns: int
    ) -> None:
        """One rank's copy has ended."""
        name = kind.name.lower()
        self._copies.labels(name, outcome.value).inc()
        self._copy_bytes.labels(name).inc(bytes_copied)
        if outcome is TransferOutcome.DONE:
            self._copy_seconds.labels(name).observe(duration_ns / 1e9)

    def job_ended(self, order: EndJob) -> None:
        """A job has ended on every rank."""
        self._jobs.labels(order.kind.name.lower(), order.status.name.lower()).inc()

    def tags_spilled(self, count: int) -> None:
        """So many tags found no place in their index page."""
        self._spilled.inc(count)


class _Gathered(CollectorRegistry):
    """What was read from a registry before."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


class _Constant(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric
