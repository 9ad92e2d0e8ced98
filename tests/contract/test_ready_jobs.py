"""What a mover remembers of its worker's words soon takes as much memory as it ever will."""

from __future__ import annotations

import tracemalloc

from kvd.mover.transfers import MAX_READY_JOBS, TransferQueue

ROUND = 64  # jobs that a worker tells of at once


def test_memory_of_ready_jobs_does_not_grow_once_there_were_twice_as_many() -> None:
    queue, told = TransferQueue(), 0

    def peak_of(jobs: int) -> int:
        nonlocal told
        tracemalloc.reset_peak()
        for start in range(told, told + jobs, ROUND):
            queue.mark_ready([1000 + job for job in range(start, start + ROUND)])
        told += jobs
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        at_first = peak_of(2 * MAX_READY_JOBS)
        later = peak_of(4 * MAX_READY_JOBS)
    finally:
        tracemalloc.stop()
    assert at_first > MAX_READY_JOBS * 32, "nothing was remembered"
    assert later < at_first + 64 * ROUND
