"""The thinnest thread through all rooms: real daemon, real mover, real shared memory."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from kvd.core.events import JobStatus
from kvd_proto.board import BoardReader
from kvd_proto.v1 import common_pb2
from tests.control.daemon_rig import (
    BLOCK_BYTES,
    RawEngine,
    RunningDaemon,
    block,
    daemon,
    identity,
    store_job,
)


def test_what_was_stored_is_loaded_byte_for_byte(engine: RawEngine) -> None:
    contents = {key: block(key) for key in range(8)}
    ended = engine.store(contents)
    assert (ended.status, ended.blocks) == (common_pb2.JOB_STATUS_DONE, 8)
    assert engine.load(list(contents)) == list(contents.values())


def test_a_store_is_visible_to_another_engine_once_it_has_ended(
    running: RunningDaemon, engine: RawEngine
) -> None:
    engine.store({100: block(100)})
    other = RawEngine(running.socket, identity=identity("e1"))
    try:
        assert other.scheduler.statuses([100, 101]) == [1, 0]
        assert other.load([100]) == [block(100)]
    finally:
        other.close()


def test_status_says_what_is_under_way_what_may_go_and_how_far_events_tell_of_it(
    running: RunningDaemon, engine: RawEngine
) -> None:
    before, events_before = figures(engine)
    (verdict,) = engine.scheduler.step(stores=[store_job(1, [900, 901], [0, 1])]).verdicts
    assert verdict.accepted
    under_way, events_then = figures(engine)
    assert np.subtract(under_way, before).tolist() == [2 * BLOCK_BYTES, 2 * BLOCK_BYTES, 0]
    engine.worker.ready(1)
    engine.ended(1)
    stored, events_after = figures(engine)
    assert np.subtract(stored, before).tolist() == [2 * BLOCK_BYTES, 0, 2 * BLOCK_BYTES]
    assert (events_then - events_before, events_after - events_then) == (0, 1)


def figures(engine: RawEngine) -> tuple[tuple[int, int, int], int]:
    """The tenant's bytes used, reserved and evictable, and the newest change's number."""
    status = engine.scheduler.status()
    (tenant,) = status.tenants
    bytes_of = (tenant.bytes_used, tenant.bytes_reserved, tenant.bytes_evictable)
    return bytes_of, status.event_sequence


def test_a_restarted_engine_finds_its_blocks(running: RunningDaemon) -> None:
    first = RawEngine(running.socket, identity=identity("restarts", b"1" * 16))
    first.store({200: block(200)})
    first.close()
    second = RawEngine(running.socket, identity=identity("restarts", b"2" * 16))
    try:
        assert second.load([200]) == [block(200)]
    finally:
        second.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_restarted_daemon_is_warm(number: int) -> None:
    with daemon() as running:
        engine = RawEngine(running.socket)
        engine.store({300: block(300), 301: block(301)})
        engine.close()
        assert running.stop(number) == (0 if number == signal.SIGTERM else -number)
        running.start()
        engine = RawEngine(running.socket)
        try:
            assert engine.scheduler.statuses([300, 301, 302]) == [1, 1, 0]
            assert engine.load([300, 301]) == [block(300), block(301)]
        finally:
            engine.close()


def test_job_that_breaks_a_rule_ends_on_the_board_and_in_the_session(engine: RawEngine) -> None:
    impossible = store_job(9, [1], [1 << 23])
    (verdict,) = engine.scheduler.step(stores=[impossible]).verdicts
    assert (verdict.accepted, verdict.reason) == (False, "INVALID_ARGUMENT")
    assert engine.ended(9).status == common_pb2.JOB_STATUS_REFUSED
    board = BoardReader(engine.worker.board_fd)
    try:
        assert [(r.job_id, int(r.status)) for r in board.poll()] == [(9, JobStatus.REFUSED)]
    finally:
        board.close()


def test_engine_memory_that_was_never_written_is_stored_as_zeros_and_stays_a_hole(
    running: RunningDaemon,
) -> None:
    """Its pages would count as the daemon's: a store is no reason to make any."""
    engine = RawEngine(running.socket, identity=identity("untouched"))
    engine.worker.write(5, block(5))
    before = os.fstat(engine.worker.fd).st_blocks
    job = store_job(1, [1001, 1002, 1005, 1007], [1, 2, 5, 7])
    assert engine.scheduler.step(stores=[job]).verdicts[0].accepted
    engine.worker.ready(1)
    assert engine.ended(1).blocks == 4
    assert os.fstat(engine.worker.fd).st_blocks == before
    zeros = bytes(BLOCK_BYTES)
    assert engine.load([1001, 1002, 1005, 1007]) == [zeros, zeros, block(5), zeros]
    engine.close()
