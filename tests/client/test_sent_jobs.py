"""Jobs on their way: when they end by the ranks' reports, and when by the daemon's word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvd_client import EngineIdentity, SchedulerConnection
from kvd_client.draft import BlockRun, JobDraft
from kvd_client.scheduler.jobs import JobTable
from kvd_client.scheduler.sent_jobs import NEVER_SENT, REPORT_GRACE_S, SentJob, SentJobs
from kvd_proto.limits import MAX_JOBS_IN_FLIGHT
from kvd_proto.v1 import common_pb2, engine_pb2
from tests.client.engine_rig import TOKENS, Rig, namespace

LATER_S = REPORT_GRACE_S + 0.1


@pytest.fixture
def jobs() -> SentJobs[SentJob]:
    """Two ranks; job 7 is one of the daemon's, job 8 two; all of this session."""
    made = SentJobs[SentJob](world_size=2)
    made.enter(3)
    made.add(7, SentJob(generation=3, parts=[1]))
    made.add(8, SentJob(generation=3, parts=[2, 3]))
    return made


def test_a_job_ends_with_the_last_ranks_report_and_fails_with_any(jobs: SentJobs[SentJob]) -> None:
    assert jobs.report(7, 1, failed=True) is None
    ended = jobs.report(7, 1, failed=False)
    assert ended is not None
    assert ended.has_failed
    assert 7 not in jobs
    assert jobs.report(7, 1, failed=False) is None
    assert len(jobs) == 1


def test_several_ranks_may_speak_at_once(jobs: SentJobs[SentJob]) -> None:
    ended = jobs.report(8, 2, failed=False)
    assert ended is not None
    assert not ended.has_failed


def test_every_part_counts_for_the_limit(jobs: SentJobs[SentJob]) -> None:
    assert jobs.free == MAX_JOBS_IN_FLIGHT - 3
    assert jobs.parts_of([8, 9]) == {2, 3}
    jobs.drop(8)
    assert jobs.free == MAX_JOBS_IN_FLIGHT - 1


def test_the_daemons_word_counts_after_a_grace_and_is_said_again(jobs: SentJobs[SentJob]) -> None:
    jobs.told([(2, True), (1, False), (99, True)], now=10.0)
    assert jobs.overdue(10.0 + REPORT_GRACE_S) == []
    assert jobs.overdue(10.0 + LATER_S) == [(2, True), (1, False)]
    assert jobs.overdue(10.0 + LATER_S) == []
    assert len(jobs.overdue(10.0 + 2 * LATER_S)) == 2


def test_a_block_that_two_stores_read_is_read_until_both_have_ended() -> None:
    """As after a reset of the engine's cache: what is stored again is still being read."""
    rig, table = Rig(), JobTable(world_size=1)
    rig.arrive("r", 3 * TOKENS)
    asker = rig.scheduler._requests["r"]
    for job_id, engine_blocks in ((1, [5, 6]), (2, [6, 7])):
        run = BlockRun(0, 0, rig.keys("p", 2 * TOKENS)[0], engine_blocks)
        table.begin(JobDraft(job_id, common_pb2.ReqContext(), [run]), asker, generation=1)
    assert [table.readers(0, [block]) for block in (5, 6, 7)] == [{1}, {1, 2}, {2}]
    table.drop(2)
    assert [table.readers(0, [block]) for block in (5, 6, 7)] == [{1}, {1}, set()]
    table.drop(1)
    assert table.readers(0, [5, 6, 7]) == set()


def test_a_job_that_was_reported_in_time_is_not_overdue(jobs: SentJobs[SentJob]) -> None:
    jobs.told([(2, True), (1, True)], now=10.0)
    jobs.report(8, 2, failed=False)
    assert jobs.overdue(10.0 + LATER_S) == [(1, True)]


def test_a_new_session_ends_what_was_sent_before_and_forgets_what_was_told(
    jobs: SentJobs[SentJob],
) -> None:
    jobs.told([(1, True)], now=10.0)
    assert jobs.of_earlier_sessions() == []
    assert not jobs.enter(3)
    assert jobs.enter(4)
    jobs.add(9, SentJob(generation=4, parts=[4]))
    jobs.add(10, SentJob(generation=NEVER_SENT, parts=[5]))
    assert jobs.of_earlier_sessions() == jobs.of_earlier_sessions() == [1, 2, 3]
    assert jobs.overdue(10.0 + LATER_S) == []


def test_a_job_of_an_earlier_session_is_told_until_it_is_dropped(jobs: SentJobs[SentJob]) -> None:
    assert jobs.of_earlier_sessions() == []
    jobs.add(9, SentJob(generation=2, parts=[4]))
    assert jobs.of_earlier_sessions() == [4]
    jobs.drop(9)
    assert jobs.of_earlier_sessions() == []
    jobs.add(10, SentJob(generation=2, parts=[5]))
    assert jobs.of_earlier_sessions() == [5]


@pytest.mark.parametrize(
    ("status", "is_done"),
    [
        (common_pb2.JOB_STATUS_DONE, True),
        (common_pb2.JOB_STATUS_PARTIAL, False),
        (common_pb2.JOB_STATUS_FAILED, False),
    ],
)
def test_by_the_daemons_word_alone_a_partial_store_is_not_whole(
    status: common_pb2.JobStatus, is_done: bool, tmp_path: Path
) -> None:
    identity = EngineIdentity("told", b"0" * 16)
    connection = SchedulerConnection(str(tmp_path / "nobody"), identity, namespace())
    ended = engine_pb2.JobsEnded(jobs=[engine_pb2.JobEnded(job_id=1, status=status)])
    nobody: Any = None
    try:
        connection._receive(engine_pb2.SessionResponse(jobs_ended=ended), nobody, nobody)
        assert connection.take_ended() == [(1, is_done)]
    finally:
        connection.close()
