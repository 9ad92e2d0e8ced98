"""Memory nodes: a shard's rows lie on the node of the rank that writes it, while there is room."""

from __future__ import annotations

import random

import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.errors import InvalidArgument
from kvd.core.keys import NODE_UNKNOWN, MoverId, NamespaceId, SessionId
from kvd.core.model.extents import FreeExtents
from tests.core.bench import BLOCK, EXTENT, Bench, only, small, spec
from tests.core.drawn import dealt
from tests.core.test_recovery import restarted

ROW = 16  # slots of a row of one shard


def attach(
    bench: Bench, nodes: list[int], session: int = 1, *, shards: list[int] | None = None
) -> list[act.Action]:
    """Attach a session's ranks, which say these nodes; what the last of them led to."""
    made: list[act.Action] = []
    seen: set[int] = set()
    for rank, node in enumerate(nodes):
        shard = rank if shards is None else shards[rank]
        mover = MoverId(100 * session + rank)
        writer = shard not in seen
        seen.add(shard)
        made = bench.feed(ev.RankAttached(SessionId(session), mover, rank, shard, writer, node))
    return made


def open_on(bench: Bench, nodes: list[int], session: int = 1, name: str = "ns") -> list[act.Action]:
    bench.open(session, spec(name, shards=len(nodes)), ranks=len(nodes), attach=False)
    return attach(bench, nodes, session)


def on_nodes(extents: int, nodes: int, spare_bytes: int = 0) -> Bench:
    return small(extents, extent_nodes=dealt(extents, nodes), spare_bytes=spare_bytes)


def extents_of(bench: Bench) -> list[tuple[int, ...]]:
    return [row.extents for _, row in sorted(bench.machine.state.rows.items())]


def test_free_extents_are_taken_lowest_first_and_on_the_node_asked_for() -> None:
    free = FreeExtents(6, (0, 0, 0, 1, 1, 1))
    assert [free.take(1), free.take(1), free.take(0), free.take()] == [3, 4, 0, 1]
    assert [free.take(1), free.take(1)] == [5, 2], "a node without any gets another's"
    assert len(free) == 0
    for extent in (4, 1, 3):
        free.put(extent)
    assert [free.take(NODE_UNKNOWN), free.take(1), free.take(7)] == [1, 3, 4]


@pytest.mark.parametrize("node", [NODE_UNKNOWN, 0, 3])
def test_on_one_node_extents_go_in_their_order_whatever_is_asked_for(node: int) -> None:
    free = FreeExtents(40)
    assert not free.is_numa
    order = list(range(40))
    assert [free.take(node) for _ in order] == order
    random.Random(1).shuffle(order)
    for extent in order:
        free.put(extent)
    assert [free.take(node) for _ in order] == sorted(order)


def test_a_shards_rows_lie_on_the_node_of_its_rank() -> None:
    bench = on_nodes(extents=8, nodes=2)
    open_on(bench, [1, 0])
    bench.stored(range(2 * ROW))
    assert extents_of(bench) == [(4, 0), (5, 1)]


def test_a_full_node_does_not_keep_a_store_from_the_other() -> None:
    bench = on_nodes(extents=4, nodes=2)
    open_on(bench, [1])
    bench.stored(range(3 * ROW))
    assert extents_of(bench) == [(0,), (2,), (3,)]


def test_ranks_that_know_no_node_get_the_lowest_extents() -> None:
    bench = on_nodes(extents=4, nodes=2)
    open_on(bench, [NODE_UNKNOWN])
    bench.stored(range(3 * ROW))
    assert extents_of(bench) == [(0,), (1,), (2,)]


def test_of_the_ranks_of_one_shard_the_writers_node_counts() -> None:
    bench = on_nodes(extents=4, nodes=2)
    bench.open(1, spec(shards=1), ranks=2, attach=False)
    attach(bench, [1, 0], shards=[0, 0])
    bench.stored(range(ROW))
    assert extents_of(bench) == [(2,)]


def test_a_reader_that_comes_first_tells_the_node_until_the_writer_is_there() -> None:
    bench = on_nodes(extents=4, nodes=2)
    bench.open(1, spec(shards=1), ranks=2, attach=False)
    for rank, (node, writer) in enumerate([(0, False), (1, True)]):
        bench.feed(ev.RankAttached(SessionId(1), MoverId(rank), rank, 0, writer, node))
        assert bench.machine.state.namespaces[NamespaceId(1)].shard_nodes == {0: node}


