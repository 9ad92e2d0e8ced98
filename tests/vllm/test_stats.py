"""The connector's metrics, through vLLM's own classes up to what Prometheus is told."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from kvd_client.integrations.vllm.connector import KvdConnector
from kvd_client.integrations.vllm.stats import (
    FAILED_LOADS,
    FAILED_STORES,
    MAX_ALLOCATIONS,
    NO_ROOM,
    REMOVALS,
    STORES_SKIPPED,
    KvdStats,
    build_metric_definitions,
)
from tests.vllm.configurations import configure


class Figures:
    """A connection that counts what a test says."""

    def __init__(self) -> None:
        self.refusals: collections.Counter[str] = collections.Counter()
        self.blocking_calls = 0
        self.waited_s = 0.0
        self.sessions = 0
        self.session: object | None = None


class Frontend:
    """The API server's side: takes a step's figures in, and answers as a scrape would."""

    def __init__(self, model: Path) -> None:
        self._known = set(REGISTRY._collector_to_names)
        types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
        vllm_config = configure(model).vllm
        labels = ["model_name", "engine"]
        self._metrics = KvdConnector.build_prom_metrics(
            vllm_config, types, labels, {0: ["tiny", "0"]}
        )

    def observe(self, stats: KvdStats) -> bool:
        """Whether there was anything to send."""
        taken = stats.take()
        if taken is not None:
            self._metrics.observe(taken.data, 0)
        return taken is not None

    def value(self, name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})

    def transferred(self, name: str, value: float) -> None:
        data = {"types": {name: "counter"}, "data": {name: {(): value}}}
        self._metrics.observe(data, 0)

    def close(self) -> None:
        for collector in set(REGISTRY._collector_to_names) - self._known:
            REGISTRY.unregister(collector)


COUNTED = (FAILED_LOADS, FAILED_STORES, NO_ROOM, REMOVALS, STORES_SKIPPED)


@pytest.fixture
def frontend(model: Path) -> Iterator[Frontend]:
    made = Frontend(model)
    yield made
    made.close()


def test_nothing_counted_is_nothing_sent(frontend: Frontend) -> None:
    assert not frontend.observe(KvdStats())


def test_counters_arrive_under_their_names_and_once(frontend: Frontend) -> None:
    stats = KvdStats()
    stats.counts.update(dict.fromkeys(COUNTED, 3))
    stats.note_allocation(5)
    assert frontend.observe(stats)
    assert not frontend.observe(stats)
    assert frontend.value("vllm:kvd_failed_loads_total") == 3
    assert frontend.value("vllm:kvd_failed_stores_total") == 3
    assert frontend.value("vllm:kvd_no_room_total") == 3
    assert frontend.value("vllm:kvd_removals_total") == 3
    assert frontend.value("vllm:kv_offload_stores_skipped_total") == 3
    assert frontend.value("vllm:kv_offload_cpu_allocation_size_count") == 1
    assert frontend.value("vllm:kv_offload_cpu_allocation_size_sum") == 5


def test_the_connections_own_figures_are_counted_from_its_beginning(frontend: Frontend) -> None:
    stats, figures = KvdStats(), Figures()
    stats.watch(figures)
    assert frontend.observe(stats)
    assert frontend.value("vllm:kvd_connected") == 0
    assert not frontend.observe(stats)
    figures.session, figures.sessions = object(), 1
    figures.blocking_calls, figures.waited_s = 2, 0.25
    figures.refusals.update(["NO_ROOM", "NO_ROOM", "QUOTA"])
    assert frontend.observe(stats)
    assert not frontend.observe(stats)
    figures.blocking_calls, figures.waited_s = 3, 0.5
    figures.refusals.update(["QUOTA"])
    assert frontend.observe(stats)
    assert frontend.value("vllm:kvd_connected") == 1
    assert frontend.value("vllm:kvd_sessions_total") == 1
    assert frontend.value("vllm:kvd_blocking_calls_total") == 3
    assert frontend.value("vllm:kvd_lookup_wait_seconds_total") == 0.5
    assert frontend.value("vllm:kvd_refusals_total", reason="NO_ROOM") == 2
    assert frontend.value("vllm:kvd_refusals_total", reason="QUOTA") == 2
    figures.session = None
    assert frontend.observe(stats)
    assert frontend.value("vllm:kvd_connected") == 0


def test_of_several_api_servers_the_one_told_last_says_whether_the_engine_is_connected(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    frontends, stats, figures = [], KvdStats(), Figures()
    stats.watch(figures)
    for server, session in ((1, object()), (2, None)):
        of_server: Any = values.MultiProcessValue
        monkeypatch.setattr(values, "ValueClass", of_server(partial(int, server)))
        frontends.append(Frontend(model))
        figures.session = session
        assert frontends[-1].observe(stats)
        frontends[-1].close()
    told = CollectorRegistry()
    collector: Any = MultiProcessCollector
    collector(told)
    text = generate_latest(told).decode()
    samples = [line for line in text.splitlines() if line.startswith("vllm:kvd_connected")]
    assert samples == ['vllm:kvd_connected{engine="0",model_name="tiny"} 0.0']


def test_lookups_given_up_are_counted_by_reason_and_once(frontend: Frontend) -> None:
    stats, given_up = KvdStats(), collections.Counter[str]()
    stats.watch_lookups(given_up)
    assert not frontend.observe(stats)
    given_up.update(["unanswered", "unanswered", "pending"])
    assert frontend.observe(stats)
    assert not frontend.observe(stats)
    given_up.update(["unanswered"])
    assert frontend.observe(stats)
    assert frontend.value("vllm:kvd_given_up_total", reason="unanswered") == 3
    assert frontend.value("vllm:kvd_given_up_total", reason="pending") == 1


def test_steps_figures_add_up_where_vllm_joins_them() -> None:
    one, two = KvdStats(), KvdStats()
    one.counts[NO_ROOM], two.counts[NO_ROOM] = 1, 2
    for stats, figures in ((one, Figures()), (two, Figures())):
        figures.refusals["QUOTA"] = 2
        figures.session = object()
        stats.watch(figures)
    first, second = one.take(), two.take()
    assert first is not None
    assert second is not None
    reduced = first.aggregate(second).reduce()
    assert reduced["vllm:kvd_no_room"] == 3
    assert reduced["vllm:kvd_connected"] == 1
    assert reduced["vllm:kvd_refusals:('QUOTA',)"] == 4


def test_a_flood_of_stores_between_two_steps_is_bounded() -> None:
    stats = KvdStats()
    for _ in range(MAX_ALLOCATIONS + 10):
        stats.note_allocation(1)
    taken = stats.take()
    assert taken is not None
    assert taken.reduce()["vllm:kv_offload_cpu_allocation_size_count"] == MAX_ALLOCATIONS


def test_everything_that_is_reported_is_defined() -> None:
    stats, figures = KvdStats(), Figures()
    figures.sessions = figures.blocking_calls = 1
    figures.waited_s = 1.0
    figures.refusals["QUOTA"] = 1
    stats.watch(figures)
    stats.watch_lookups(collections.Counter(unanswered=1))
    stats.counts.update(COUNTED)
    stats.note_allocation(1)
    taken = stats.take()
    assert taken is not None
    definitions: dict[str, Any] = build_metric_definitions({})
    assert set(taken.data["data"]) == set(definitions)


def test_vllms_older_totals_count_for_kvd_too(frontend: Frontend) -> None:
    frontend.transferred("vllm:kv_offload_load_bytes", 4096)
    frontend.transferred("vllm:kv_offload_store_bytes", 512)
    assert frontend.value("vllm:kv_offload_load_bytes_total") == 4096
    total = "vllm:kv_offload_total_bytes_total"
    assert frontend.value(total, transfer_type="CPU_to_GPU") == 4096
    assert frontend.value(total, transfer_type="GPU_to_CPU") == 512


@pytest.mark.parametrize("ours_first", [True, False])
def test_vllms_own_offloading_beside_it_counts_under_the_same_names(
    model: Path, ours_first: bool
) -> None:
    known = set(REGISTRY._collector_to_names)
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    ours = configure(model).vllm
    theirs = configure(model).vllm
    assert theirs.kv_transfer_config is not None
    theirs.kv_transfer_config.kv_connector_extra_config = {
        "spec_name": "CPUOffloadingSpec",
        "cpu_bytes_to_use": 1 << 20,
    }
    order = [(KvdConnector, ours), (OffloadingConnector, theirs)]
    made = {
        connector: connector.build_prom_metrics(
            config, types, ["model_name", "engine"], {0: ["tiny", "0"]}
        )
        for connector, config in (order if ours_first else order[::-1])
    }
    try:
        generate_latest(REGISTRY)  # a scrape before any figure
        data = {
            "types": {"vllm:kv_offload_store_bytes": "counter"},
            "data": {"vllm:kv_offload_store_bytes": {(): 5}},
        }
        for metrics in made.values():
            metrics.observe(data, 0)
        text = generate_latest(REGISTRY).decode()
        samples = [line for line in text.splitlines() if not line.startswith("#")]
        names = [line.rsplit(" ", 1)[0] for line in samples]
        assert len(names) == len(set(names)), "a scrape has each series once"
        (total,) = [
            line for line in samples if line.startswith("vllm:kv_offload_store_bytes_total")
        ]
        assert float(total.rsplit(" ", 1)[1]) == 10
    finally:
        for collector in set(REGISTRY._collector_to_names) - known:
            REGISTRY.unregister(collector)
