"""Offered, found and missed, as engines tell it: shown by tenant and namespace, and bounded."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvd.cli.status import as_json, as_text
from kvd.core.keys import NamespaceId, TenantId
from kvd.core.machine import Machine, MachineConfig
from kvd.observability.metrics import Metrics
from kvd.observability.status_page import Sources, StatusPage
from kvd.runtime.told_lookups import (
    MAX_COUNTED,
    MAX_NAMESPACES_TOLD,
    MAX_TENANTS_TOLD,
    MAX_TOLD,
    MAX_UNSERVED_S,
    NO_TENANT,
    LookupFigures,
    ToldLookups,
    ToldOf,
)
from kvd_proto.v1 import engine_pb2
from tests.control.daemon_rig import RawScheduler, RunningDaemon, daemon, identity, namespace
from tests.ports import free_port

TENANT = TenantId("acme")
ONE_MISS = LookupFigures(1, 0, 4, 0, 70, 0)
ONE_HIT = LookupFigures(1, 1, 4, 3, 70, 48)


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with daemon("--http-port", str(free_port())) as started:
        yield started


def test_misses_that_were_no_call_are_shown_in_metrics_and_status() -> None:
    port = free_port()
    with daemon("--http-port", str(port)) as running:
        engines = [
            RawScheduler(running.socket, identity=identity(name), namespace=namespace(model=name))
            for name in ("a", "b")
        ]
        numbers = [engine.opened.namespace_id for engine in engines]
        told = engine_pb2.LookupCounts(
            requests=4, requests_found=1, blocks=20, blocks_found=9, tokens=330, tokens_found=144
        )
        engines[0].step(lookups=told, end_step=True)
        engines[0].step(end_step=True)
        engines[1].step(end_step=True)  # as an older client
        status = engines[0].status()
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
        for engine in engines:
            engine.close()
    told_of = {each.namespace_id: each for each in status.namespaces}
    one, two = (told_of[number] for number in numbers)
    assert (one.lookups.blocks_found, one.lookups.blocks) == (9, 20)
    assert not two.HasField("lookups")
    (tenant,) = status.tenants
    assert tenant.lookups == one.lookups
    assert tenant.lookups.tokens_found == 144
    lines = "\n".join(as_text(status))
    assert "45.0% of 20 blocks" in lines
    assert as_json(status)["tenants"][0]["lookups"]["requests_found"] == 1  # type: ignore[index]
    values = samples(page, one.namespace_id)
    assert values == {
        "kvd_offered_requests_total": 4,
        "kvd_found_requests_total": 1,
        "kvd_missed_requests_total": 3,
        "kvd_offered_blocks_total": 20,
        "kvd_found_blocks_total": 9,
        "kvd_missed_blocks_total": 11,
        "kvd_offered_tokens_total": 330,
        "kvd_found_tokens_total": 144,
    }


def test_time_without_a_session_is_told_at_the_next_one(running: RunningDaemon) -> None:
    for seconds in (0.0, 12.5, 30.0):
        scheduler = RawScheduler(running.socket, unserved_seconds=seconds)
        assert scheduler.opened.session_id
        scheduler.close()
    url = f"http://127.0.0.1:{running.more_flags[1]}/metrics"
    page = urllib.request.urlopen(url, timeout=10).read()
    assert b'kvd_unserved_seconds_total{tenant="default"} 42.5' in page


def samples(page: bytes, namespace_id: int) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.labels.get("namespace") == str(namespace_id)
        and not sample.name.endswith("_created")
    }


def test_a_step_that_is_sent_again_counts_once(running: RunningDaemon) -> None:
    engine = RawScheduler(running.socket)
    told = engine_pb2.LookupCounts(requests=1, blocks=5)
    for _ in range(2):
        engine.send(step=engine_pb2.Step(sequence=1, lookups=told, end_step=True))
        engine.next("step")
    assert engine.status().tenants[0].lookups.blocks == 5
    engine.close()


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        (LookupFigures(1, 2, 3, 4, 5, 6), LookupFigures(1, 1, 3, 3, 5, 5)),
        (LookupFigures(blocks=MAX_COUNTED), LookupFigures(blocks=MAX_COUNTED)),
        (
            LookupFigures(blocks=MAX_COUNTED + 1, blocks_found=(1 << 64) - 1),
            LookupFigures(blocks=MAX_COUNTED, blocks_found=MAX_COUNTED),
        ),
    ],
    ids=["more found than sought", "at the bound", "beyond it"],
)
def test_a_client_that_lies_counts_within_bounds(
    said: LookupFigures, counted: LookupFigures
) -> None:
    told = ToldLookups(lambda _: True)
    told.add(NamespaceId(1), TENANT, said)
    assert told.of_namespace(NamespaceId(1)) == counted


@pytest.mark.parametrize(
    ("said", "counted"),
    [(1.5, 1.5), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), MAX_UNSERVED_S)],
    ids=["some", "less than none", "no number", "for ever"],
)
def test_time_without_a_session_counts_within_bounds(said: float, counted: float) -> None:
    told = ToldLookups(lambda _: True)
    told.add_unserved(TENANT, said)
    assert list(told.unserved()) == [(TENANT, counted)]


def test_sums_end_at_what_the_protocol_can_say() -> None:
    sums = LookupFigures(blocks=MAX_TOLD - 1)
    sums.add(LookupFigures(blocks=1))
    assert sums.blocks == MAX_TOLD
    sums.add(LookupFigures(blocks=1))
    assert sums.blocks == MAX_TOLD


def test_what_one_tenant_says_is_no_other_tenants() -> None:
    told = ToldLookups(lambda _: True)
    told.add(NamespaceId(1), TENANT, ONE_HIT)
    told.add(NamespaceId(2), TenantId("liar"), LookupFigures(9, 9, 9, 9, 9, 9))
    assert told.of_tenant(TENANT) == ONE_HIT
    assert told.of_namespace(NamespaceId(1)) == ONE_HIT


def test_what_is_told_together_of_a_forgotten_tenant_is_shown_no_more() -> None:
    gone = TenantId("gone")
    told = ToldLookups(lambda _: True, lambda tenant: tenant != gone)
    for number in range(MAX_NAMESPACES_TOLD + 1):
        told.add(NamespaceId(number), gone, LookupFigures(1))
    assert [row for row in told.rows() if row.namespace is None] == []


def test_namespaces_beyond_the_bound_are_told_together_by_tenant() -> None:
    told = ToldLookups(lambda _: True)
    for number in range(MAX_NAMESPACES_TOLD + 2):
        told.add(NamespaceId(number), TENANT, ONE_MISS)
    rows = list(told.rows())
    assert len(rows) == MAX_NAMESPACES_TOLD + 1
    assert rows[-1].namespace is None
    assert rows[-1].figures.blocks == 2 * ONE_MISS.blocks
    assert told.of_namespace(NamespaceId(MAX_NAMESPACES_TOLD)) is None
    metrics = Metrics("1")
    metrics.watch_lookups(told)
    page = generate_latest(metrics.registry).decode()
    assert page.count("kvd_missed_blocks_total{") == MAX_NAMESPACES_TOLD + 1
    assert 'kvd_missed_blocks_total{namespace="",tenant="acme"} 8.0' in page


def test_forgotten_tenants_give_their_places_to_others_and_stay_in_the_whole_sum() -> None:
    known: set[TenantId] = set()
    told = ToldLookups(lambda _: True, known.__contains__)
    for number in range(MAX_TENANTS_TOLD + 1):
        tenant = TenantId(f"t{number}")
        known.clear()
        known.add(tenant)
        told.add(NamespaceId(number), tenant, ONE_MISS)
        told.add_unserved(tenant, 1.0)
        assert [each for each, _ in told.unserved()] == [tenant]
        assert len(told._tenants) <= MAX_TENANTS_TOLD
    assert told.of_tenant(TenantId("t0")) is None
    assert told.of_tenant(tenant) == ONE_MISS
    assert [row.tenant for row in told.rows() if row.namespace is None] == [tenant]
    whole = sum(row.figures.requests for row in told.by_tenant())
    assert whole == (MAX_TENANTS_TOLD + 1) * ONE_MISS.requests


def test_tenants_beyond_the_bound_are_told_together() -> None:
    told = ToldLookups(lambda _: True)
    for number in range(MAX_TENANTS_TOLD + 2):
        told.add(NamespaceId(number), TenantId(f"t{number}"), ONE_MISS)
    rows = list(told.by_tenant())
    assert len(rows) == MAX_TENANTS_TOLD + 1
    last = rows[-1]
    assert last == ToldOf(NO_TENANT, None, last.figures)
    assert last.figures.requests == 2 * ONE_MISS.requests


def test_a_forgotten_namespace_gives_its_place_to_another_and_stays_in_its_tenants_sum() -> None:
    known = set(range(MAX_NAMESPACES_TOLD + 1))
    told = ToldLookups(lambda namespace: namespace in known)
    for number in range(MAX_NAMESPACES_TOLD):
        told.add(NamespaceId(number), TENANT, ONE_MISS)
    known.discard(0)
    assert 0 not in {row.namespace for row in told.rows()}
    told.add(NamespaceId(MAX_NAMESPACES_TOLD), TENANT, ONE_MISS)
    assert MAX_NAMESPACES_TOLD in {row.namespace for row in told.rows()}
    whole = told.of_tenant(TENANT)
    assert whole is not None
    assert whole.requests == MAX_NAMESPACES_TOLD + 1


def test_the_status_page_counts_on_when_a_namespace_is_forgotten() -> None:
    known = {NamespaceId(1), NamespaceId(2)}
    told = ToldLookups(known.__contains__)
    told.add(NamespaceId(1), TENANT, ONE_HIT)
    told.add(NamespaceId(2), TENANT, ONE_MISS)
    machine = Machine(MachineConfig(extents=8, extent_bytes=1 << 20))
    page = StatusPage("1")
    page._sources = Sources(machine.statistics, told.by_tenant, lambda: (), lambda: "ready")
    page.sample()
    known.discard(NamespaceId(1))
    page.sample()
    said = json.loads(page.figures()[2])
    offered = said["columns"].index("offered")
    assert [row[offered] for row in said["samples"]] == [8, 8]
