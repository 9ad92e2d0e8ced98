"""What a mover remembers of its worker's words soon takes as much memory as it ever will."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from kvd.mover.transfers import MAX_READY_JOBS, ReadyJobs, TransferQueue

ROUND = 64  # jobs that a worker tells of at once
FIRST = 1 << 40


def peaks(step: int) -> tuple[int, int]:
    """Bytes after twice as many jobs as are remembered, and later; numbered by the step."""
    queue, told = TransferQueue(), 0

    def peak_of(jobs: int) -> int:
        nonlocal told
        tracemalloc.reset_peak()
        for start in range(told, told + jobs, ROUND):
            queue.mark_ready([FIRST + step * job for job in range(start, start + ROUND)])
        told += jobs
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        return peak_of(2 * MAX_READY_JOBS), peak_of(4 * MAX_READY_JOBS)
    finally:
        tracemalloc.stop()


def test_memory_of_ready_jobs_does_not_grow_once_there_were_twice_as_many() -> None:
    at_first, later = peaks(step=1000)
    assert at_first > MAX_READY_JOBS * 32, "nothing was remembered"
    assert later < at_first + 64 * ROUND


def test_jobs_that_are_numbered_one_by_one_take_a_bit_each() -> None:
    assert max(peaks(step=1)) < 64 << 10


@pytest.mark.parametrize("step", [1, 3, 100_000])
def test_the_last_jobs_said_ready_are_remembered_but_for_ended_ones(step: int) -> None:
    chance, ready = random.Random(step), ReadyJobs()
    jobs = [FIRST + step * number for number in range(4 * MAX_READY_JOBS + 99)]
    ended: set[int] = set()
    for number, job in enumerate(jobs):
        ready.add(job)
        if chance.random() < 0.5:
            ended.add(over := jobs[chance.randint(max(0, number - 99), number)])
            ready.discard(over)
        ready.discard(job + step)  # which nobody has said ready
    known = {job for job in jobs if job in ready}
    assert known >= set(jobs[-MAX_READY_JOBS:]) - ended
    assert not known & ended
    assert not known & set(jobs[: -2 * MAX_READY_JOBS])
