"""A step's small stores against a real daemon: few copies, and an end for each of them."""

from __future__ import annotations

import os
import signal
import time
import urllib.request

from kvd_proto.v1 import common_pb2, engine_pb2
from tests.control.daemon_rig import (
    NUM_BLOCKS,
    RawEngine,
    block,
    daemon,
    store_job,
)
from tests.ports import free_port
from tests.waiting import wait_until

JOBS = 40  # more than begin in one event
DONE, FAILED = common_pb2.JOB_STATUS_DONE, common_pb2.JOB_STATUS_FAILED


def copies(port: int) -> int:
    """How many copies of stores have ended."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    lines = [line.split() for line in page.splitlines() if "kvd_transfers_total{" in line]
    return sum(int(float(count)) for name, count in lines if 'kind="store"' in name)


def offer(engine: RawEngine, first_job: int, first_key: int) -> list[engine_pb2.StoreJob]:
    """A block of each of many requests, whose bytes are there."""
    for number in range(JOBS):
        engine.worker.write(number, block(first_key + number))
    return [small(first_job + n, first_key + n, n) for n in range(JOBS)]


def small(job: int, key: int, engine_block: int) -> engine_pb2.StoreJob:
    made = store_job(job, [key], [engine_block])
    made.ready_together = 1
    return made


def check(engine: RawEngine, keys: list[int]) -> None:
    """What was stored is there."""
    for some in (keys[:20], keys[20:]):
        assert engine.load(some) == [block(key) for key in some]


def test_small_stores_are_copied_together_and_end_each_for_itself() -> None:
    port = free_port()
    with daemon("--http-port", str(port)) as running:
        engine = RawEngine(running.socket)
        store_and_check(engine)
        # Of 32 jobs, and of 8. A page is made once a second.
        wait_until(lambda: copies(port) >= 2, "two copies", 20.0)
        time.sleep(1.1)
        assert copies(port) == 2
        engine.close()


def store_and_check(engine: RawEngine) -> None:
    stores = offer(engine, 1, 1000)
    reply = engine.scheduler.step(stores=stores, end_step=True)
    assert [verdict.job_id for verdict in reply.verdicts] == list(range(1, JOBS + 1))
    assert all(verdict.accepted and verdict.blocks == 1 for verdict in reply.verdicts)
    engine.worker.ready(*range(1, JOBS + 1))
    ends = [engine.ended(job) for job in range(1, JOBS + 1)]
    assert {(end.status, end.blocks) for end in ends} == {(DONE, 1)}
    keys = list(range(1000, 1000 + JOBS))
    check(engine, keys)


def test_what_is_wrong_with_one_changes_nothing_for_the_others(engine: RawEngine) -> None:
    stores = offer(engine, 1, 2000)
    stores[5] = small(6, 2004, NUM_BLOCKS - 1)  # a key of the one before
    stores[20] = small(10, 2020, 20)  # a job of another
    stores[30] = small(31, 2030, NUM_BLOCKS)  # no such engine block
    reply = engine.scheduler.step(stores=stores, end_step=True)
    assert [verdict.job_id for verdict in reply.verdicts] == [store.job_id for store in stores]
    refused = {n: v.reason for n, v in enumerate(reply.verdicts) if not v.accepted}
    assert refused == {20: "DUPLICATE_JOB", 30: "INVALID_ARGUMENT"}
    begun = [store.job_id for n, store in enumerate(stores) if n not in refused]
    engine.worker.ready(*begun)
    ends = {job: engine.ended(job) for job in begun}
    assert [job for job in begun if ends[job].status != DONE] == [6]  # it left its key to another
    keys = [2000 + n for n in range(JOBS) if n not in {5, 20, 30}]
    check(engine, keys)
    assert engine.scheduler.statuses([2005, 2020, 2030]) == [0, 0, 0]


def test_all_of_them_end_where_their_mover_dies(engine: RawEngine) -> None:
    reply = engine.scheduler.step(stores=offer(engine, 1, 3000), end_step=True)
    assert all(verdict.accepted for verdict in reply.verdicts)
    engine.worker.ready(*range(1, JOBS))  # but for the last one
    ends = [engine.ended(job) for job in range(1, 33)]
    assert {end.status for end in ends} == {DONE}
    os.kill(engine.mover_pid, signal.SIGKILL)
    ends = [engine.ended(job) for job in range(33, JOBS + 1)]
    assert {(end.status, end.reason) for end in ends} == {(FAILED, "MOVER_GONE")}
    assert engine.scheduler.statuses([3000, 3000 + JOBS - 1]) == [1, 0]
