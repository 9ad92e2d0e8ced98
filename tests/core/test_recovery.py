"""What READY records say is served again by the next incarnation, and nothing else."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import NODE_UNKNOWN, U32, U64, NamespaceId, RowId, ScopeId, Slots
from kvd.core.model.index import Index
from tests.core.bench import SECOND, Bench, keys, numbers_of, only, small, spec, verdict

HIGH_SCOPE = 30_000_000


def scopes_read_back(left: Bench) -> list[ev.ScopesRecovered]:
    """Each in an event of its own, as where a namespace has more than go into one."""
    return [
        ev.ScopesRecovered(
            s.namespace,
            left.machine.state.namespaces[s.namespace].spec,
            (ev.RecoveredScope(s.scope, s.epoch, s.account, s.group, s.own),),
        )
        for s in left.pool.scopes.values()
        if s.scope not in left.pool.cleared
    ]


def rows_read_back(left: Bench, rows: list[act.GrantRow], *, quarantined: bool) -> ev.RowsRecovered:
    """Rows of one class in one event."""
    found, held = [], []
    ordinals: list[int] = []
    for row in rows:
        slots = range(row.first_slot, row.first_slot + row.slots)
        mine = [slot for slot in slots if slot in left.pool.ready]
        found.append(ev.RecoveredRow(row.row, row.extents, len(mine), quarantined))
        ordinals += [slot - row.first_slot for slot in mine]
        held += mine
    return ev.RowsRecovered(
        rows[0].namespace,
        rows[0].group,
        tuple(found),
        np.array(ordinals, dtype=np.uint32),
        np.array([left.pool.ready[s][0] for s in held], dtype=np.uint32),
        keys(*(left.pool.ready[s][1] for s in held)),
        np.array([left.pool.stamps[s] for s in held], dtype=np.uint64),
    )


def batches(rows: Iterable[act.GrantRow]) -> Iterator[list[act.GrantRow]]:
    """Rows of one class, two at a time."""
    of_class = sorted(rows, key=lambda row: (row.namespace, row.group, row.row))
    for _, same in groupby(of_class, key=lambda row: (row.namespace, row.group)):
        left = list(same)
        for first in range(0, len(left), 2):
            yield left[first : first + 2]


def restarted(left: Bench, *, quarantined: bool = False) -> Bench:
    """The next incarnation over what `left` wrote to its pool, at any moment of its life."""
    bench = Bench(left.config, now_ns=left.now_ns)
    bench.pool.scopes.update(left.pool.scopes)
    for scopes in scopes_read_back(left):
        bench.machine.handle(scopes, bench.now_ns)
    known = set(bench.machine.namespaces())
    bench.pool.stamps.update(left.pool.stamps)
    # A row of a namespace that was forgotten is only yet to be zeroed: the pool leaves it out.
    for rows in batches(r for r in left.pool.rows.values() if r.namespace in known):
        event = rows_read_back(left, rows, quarantined=quarantined)
        ready = left.pool.ready
        for row in rows:
            slots = range(row.first_slot, row.first_slot + row.slots)
            bench.pool.ready.update({slot: ready[slot] for slot in slots if slot in ready})
        for action in bench.machine.handle(event, bench.now_ns):
            bench.pool.carry_out(action)
    for namespace in bench.machine.namespaces():
        bench.pool.announced[namespace] = {
            (epoch, account, group, number)
            for piece in bench.machine.resident(namespace)
            for epoch, account, group, batch, _ in piece
            for number in numbers_of(batch)
        }
    bench.feed(ev.PoolRecovered())
    return bench


def test_every_ready_block_is_served_and_no_other() -> None:
    left = small()
    left.open(ranks=2)
    left.stored(range(5))
    left.stored([7], account="salt")
    left.store(range(10, 13))
    bench = restarted(left)
    assert bench.machine.statistics().counters.recovered == 6
    bench.open(ranks=2)
    assert bench.statuses(range(5)) == "HHHHH"
    assert bench.statuses([7], account="salt") == "H"
    assert bench.statuses([7, 10, 11, 12]) == "MMMM"


def test_seeds_and_numbers_go_on_where_they_were() -> None:
    left = small()
    first = left.open(1, spec("a"))
    bench = restarted(left)
    assert bench.open(1, spec("a")) == first
    other = bench.open(2, spec("b"))
    assert other.namespace == 2
    assert other.epoch.scopes == (2,)


def test_tags_are_published_and_rows_granted_again() -> None:
    left = small()
    left.open()
    left.stored([1, 2])
    bench = restarted(left)
    assert bench.pool.tags == left.pool.tags
    assert bench.pool.rows == left.pool.rows


def test_recency_outlives_the_daemon() -> None:
    left = small(extents=2)
    left.open()
    for start in (16, 0):
        left.stored(range(start, start + 16))
        left.now_ns += SECOND
    bench = restarted(left)
    bench.open()
    bench.stored([100])
    assert bench.statuses(range(16)) == "H" * 16
    assert bench.statuses(range(16, 32)).count("M") == 1


def test_places_that_an_orphaned_mover_may_write_are_not_given_out() -> None:
    left = small(extents=1)
    left.open()
    left.stored(range(4))
    bench = restarted(left, quarantined=True)
    slots = bench.machine.statistics().slots
    assert (slots.ready, slots.quarantined, slots.free) == (4, 12, 0)
    bench.open()
    assert bench.statuses(range(4)) == "HHHH"
    assert verdict(bench.store(range(100, 105))).reason == "NO_ROOM"


def test_second_record_of_one_key_is_freed() -> None:
    left = small()
    left.open()
    left.stored([1])
    (scope,) = left.pool.scopes
    (row,) = left.pool.rows.values()
    bench = small()
    bench.machine.handle(scopes_read_back(left)[0], 0)
    event = ev.RowsRecovered(
        row.namespace,
        row.group,
        (ev.RecoveredRow(row.row, row.extents, 2),),
        np.array([0, 3], dtype=np.uint32),
        np.array([scope, scope], dtype=np.uint32),
        keys(1, 1),
        np.array([5, 6], dtype=np.uint64),
    )
    (freed,) = only(bench.machine.handle(event, 0), act.WriteFree)
    assert freed.slots.tolist() == [3]


def test_record_of_an_unknown_scope_is_freed() -> None:
    left = small()
    left.open()
    bench = small()
    bench.machine.handle(scopes_read_back(left)[0], 0)
    event = ev.RowsRecovered(
        NamespaceId(1),
        0,
        (ev.RecoveredRow(RowId(0), (0,), 1),),
        np.array([2], dtype=np.uint32),
        np.array([ScopeId(77)], dtype=np.uint32),
        keys(1),
        np.array([5], dtype=np.uint64),
    )
    (freed,) = only(bench.machine.handle(event, 0), act.WriteFree)
    assert freed.slots.tolist() == [2]
    assert bench.machine.statistics().slots.ready == 0


def test_scopes_whose_numbers_have_risen_far_take_no_memory() -> None:
    left = small()
    left.machine.state.next_scope = HIGH_SCOPE
    left.open()
    left.stored(range(5))
    tracemalloc.start()
    try:
        bench = restarted(left)
        assert tracemalloc.get_traced_memory()[1] < HIGH_SCOPE
    finally:
        tracemalloc.stop()
    bench.open()
    assert bench.statuses(range(5)) == "HHHHH"


class CountedExtent(int):
    """An extent number that counts how often any was compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedExtent.comparisons += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        CountedExtent.comparisons += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


