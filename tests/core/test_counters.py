"""What is counted, each in the one scenario that it is for; all else stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from kvd.core import events as ev
from kvd.core.keys import SessionId, TenantId
from kvd.core.upkeep.statistics import first_tenants, largest_tenants, no_tenants
from tests.core.bench import BLOCK, EXTENT, SECOND, Bench, context, keys, small

FAILED = ev.TransferOutcome.FAILED


@pytest.fixture
def bench() -> Bench:
    """Two engines of one namespace; blocks 1 to 4 are there."""
    bench = small()
    bench.open(1)
    bench.open(2)
    bench.stored([1, 2, 3, 4])
    return bench


def counted(bench: Bench, work: Callable[[], object]) -> dict[str, Any]:
    """What the work added, by counter; for a counter by reason all that it says."""

    def now() -> dict[str, Any]:
        return asdict(bench.machine.statistics().counters)

    before = now()
    work()
    return {
        name: value if isinstance(value, dict) else value - before[name]
        for name, value in now().items()
        if value != before[name]
    }


def test_a_store_counts_its_blocks_and_the_bytes_that_each_mover_copied(bench: Bench) -> None:
    assert counted(bench, lambda: bench.stored([5, 6, 7])) == {"stored": 3, "store_bytes": BLOCK}


def test_a_load_counts_its_blocks_and_bytes(bench: Bench) -> None:
    bench.load([1, 2])
    assert counted(bench, bench.finish) == {"loaded": 2, "load_bytes": BLOCK}


def test_what_is_there_or_on_its_way_is_counted_as_stored_once(bench: Bench) -> None:
    bench.store([5, 6], session=1)
    work = counted(bench, lambda: bench.store([2, 5, 6], session=2))
    assert work == {"deduplicated": 3}


def test_each_key_of_an_answer_is_counted_as_what_it_was(bench: Bench) -> None:
    bench.store([5])
    work = counted(bench, lambda: bench.lookup([1, 2, 5, 8, 9]))
    assert work == {"hits": 2, "pending": 1, "misses": 2}


def test_what_may_not_be_leased_any_more_is_counted_as_a_retry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.core.claims.lease.MAX_LEASES_PER_SESSION", 1)
    prefix = ev.LeaseMode.PREFIX
    assert counted(bench, lambda: bench.lookup([1, 2], lease=prefix)) == {"hits": 2}
    work = counted(bench, lambda: bench.lookup([1, 2, 3, 9], lease=prefix, request="other"))
    assert work == {"retries": 3, "misses": 1}


def test_leases_that_nobody_renews_are_counted_when_they_end(bench: Bench) -> None:
    for request in ("one", "other"):
        bench.lookup([1, 2], lease=ev.LeaseMode.PREFIX, request=request)
    assert counted(bench, lambda: bench.tick(1 * SECOND)) == {}
    assert counted(bench, lambda: bench.tick(60 * SECOND)) == {"leases_expired": 2}


def test_a_mover_whose_copy_is_late_is_counted_once(bench: Bench) -> None:
    config = bench.config
    bench.load([1, 2])
    bench.load([3])
    late = config.submit_deadline_ns + config.copy_deadline_ns
    assert "movers_killed" not in counted(bench, lambda: bench.tick(late - 1))
    assert counted(bench, lambda: bench.tick(1))["movers_killed"] == 1
    assert "movers_killed" not in counted(bench, lambda: bench.tick(1))
    mover = next(iter(bench.machine.state.movers))
    assert "movers_killed" not in counted(bench, lambda: bench.feed(ev.MoverGone(mover, "")))


@pytest.mark.parametrize(
    ("copies", "told_to_end", "counts"),
    [(True, False, 1), (True, True, 0), (False, False, 0)],
    ids=["with copies", "told to end", "idle"],
)
def test_a_mover_that_ends_by_itself_counts_where_it_had_copies(
    bench: Bench, copies: bool, told_to_end: bool, counts: int
) -> None:
    """Its worker ends one whose load is late, without a word to the daemon."""
    if copies:
        bench.load([1, 2])
    mover = next(iter(bench.machine.state.movers))
    if told_to_end:
        bench.feed(ev.RankEnding(mover, ""))
    work = counted(bench, lambda: bench.feed(ev.MoverGone(mover, "")))
    assert work.get("movers_killed", 0) == counts


def test_a_row_that_the_pool_had_no_memory_for_is_counted() -> None:
    bench = small(extents=16, spare_bytes=EXTENT)
    bench.open()
    row = next(iter(bench.machine.state.rows))
    assert counted(bench, lambda: bench.feed(ev.RowRefused(row)))["rows_refused"] == 1
    assert counted(bench, lambda: bench.feed(ev.RowRefused(row))) == {}


def test_jobs_that_fail_are_counted_by_reason(bench: Bench) -> None:
    for _ in range(2):
        bench.load([1, 99])
    assert bench.machine.statistics().counters.refused == {"KEY_MISSING": 2}
    bench.store([50])
    work = counted(bench, lambda: bench.finish(outcome=FAILED))
    assert work == {"failed": 1, "refused": {"KEY_MISSING": 2, "COPY_FAILED": 1}}


def test_blocks_of_a_copy_that_broke_are_counted_whichever_way_they_went(bench: Bench) -> None:
    bench.load([1, 2])
    assert counted(bench, lambda: bench.finish(outcome=FAILED))["failed"] == 2
    bench.load([1])
    mover = next(iter(bench.machine.state.movers))
    assert counted(bench, lambda: bench.feed(ev.MoverGone(mover, "")))["failed"] == 1


@pytest.mark.parametrize("way", ["abandoned", "cleared", "ended", "closed"])
def test_blocks_of_a_copy_that_was_called_off_are_no_failure(bench: Bench, way: str) -> None:
    """Engines end, give stores up and reset their cache: nobody need be woken for it."""
    bench.store([50, 51])
    mover = next(iter(bench.machine.state.movers))

    def calls_off() -> None:
        match way:
            case "abandoned":
                bench.finish(outcome=ev.TransferOutcome.ABANDONED)
            case "cleared":
                bench.clear()
                bench.finish(outcome=FAILED)
            case "ended":
                bench.feed(ev.RankEnding(mover, ""))
                bench.feed(ev.MoverGone(mover, ""))
            case _:
                bench.close(gone=True)
                bench.finish(outcome=FAILED)

    work = counted(bench, calls_off)
    assert "failed" not in work
    assert sum(work["refused"].values()) == 1
    assert "COPY_FAILED" not in work["refused"]


def test_a_row_that_a_class_is_given_is_counted(bench: Bench) -> None:
    rows = len(bench.machine.state.rows)
    work = counted(bench, lambda: bench.stored(range(10, 26)))
    assert work["rows_granted"] == len(bench.machine.state.rows) - rows == 1


def test_figures_that_were_told_stay_as_they_were(bench: Bench) -> None:
    bench.load([1, 99])
    bench.lookup([1], request="retains")
    told = bench.machine.statistics()
    before = asdict(told)
    bench.load([1, 99])
    bench.feed(ev.DrainStarted())
    bench.store([5])
    bench.feed(ev.Touched(SessionId(1), context(request="releases"), 0, keys(1)))
    assert asdict(told) == before
    after = bench.machine.statistics().counters
    assert (after.refused, after.hinted) != (told.counters.refused, told.counters.hinted)


def test_figures_of_namespaces_are_left_out_where_nobody_asks_for_them() -> None:
    bench = small()
    bench.open()
    whole = bench.machine.statistics()
    assert len(whole.namespaces) == whole.namespaces_known == 1
    assert bench.machine.statistics(by_namespace=False) == replace(whole, namespaces=())


def test_figures_of_tenants_are_those_that_are_asked_for() -> None:
    bench = small()
    bench.open()
    bench.store([1, 2])
    for number in range(8):
        bench.feed(ev.QuotaSet(number, TenantId(f"t{number}"), 1 << 20))
    whole = bench.machine.statistics()
    tenants = whole.tenants
    assert len(tenants) == whole.tenants_known == 9
    assert tuple(bench.machine.tenants()) == tenants
    for which, shown in (
        (no_tenants, ()),
        (first_tenants(3), tenants[:3]),
        (largest_tenants(3), tenants[:3]),
        (first_tenants(20), tenants),
    ):
        some = bench.machine.statistics(which_tenants=which)
        assert some == replace(whole, tenants=shown)


def test_tenants_that_use_most_come_first() -> None:
    bench = small()
    bench.feed(ev.QuotaSet(1, TenantId("idle"), 1 << 20))
    bench.open()
    bench.store([1, 2])
    (largest,) = bench.machine.statistics(which_tenants=largest_tenants(1)).tenants
    assert largest.used_bytes > 0
    assert largest.tenant != "idle"
