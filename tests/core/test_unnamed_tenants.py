"""Tenants that no rule names any more: known as long as anything is theirs."""

from __future__ import annotations

from dataclasses import replace

from kvd.core import events as ev
from kvd.core.keys import TenantId
from kvd.core.upkeep.operator import TENANTS_A_TICK
from tests.core.bench import Bench, small, spec
from tests.core.replaying import replay

TENANT = "tenant"  # whose the bench's sessions are


def name(bench: Bench, tenant: str, *, named: bool = True, quota_bytes: int = 0) -> None:
    token = len(bench.log)
    bench.feed(ev.QuotaSet(token, TenantId(tenant), quota_bytes, named))


def known(bench: Bench) -> set[str]:
    return {figures.tenant for figures in bench.machine.tenants()}


def test_one_without_anything_is_forgotten() -> None:
    bench = small()
    name(bench, "gone", quota_bytes=1 << 20)
    name(bench, "stays")
    bench.tick()
    assert known(bench) == {"gone", "stays"}
    name(bench, "gone", named=False)
    bench.tick()
    bench.tick()
    assert known(bench) == {"stays"}
    assert bench.machine.quota_of(TenantId("gone")) is None


def test_one_that_is_named_again_stays() -> None:
    bench = small()
    name(bench, "back", named=False)
    name(bench, "back")
    bench.tick()
    bench.tick()
    assert known(bench) == {"back"}


def test_one_with_blocks_is_known_until_its_namespace_is_forgotten() -> None:
    bench = small()
    bench.open(1, replace(spec("private"), unshared=True))
    bench.stored([1, 2])
    name(bench, TENANT, named=False)
    bench.tick()
    bench.tick()
    assert known(bench) == {TENANT}
    bench.leave(1, gone=True)
    bench.tick()
    assert bench.machine.statistics().namespaces_known == 0
    assert not bench.machine.state.gone.shares, "of what went as well"
    assert known(bench) == set()
    replay(bench)


def test_one_whose_engine_comes_back_before_it_is_forgotten_has_its_blocks() -> None:
    bench = small()
    bench.open()
    bench.stored([1, 2])
    bench.leave(1)
    name(bench, TENANT, named=False)
    bench.tick()
    name(bench, TENANT)
    bench.open(2)
    assert bench.statuses([1, 2], 2) == "HH"
    assert known(bench) == {TENANT}


def test_tenants_that_no_rule_names_any_more_are_forgotten_some_a_tick() -> None:
    bench = small()
    for number in range(TENANTS_A_TICK + 1):
        name(bench, f"t{number}", named=False)
    bench.work_off()
    bench.tick()
    assert len(known(bench)) == 1
    bench.tick()
    assert not known(bench)


def test_an_operators_quota_for_one_that_no_rule_names_keeps_it_no_longer() -> None:
    bench = small()
    name(bench, "goes", named=False)
    bench.feed(ev.QuotaSet(99, TenantId("goes"), 1 << 20))
    bench.tick()
    bench.tick()
    assert known(bench) == set()


def test_figures_that_are_told_in_pieces_leave_out_who_is_forgotten_meanwhile() -> None:
    bench = small()
    name(bench, "stays")
    name(bench, "goes", named=False)
    figures = bench.machine.tenants()
    assert next(figures).tenant == "stays"
    bench.tick()
    assert list(figures) == []
