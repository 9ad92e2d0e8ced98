"""Whoever flushes hears of the end of every job, and never waits past the deadline."""

from __future__ import annotations

import asyncio

import pytest

from kvd.core.actions import EndJob
from kvd.core.events import JobKind, JobStatus
from kvd.core.keys import JobId, SessionId
from kvd.job_board import JobBoard

SESSION = SessionId(1)


def end(job: int) -> EndJob:
    return EndJob(SESSION, JobId(job), JobKind.STORE, JobStatus.DONE, "", 1, 4096)


async def test_flush_returns_when_the_named_jobs_have_ended() -> None:
    board = JobBoard()
    board.started(SESSION, JobId(1))
    board.started(SESSION, JobId(2))
    flush = asyncio.create_task(board.wait(SESSION, [JobId(1)], 1))
    await asyncio.sleep(0)
    board.ended(end(1))
    assert [order.job for order in await flush] == [1]
    assert board.live(SESSION) == {2}


async def test_flush_past_its_deadline_raises_and_the_job_stays_live() -> None:
    board = JobBoard()
    board.started(SESSION, JobId(1))
    with pytest.raises(TimeoutError):
        await board.wait(SESSION, [], 0.01)
    assert board.live(SESSION) == {1}


async def test_late_flush_still_hears_how_a_job_ended() -> None:
    board = JobBoard()
    board.started(SESSION, JobId(1))
    board.ended(end(1))
    assert [order.job for order in await board.wait(SESSION, [JobId(1)], 1)] == [1]


async def test_starting_a_live_job_again_is_told() -> None:
    board = JobBoard()
    assert board.started(SESSION, JobId(1))
    assert not board.started(SESSION, JobId(1))


async def test_drain_counts_what_is_left() -> None:
    board = JobBoard()
    board.started(SESSION, JobId(1))
    assert await board.wait_for_all(0.01) == 1
    board.ended(end(1))
    assert await board.wait_for_all(0.01) == 0


async def test_end_of_a_forgotten_sessions_job_is_not_kept() -> None:
    board = JobBoard()
    board.started(SESSION, JobId(1))
    board.forget(SESSION)
    board.ended(end(1))
    assert await board.wait(SESSION, [JobId(1)], 1) == []
