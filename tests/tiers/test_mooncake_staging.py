"""Small blocks go beside their records in one stretch of memory; values don't tell."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.cluster.mooncake import end
from kvd.linux.calls import set_timer_slack
from kvd.tiers.mooncake import client, codes, staging
from kvd.tiers.mooncake.moves import MAX_STAGED_BYTES, name_of
from kvd.tiers.mooncake.store import STAGED_PART_BYTES, MooncakeStore
from kvd.tiers.store import Outcome, TierBlock, TierReason
from kvd.tiers.sums import sums_of
from tests.tiers import mooncake_cluster
from tests.tiers.contract import content, key, memory, record_of, soon, source, target
from tests.tiers.fake_mooncake import FakeLibrary, store_over

LIMIT = STAGED_PART_BYTES["tcp"]
_PR_GET_TIMERSLACK = 30  # linux/prctl.h
NEVER_S = 15.0  # the library alone would take a second for each value
DONE, FAILED = Outcome.DONE, Outcome.FAILED
# Parts of a block, and of how many stretches of memory it is written.
SHAPES = [
    ((8,), 1),
    ((LIMIT - 8,), 1),
    ((LIMIT,), 1),
    ((LIMIT + 8,), 2),
    ((8, LIMIT, 2 * LIMIT - 8), 1),
    ((8, LIMIT, 2 * LIMIT), 4),
    ((LIMIT,) * (MAX_STAGED_BYTES // LIMIT - 1), 1),
    ((LIMIT,) * (MAX_STAGED_BYTES // LIMIT), MAX_STAGED_BYTES // LIMIT + 1),
]


def of_shape(number: int, sizes: tuple[int, ...]) -> TierBlock:
    return TierBlock(key(number), tuple(memory(content((number, n), n)) for n in sizes))


def to_fill(block: TierBlock) -> TierBlock:
    return TierBlock(block.key, tuple(memory(b"\xee" * part.nbytes) for part in block.parts))


def bytes_of(block: TierBlock) -> list[bytes]:
    return [bytes(part) for part in block.parts]


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def store(library: FakeLibrary) -> Iterator[MooncakeStore]:
    opened = store_over(library)
    yield opened
    opened.close()


@pytest.mark.parametrize(("sizes", "stretches"), SHAPES)
def test_a_value_is_its_record_and_its_parts_however_it_is_moved(
    library: FakeLibrary, store: MooncakeStore, sizes: tuple[int, ...], stretches: int
) -> None:
    block = of_shape(1, sizes)
    assert store.write([block], soon()) == [DONE]
    name = name_of(block.key)
    assert library.stretches[name] == stretches
    assert library.values == {name: record_of(block) + b"".join(bytes_of(block))}
    came = to_fill(block)
    assert store.read([came], soon()) == [DONE]
    assert bytes_of(came) == bytes_of(block)


def test_blocks_of_many_shapes_go_together(store: MooncakeStore) -> None:
    sizes = [(64, 128)] * 40 + [(LIMIT + 8,), (64,), (128, 64)] + [(4096,)] * 300
    blocks = [of_shape(number, each) for number, each in enumerate(sizes)]
    assert set(store.write(blocks, soon())) == {DONE}
    came = [to_fill(block) for block in reversed(blocks)]
    assert set(store.read(came, soon())) == {DONE}
    assert [bytes_of(each) for each in came] == [bytes_of(each) for each in reversed(blocks)]


def test_sums_of_a_staged_block_are_those_of_its_parts(store: MooncakeStore) -> None:
    block = of_shape(1, (64, 8192 + 64, 8))
    block = block._replace(sums=sums_of(block.parts))
    assert store.write([block], soon()) == [DONE]
    came = to_fill(block)._replace(sums=sums_of([memory(bytes(8))] * 3))
    assert store.read([came], soon()) == [DONE]
    assert came.sums is not None
    assert block.sums is not None
    assert came.sums.tolist() == block.sums.tolist()


# -- what was begun ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, LIMIT + 8])
def test_a_damaged_block_leaves_no_room_taken(
    library: FakeLibrary, store: MooncakeStore, size: int
) -> None:
    blocks = [of_shape(n, (size,)) for n in range(3)]
    blocks = [block._replace(sums=sums_of(block.parts)) for block in blocks]
    blocks[1].parts[0][5] ^= 1
    assert store.write(blocks, soon()) == [DONE, Outcome.DAMAGED, DONE]
    assert len(library.values) == 2
    assert not library.begun


def test_what_breaks_in_the_middle_leaves_no_room_taken(
    library: FakeLibrary, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(staging.NetworkMemory, "seal", broken)
        with pytest.raises(AssertionError, match="broken"):
            store.write([source(key(1), content(1))], soon())
    assert not library.begun
    assert store.write([source(key(1), content(1))], soon()) == [DONE]


def test_a_block_that_did_not_go_can_be_written_again(
    library: FakeLibrary, store: MooncakeStore
) -> None:
    library.fault = lambda call, _: codes.TRANSFER_FAILED if call == "put" else None
    assert store.write([source(key(1), content(1))], soon()) == [FAILED]
    assert not library.begun
    assert not library.values
    library.fault = lambda call, _: None
    assert store.write([source(key(1), content(1))], soon()) == [DONE]


def test_so_can_one_that_the_master_could_not_be_told_of(
    library: FakeLibrary, store: MooncakeStore
) -> None:
    library.fault = lambda call, _: {"put": -800, "give up": -4711}.get(call)
    assert store.write([source(key(1), content(1))], soon()) == [FAILED]
    assert library.begun
    library.fault = lambda call, _: None
    store._client._in_doubt_until = 0
    assert store.write([source(key(1), content(1))], soon()) == [DONE]
    assert not library.begun
    library.fault = lambda call, _: -4711 if call == "end" else None
    assert store.write([source(key(2), content(2))], soon()) == [FAILED]
    library.fault = lambda call, _: None
    assert store.write([source(key(2), content(2))], soon()) == [DONE]


# -- a node that is gone ----------------------------------------------------------------------


def test_where_a_node_is_gone_few_values_are_waited_for(
    library: FakeLibrary, store: MooncakeStore
) -> None:
    """Each of those that one call moves in turn takes a second to fail."""
    blocks = [source(key(n), content(n)) for n in range(100)]
    assert set(store.write(blocks, soon())) == {DONE}
    asked = len(library.names_of("get"))
    gone = {name_of(key(n)) for n in range(0, 100, 2)}

    def fault(call: str, name: str) -> int | None:
        is_move = call in ("get", "put", "get at once", "put at once")
        return codes.TRANSFER_FAILED if is_move and name in gone else None

    library.fault = fault
    came = [target(key(n), len(content(0))) for n in range(100)]
    outcomes = store.read(came, soon())
    assert outcomes == [FAILED, DONE] * 50
    assert [bytes(b.parts[0]) for b in came[1::2]] == [content(n) for n in range(1, 100, 2)]
    asked = len(library.names_of("get")) - asked
    assert 1 <= asked <= 2  # what was taken for well; then all others together
    assert len(library.names_of("get at once")) == 1
    assert store.read(came, soon()) == [FAILED, DONE] * 50
    assert len(library.names_of("get at once")) == 2
    assert not library.found

    library.values.clear()
    assert store.write(blocks, soon()) == [FAILED, DONE] * 50
    assert len(library.names_of("put at once")) == 1
    assert not library.begun
    assert set(library.values) == {name_of(key(n)) for n in range(1, 100, 2)}


def test_one_value_goes_first_and_then_as_many_stretches_as_may_fail(
    library: FakeLibrary, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_IN_TURN", 10)
    blocks = [source(key(n), content(n)) for n in range(22)]
    assert set(store.write(blocks, soon())) == {DONE}
    assert list(map(len, library.names_of("put"))) == [1, 10, 10, 1]
    came = [target(key(n), len(content(0))) for n in range(12)]
    assert store.read(came, soon()) == [DONE] * 12
    assert list(map(len, library.names_of("get"))) == [10, 2]


def test_after_a_while_without_any_one_value_goes_first_again(
    library: FakeLibrary, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [source(key(n), content(n)) for n in range(8)]
    assert set(store.write(blocks[:4], soon())) == {DONE}
    store._client._proven_until = time.monotonic()
    assert set(store.write(blocks[4:], soon())) == {DONE}
    assert list(map(len, library.names_of("put"))) == [1, 3] * 2
    monkeypatch.setattr(client, "IN_DOUBT_S", 0.0)  # a failure is the end of it, too
    bad = name_of(blocks[2].key)
    library.fault = lambda call, name: -800 if (call, name) == ("get", bad) else None
    came = [target(key(n), len(content(0))) for n in (2, 3, 4, 5)]
    assert store.read(came[1:], soon()) == [DONE] * 3
    assert store.read(came, soon()) == [FAILED, DONE, DONE, DONE]
    assert store.read(came[1:], soon()) == [DONE] * 3
    assert list(map(len, library.names_of("get"))) == [3, 4, 1, 2]


def test_what_may_fail_in_turn_is_counted_by_stretches(
    library: FakeLibrary, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store._staged_part_bytes = 0
    monkeypatch.setattr(client, "MAX_IN_TURN", 8)
    most = client.MAX_OF_ONE_IN_TURN - 1  # and the record
    blocks = [of_shape(n, (8,) * most) for n in range(2)] + [of_shape(n, (8,)) for n in range(2, 9)]
    assert set(store.write(blocks, soon())) == {DONE}
    assert list(map(len, library.names_of("put"))) == [1, 1, 4, 3]
    assert not library.names_of("put at once")
    assert store.write([of_shape(9, (8,) * (most + 1)), of_shape(10, (8,))], soon()) == [DONE] * 2
    assert list(map(len, library.names_of("put at once"))) == [2]


def test_after_a_while_values_move_in_turn_again(
    library: FakeLibrary, store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "IN_DOUBT_S", 0.05)
    library.fault = lambda call, _: codes.TRANSFER_FAILED if call == "put" else None
    assert store.write([source(key(1), content(1))], soon()) == [FAILED]
    time.sleep(0.1)
    library.fault = lambda call, _: None
    assert store.write([source(key(1), content(1))], soon()) == [DONE]
    assert len(library.names_of("put")) == 2
    assert not library.names_of("put at once")


@pytest.mark.parametrize(
    ("protocol", "nbytes", "look_ns"),
    [
        ("tcp", 4096, client.LEAST_LOOK_NS),
        ("tcp", 4 << 20, (4 << 20) // 16),
        ("tcp", 1 << 30, client.MOST_LOOK_NS),
        ("rdma", 1 << 30, client.LEAST_LOOK_NS),
    ],
)
def test_who_waits_for_many_bytes_looks_less_often_for_their_end(
    library: FakeLibrary, protocol: str, nbytes: int, look_ns: int
) -> None:
    slack_ns: list[int] = []

    def fault(*_: str) -> int:
        slack_ns.append(ctypes.CDLL(None).prctl(_PR_GET_TIMERSLACK))
        return codes.NOT_FOUND

    library.fault = fault
    library.found.add("one")
    own = client.MooncakeClient(library, None, client.LOOK_NS_PER_BYTE[protocol])
    try:
        assert own.get(["one"], [[0]], [[nbytes]]) == [codes.NOT_FOUND]
        assert own.put(["one"], [[0]], [[nbytes]]) == [codes.NOT_FOUND]
    finally:
        set_timer_slack(0)
    assert slack_ns == [look_ns] * 2


# -- the same blocks in several calls ---------------------------------------------------------


def test_calls_with_the_same_blocks_take_turns(library: FakeLibrary, store: MooncakeStore) -> None:
    """The library takes a name into one read and one write at a time, and forgets the other."""
    blocks = [source(key(n), content(n)) for n in range(6)]
    library.fault = lambda call, _: time.sleep(0.002) if call in ("put", "get") else None
    outcomes: list[Outcome] = []

    def work(first: int) -> None:
        mine = blocks[first:] + blocks[:first]
        outcomes.extend(store.write(mine, soon()))
        for _ in range(5):
            outcomes.extend(store.read([target(b.key, len(content(0))) for b in mine], soon()))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4 * 6 * 6
    assert set(outcomes) == {DONE}
    assert not library.begun
    assert not library.found


def test_a_call_waits_for_its_turn_until_its_deadline_and_no_longer(
    library: FakeLibrary, store: MooncakeStore
) -> None:
    may_end, begun = threading.Event(), threading.Event()

    def fault(call: str, _: str) -> None:
        if call == "put":
            begun.set()
            may_end.wait(20)

    library.fault = fault
    writing = threading.Thread(target=store.write, args=([source(key(1), content(1))], soon()))
    writing.start()
    begun.wait(20)
    began = time.monotonic()
    assert store.write([source(key(1), content(1))], began + 1) == [FAILED]
    assert 1 <= time.monotonic() - began < 15
    assert store.usage().errors == {TierReason.TIMEOUT: 1}
    library.fault = lambda call, _: None
    assert store.write([source(key(2), content(2))], soon()) == [DONE]
    may_end.set()
    writing.join()


# -- a real cluster ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_cluster_keeps_blocks_of_every_shape_and_loses_them_with_its_node(
    tmp_path: Path,
) -> None:
    pytest.importorskip("mooncake.store", reason="needs the mooncake extra", exc_type=ImportError)
    with mooncake_cluster.mooncake_cluster(tmp_path, megabytes=64) as cluster:
        # Nothing is broken yet: who writes has time on a busy machine, too.
        ours = mooncake_cluster.opened(cluster, rpc_timeout_seconds=20.0)
        others = mooncake_cluster.opened(cluster)
        blocks = [of_shape(number, sizes) for number, (sizes, _) in enumerate(SHAPES)]
        blocks += [of_shape(number, (4096,)) for number in range(100, 1100)]
        assert set(ours.write(blocks, soon())) == {DONE}, ours.usage().errors
        came = [to_fill(block) for block in blocks]
        assert set(others.read(came, soon())) == {DONE}
        same = [bytes_of(each) for each in came] == [bytes_of(each) for each in blocks]
        assert same
        # Between two calls: where it dies while bytes come, Mooncake may wait for 60 s, and then
        # the store never returns. test_mooncake_faults.py has that, in a process of its own.
        end(cluster.nodes[0])
        outcomes, began = [DONE], time.monotonic()
        while DONE in outcomes:
            outcomes = others.read(came, soon())
            assert set(outcomes) <= {DONE, FAILED, Outcome.MISSING}
            right = [
                bytes_of(each) == bytes_of(block)
                for each, block, outcome in zip(came, blocks, outcomes, strict=True)
                if outcome is DONE
            ]
            assert all(right)
        assert time.monotonic() - began < NEVER_S
        new = [of_shape(number, (4096,)) for number in range(2000, 2100)]
        assert DONE not in ours.write(new, soon())
        cluster.nodes.clear()
        cluster.start_node()
        left, until = new, time.monotonic() + 20
        while left:
            assert time.monotonic() < until
            outcomes = ours.write(left, soon())
            left = [b for b, outcome in zip(left, outcomes, strict=True) if outcome is not DONE]
        assert set(ours.read([to_fill(block) for block in new], soon())) == {DONE}
        ours.close()
        others.close()