def test_spare_rows_wait_for_the_ranks_and_are_then_on_their_nodes() -> None:
    bench = on_nodes(extents=16, nodes=2, spare_bytes=EXTENT)
    bench.open(1, spec(shards=1), attach=False)
    assert not only(bench.tick(), act.GrantRow)
    granted = only(attach(bench, [1]), act.GrantRow)
    assert [row.extents for row in granted] == [(8,)]


def test_a_rank_on_another_node_moves_what_is_granted_from_then_on() -> None:
    bench = on_nodes(extents=8, nodes=2)
    open_on(bench, [0])
    bench.stored(range(ROW))
    bench.close(1)
    bench.gone(100)
    open_on(bench, [1], session=2)
    bench.stored(range(100, 100 + ROW), 2)
    assert extents_of(bench) == [(0,), (4,)]


def test_a_row_that_is_taken_back_is_free_on_its_own_node() -> None:
    bench = on_nodes(extents=2, nodes=2)
    open_on(bench, [1], name="a")
    bench.stored(range(2 * ROW))
    open_on(bench, [1], session=2, name="b")
    bench.now_ns += 1_000_000_000
    bench.unmap(bench.store([1], 2))
    state = bench.machine.state
    owned = {row.extents for row in state.rows.values() if row.size_class.namespace == 2}
    assert len(owned) == 1
    assert len(state.free_extents) == 0


def test_a_restart_leaves_extents_where_they_were_and_goes_on_by_node() -> None:
    left = on_nodes(extents=8, nodes=2)
    open_on(left, [1])
    left.stored(range(ROW))
    bench = restarted(left)
    assert extents_of(bench) == [(4,)]
    open_on(bench, [1])
    bench.stored(range(100, 100 + ROW))
    assert extents_of(bench) == [(4,), (5,)]


def test_a_rank_that_is_refused_tells_nothing() -> None:
    bench = on_nodes(extents=4, nodes=2)
    open_on(bench, [0])
    with pytest.raises(InvalidArgument):
        bench.feed(ev.RankAttached(SessionId(1), MoverId(999), 0, 0, True, 1))
    assert bench.machine.state.namespaces[NamespaceId(1)].shard_nodes == {0: 0}


# -- rows ahead of need ---------------------------------------------------------------------------


def wide(shards: int) -> tuple[Bench, int]:
    """An engine whose rows, of one extent a shard, are larger than the spare bytes; its row."""
    bench = small(64 * shards, spare_bytes=2 * EXTENT)
    bench.open(1, spec(shards=shards, block_bytes=BLOCK), ranks=shards)
    return bench, ROW


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_a_whole_row_is_free_and_mapped_before_a_store_wants_it(shards: int) -> None:
    bench, row = wide(shards)
    stored = 0
    for count in (1, row - 1, row, 3, row - 3, row):
        free = sum(len(c.free) for c in bench.machine.state.classes.values())
        assert free >= row
        made = bench.store(range(stored, stored + count))
        kinds = [type(a) for a in made if isinstance(a, act.StartTransfer | act.GrantRow)]
        assert kinds[:shards] == [act.StartTransfer] * shards, "a row was granted for this store"
        bench.finish(made)
        stored += count


def test_no_row_is_spare_where_none_is_wanted() -> None:
    bench = small(64, spare_bytes=0)
    bench.open()
    bench.tick()
    assert bench.machine.statistics().rows == 0


def test_spare_rows_stay_within_their_share_of_the_pool() -> None:
    bench = small(16, spare_bytes=EXTENT)
    bench.open(1, spec("a", shards=4), ranks=4)
    assert bench.machine.statistics().rows == 0, "a row of 4 extents is more than 1/8 of 16"
    bench.stored(range(3))
    assert bench.machine.statistics().rows == 1


def test_the_share_of_spare_rows_is_divided_among_the_groups_in_use() -> None:
    bench = small(64, spare_bytes=8 * EXTENT)
    bench.open(1, spec("a", groups=4))
    rows = [len(owner.rows) for owner in bench.machine.state.classes.values()]
    assert rows == [2, 2, 2, 2], "of 1/8 of 64 extents"
    bench.open(2, spec("b"))
    assert len(bench.machine.state.classes[NamespaceId(2), 0].rows) == 4, "the half of that"
