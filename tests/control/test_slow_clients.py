"""A client that takes no answers is dropped, and costs the others nothing."""

from __future__ import annotations

import asyncio
import itertools
import queue
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvd.control.sessions.outbox import (
    JOBS_PER_MESSAGE,
    MAX_UNSENT_BYTES,
    MAX_UNSENT_MESSAGES,
    Outbox,
)
from kvd_proto.v1 import engine_pb2, engine_pb2_grpc
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    block,
    daemon,
    identity,
    namespace,
)
from tests.waiting import wait_until

# What HTTP/2 holds for a client that doesn't read: as little as may be, and no more later.
SMALL_WINDOW = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16384),
)


async def test_a_client_that_reads_no_large_answers_is_taken_for_dead_by_their_bytes() -> None:
    outbox, sent = Outbox(), asyncio.Queue[engine_pb2.SessionResponse]()
    verdict = engine_pb2.JobVerdict(job_id=1, message="x" * (MAX_UNSENT_BYTES // 4))
    reply = engine_pb2.StepReply(sequence=1, verdicts=[verdict])
    for _ in range(3):
        outbox.put_reply(reply)
        outbox.put_ended(engine_pb2.JobEnded(job_id=1))
        outbox.put_ended(engine_pb2.JobEnded(job_id=2))
    context: Any = SimpleNamespace(write=sent.put)
    writing = asyncio.ensure_future(outbox.write_all(context))
    for _ in range(6):
        await sent.get()
    for _ in range(4):
        assert not outbox.overflowed.is_set(), "what was read counts no more"
        outbox.put_reply(reply)
    writing.cancel()
    outbox.put_reply(reply)
    assert outbox.overflowed.is_set()


def test_ends_of_jobs_that_go_together_count_by_their_bytes_too() -> None:
    outbox = Outbox()
    for number in range(5):
        reason = "x" * (MAX_UNSENT_BYTES // 4)
        outbox.put_ended(engine_pb2.JobEnded(job_id=number, reason=reason))
    assert not outbox.overflowed.is_set(), "the last message may pass the bound"
    outbox.put_reply(engine_pb2.StepReply(sequence=1))
    assert outbox.overflowed.is_set()


@pytest.mark.parametrize("quiet", [False, True], ids=["at once", "a moment late"])
async def test_ends_of_jobs_go_together_but_not_more_than_so_many(quiet: bool) -> None:
    outbox, sent = Outbox(quiet=quiet), asyncio.Queue[engine_pb2.SessionResponse]()
    for number in range(2 * JOBS_PER_MESSAGE + 1):
        outbox.put_ended(engine_pb2.JobEnded(job_id=number))
    context: Any = SimpleNamespace(write=sent.put)
    writing = asyncio.ensure_future(outbox.write_all(context))
    jobs: list[list[int]] = []
    while sum(map(len, jobs)) <= 2 * JOBS_PER_MESSAGE:
        jobs.append([job.job_id for job in (await sent.get()).jobs_ended.jobs])
    writing.cancel()
    assert [len(some) for some in jobs] == [JOBS_PER_MESSAGE, JOBS_PER_MESSAGE, 1]
    assert [*itertools.chain(*jobs)] == list(range(2 * JOBS_PER_MESSAGE + 1))


def test_a_session_whose_client_reads_no_answers_is_ended() -> None:
    with daemon() as running:
        deaf = Caller(running.socket, "SCHEDULER")
        watching = Caller(running.socket)
        requests: queue.SimpleQueue[engine_pb2.SessionRequest | None] = queue.SimpleQueue()
        opening = engine_pb2.OpenSession(
            identity=identity("deaf"), namespace=namespace(), world_size=1
        )
        requests.put(engine_pb2.SessionRequest(open=opening))
        with grpc.insecure_channel(f"unix:{running.socket}", SMALL_WINDOW) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            stream = stub.Session(iter(requests.get, None), metadata=deaf.metadata)
            wait_until(lambda: len(watching.status().sessions) == 1, "the session")
            unread = engine_pb2.SessionRequest(lookup=engine_pb2.LookupCall(call_id=1))
            for _ in range(MAX_UNSENT_MESSAGES + 1024):
                requests.put(unread)
            wait_until(lambda: not watching.status().sessions, "the deaf session's end")
            requests.put(None)
            stream.cancel()
        engine = RawEngine(running.socket)
        engine.store({1: block(1)})
        for caller in (engine, watching, deaf):
            caller.close()
