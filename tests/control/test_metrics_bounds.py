"""The metrics page names so many tenants and ranks, and leaves the others out."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvd.core.keys import NamespaceId, TenantId
from kvd.core.model.state import Counters
from kvd.core.upkeep.statistics import Occupancy, Statistics, TenantFigures
from kvd.mover.facts import MoverFacts
from kvd.observability.metrics import MAX_RANKS_SHOWN, MAX_TENANTS_SHOWN, Metrics
from kvd.runtime.told_lookups import MAX_NAMESPACES_TOLD, LookupFigures, ToldLookups
from tests.control.test_transport_shown import attached


def shown(metrics: Metrics, name: str, label: str) -> list[str]:
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return [
        sample.labels[label]
        for family in families
        for sample in family.samples
        if sample.name == name
    ]


@pytest.mark.parametrize("more", [0, 1])
def test_ranks_beyond_the_bound_are_left_out(more: int) -> None:
    metrics = Metrics("1")
    movers = [attached(1, rank, MoverFacts()) for rank in range(MAX_RANKS_SHOWN + more)]
    metrics.watch_ranks(lambda: movers)
    ranks = shown(metrics, "kvd_rank_transport_info", "rank")
    assert ranks == [str(rank) for rank in range(MAX_RANKS_SHOWN)]


@pytest.mark.parametrize("more", [0, 1])
def test_tenants_beyond_the_bound_are_left_out(more: int) -> None:
    tenants = tuple(
        TenantFigures(TenantId(f"t{n}"), n, 0, 0, 0, 0) for n in range(MAX_TENANTS_SHOWN + more)
    )
    none = Occupancy(0, 0, 0, 0, 0)
    figures = Statistics(
        none, none, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, False, len(tenants), tenants, 0, (), (), (),
        Counters(), None, (0,) * 9, 0.0, (0.0,) * 3, {},
    )  # fmt: skip
    metrics = Metrics("1")
    metrics.watch(lambda: figures)
    for name in ("kvd_tenant_bytes", "kvd_tenant_quota_bytes", "kvd_tenant_leased_bytes"):
        assert shown(metrics, name, "tenant") == [f"t{n}" for n in range(MAX_TENANTS_SHOWN)]


@pytest.mark.parametrize("more", [0, 1])
def test_tenants_beyond_the_bound_whose_namespaces_are_too_are_left_out(more: int) -> None:
    told = ToldLookups(lambda _: True)
    for number in range(MAX_NAMESPACES_TOLD + MAX_TENANTS_SHOWN + more):
        told.add(NamespaceId(number), TenantId(f"t{number}"), LookupFigures(1, 0, 4, 0, 64, 0))
    metrics = Metrics("1")
    metrics.watch_lookups(told)
    tenants = shown(metrics, "kvd_offered_blocks_total", "tenant")
    assert tenants == [f"t{number}" for number in range(MAX_NAMESPACES_TOLD + MAX_TENANTS_SHOWN)]


async def test_others_have_turns_while_the_page_is_made_and_it_is_written_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = Metrics("1")
    metrics.watch_lookups(ToldLookups(lambda _: True))
    families = len(list(metrics.registry.collect()))
    threads: list[threading.Thread] = []

    def noted(of: CollectorRegistry) -> bytes:
        threads.append(threading.current_thread())
        return generate_latest(of)

    monkeypatch.setattr("kvd.observability.metrics.generate_latest", noted)
    monkeypatch.setattr("kvd.observability.metrics.GATHER_SECONDS", 0)
    making = asyncio.create_task(metrics.exposition())
    for _ in range(families):
        await asyncio.sleep(0)
        assert not making.done()
    lines = (await making).splitlines()
    assert threads != [threading.current_thread()]
    assert [line for line in lines if line.startswith(b"# TYPE")] == [
        line
        for line in generate_latest(metrics.registry).splitlines()
        if line.startswith(b"# TYPE")
    ]
