"""The session stream against what may not be sent: openings, steps, lookups, resets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from kvd_proto.limits import MAX_MESSAGE_BYTES, MAX_STRING_BYTES
from kvd_proto.v1 import common_pb2, engine_pb2
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    context,
    group,
    identity,
    namespace,
    open_and_close,
    query,
    refusal,
    store_job,
    transfer_run,
)
from tests.control.test_wire import nested_step
from tests.faults.stand import Stand, resident_kib, standing
from tests.waiting import wait_until

INVALID = ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
HASHES = ("INVALID_ARGUMENT", "HASH_BYTES")
GROUPS = ("INVALID_ARGUMENT", "GROUP_COUNT")
RANKS = ("INVALID_ARGUMENT", "RANK_COUNT")
MATRIX = ("INVALID_ARGUMENT", "BLOCKS_PER_BLOCK")
LONG = ("INVALID_ARGUMENT", "STRING_TOO_LONG")
MANY = ("INVALID_ARGUMENT", "TOO_MANY_PARTS")
DENIED = ("PERMISSION_DENIED", "PERMISSION_DENIED")


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with standing() as made:
        yield made


def of(**changes: Any) -> dict[str, Any]:
    return {"namespace": namespace(**changes)}


def grouped(**changes: Any) -> dict[str, Any]:
    return of(groups=[group(**changes)])


OPENINGS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"identity": engine_pb2.EngineIdentity(boot_nonce=bytes(16))}, INVALID),
    ({"identity": identity("e" * 257)}, LONG),
    ({"identity": identity("e", b"")}, INVALID),
    ({"identity": identity("e", bytes(17))}, INVALID),
    ({"world_size": 0}, RANKS),
    ({"world_size": 257}, RANKS),
    ({"world_size": 2**32 - 1}, RANKS),
    ({"capabilities": ["c"] * 65}, MANY),
    ({"epoch": "e" * 65}, LONG),
    ({"namespace": None}, INVALID),
    (of(model=""), INVALID),
    (of(model="m" * 257), LONG),
    (of(account="a" * 257), LONG),
    (of(kv_dtype=""), INVALID),
    (of(hash_algorithm=""), INVALID),
    (of(tokens_per_block=0), INVALID),
    (of(hash_bytes=0), HASHES),
    (of(hash_bytes=65), HASHES),
    (of(hash_bytes=2**32 - 1), HASHES),
    (of(tenant="somebody else"), DENIED),
    (of(tenant="t" * MAX_STRING_BYTES), DENIED),  # quoted in the refusal, which must be heard
    (of(tenant="t" * (MAX_STRING_BYTES + 1)), LONG),
    (of(groups=[]), GROUPS),
    (of(groups=[group()] * 65), GROUPS),
    (of(groups=[group(), group(shard_bytes=[4096, 4096])]), RANKS),
    (grouped(kind=99), INVALID),
    (grouped(kind=0), INVALID),
    (grouped(tokens_per_block=0), INVALID),
    (grouped(blocks_per_block=0), MATRIX),
    (grouped(blocks_per_block=65), MATRIX),
    (grouped(shard_bytes=[]), RANKS),
    (grouped(shard_bytes=[4096] * 257), RANKS),
    (grouped(shard_bytes=[0]), INVALID),
    (grouped(shard_bytes=[7]), INVALID),
    (grouped(shard_bytes=[2**64 - 8]), INVALID),
    (grouped(shard_bytes=[64 << 20]), INVALID),  # larger than an extent
    (grouped(kind=engine_pb2.GROUP_KIND_SLIDING_WINDOW), INVALID),
]


def begin(stand: Stand, **opening: Any) -> None:
    open_and_close(stand.scene.daemon.socket, **{"identity": identity("x"), **opening})


@pytest.mark.parametrize(("opening", "due"), OPENINGS, ids=range(len(OPENINGS)))
def test_opening_that_breaks_a_rule_is_refused_with_its_reason(
    stand: Stand, opening: dict[str, Any], due: tuple[str, str]
) -> None:
    assert refusal(lambda: begin(stand, **opening))[:2] == due


@pytest.mark.parametrize("kind", ["step", "lookup", "reset_cache", "close", "nothing"])
def test_stream_that_does_not_begin_with_open_is_refused(stand: Stand, kind: str) -> None:
    request = engine_pb2.SessionRequest()
    if kind != "nothing":
        getattr(request, kind).SetInParent()
    answer = stand.send("EngineService.Session", request.SerializeToString())
    assert answer == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")


def many(count: int) -> list[int]:
    return list(range(1, count + 1))


def stores(**changes: Any) -> dict[str, Any]:
    fields = {"job_id": 10**9, "context": context(), "runs": [transfer_run([5], [0])]}
    return {"stores": [engine_pb2.StoreJob(**{**fields, **changes})]}


ONE_KEY = common_pb2.KeyRun(hashes=bytes(32))
STEPS: list[tuple[dict[str, Any], str]] = [
    ({"touches": [engine_pb2.Touch(context=context(), runs=[ONE_KEY])] * 1025}, "TOO_MANY_PARTS"),
    (
        {"hand_offs": [engine_pb2.HandOff(context=context(), runs=[ONE_KEY])] * 1025},
        "TOO_MANY_PARTS",
    ),
    ({"loads": [engine_pb2.LoadJob()] * 1025}, "TOO_MANY_PARTS"),
    ({"stores": [engine_pb2.StoreJob()] * 1025}, "TOO_MANY_PARTS"),
    ({"touches": [engine_pb2.Touch(context=context())]}, "TOO_MANY_PARTS"),
    ({"loads": [engine_pb2.LoadJob(job_id=1)]}, "INVALID_ARGUMENT"),
    (stores(job_id=0), "INVALID_ARGUMENT"),
    (stores(context=None), "INVALID_ARGUMENT"),
    (stores(runs=[]), "TOO_MANY_PARTS"),
    (stores(runs=[transfer_run([5, 6], [0])]), "BLOCKS_PER_BLOCK"),
    (stores(runs=[common_pb2.TransferRun(hashes=bytes(31))]), "HASH_BYTES"),
    (stores(runs=[common_pb2.TransferRun(group=9, hashes=bytes(32))]), "INVALID_ARGUMENT"),
    ({"released_leases": many(16385)}, "TOO_MANY_PARTS"),
    ({"preempted_request_ids": ["r" * 257]}, "STRING_TOO_LONG"),
    ({"finished_request_ids": ["r"] * 16385}, "TOO_MANY_PARTS"),
]


def refused(stand: Stand, **request: Any) -> engine_pb2.StepRefused:
    stand.engine.scheduler.send(**request)
    answer: engine_pb2.StepRefused = stand.engine.scheduler.next("refused")
    return answer


@pytest.mark.parametrize(("parts", "reason"), STEPS, ids=range(len(STEPS)))
def test_step_that_breaks_a_rule_is_refused_whole_and_the_session_goes_on(
    stand: Stand, parts: dict[str, Any], reason: str
) -> None:
    sequence = stand.next_sequence()
    answer = refused(stand, step=engine_pb2.Step(sequence=sequence, **parts))
    assert (answer.sequence, answer.reason) == (sequence, reason)
    assert stand.engine.scheduler.statuses([1]) == [1]


def test_steps_with_a_gap_in_their_numbers_are_refused_and_a_repeated_one_applies_once(
    stand: Stand,
) -> None:
    scheduler = stand.engine.scheduler
    for gap in (scheduler.sequence + 2, 2**64 - 1, 0):
        answer = refused(stand, step=engine_pb2.Step(sequence=gap))
        assert (answer.sequence, answer.reason) == (gap, "SEQUENCE_GAP")
    job = store_job(700, [700], [7])
    (first,) = scheduler.step(stores=[job]).verdicts
    scheduler.send(step=engine_pb2.Step(sequence=scheduler.sequence, stores=[job]))
    assert list(scheduler.next("step").verdicts) == [first]
    stand.engine.worker.ready(700)
    assert stand.engine.ended(700).status == common_pb2.JOB_STATUS_DONE
    assert scheduler.statuses([700]) == [1]


@pytest.mark.parametrize(
    ("reset", "reason"),
    [({"epoch": ""}, "INVALID_ARGUMENT"), ({"epoch": "e" * 65}, "STRING_TOO_LONG")],
)
def test_reset_that_breaks_a_rule_is_refused(
    stand: Stand, reset: dict[str, Any], reason: str
) -> None:
    message = engine_pb2.ResetCache(sequence=stand.next_sequence(), **reset)
    assert refused(stand, reset_cache=message).reason == reason


def test_second_opening_and_an_empty_message_are_refused_and_the_session_goes_on(
    stand: Stand,
) -> None:
    opening = engine_pb2.OpenSession(identity=identity(), namespace=namespace(), world_size=1)
    assert refused(stand, open=opening).reason == "INVALID_ARGUMENT"
    assert refused(stand).reason == "INVALID_ARGUMENT"
    assert stand.engine.scheduler.statuses([1]) == [1]


def test_lookup_that_breaks_a_rule_is_answered_with_the_reason(stand: Stand) -> None:
    scheduler = stand.engine.scheduler
    for queries, reason in (
        ([], "TOO_MANY_PARTS"),
        ([query([1])] * 1025, "TOO_MANY_PARTS"),
        ([query(many(9000))] * 2, "TOO_MANY_KEYS"),
        ([engine_pb2.Query(context=context())], "HASH_BYTES"),
    ):
        scheduler.send(lookup=engine_pb2.LookupCall(call_id=77, queries=queries))
        answer = scheduler.next("lookup")
        assert (answer.call_id, answer.reason, len(answer.answers)) == (77, reason, 0)


def opening_of(name: str) -> bytes:
    opening = engine_pb2.OpenSession(identity=identity(name), namespace=namespace(), world_size=1)
    return engine_pb2.SessionRequest(open=opening).SerializeToString()


def test_stream_with_a_message_over_the_limit_ends_and_frees_its_session(stand: Stand) -> None:
    before = len(stand.tool.status().sessions)
    victim = RawEngine(stand.scene.daemon.socket, identity=identity("victim"))
    channel: Any = victim.scheduler.channel
    stream = channel.stream_stream("/kvd.v1.EngineService/Session")(
        iter([opening_of("raw"), bytes(MAX_MESSAGE_BYTES + 1)]),
        metadata=victim.scheduler.metadata,
        timeout=25,
    )
    with pytest.raises(grpc.RpcError) as caught:
        for _ in stream:
            pass
    assert caught.value.code().name == "RESOURCE_EXHAUSTED"
    assert victim.store({5: bytes(4096)}).status == common_pb2.JOB_STATUS_DONE
    victim.close()
    wait_for_sessions(stand, before)


def test_messages_that_can_not_be_read_are_refused_and_the_session_goes_on(stand: Stand) -> None:
    """Each with its own number, where that can be found: it is used up, and the next one is due."""
    scheduler = Caller(stand.scene.daemon.socket, "SCHEDULER")
    step = engine_pb2.SessionRequest(step=engine_pb2.Step(sequence=2)).SerializeToString()
    lookup = b"\x1a\x05\x08\x63\x12\x01\xff"
    content = [opening_of("raw"), b"\xff" * 9, nested_step(1, 33), step, lookup, nested_step(3, 60)]
    session: Any = scheduler.channel.stream_stream("/kvd.v1.EngineService/Session")
    stream = session(iter(content), metadata=scheduler.metadata, timeout=25)
    answers = [engine_pb2.SessionResponse.FromString(each) for each in stream]
    refused = [(a.refused.sequence, a.refused.reason) for a in answers if a.HasField("refused")]
    assert refused == [(n, "MALFORMED_MESSAGE") for n in (0, 1, 3)]
    assert [a.step.sequence for a in answers if a.HasField("step")] == [2]
    (reply,) = (a.lookup for a in answers if a.HasField("lookup"))
    assert (reply.call_id, reply.reason) == (99, "MALFORMED_MESSAGE")
    scheduler.close()


def test_each_of_many_streams_that_end_right_after_their_opening_is_answered(
    stand: Stand,
) -> None:
    before = len(stand.tool.status().sessions)
    scheduler = Caller(stand.scene.daemon.socket, "SCHEDULER")
    content = [opening_of("raw"), b"\xff" * 9]
    session: Any = scheduler.channel.stream_stream("/kvd.v1.EngineService/Session")
    for _ in range(300):  # each has another moment at which its first answer is written
        stream = session(iter(content), metadata=scheduler.metadata, timeout=25)
        for _ in stream:
            pass
        assert stream.code().name == "OK"
    scheduler.close()
    wait_for_sessions(stand, before)


def wait_for_sessions(stand: Stand, count: int) -> None:
    wait_until(lambda: len(stand.tool.status().sessions) == count, "the sessions' ends")


def test_thousands_of_bad_messages_leave_the_daemons_memory_as_it_was(stand: Stand) -> None:
    stand.bystander.order("churn", prefixes=["a", "b"], rounds=40, most=64)

    def throw_all(rounds: int) -> None:
        for _ in range(rounds):
            for parts, reason in STEPS:
                step = engine_pb2.Step(sequence=stand.next_sequence(), **parts)
                assert refused(stand, step=step).reason == reason
        for opening, due in OPENINGS[::4] * rounds:
            assert refusal(partial(begin, stand, **opening))[:2] == due

    throw_all(4)
    before = resident_kib(stand.scene.daemon.pid)
    throw_all(40)
    grown = resident_kib(stand.scene.daemon.pid) - before
    assert stand.bystander.answer()["wrong"] == []
    assert grown < 8 * 1024, f"{grown} KiB"
