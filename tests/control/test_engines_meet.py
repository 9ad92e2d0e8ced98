"""Schedulers and ranks meet in any order, agree on the layout, and hold their engine's id."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvd.core.model.state import MAX_ENGINE_BLOCKS
from kvd_proto.v1 import engine_pb2, worker_pb2
from tests.control.daemon_rig import (
    BLOCK_BYTES,
    RawScheduler,
    RawWorker,
    RunningDaemon,
    group,
    group_layout,
    identity,
    memory,
    namespace,
    refusal,
)
from tests.waiting import wait_until


@pytest.fixture
def worker(running: RunningDaemon) -> Iterator[RawWorker]:
    made = RawWorker(running.socket)
    yield made
    made.close()


def test_the_scheduler_may_come_first(running: RunningDaemon, worker: RawWorker) -> None:
    scheduler = RawScheduler(running.socket, identity=identity("first"))
    assert scheduler.opened.session_id
    worker.register(identity=identity("first"))
    scheduler.next("ranks_ready")
    scheduler.close()


def test_the_session_is_usable_only_when_every_rank_is_there(running: RunningDaemon) -> None:
    name = identity("two-ranks")
    shards = namespace(groups=[group(shard_bytes=[BLOCK_BYTES, BLOCK_BYTES])])
    workers = [RawWorker(running.socket), RawWorker(running.socket)]
    workers[1].register(identity=name, rank=1, shard=1, world_size=2)
    scheduler = RawScheduler(running.socket, identity=name, namespace=shards, world_size=2)
    assert scheduler.opened.session_id
    (session,) = [s for s in scheduler.status().sessions if s.engine_id == "two-ranks"]
    assert (session.usable, [r.rank for r in session.ranks]) == (False, [1])
    workers[0].register(identity=name, rank=0, shard=0, world_size=2)
    scheduler.next("ranks_ready")
    (session,) = [s for s in scheduler.status().sessions if s.engine_id == "two-ranks"]
    assert (session.usable, [r.rank for r in session.ranks]) == (True, [0, 1])
    for caller in (scheduler, *workers):
        caller.close()


def test_a_layout_mismatch_names_rank_group_and_both_figures(
    running: RunningDaemon, worker: RawWorker
) -> None:
    scheduler = RawScheduler(running.socket, identity=identity("mismatch"))
    assert scheduler.opened.session_id
    half = worker_pb2.Fragment(memory=0, base=0, stride=BLOCK_BYTES, bytes=BLOCK_BYTES // 2)
    with pytest.raises(grpc.RpcError) as caught:
        worker.register(identity=identity("mismatch"), groups=[group_layout(fragments=[half])])
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    for figure in ("rank 0", "group 0", str(BLOCK_BYTES), str(BLOCK_BYTES // 2)):
        assert figure in str(caught.value.details())
    scheduler.close()


def test_a_scheduler_that_disagrees_with_earlier_ranks_is_refused(
    running: RunningDaemon, worker: RawWorker
) -> None:
    worker.register(identity=identity("late"))
    scheduler = RawScheduler(
        running.socket,
        identity=identity("late"),
        namespace=namespace(groups=[group(shard_bytes=[2 * BLOCK_BYTES])]),
    )
    code, reason, _ = refusal(lambda: scheduler.opened)
    assert (code, reason) == ("FAILED_PRECONDITION", "LAYOUT_MISMATCH")
    scheduler.close()


def test_a_rank_that_guessed_the_block_size_wrong_is_lost_and_registers_again(
    running: RunningDaemon, worker: RawWorker
) -> None:
    guessing = {"identity": identity("guess"), "groups": [group_layout(blocks_per_block=0)]}
    worker.register(**guessing)
    scheduler = RawScheduler(
        running.socket,
        identity=identity("guess"),
        namespace=namespace(groups=[group(blocks_per_block=4)]),
    )
    assert scheduler.opened.session_id
    first = worker.registration
    worker.register(**guessing)
    assert worker.registration != first
    scheduler.next("ranks_ready")
    scheduler.close()


def test_two_ranks_that_write_one_shard_are_refused(running: RunningDaemon) -> None:
    name = identity("two-writers")
    workers = [RawWorker(running.socket), RawWorker(running.socket)]
    scheduler = RawScheduler(running.socket, identity=name, world_size=2)
    assert scheduler.opened.session_id
    workers[0].register(identity=name, world_size=2)
    code, reason, field = refusal(
        lambda: workers[1].register(identity=name, rank=1, world_size=2, writer=True)
    )
    assert (code, reason, field) == ("FAILED_PRECONDITION", "LAYOUT_MISMATCH", "writer")
    workers[1].register(identity=name, rank=1, world_size=2, writer=False)
    scheduler.next("ranks_ready")
    for caller in (scheduler, *workers):
        caller.close()


def test_a_second_live_engine_of_the_same_id_is_refused(running: RunningDaemon) -> None:
    holder = RawScheduler(running.socket, identity=identity("held", b"1" * 16))
    assert holder.opened.session_id
    second = RawScheduler(running.socket, identity=identity("held", b"2" * 16))
    code, reason, _ = refusal(lambda: second.opened)
    assert (code, reason) == ("ALREADY_EXISTS", "ENGINE_ALREADY_LIVES")
    second.close()
    holder.close()


def test_a_newer_session_of_the_same_scheduler_takes_over(running: RunningDaemon) -> None:
    old = RawScheduler(running.socket, identity=identity("reconnects"))
    assert old.opened.session_id
    new = RawScheduler(running.socket, identity=identity("reconnects"))
    assert new.opened.session_id != old.id
    wait_until(lambda: len(named(new, "reconnects")) == 1, "the old session's end")
    new.close()
    old.close()


def named(caller: RawScheduler, engine_id: str) -> list[int]:
    return [s.session_id for s in caller.status().sessions if s.engine_id == engine_id]


ENGINE_PROCESS = """
import sys, time
from tests.control.daemon_rig import RawEngine, identity
engine = RawEngine(sys.argv[1], identity=identity("killed", b"1" * 16))
print(engine.mover_pid, flush=True)
time.sleep(60)
"""


def test_an_engine_killed_and_started_anew_waits_for_its_old_movers_end(
    running: RunningDaemon, worker: RawWorker
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", ENGINE_PROCESS, running.socket], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    old_mover = int(child.stdout.readline())
    assert Path(f"/proc/{old_mover}").exists()
    child.kill()
    child.wait()
    child.stdout.close()
    worker.register(identity=identity("killed", b"2" * 16))
    assert not Path(f"/proc/{old_mover}").exists()
    scheduler = RawScheduler(running.socket, identity=identity("killed", b"2" * 16))
    scheduler.next("ranks_ready")
    scheduler.close()


def test_unregister_returns_when_the_mover_is_gone_and_may_be_repeated(
    running: RunningDaemon, worker: RawWorker
) -> None:
    scheduler = RawScheduler(running.socket, identity=identity("leaves"))
    assert scheduler.opened.session_id
    mover = worker.register(identity=identity("leaves"))
    worker.unregister()
    assert not Path(f"/proc/{mover}").exists()
    lost = scheduler.next("rank_lost")
    assert lost.rank == 0
    worker.unregister()
    scheduler.close()


def test_registrations_of_one_rank_at_once_leave_one_mover(
    running: RunningDaemon, worker: RawWorker
) -> None:
    scheduler = RawScheduler(running.socket, identity=identity("at-once"))
    assert scheduler.opened.session_id
    request = worker.request(identity=identity("at-once"))
    calls = [
        worker.worker.RegisterRank.future(request, timeout=20, metadata=worker.metadata)
        for _ in range(4)
    ]
    assert all(call.result().registration_id for call in calls)
    (session,) = [s for s in worker.status().sessions if s.engine_id == "at-once"]
    assert (len(session.ranks), session.usable) == (1, True)
    movers = [call.result().mover_pid for call in calls]
    assert sum(Path(f"/proc/{pid}").exists() for pid in movers) == 1
    scheduler.close()


def test_a_killed_mover_is_news_and_its_rank_registers_again(
    running: RunningDaemon, worker: RawWorker
) -> None:
    import os
    import signal

    scheduler = RawScheduler(running.socket, identity=identity("mover-dies"))
    assert scheduler.opened.session_id
    mover = worker.register(identity=identity("mover-dies"))
    scheduler.next("ranks_ready")
    os.kill(mover, signal.SIGKILL)
    assert scheduler.next("rank_lost").rank == 0
    worker.register(identity=identity("mover-dies"))
    scheduler.next("ranks_ready")
    scheduler.close()


def test_the_end_of_a_worker_ends_its_mover(running: RunningDaemon) -> None:
    gone = RawWorker(running.socket)
    mover = gone.register(identity=identity("worker-dies"))
    gone.close()
    wait_until(lambda: not Path(f"/proc/{mover}").exists(), "the mover's end")


@pytest.mark.parametrize(
    ("groups", "more", "field"),
    [(1, 0, ""), (1, 1, "groups[0].num_blocks"), (4, 0, ""), (5, 0, "groups.num_blocks")],
)
def test_a_rank_with_too_many_engine_blocks_is_refused_though_it_comes_first(
    running: RunningDaemon, worker: RawWorker, groups: int, more: int, field: str
) -> None:
    blocks = MAX_ENGINE_BLOCKS + more
    fd = os.memfd_create("kvd-test-kv")
    os.ftruncate(fd, 8 * blocks)
    worker.companion.offer_memory(9, fd)
    os.close(fd)
    fragments = [worker_pb2.Fragment(stride=8, bytes=8)]
    layouts = [
        group_layout(group=number, num_blocks=blocks, fragments=fragments)
        for number in range(groups)
    ]

    def register() -> None:
        memories = [memory(memory_token=9, bytes=8 * blocks)]
        worker.register(identity=identity("many"), memories=memories, groups=layouts)

    if field:
        assert refusal(register) == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED", field)
    else:
        register()
        worker.unregister()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"identity": engine_pb2.EngineIdentity(engine_id="x")}, "INVALID_ARGUMENT"),
        ({"identity": identity("y" * 257)}, "STRING_TOO_LONG"),
        ({"rank": 1}, "RANK_COUNT"),
        ({"world_size": 0}, "RANK_COUNT"),
        ({"world_size": 257, "rank": 256}, "RANK_COUNT"),
        ({"shard": 1}, "RANK_COUNT"),
        ({"groups": []}, "GROUP_COUNT"),
        ({"groups": [group_layout(group=3)]}, "INVALID_ARGUMENT"),
        ({"groups": [group_layout(num_blocks=0)]}, "INVALID_ARGUMENT"),
        ({"groups": [group_layout(num_blocks=1 << 40)]}, "INVALID_ARGUMENT"),
        ({"groups": [group_layout(num_blocks=65)]}, "INVALID_ARGUMENT"),
        ({"groups": [group_layout(fragments=[])]}, "TOO_MANY_PARTS"),
        ({"groups": [group_layout(blocks_per_block=65)]}, "BLOCKS_PER_BLOCK"),
        ({"memories": []}, "TOO_MANY_PARTS"),
        ({"memories": [worker_pb2.MemoryHandle()]}, "INVALID_ARGUMENT"),
        ({"memories": [memory(memory_token=8)]}, "INVALID_ARGUMENT"),
        ({"memories": [memory(offset=3)]}, "INVALID_ARGUMENT"),
        ({"memories": [memory(bytes=1 << 40)]}, "INVALID_ARGUMENT"),
        ({"memories": [memory(offset=(1 << 64) - 8)]}, "INVALID_ARGUMENT"),
    ],
)
def test_an_impossible_registration_is_refused(
    worker: RawWorker, changes: dict[str, object], expected: str
) -> None:
    code, reason, field = refusal(lambda: worker.register(**changes))
    assert (code, reason) == ("INVALID_ARGUMENT", expected)
    assert field


@pytest.mark.parametrize(
    "fragment",
    [
        {"memory": 1},
        {"base": 4},
        {"stride": 0},
        {"bytes": 0},
        {"bytes": 2 * BLOCK_BYTES},
        {"base": (1 << 64) - 8},
        {"stride": 1 << 60},
    ],
)
def test_a_fragment_outside_its_memory_is_refused(
    worker: RawWorker, fragment: dict[str, int]
) -> None:
    usual = {"memory": 0, "base": 0, "stride": BLOCK_BYTES, "bytes": BLOCK_BYTES}
    made = worker_pb2.Fragment(**{**usual, **fragment})
    layout = group_layout(fragments=[made])
    code, reason, _ = refusal(lambda: worker.register(groups=[layout]))
    assert (code, reason) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
