"""A daemon that finds its own state wrong ends with 70 and tells why; the next one is sound."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import pytest

from kvd.cli.serve import EXIT_BROKEN_INVARIANT
from kvd_proto.v1 import operator_pb2
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    RunningDaemon,
    block,
    store_job,
)
from tests.control.running_daemon import DEADLINE_S

HIT, MISS = 1, 0
WHERE = ["broken invariant while handling TransferFinished"]
# What became of the job's slot, event by event, and how it is now.
STORY = [
    "its slots and its job",
    "StoreRequested of session 1, job 1: FREE -> RESERVED [1]; pinned [1]",
    "TransferFinished of session 1, job 1: unpinned [1]; RESERVED -> READY [1]",
]


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    """A sound daemon's pool with one block in it; nobody serves it yet."""
    made = RunningDaemon()
    try:
        made.start()
        engine = RawEngine(made.socket)
        engine.store({1: block(1)})
        engine.close()
        made.stop()
        yield made
    finally:
        made.remove()


def break_it(running: RunningDaemon, fault: str) -> str:
    """Start over the pool with this fault and do what shows it; the log from then on."""
    before = len(running.log.read_text())
    running.module = "tests.fakes.broken_daemon"
    running.environment = {"KVD_TEST_FAULT": fault}
    running.start()
    if fault in {"event", "effect", "refusal"}:
        engine = RawEngine(running.socket)
        engine.worker.write(0, block(2))
        engine.scheduler.step(stores=[store_job(1, [2], [0])], end_step=True)
        with contextlib.suppress(grpc.RpcError):  # the daemon may be gone before it answers
            engine.worker.ready(1)
        status = running.process.wait(DEADLINE_S)
        engine.close()
    else:
        caller = Caller(running.socket)
        with pytest.raises(grpc.RpcError):
            caller.call(caller.operator.Clear, operator_pb2.ClearRequest())
        status = running.process.wait(DEADLINE_S)
        caller.close()
    assert status == EXIT_BROKEN_INVARIANT
    return running.log.read_text()[before:]


@pytest.mark.parametrize(
    ("fault", "story"),
    [
        ("event", [*WHERE, "BrokenSlots: a slot was not RESERVED: slots [1]", *STORY]),
        ("effect", [*WHERE, "AssertionError: planted by a test", *STORY]),
        ("refusal", [*WHERE, "LimitExceeded: planted by a test", *STORY]),
        ("call", ["AssertionError: planted by a test"]),
        ("callback", ["in a callback of the loop", "AssertionError: planted by a test"]),
    ],
)
def test_daemon_with_a_broken_invariant_ends_with_70_and_tells_why(
    running: RunningDaemon, fault: str, story: list[str]
) -> None:
    log = break_it(running, fault)
    for part in (*story, "Traceback"):
        assert part in log, log
    running.module, running.environment = "kvd", {}
    running.start()
    engine = RawEngine(running.socket)
    assert engine.scheduler.statuses([1, 2]) == [HIT, MISS], "what was being stored is not served"
    assert engine.load([1]) == [block(1)]
    engine.close()


def test_key_repeated_more_than_a_piece_apart_ends_its_job_once() -> None:
    """A request-level store that names a key again in a later piece ended the daemon."""
    made = RunningDaemon()
    try:
        made.start()
        engine = RawEngine(made.socket)
        keys = [*range(100, 356), 100]  # pieces have 256 keys
        job = store_job(1, keys, [n % 64 for n in range(len(keys))])
        job.request_level = True
        engine.scheduler.step(stores=[job], end_step=True)
        engine.worker.ready(1)
        assert engine.ended(1).job_id == 1
        assert engine.store({1: block(1)}).status == 1
        assert engine.load([1]) == [block(1)]
        engine.close()
    finally:
        made.remove()
