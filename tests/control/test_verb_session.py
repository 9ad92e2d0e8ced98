"""The conformance tests' session, a call for each verb, over a real daemon and mover."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvd_client.draft import BlockRun, JobDraft
from kvd_client.identity import EngineIdentity, Group, NamespaceFields
from kvd_proto.v1 import common_pb2, events_pb2
from tests.control.daemon_rig import (
    BLOCK_BYTES,
    HASH_BYTES,
    RawWorker,
    RunningDaemon,
    block,
    context,
    hashes,
    identity,
)
from verb_session import ChangeTail, VerbSession

MISS, HIT, PENDING = 0, 1, 2


@pytest.fixture
def worker(running: RunningDaemon) -> Iterator[RawWorker]:
    made = RawWorker(running.socket)
    made.register()
    yield made
    made.close()


@pytest.fixture
def session(running: RunningDaemon, worker: RawWorker) -> Iterator[VerbSession]:
    who = EngineIdentity(identity().engine_id, identity().boot_nonce)
    namespace = NamespaceFields(
        model="verbs",
        kv_dtype="float32",
        hash_algorithm="sha256",
        hash_bytes=HASH_BYTES,
        groups=(Group(16, (BLOCK_BYTES,)),),
    )
    made = VerbSession(running.socket, who, namespace, timeout_s=20.0)
    made.wait_usable()
    made.clear()
    yield made
    made.close()


@pytest.fixture
def changes(session: VerbSession) -> Iterator[ChangeTail]:
    tail = session.watch()
    yield tail
    tail.close()


def run(*keys: int, blocks: tuple[int, ...] = ()) -> BlockRun:
    return BlockRun(0, 0, [hashes(key) for key in keys], blocks)


def statuses(session: VerbSession, *keys: int) -> list[int]:
    (found,) = session.lookup(context(), [run(*keys)])
    return [status & 3 for status in found.statuses]


def test_block_goes_in_and_comes_back_by_calls_alone(
    session: VerbSession, worker: RawWorker, changes: ChangeTail
) -> None:
    worker.write(0, block(7))
    job = session.next_job_id()
    verdict = session.prepare_store(JobDraft(job, context(), [run(7, blocks=(0,))]))
    assert (verdict.accepted, verdict.blocks) == (True, 1)
    assert statuses(session, 7, 8) == [PENDING, MISS]
    worker.ready(job)
    (ended,) = session.flush([job])
    assert ended.status == common_pb2.JOB_STATUS_DONE
    (stored,) = changes.take(session.status().event_sequence)
    assert (stored.kind, stored.hashes) == (events_pb2.CacheEvent.KIND_STORED, hashes(7))

    (found,) = session.lookup(context(), [run(7)], lease=True)
    load = session.next_job_id()
    assert session.prepare_load(JobDraft(load, context(), [run(7, blocks=(5,))])).accepted
    session.release_leases([found.lease_id])
    worker.ready(load)
    session.flush([load])
    assert worker.read(5) == block(7)


def test_reset_leaves_nothing_to_be_found(session: VerbSession, worker: RawWorker) -> None:
    job = session.next_job_id()
    session.prepare_store(JobDraft(job, context(), [run(1, blocks=(0,))]))
    worker.ready(job)
    session.flush([job])
    session.touch(context(), [run(1)])
    session.end_step(finished=["r0"])
    assert statuses(session, 1) == [HIT]
    session.reset_cache("mine alone")
    assert session.epoch == "mine alone"
    assert statuses(session, 1) == [MISS]


def test_refusals_are_raised(session: VerbSession) -> None:
    with pytest.raises(grpc.RpcError):
        session.set_quota("nobody", 1)
    verdict = session.prepare_load(
        JobDraft(session.next_job_id(), context(), [run(99, blocks=(0,))])
    )
    assert (verdict.accepted, verdict.reason) == (False, "KEY_MISSING")


def test_waiting_for_a_change_that_does_not_come_ends(session: VerbSession) -> None:
    tail = session.watch()
    try:
        tail._timeout_s = 0.05
        with pytest.raises(TimeoutError):
            tail.take(session.status().event_sequence + 1)
    finally:
        tail.close()
