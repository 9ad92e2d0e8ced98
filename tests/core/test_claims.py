"""Claims on rows: what ends them, and how much work one event does for them."""

from __future__ import annotations

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.events import LeaseMode
from kvd.core.keys import SessionId
from kvd.core.model import row_claims
from kvd.core.model.size_class import Row
from kvd.core.model.turn import Turn
from kvd.core.room import reclaim, row_rights
from tests.core.bench import MS, SECOND, Bench, only, small, spec, verdict


@pytest.fixture(autouse=True)
def _promises_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases keep rows from being taken here, however long claims wait."""
    monkeypatch.setattr(reclaim, "PROMISED_NS", 1 << 60)


def claimed(bench: Bench) -> list[str]:
    """The namespaces that wait for a row, in their order."""
    state = bench.machine.state
    return [state.namespaces[c.owner.namespace].spec.fingerprint for c in state.claims]


def full(extents: int = 4, but: int | None = None, **options: object) -> Bench:
    """Session 1 has all rows; every block is leased, but for those of row `but`."""
    bench = small(extents=extents, lease_share=1.0, **options)
    bench.open(1, spec("a"))
    bench.stored(range(extents * 16), 1)
    leased = [key for slot, (_, key) in bench.pool.ready.items() if slot // 16 != but]
    bench.lookup(leased, 1, lease=LeaseMode.ALL)
    return bench


def test_claims_are_served_in_the_order_in_which_they_were_made() -> None:
    bench = full(extents=6, lease_ttl_ns=100 * MS)
    for session, shards in ((2, 3), (3, 1)):
        bench.open(session, spec(f"s{session}", shards=shards), ranks=shards)
        bench.store([session], session)
    assert claimed(bench) == ["s2", "s3"]
    bench.now_ns += 200 * MS
    made = bench.tick()
    granted: list[int] = []
    for _ in range(8):
        made = bench.unmap(made)[len(made) :] + bench.tick(60 * MS)
        granted += [row.namespace for row in only(made, act.GrantRow)]
    assert granted == [2, 3]
    assert claimed(bench) == []


def test_claim_ends_when_it_is_not_asked_for_again() -> None:
    bench = full(lease_ttl_ns=60 * SECOND)
    bench.open(2, spec("b"))
    bench.store([1], 2)
    bench.tick(row_rights.CLAIM_NS)
    assert claimed(bench) == ["b"]
    bench.store([1], 2)
    bench.tick(row_rights.CLAIM_NS)
    assert claimed(bench) == ["b"]
    bench.tick(MS)
    assert claimed(bench) == []


def test_claim_ends_with_the_session_of_its_class() -> None:
    bench = full(lease_ttl_ns=60 * SECOND)
    bench.open(2, spec("b"))
    bench.store([1], 2)
    bench.leave(2)
    assert claimed(bench) == []


def test_claim_of_a_namespace_that_is_forgotten_is_forgotten() -> None:
    bench = full(lease_ttl_ns=60 * SECOND)
    bench.open(2, spec("b"))
    bench.store([1], 2)
    bench.close(2, gone=True)
    bench.gone(200)
    assert claimed(bench) == []


def test_nobody_else_is_given_what_a_claim_has_gathered() -> None:
    bench = full(but=2, lease_ttl_ns=60 * SECOND)
    bench.open(2, spec("b", shards=3), ranks=3)
    bench.unmap(bench.store([1], 2))
    assert list(bench.machine.state.free_extents) == [2]
    assert not only(bench.feed(opened(3)), act.GrantRow)
    bench.attach(3)
    assert verdict(bench.store([1], 3)).reason == "NO_ROOM"
    assert list(bench.machine.state.free_extents) == [2]
    assert claimed(bench) == ["b", "c"]


def opened(session: int) -> ev.SessionOpened:
    return ev.SessionOpened(SessionId(session), spec("c"), "", 1)


def test_search_reads_few_rows_an_event_and_finds_the_last_one_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    weigh = reclaim._weigh

    def counted(turn: Turn, claim: row_claims.Claim, row: Row) -> object:
        read.append(row.row)
        return weigh(turn, claim, row)

    monkeypatch.setattr(reclaim, "ROWS_LOOKED_AT", 4)
    monkeypatch.setattr(reclaim, "_weigh", counted)
    bench = full(extents=16, but=15, lease_ttl_ns=60 * SECOND)
    bench.open(2, spec("b"))
    taken: list[act.UnmapRow] = []
    for _ in range(6):
        before = len(read)
        taken += only(bench.store([1], 2), act.UnmapRow)
        assert len(read) - before <= 5
    assert [order.row for order in taken] == [15]


def test_class_whose_movers_do_not_unmap_is_asked_for_one_row_only() -> None:
    bench = small(extents=8)
    bench.open(1, spec("a"))
    bench.open(2, spec("b"))
    bench.stored(range(64), 1)
    bench.stored(range(64), 2)
    bench.open(3, spec("c"))
    first = only(bench.store([1], 3), act.UnmapRow)
    assert len(first) == 1
    hung = first[0].mover
    orders = [o for _ in range(20) for o in only(bench.tick(), act.UnmapRow)]
    assert {o.mover for o in orders} == {300 - hung}, "the other one's row comes instead"