def test_reading_a_row_back_does_not_search_every_extent() -> None:
    left = small(extents=256)
    left.open()
    for first in range(0, 1024, 256):
        left.stored(range(first, first + 256))
    bench = Bench(left.config, now_ns=left.now_ns)
    for scope in scopes_read_back(left):
        bench.machine.handle(scope, bench.now_ns)
    free = bench.machine.state.free_extents
    free._by_node = {NODE_UNKNOWN: [CountedExtent(e) for e in range(256)]}
    CountedExtent.comparisons = 0
    rows = sorted(left.pool.rows.values(), key=lambda row: -row.row)
    for row in rows:
        bench.machine.handle(rows_read_back(left, [row], quarantined=False), bench.now_ns)
    assert len(rows) >= 64
    assert CountedExtent.comparisons <= len(rows) * 10  # log2 of the extents, and one to be sure


def test_a_row_is_read_back_at_once_however_many_accounts_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = small(extents=1)
    left.open()
    for number in range(12):
        left.stored([number], account=f"user {number}")
    asked: list[int] = []
    find = Index.find

    def counted(index: Index, tags: U64, words: U64, scope: int | U32) -> Slots:
        asked.append(len(tags))
        return find(index, tags, words, scope)

    monkeypatch.setattr(Index, "find", counted)
    bench = restarted(left)
    assert asked[0] == 12, "the first look-up is the row's; the check of all rules asks again"
    bench.open()
    assert [bench.statuses([n], account=f"user {n}") for n in range(12)] == ["H"] * 12
    assert bench.statuses([3], account="user 4") == "M"
