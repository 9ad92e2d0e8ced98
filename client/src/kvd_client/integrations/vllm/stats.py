"""The connector's metrics: vLLM's own names where kvd has the same thing to say, and kvd's.

vLLM sends what `KvdStats.take` returns to its API server with each step's output; there the
definitions below make Prometheus metrics of it. Labels that vLLM adds are its model and engine.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics

CONNECTED = "vllm:kvd_connected"
SESSIONS = "vllm:kvd_sessions"
REFUSALS = "vllm:kvd_refusals"
FAILED_LOADS = "vllm:kvd_failed_loads"
FAILED_STORES = "vllm:kvd_failed_stores"
NO_ROOM = "vllm:kvd_no_room"
STORES_SKIPPED = CPUOffloadingMetrics.STORES_SKIPPED
BLOCKING_CALLS = "vllm:kvd_blocking_calls"
LOOKUP_WAIT = "vllm:kvd_lookup_wait_seconds"
REMOVALS = "vllm:kvd_removals"
GIVEN_UP = "vllm:kvd_given_up"

ALLOCATION_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)  # as vLLM's
MAX_ALLOCATIONS = 1024  # in one step; what is beyond is not in the histogram

_COUNTERS = {
    STORES_SKIPPED: (
        "Blocks not stored because they have not been seen often enough; the daemon sets how often."
    ),
    SESSIONS: "Sessions opened with the kvd daemon; each one after the first is a reconnect.",
    FAILED_LOADS: "Loads that failed: their requests were computed instead.",
    FAILED_STORES: "Blocks whose store was refused or failed.",
    NO_ROOM: "Stores put off because the daemon's pool had no room for them just then.",
    BLOCKING_CALLS: "Scheduler steps that waited for the daemon's answer to their lookups.",
    LOOKUP_WAIT: "Seconds that the scheduler has waited for answers to lookups.",
    REMOVALS: "Blocks of this engine that the daemon evicted, as passed on to KV events.",
}


class ConnectionFigures(Protocol):
    """What the connection counts by itself."""

    refusals: collections.Counter[str]
    blocking_calls: int
    waited_s: float

    @property
    def sessions(self) -> int: ...

    @property
    def session(self) -> object | None: ...


def build_metric_definitions(
    extra_config: Mapping[str, Any],  # noqa: ARG001 - vLLM's signature
) -> dict[str, OffloadingMetricMetadata]:
    """Every metric that `KvdStats` may report, by name.

    vLLM's gauges of how much of its CPU cache is pinned are not among them: the pool is the
    daemon's, which exports what is pinned in it, and by whom, on its own endpoint.
    """
    definitions: dict[str, OffloadingMetricMetadata] = {
        name: OffloadingCounterMetadata(documentation=text) for name, text in _COUNTERS.items()
    }
    definitions[REFUSALS] = OffloadingCounterMetadata(
        documentation="What the daemon refused, by its reason.", labelnames=("reason",)
    )
    definitions[GIVEN_UP] = OffloadingCounterMetadata(
        documentation="Lookups given up, whatever the daemon had: unanswered or in doubt for longer"
        " than computing takes, or without a session.",
        labelnames=("reason",),
    )
    definitions[CONNECTED] = OffloadingGaugeMetadata(
        documentation="1 while the daemon answers and every rank is registered, else 0."
    )
    definitions[CPUOffloadingMetrics.CPU_ALLOCATION_SIZE] = OffloadingHistogramMetadata(
        documentation="Blocks in each store that was sent to the daemon.",
        buckets=ALLOCATION_BUCKETS,
    )
    return definitions


class KvdStats:
    """What the scheduler side counts between two steps; `counts` are by the metric's name.

    One thread adds and takes; what the connection counts is read when taken.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._allocations: list[int] = []
        self._connection: ConnectionFigures | None = None
        self._connected: bool | None = None
        self._seen: tuple[int, int, float] = (0, 0, 0.0)
        self._seen_refusals: dict[str, int] = {}
        self._given_up: collections.Counter[str] = collections.Counter()
        self._seen_given_up: dict[str, int] = {}

    def watch(self, connection: ConnectionFigures) -> None:
        """Report what this connection counts, too; from its beginning."""
        self._connection = connection
        self._seen, self._seen_refusals = (0, 0, 0.0), {}

    def watch_lookups(self, given_up: collections.Counter[str]) -> None:
        """Report these, too: lookups that were given up, by reason."""
        self._given_up, self._seen_given_up = given_up, {}

    def note_allocation(self, blocks: int) -> None:
        """A store of so many blocks is sent."""
        if len(self._allocations) < MAX_ALLOCATIONS:
            self._allocations.append(blocks)

    def take(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call; None when that is nothing."""
        stats = OffloadingConnectorStats()
        for blocks in self._allocations:
            stats.observe_histogram(CPUOffloadingMetrics.CPU_ALLOCATION_SIZE, blocks)
        for name, count in self.counts.items():
            if count:
                stats.increase_counter(name, count)
        self._allocations.clear()
        self.counts.clear()
        self._seen_given_up = _add_news(stats, GIVEN_UP, self._given_up, self._seen_given_up)
        if self._connection is not None:
            self._add_connection(stats, self._connection)
        return None if stats.is_empty() else stats

    def _add_connection(
        self, stats: OffloadingConnectorStats, connection: ConnectionFigures
    ) -> None:
        connected = connection.session is not None
        if connected is not self._connected:
            self._connected = connected
            stats.set_gauge(CONNECTED, int(connected))
        now = (connection.sessions, connection.blocking_calls, connection.waited_s)
        if now != self._seen:
            names = (SESSIONS, BLOCKING_CALLS, LOOKUP_WAIT)
            for name, value, before in zip(names, now, self._seen, strict=True):
                if value != before:
                    stats.increase_counter(name, value - before)
            self._seen = now
        refusals = connection.refusals
        self._seen_refusals = _add_news(stats, REFUSALS, refusals, self._seen_refusals)


def _add_news(
    stats: OffloadingConnectorStats,
    name: str,
    counts: collections.Counter[str],
    seen: dict[str, int],
) -> dict[str, int]:
    """Add to the counter what is more than was seen, by reason. What is seen now."""
    if not counts:
        return seen
    now = dict(counts)  # copied at once: another thread may add to it meanwhile
    if now != seen:
        for reason, count in now.items():
            more = count - seen.get(reason, 0)
            if more:
                stats.increase_counter(name, more, (reason,))
    return now


def keep_deprecated_totals(prom_metrics: Any) -> Any:
    """Let vLLM's older totals (vllm:kv_offload_total_bytes, ...) count for kvd as well.

    vLLM feeds them for its own CPU spec only, and declares them for every spec: a dashboard
    that shows them would say that nothing is offloaded.
    """
    if hasattr(prom_metrics, "_observe_deprecated_metrics"):
        prom_metrics._observe_deprecated_metrics = True
    return prom_metrics
