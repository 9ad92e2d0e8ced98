"""Whoever flushes hears of the end of every job, and never waits past the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import weakref

import pytest

from kvd.control.sessions.verbs import REMEMBERED_ANSWERS, REMEMBERED_BYTES, SequenceBook
from kvd.core.actions import EndJob
from kvd.core.errors import InvalidArgument, LimitExceeded
from kvd.core.events import JobKind, JobStatus
from kvd.core.keys import JobId, SessionId
from kvd.runtime.pending_jobs import MAX_FLUSHES, REMEMBERED_ENDS, PendingJobs
from kvd_proto.v1 import engine_pb2

SESSION = SessionId(1)


def end(job: int) -> EndJob:
    return EndJob(SESSION, JobId(job), JobKind.STORE, JobStatus.DONE, "", 1, 4096)


async def test_flush_returns_when_the_named_jobs_have_ended() -> None:
    board = PendingJobs()
    board.started(SESSION, JobId(1))
    board.started(SESSION, JobId(2))
    flush = asyncio.create_task(board.wait(SESSION, [JobId(1)], 1))
    await asyncio.sleep(0)
    board.ended(end(1))
    assert [order.job for order in await flush] == [1]
    assert board.live(SESSION) == {2}


async def test_flush_past_its_deadline_raises_and_the_job_stays_live() -> None:
    board = PendingJobs()
    board.started(SESSION, JobId(1))
    with pytest.raises(TimeoutError):
        await board.wait(SESSION, [], 0.01)
    assert board.live(SESSION) == {1}


async def test_so_many_may_wait_for_the_jobs_of_a_session() -> None:
    board = PendingJobs()
    other = SessionId(2)
    for session in (SESSION, other):
        board.started(session, JobId(1))
    flushes = [asyncio.create_task(board.wait(SESSION, [], 1)) for _ in range(MAX_FLUSHES)]
    await asyncio.sleep(0)
    with pytest.raises(LimitExceeded):
        await board.wait(SESSION, [JobId(1)], 1)
    with pytest.raises(TimeoutError):
        await board.wait(other, [], 0.01)
    board.ended(end(1))
    assert [[order.job for order in await flush] for flush in flushes] == [[1]] * MAX_FLUSHES
    assert [order.job for order in await board.wait(SESSION, [JobId(1)], 1)] == [1]


async def test_whoever_waited_in_vain_gives_the_place_back_and_leaves_nothing() -> None:
    board = PendingJobs()
    board.started(SESSION, JobId(1))
    for _ in range(MAX_FLUSHES + 1):
        with pytest.raises(TimeoutError):
            await board.wait(SESSION, [], 0)
    assert not board._flushes, "there may be sessions without end"


async def test_jobs_that_end_before_a_flush_goes_on_are_no_defect() -> None:
    """The driver takes any error of it for a broken invariant, and the daemon would end."""
    board = PendingJobs()
    for job in (1, 2):
        board.started(SESSION, JobId(job))
    flush = asyncio.create_task(board.wait(SESSION, [JobId(1)], 1))
    await asyncio.sleep(0)
    board.ended(end(1))
    board.ended(end(2))
    assert [order.job for order in await flush] == [1]


class Counted(PendingJobs):
    """Counts how often somebody looks at all live jobs of a session."""

    looks = 0

    def live(self, session: SessionId) -> frozenset[JobId]:
        self.looks += 1
        return super().live(session)


async def test_end_of_a_job_costs_no_look_at_all_jobs_for_each_who_waits() -> None:
    board = Counted()
    for job in range(1, 4):
        board.started(SESSION, JobId(job))
    flush = asyncio.create_task(board.wait(SESSION, [], 1))
    await asyncio.sleep(0)
    looks = board.looks
    for job in range(1, 4):
        board.ended(end(job))
        await asyncio.sleep(0)
    assert board.looks == looks
    assert [order.job for order in await flush] == [1, 2, 3]


async def test_late_flush_still_hears_how_a_job_ended() -> None:
    board = PendingJobs()
    board.started(SESSION, JobId(1))
    board.ended(end(1))
    assert [order.job for order in await board.wait(SESSION, [JobId(1)], 1)] == [1]


async def test_starting_a_live_job_again_is_told() -> None:
    board = PendingJobs()
    assert board.started(SESSION, JobId(1))
    assert not board.started(SESSION, JobId(1))


async def test_drain_counts_what_is_left() -> None:
    board = PendingJobs()
    board.started(SESSION, JobId(1))
    assert await board.wait_for_all(0.01) == 1
    board.ended(end(1))
    assert await board.wait_for_all(0.01) == 0


async def test_nothing_is_kept_of_a_closed_session_once_its_last_job_has_ended() -> None:
    board = PendingJobs()
    board.started(SESSION, JobId(1))
    board.forget_if_idle(SESSION)
    assert board.live(SESSION) == {1}
    board.ended(end(1))
    board.forget_if_idle(SESSION)
    assert await board.wait(SESSION, [JobId(1)], 1) == []


async def test_who_waits_for_the_jobs_of_a_session_hears_of_them_though_it_is_forgotten() -> None:
    board = PendingJobs()
    board.started(SESSION, JobId(1))
    flush = asyncio.create_task(board.wait(SESSION, [], 1))
    await asyncio.sleep(0)
    board.ended(end(1))
    board.forget_if_idle(SESSION)
    assert [order.job for order in await flush] == [1]


async def test_so_many_ends_of_a_session_are_remembered_and_the_oldest_goes() -> None:
    board = PendingJobs()
    jobs = [JobId(number) for number in range(1, REMEMBERED_ENDS + 2)]
    for job in jobs[:-1]:
        board.started(SESSION, job)
        board.ended(end(job))
    assert len(await board.wait(SESSION, jobs[:-1], 1)) == REMEMBERED_ENDS
    board.started(SESSION, jobs[-1])
    board.ended(end(jobs[-1]))
    assert [order.job for order in await board.wait(SESSION, jobs, 1)] == jobs[1:]


def test_so_many_answers_of_a_session_are_remembered_and_the_oldest_goes() -> None:
    book = SequenceBook()
    for number in range(1, REMEMBERED_ANSWERS + 1):
        assert book.admit(number)
        book.remember(number, step_reply(number))
    assert book.answer_again(1) == step_reply(1)
    assert book.admit(REMEMBERED_ANSWERS + 1)
    book.remember(REMEMBERED_ANSWERS + 1, step_reply(REMEMBERED_ANSWERS + 1))
    assert not book.admit(1)
    assert book.answer_again(1) == engine_pb2.StepReply(sequence=1)
    assert book.answer_again(2) == step_reply(2)


def test_so_many_bytes_of_answers_are_remembered_and_the_oldest_go() -> None:
    book = SequenceBook()
    verdict = engine_pb2.JobVerdict(job_id=1, message="x" * (REMEMBERED_BYTES // 3))
    answers = [engine_pb2.StepReply(sequence=n, verdicts=[verdict]) for n in range(1, 5)]
    for answer in answers:
        assert book.admit(answer.sequence)
        book.remember(answer.sequence, answer)
    forgotten = engine_pb2.StepReply
    assert [book.answer_again(n) for n in (1, 2)] == [forgotten(sequence=1), forgotten(sequence=2)]
    assert [book.answer_again(n) for n in (3, 4)] == answers[2:]
    large = engine_pb2.StepReply(sequence=5, verdicts=[verdict] * 4)
    assert book.admit(5)
    book.remember(5, large)
    assert book.answer_again(5) == large, "the last one always is"


class Message:
    """What a call brought."""


def test_refusal_that_is_answered_again_holds_on_to_no_call() -> None:
    book = SequenceBook()
    assert book.admit(1)
    book.remember(1, InvalidArgument("no"))

    def ask_again() -> weakref.ref[Message]:
        message = Message()
        with contextlib.suppress(InvalidArgument):
            book.answer_again(1)
        return weakref.ref(message)

    assert [ask_again()() for _ in range(3)] == [None] * 3


def step_reply(number: int) -> engine_pb2.StepReply:
    verdict = engine_pb2.JobVerdict(job_id=number, accepted=True)
    return engine_pb2.StepReply(sequence=number, verdicts=[verdict])
