"""The session stream against a real daemon: numbers, verdicts, refusals, epochs, ends."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvd_proto.v1 import common_pb2, engine_pb2
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    RawScheduler,
    RunningDaemon,
    block,
    context,
    hashes,
    identity,
    load_job,
    namespace,
    open_and_close,
    query,
    refusal,
    store_job,
)
from tests.control.running_daemon import DEADLINE_S
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def engine(running: RunningDaemon) -> Iterator[RawEngine]:
    made = RawEngine(running.socket)
    yield made
    made.close()


@pytest.fixture
def former(running: RunningDaemon) -> Iterator[RawEngine]:
    """An engine whose client is of a former version."""
    made = RawEngine(running.socket, identity=identity("former"))
    yield made
    made.close()


@pytest.fixture
def scheduler(engine: RawEngine) -> RawScheduler:
    return engine.scheduler


def send_again(scheduler: RawScheduler, sequence: int, **parts: object) -> engine_pb2.StepReply:
    scheduler.send(step=engine_pb2.Step(sequence=sequence, **parts))  # type: ignore[arg-type]
    reply: engine_pb2.StepReply = scheduler.next("step")
    return reply


def test_a_repeated_step_is_not_applied_again_and_is_answered_the_same(engine: RawEngine) -> None:
    scheduler = engine.scheduler
    job = store_job(1000, [1], [0])
    first = scheduler.step(stores=[job])
    assert first.verdicts[0].accepted
    assert send_again(scheduler, scheduler.sequence, stores=[job]) == first
    engine.worker.ready(1000)
    assert engine.ended(1000).blocks == 1


def test_a_number_too_far_ahead_is_refused_and_the_session_goes_on(scheduler: RawScheduler) -> None:
    scheduler.send(step=engine_pb2.Step(sequence=scheduler.sequence + 2, end_step=True))
    refused = scheduler.next("refused")
    assert refused.reason == "SEQUENCE_GAP"
    assert refused.sequence == scheduler.sequence + 2
    assert scheduler.step(end_step=True).sequence == scheduler.sequence


def test_a_malformed_step_is_refused_whole_and_uses_up_its_number(scheduler: RawScheduler) -> None:
    good = store_job(1001, [2], [0])
    bad = store_job(1002, [3], [0, 1])  # two engine blocks for one key
    scheduler.sequence += 1
    scheduler.send(step=engine_pb2.Step(sequence=scheduler.sequence, stores=[good, bad]))
    assert scheduler.next("refused").reason == "BLOCKS_PER_BLOCK"
    assert scheduler.statuses([2]) == [0]  # not even pending
    assert scheduler.step(end_step=True).sequence == scheduler.sequence


def test_a_job_that_clashes_is_refused_alone(engine: RawEngine) -> None:
    jobs = [store_job(1003, [4], [0]), store_job(1003, [5], [1]), store_job(1004, [6], [2])]
    verdicts = engine.scheduler.step(stores=jobs).verdicts
    assert [(v.accepted, v.reason) for v in verdicts] == [
        (True, ""),
        (False, "DUPLICATE_JOB"),
        (True, ""),
    ]
    assert [v.message for v in verdicts] == ["", "job 1003 is in flight", ""]
    engine.worker.ready(1003, 1004)
    assert {engine.ended(1003).status, engine.ended(1004).status} == {common_pb2.JOB_STATUS_DONE}


def test_the_end_of_a_job_comes_behind_the_verdict_on_it(former: RawEngine) -> None:
    """Of a refused one, too, which has ended before its step is worked off."""
    former.store({12: block(12)})
    scheduler = former.scheduler
    scheduler.sequence += 1
    job = store_job(scheduler.highest_job, [13], [0])  # an earlier one's number
    scheduler.send(step=engine_pb2.Step(sequence=scheduler.sequence, stores=[job]))
    told = [scheduler.responses.get(timeout=DEADLINE_S) for _ in range(2)]
    assert [each.WhichOneof("kind") for each in told] == ["step", "jobs_ended"]


def test_a_load_of_what_is_not_there_is_refused_in_its_verdict(scheduler: RawScheduler) -> None:
    (verdict,) = scheduler.step(loads=[load_job(1005, [987654], [0])]).verdicts
    assert (verdict.accepted, verdict.reason) == (False, "KEY_MISSING")


def test_unary_verbs_and_steps_share_their_numbers_and_their_meaning(engine: RawEngine) -> None:
    scheduler = engine.scheduler
    scheduler.sequence += 1
    request = engine_pb2.PrepareStoreRequest(
        session_id=scheduler.id, sequence=scheduler.sequence, job=store_job(1006, [7], [3])
    )
    answer = scheduler.call(scheduler.engine.PrepareStore, request)
    assert answer.verdict.accepted
    assert scheduler.call(scheduler.engine.PrepareStore, request) == answer
    engine.worker.ready(1006)
    flush = engine_pb2.FlushRequest(session_id=scheduler.id, job_ids=[1006], deadline_ms=5000)
    (ended,) = scheduler.call(scheduler.engine.Flush, flush).jobs
    assert (ended.job_id, ended.status) == (1006, common_pb2.JOB_STATUS_DONE)
    scheduler.sequence += 1
    load = engine_pb2.PrepareLoadRequest(
        session_id=scheduler.id, sequence=scheduler.sequence, job=load_job(1007, [7], [9])
    )
    assert scheduler.call(scheduler.engine.PrepareLoad, load).verdict.accepted
    scheduler.highest_job = 1007
    engine.worker.ready(1007)
    assert engine.ended(1007).status == common_pb2.JOB_STATUS_DONE
    for method, request_type, parts in (
        ("ReleaseLease", engine_pb2.ReleaseLeaseRequest, {"lease_ids": [1]}),
        ("EndStep", engine_pb2.EndStepRequest, {"finished_request_ids": ["r0"]}),
    ):
        scheduler.sequence += 1
        numbered = request_type(session_id=scheduler.id, sequence=scheduler.sequence, **parts)
        scheduler.call(getattr(scheduler.engine, method), numbered)
    assert scheduler.step(end_step=True).sequence == scheduler.sequence


def test_a_load_that_is_complete_gives_back_the_leases_of_its_request_alone(
    former: RawEngine,
) -> None:
    scheduler = former.scheduler
    former.store({11: block(11)})
    for request in ("mine", "another"):
        asked = query([11])
        asked.context.request_id = request
        lookup = engine_pb2.LookupRequest(session_id=scheduler.id, queries=[asked])
        assert scheduler.call(scheduler.engine.Lookup, lookup).answers[0].lease_id
    scheduler.sequence += 1
    complete = engine_pb2.CompleteLoadRequest(
        session_id=scheduler.id, sequence=scheduler.sequence, context=context("mine")
    )
    for _ in range(2):  # sent again it is answered as before
        scheduler.call(scheduler.engine.CompleteLoad, complete)
        assert sum(each.leases for each in scheduler.status().sessions) == 1
    scheduler.step(finished_request_ids=["another"])
    assert sum(each.leases for each in scheduler.status().sessions) == 0


def test_what_a_former_client_says_of_ended_jobs_is_passed_over(former: RawEngine) -> None:
    scheduler = former.scheduler
    former.store({9: block(9)})
    (answer,) = scheduler.call(
        scheduler.engine.Lookup,
        engine_pb2.LookupRequest(session_id=scheduler.id, queries=[query([9])]),
    ).answers
    assert answer.lease_id
    assert former.load([9]) == [block(9)]
    acknowledged = b"".join(  # fields 5 and 6: 20,000 ids each, more than a list of ids may have
        bytes([field << 3 | 2]) + b"\xa0\x9c\x01" + b"\x07" * 20_000 for field in (5, 6)
    )
    scheduler.sequence += 1
    said = engine_pb2.Step(sequence=scheduler.sequence).SerializeToString() + acknowledged
    scheduler.send(step=engine_pb2.Step.FromString(said))
    assert scheduler.next("step").sequence == scheduler.sequence
    assert sum(each.leases for each in scheduler.status().sessions) == 1
    scheduler.step(released_leases=[answer.lease_id])
    assert sum(each.leases for each in scheduler.status().sessions) == 0


def test_a_flush_whose_deadline_passes_says_what_still_runs(engine: RawEngine) -> None:
    scheduler = engine.scheduler
    assert scheduler.step(stores=[store_job(1010, [10], [0])]).verdicts[0].accepted
    flush = engine_pb2.FlushRequest(session_id=scheduler.id, deadline_ms=50)
    code, reason, _ = refusal(lambda: scheduler.call(scheduler.engine.Flush, flush))
    assert (code, reason) == ("DEADLINE_EXCEEDED", "DEADLINE")
    engine.worker.ready(1010)
    assert engine.ended(1010).job_id == 1010


def test_lookups_are_answered_in_the_order_of_their_queries(engine: RawEngine) -> None:
    engine.store({20: block(20), 21: block(21)})
    call = engine_pb2.LookupCall(
        call_id=77, queries=[query([20, 21, 22]), query([22]), query([21, 22], 0)]
    )
    engine.scheduler.send(lookup=call)
    reply = engine.scheduler.next("lookup")
    assert reply.call_id == 77
    assert [[s & 3 for s in a.statuses] for a in reply.answers] == [[1, 1, 0], [0], [1, 0]]
    assert [bool(a.lease_id) for a in reply.answers] == [True, False, False]


def test_a_malformed_lookup_is_answered_with_its_reason(scheduler: RawScheduler) -> None:
    bad = query([1])
    bad.run.hashes = b"short"
    scheduler.send(lookup=engine_pb2.LookupCall(call_id=78, queries=[bad]))
    reply = scheduler.next("lookup")
    assert (reply.call_id, reply.reason, len(reply.answers)) == (78, "HASH_BYTES", 0)


def test_a_reset_cache_moves_this_session_alone_to_its_own_epoch(running: RunningDaemon) -> None:
    one = RawEngine(running.socket, identity=identity("resets"))
    other = RawEngine(running.socket, identity=identity("stays"))
    try:
        one.store({30: block(30)})
        reset = engine_pb2.ResetCache(sequence=one.scheduler.sequence + 1, epoch="mine")
        one.scheduler.send(reset_cache=reset)
        epoch = one.scheduler.next("epoch")
        one.scheduler.sequence += 1
        assert epoch.epoch == "mine"
        assert epoch.group_seeds != one.scheduler.opened.epoch.group_seeds
        assert one.scheduler.statuses([30]) == [0]
        assert other.scheduler.statuses([30]) == [1]
        one.scheduler.send(reset_cache=reset)  # the same number once more
        assert one.scheduler.next("epoch") == epoch
    finally:
        one.close()
        other.close()


def test_a_session_that_closes_frees_what_it_held(running: RunningDaemon) -> None:
    engine = RawEngine(running.socket, identity=identity("closes"))
    watcher = engine.worker
    engine.store({40: block(40)})
    engine.scheduler.send(lookup=engine_pb2.LookupCall(call_id=1, queries=[query([40])]))
    assert engine.scheduler.next("lookup").answers[0].lease_id
    engine.scheduler.send(close=engine_pb2.CloseSession())
    wait_until(lambda: engine.scheduler.responses.get() is None, "the end of the stream")

    def gone() -> bool:
        status = watcher.status()
        return all(s.engine_id != "closes" for s in status.sessions)

    wait_until(gone, "the session's end")
    engine.close()


@pytest.mark.parametrize("first", ["step", "close"])
def test_a_stream_that_does_not_begin_with_open_is_refused(
    running: RunningDaemon, first: str
) -> None:
    caller = Caller(running.socket, "SCHEDULER")
    request = (
        engine_pb2.SessionRequest(step=engine_pb2.Step(sequence=1))
        if first == "step"
        else engine_pb2.SessionRequest(close=engine_pb2.CloseSession())
    )
    try:
        stream = caller.engine.Session(iter([request]), metadata=caller.metadata)
        code, reason, _ = refusal(lambda: next(stream))
        assert (code, reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
    finally:
        caller.close()


def test_a_second_open_is_refused_and_the_session_goes_on(scheduler: RawScheduler) -> None:
    scheduler.send(open=engine_pb2.OpenSession(identity=identity()))
    assert scheduler.next("refused").reason == "INVALID_ARGUMENT"
    assert scheduler.step(end_step=True).sequence == scheduler.sequence


def test_another_peers_session_can_not_be_used(running: RunningDaemon, engine: RawEngine) -> None:
    other = RawScheduler(running.socket, identity=identity("thief"))
    try:
        assert other.opened.session_id != engine.scheduler.id
        request = engine_pb2.LookupRequest(session_id=engine.scheduler.id, queries=[query([1])])
        code, reason, _ = refusal(lambda: other.call(other.engine.Lookup, request))
        assert (code, reason) == ("NOT_FOUND", "UNKNOWN_SESSION")
    finally:
        other.close()


def test_large_steps_and_lookups_are_answered_whole(engine: RawEngine) -> None:
    keys = list(range(50_000, 54_000))
    engine.scheduler.send(lookup=engine_pb2.LookupCall(call_id=5, queries=[query(keys)]))
    (answer,) = engine.scheduler.next("lookup").answers
    assert len(answer.statuses) == 4000
    touch = engine_pb2.Touch(context=context(), runs=[common_pb2.KeyRun(hashes=hashes(*keys))])
    assert engine.scheduler.step(touches=[touch], end_step=True).sequence


def test_without_a_token_nothing_is_answered(running: RunningDaemon) -> None:
    with grpc.insecure_channel(f"unix:{running.socket}") as channel:
        from kvd_proto.v1 import operator_pb2, operator_pb2_grpc

        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        code, reason, field = refusal(lambda: stub.Status(operator_pb2.StatusRequest(), timeout=25))
        assert (code, reason, field) == ("UNAUTHENTICATED", "UNAUTHENTICATED", "kvd-token")


def test_a_job_id_of_an_earlier_message_is_refused_and_its_ranks_hear_of_it(
    engine: RawEngine,
) -> None:
    engine.store({29: block(29)})  # so that there is one before the last, whatever ran before
    engine.store({30: block(30)})
    last = engine.scheduler.highest_job
    jobs = [store_job(number, [31], [0]) for number in (last, last - 1, last + 2, last + 1)]
    verdicts = engine.scheduler.step(stores=jobs).verdicts
    reasons = [verdict.reason for verdict in verdicts]
    assert reasons == ["JOB_NOT_RISING", "JOB_NOT_RISING", "", ""]
    assert verdicts[1].message == f"job {last - 1} comes after job {last}"
    refused = engine.ended(last)
    assert (refused.status, refused.reason) == (common_pb2.JOB_STATUS_REFUSED, "JOB_NOT_RISING")
    engine.worker.ready(last + 1, last + 2)
    assert engine.ended(last + 2).status == common_pb2.JOB_STATUS_DONE
    reused = engine.scheduler.step(loads=[load_job(last + 1, [31], [5])]).verdicts[0]
    assert reused.reason == "JOB_NOT_RISING"


def test_of_a_job_id_that_is_twice_in_one_message_the_refusal_says_so(engine: RawEngine) -> None:
    engine.store({32: block(32)})
    fresh = engine.scheduler.highest_job + 1
    jobs = [load_job(fresh, [33], [5]), load_job(fresh, [32], [6])]  # nobody stored the first one
    verdicts = engine.scheduler.step(loads=jobs).verdicts
    assert [verdict.reason for verdict in verdicts] == ["KEY_MISSING", "JOB_NOT_RISING"]
    assert verdicts[1].message == f"job {fresh} is twice in one message"


def test_a_tenant_is_looked_for_only_where_its_name_is_short(running: RunningDaemon) -> None:
    """Who is not that tenant is told the name, and to write some MiB of it takes long."""
    fields = namespace(tenant="\x01" * 4_000_000)
    said = refusal(lambda: open_and_close(running.socket, namespace=fields))
    assert said == ("INVALID_ARGUMENT", "STRING_TOO_LONG", "namespace.tenant")


def test_a_flush_in_vain_names_the_jobs_that_it_waits_for(former: RawEngine) -> None:
    scheduler = former.scheduler
    first = scheduler.highest_job + 1
    jobs = [first, first + 1]
    keys = [9_001, 9_002]  # that no other test stores
    stores = [store_job(job, [key], [key - 9_001]) for job, key in zip(jobs, keys, strict=True)]
    assert all(verdict.accepted for verdict in scheduler.step(stores=stores).verdicts)
    for asked, running in (([first, 999_999], str(first)), ([], f"{first}, {first + 1}")):
        flush = engine_pb2.FlushRequest(session_id=scheduler.id, job_ids=asked, deadline_ms=1)
        with pytest.raises(grpc.RpcError) as caught:
            scheduler.call(scheduler.engine.Flush, flush)
        assert caught.value.details() == f"jobs still run: {running}"
