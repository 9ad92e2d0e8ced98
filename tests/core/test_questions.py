"""What the machine answers between events, without changing anything."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core import machine as machine_module
from kvd.core.errors import InvalidArgument, UnknownSession
from kvd.core.keys import NamespaceId, RequestId, RowId, SessionId
from kvd.core.model.backlog import Clear
from kvd.core.room import expiry
from tests.core.bench import BLOCK, Bench, keys, only, small, spec, verdict

NS, OTHER = NamespaceId(1), NamespaceId(2)
NOWHERE = NamespaceId(9)


@pytest.fixture
def bench() -> Bench:
    """A namespace with 20 blocks in two rows of 16 slots, and another one with none."""
    bench = small(extents=8)
    bench.open(1, epoch="mine")
    bench.open(2, spec("other", "neighbour", shards=2, block_bytes=2 * BLOCK), ranks=2)
    bench.stored(range(16))
    bench.stored(range(16, 20))
    return bench


def test_namespaces_are_known_by_name_and_tenant(bench: Bench) -> None:
    machine = bench.machine
    assert [machine.knows(n) for n in (NS, OTHER, NOWHERE)] == [True, True, False]
    assert machine.namespaces() == [NS, OTHER]
    assert [machine.fingerprint_of(n) for n in (NS, OTHER)] == ["ns", "other"]
    tenants = [machine.tenant_of(n) for n in (NS, OTHER, NOWHERE)]
    assert tenants == ["tenant", "neighbour", None]


def test_blocks_of_a_new_namespace_are_what_the_pool_could_hold(bench: Bench) -> None:
    machine = bench.machine
    assert machine.blocks_of_new(spec()) is None
    assert machine.blocks_of_new(spec("new")) == 8 * 16
    assert machine.blocks_of_new(spec("new", shards=3, block_bytes=4 * BLOCK)) == 2 * 4
    with pytest.raises(InvalidArgument, match="raise extent_bytes"):
        machine.blocks_of_new(spec("new", block_bytes=17 * BLOCK))
    assert not machine.knows(NamespaceId(3))
    bench.open(3, spec("new"))
    made = [each for actions in bench.history for each in only(actions, act.OpenNamespace)]
    assert [(each.namespace, each.page_blocks) for each in made] == [(1, 128), (2, 32), (3, 128)]


def test_an_open_session_s_epoch_and_leases_are_told(bench: Bench) -> None:
    machine, session = bench.machine, SessionId(1)
    assert machine.epoch_of(session) == "mine"
    assert machine.leases_of(session, RequestId("a")) == ()
    answers = [bench.lookup([n], lease=ev.LeaseMode.PREFIX, request="a") for n in (1, 2)]
    other = bench.lookup([3], lease=ev.LeaseMode.PREFIX, request="b")
    assert machine.leases_of(session, RequestId("a")) == tuple(each.lease for each in answers)
    assert machine.leases_of(session, RequestId("b")) == (other.lease,)
    for ask in (machine.epoch_of, lambda s: machine.leases_of(s, RequestId("a"))):
        with pytest.raises(UnknownSession):
            ask(SessionId(9))


def test_a_slot_is_in_the_row_of_its_extent(bench: Bench) -> None:
    machine = bench.machine
    (first, second) = (piece for (piece,) in machine.granted_rows(NS, 1))
    slots = np.array([second.first_slot + 3, first.first_slot, second.first_slot])
    assert sorted(machine.rows_of(slots)) == sorted([first.row, second.row])
    assert machine.rows_of(slots[:1]) == [second.row]
    assert machine.granted_row(RowId(second.row)) == second
    assert (second.namespace, second.slots) == (NS, 16)


def test_rows_are_named_so_many_at_a_time_and_none_of_who_is_not_known(bench: Bench) -> None:
    whole = list(bench.machine.granted_rows(NS, 100))
    assert [len(piece) for piece in whole] == [2]
    assert [row for piece in bench.machine.granted_rows(NS, 1) for row in piece] == whole[0]
    assert list(bench.machine.granted_rows(NOWHERE, 1)) == []


def test_tags_and_blocks_are_told_in_pieces_and_are_those_that_are_published(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = {tag for namespace, tag in bench.pool.tags if namespace == NS}
    for size, counts in ((100, [16, 4]), (6, [6, 6, 4, 4, 0, 0])):
        monkeypatch.setattr(machine_module, "TAGGED_SLOTS", size)
        pieces = [tags.tolist() for tags in bench.machine.readable_tags(NS)]
        assert [len(piece) for piece in pieces] == counts
        assert {tag for piece in pieces for tag in piece} == published
    assert list(bench.machine.readable_tags(NOWHERE)) == []


def test_a_row_that_goes_between_two_pieces_is_told_of_no_further(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "TAGGED_SLOTS", 8)
    pieces = bench.machine.readable_tags(NS)
    assert len(next(pieces)) == 8
    rows = bench.machine.state.classes[NS, 0].rows
    (first, _) = rows
    del rows[first]
    assert [len(piece) for piece in pieces] == [4, 0]


def test_after_a_drain_stores_are_taken_again(bench: Bench) -> None:
    bench.feed(ev.DrainStarted())
    assert bench.machine.statistics().draining
    assert verdict(bench.store([50])).reason == "DRAINING"
    bench.feed(ev.DrainEnded())
    assert not bench.machine.statistics().draining
    bench.stored([50])


def test_figures_say_who_holds_what(bench: Bench) -> None:
    bench.lookup([1, 2, 3], lease=ev.LeaseMode.PREFIX)
    bench.store([30, 31], session=1)
    told = bench.machine.statistics()
    (mine, other) = told.namespaces
    assert (mine.namespace, mine.fingerprint, mine.tenant) == (NS, "ns", "tenant")
    assert (mine.blocks, mine.bytes, mine.sessions) == (20, 20 * BLOCK, 1)
    assert (other.namespace, other.blocks, other.bytes, other.sessions) == (OTHER, 0, 0, 1)
    (first, second) = told.sessions
    assert (first.session, first.namespace, first.jobs, first.leases) == (1, NS, 1, 1)
    assert (second.session, second.namespace, second.jobs, second.usable) == (2, OTHER, 0, True)
    (tenant, _) = told.tenants
    assert tenant.tenant == "tenant"
    assert (tenant.used_bytes, tenant.quota_bytes) == (22 * BLOCK, 0)
    assert (tenant.leased_bytes, tenant.reserved_bytes) == (3 * BLOCK, 2 * BLOCK)
    assert tenant.evictable_bytes == 17 * BLOCK
    slots = told.slots
    assert (slots.ready, slots.reserved, slots.quarantined) == (20, 2, 0)
    assert slots.capacity == slots.ready + slots.reserved + slots.free
    assert (told.bytes.ready, told.bytes.reserved) == (20 * BLOCK, 2 * BLOCK)
    assert (told.extents, told.extent_bytes) == (8, 16 * BLOCK)
    assert told.rows == len(bench.machine.state.rows)
    assert (told.leases, told.transfers, told.rows_retiring) == (1, 1, 0)


def test_a_clear_of_a_namespace_without_blocks_is_answered_at_once(bench: Bench) -> None:
    made = bench.feed(ev.NamespaceCleared(77, OTHER))
    assert [(each.token, each.blocks) for each in only(made, act.TellDone)] == [(77, 0)]
    assert not bench.machine.has_work()


def test_keys_are_taken_by_place() -> None:
    assert keys(1, 2, 3)[1:].to_bytes() == keys(2, 3).to_bytes()
    assert keys(1, 2, 3)[np.array([2, 0])].to_bytes() == keys(3, 1).to_bytes()


def test_without_tiers_an_answer_tells_of_no_sources(bench: Bench) -> None:
    assert bench.lookup([1, 2, 99]).sources == b""


def test_a_namespace_whose_clear_goes_on_or_whose_row_may_be_written_is_not_forgotten_at_once(
    bench: Bench,
) -> None:
    state, other = bench.machine.state, "neighbour"
    bench.stored([1], 2)
    bench.clear(OTHER)
    bench.leave(2, ranks=2)
    found = expiry.forgettable(state, other)
    assert found is not None
    assert found.namespace == OTHER
    state.backlog.clears[OTHER] = Clear()
    assert expiry.forgettable(state, other) is None
    del state.backlog.clears[OTHER]
    for owner in state.namespaces[OTHER].classes:
        for row in owner.rows.values():
            row.orphaned = True
    assert expiry.forgettable(state, other) is None
