"""An engine of two ranks, one of which fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from kvd_proto.v1 import common_pb2
from tests.control.daemon_rig import (
    BLOCK_BYTES,
    RawScheduler,
    RawWorker,
    group,
    namespace,
    store_job,
)
from tests.faults.probe import Probe
from tests.faults.scene import RELEASE_SECONDS, Scene, freeze, thaw
from tests.waiting import wait_until

COUNT = 32


@pytest.fixture
def engine(scene: Scene) -> Probe:
    """Two ranks, each with its own shard of every block."""
    made = scene.engine("pair", world_size=2)
    assert made.store("old", 8) == 8
    return made


@pytest.mark.parametrize("failing", [0, 1])
def test_store_of_which_one_rank_dies_is_never_a_hit(
    scene: Scene, engine: Probe, failing: int
) -> None:
    movers = scene.movers_of(engine)
    freeze(movers[failing])
    engine.ask("store", prefix="half", count=COUNT, wait=False)
    wait_until(
        lambda: scene.copied_blocks("half", COUNT, 4096, 1 - failing) == COUNT, "the other rank"
    )
    assert engine.hits("half", COUNT) == (0, 0)
    os.kill(movers[failing], signal.SIGKILL)
    assert engine.ask("pump")["idle"]
    scene.wait_replaced(engine, movers[failing])
    assert engine.hits("half", COUNT) == (0, 0)
    wait_until(lambda: scene.status().pool.slots_quarantined == 0, "the slots")
    assert scene.movers_of(engine)[1 - failing] == movers[1 - failing]
    assert engine.store("half", COUNT) == COUNT
    assert engine.load("half", COUNT) == COUNT


@pytest.mark.parametrize("failing", [0, 1])
def test_load_of_which_one_rank_dies_fails_for_the_whole_request(
    scene: Scene, engine: Probe, failing: int
) -> None:
    movers = scene.movers_of(engine)
    assert engine.ask("match", request="r", prefix="old", count=8)["found"] == 8
    freeze(movers[failing])
    engine.ask("start_load", request="r", found=8, first_block=100)
    engine.ask("pump", seconds=0.2)
    status = engine.ask("status")
    assert "r" not in status["finished"] + status["failed"]  # the other rank has its bytes
    os.kill(movers[failing], signal.SIGKILL)
    status = engine.ask("pump")
    assert "r" in status["failed"]
    assert "r" not in status["finished"]
    scene.wait_replaced(engine, movers[failing])
    assert engine.load("old", 8) == 8


def test_store_is_a_hit_only_once_both_ranks_have_written(scene: Scene, engine: Probe) -> None:
    movers = scene.movers_of(engine)
    freeze(movers[1])
    engine.ask("store", prefix="slow", count=COUNT, wait=False)
    wait_until(lambda: scene.copied_blocks("slow", COUNT, 4096, 0) == COUNT, "rank 0")
    assert engine.hits("slow", COUNT) == (0, 0)
    thaw(movers[1])
    assert engine.ask("pump")["idle"]
    assert engine.load("slow", COUNT) == COUNT


@pytest.fixture
def apart(shared_scene: Scene) -> Iterator[tuple[RawScheduler, list[RawWorker]]]:
    """A scheduler and two workers, each with a connection of its own, as processes have."""
    socket = shared_scene.daemon.socket
    spec = namespace(groups=[group(shard_bytes=[BLOCK_BYTES, BLOCK_BYTES])])
    scheduler = RawScheduler(socket, namespace=spec, world_size=2)
    workers = [RawWorker(socket), RawWorker(socket)]
    for rank, worker in enumerate(workers):
        worker.register(rank=rank, shard=rank, world_size=2)
    assert scheduler.opened.session_id
    scheduler.next("ranks_ready")
    yield scheduler, workers
    scheduler.close()
    for worker in workers:
        worker.close()
    wait_until(lambda: not shared_scene.daemon.movers(), "their movers' end")


def test_worker_that_dies_takes_its_mover_and_its_stores_along_and_nothing_else(
    shared_scene: Scene, apart: tuple[RawScheduler, list[RawWorker]]
) -> None:
    scheduler, workers = apart
    movers = shared_scene.daemon.movers()
    (verdict,) = scheduler.step(stores=[store_job(1, [1, 2], [0, 1])]).verdicts
    assert verdict.accepted
    workers[0].ready(1)
    workers[1].companion.close()  # what the kernel does when its process is killed
    ended = time.monotonic()
    assert scheduler.next("rank_lost").rank == 1
    [job] = scheduler.next("jobs_ended").jobs
    assert (job.status, job.reason) == (common_pb2.JOB_STATUS_FAILED, "MOVER_GONE")
    wait_until(lambda: shared_scene.daemon.movers() == movers[:1], "the mover's end")
    assert time.monotonic() - ended < RELEASE_SECONDS
    assert [status & 3 for status in scheduler.statuses([1, 2])] == [0, 0]
    (verdict,) = scheduler.step(stores=[store_job(2, [3], [0])]).verdicts
    assert (verdict.accepted, verdict.reason) == (False, "RANKS_MISSING")
    assert shared_scene.busy_slots() == 0


def test_scheduler_that_dies_takes_its_session_and_its_ranks_movers_along(
    shared_scene: Scene, apart: tuple[RawScheduler, list[RawWorker]]
) -> None:
    scheduler, _workers = apart
    (verdict,) = scheduler.step(stores=[store_job(1, [1, 2], [0, 1])]).verdicts
    assert verdict.accepted
    scheduler.companion.close()
    ended = time.monotonic()
    wait_until(lambda: not shared_scene.daemon.movers(), "its movers' end")
    wait_until(lambda: not shared_scene.status().sessions, "its session's end")
    assert time.monotonic() - ended < RELEASE_SECONDS
    assert shared_scene.busy_slots() == 0
