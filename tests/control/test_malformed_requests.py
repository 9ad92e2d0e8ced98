"""Every RPC against nonsense: a typed refusal each time, no growth, nobody else disturbed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvd.control.errors import STATUS_OF
from kvd_proto.v1 import common_pb2, engine_pb2, events_pb2, operator_pb2, worker_pb2
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    RunningDaemon,
    block,
    context,
    details_of,
    hashes,
    identity,
    query,
    refusal,
    transfer_run,
)

METHODS: list[MethodDescriptor] = [
    method
    for module in (engine_pb2, worker_pb2, events_pb2, operator_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ROLES = {"EngineService": "SCHEDULER", "WorkerService": "WORKER"}
# Calls that change what the other tests stand on, or that wait.
DISRUPTIVE = {"Drain", "Clear", "SetQuota", "WatchEvents", "Record"}


@pytest.fixture(scope="module")
def engine(running: RunningDaemon) -> Iterator[RawEngine]:
    """An engine that must not notice anything."""
    made = RawEngine(running.socket, identity=identity("bystander"))
    made.store({1: block(1)})
    yield made
    assert made.load([1]) == [block(1)]
    made.close()


@pytest.fixture(scope="module")
def callers(running: RunningDaemon, engine: RawEngine) -> Iterator[dict[str, Caller]]:
    made = {role: Caller(running.socket, role) for role in ("SCHEDULER", "WORKER", "TOOL")}
    yield made
    for caller in made.values():
        caller.close()


def send(callers: dict[str, Caller], method: MethodDescriptor, content: bytes) -> Any:
    """Call with raw bytes; the error, or an empty one where the call was answered."""
    caller = callers[ROLES.get(method.containing_service.name, "TOOL")]
    channel: Any = caller.channel
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.name == "Session":
        stream = channel.stream_stream(path)
        call: Any = stream(iter([content]), timeout=25, metadata=caller.metadata)
    elif method.server_streaming:
        call = channel.unary_stream(path)(content, timeout=0.2, metadata=caller.metadata)
    else:
        call = None
    try:
        if call is None:
            channel.unary_unary(path)(content, timeout=25, metadata=caller.metadata)
        else:
            next(call, None)
            call.cancel()
    except grpc.RpcError as error:
        return error
    return grpc.RpcError()


def reason_of(error: Any) -> str:
    info = details_of(error)
    return str(info.reason) if info is not None else ""


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_bytes_that_are_no_message_are_refused_as_such(
    callers: dict[str, Caller], method: MethodDescriptor
) -> None:
    error = send(callers, method, b"\xff" * 7)
    assert (error.code().name, reason_of(error)) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_an_empty_message_is_answered_or_refused_with_a_reason(
    callers: dict[str, Caller], method: MethodDescriptor
) -> None:
    if method.name in DISRUPTIVE:
        pytest.skip("an empty one is a proper request")
    error = send(callers, method, b"")
    if method.name in ("Status", "ListNamespaces", "Undrain", "Verify", "Explain"):
        assert not hasattr(error, "code")
    else:
        assert reason_of(error) in STATUS_OF, error


def scrambled(message: Message, dice: random.Random, depth: int = 0) -> Message:
    """Fill a message with values of the right types and no sense."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.3 or (field.message_type is not None and depth > 3):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.is_repeated:
            for _ in range(dice.choice([1, 2, 5])):
                if field.message_type is not None:
                    scrambled(getattr(message, field.name).add(), dice, depth + 1)
                else:
                    getattr(message, field.name).append(nonsense(field, dice))
        elif field.message_type is not None:
            scrambled(getattr(message, field.name), dice, depth + 1)
        else:
            setattr(message, field.name, nonsense(field, dice))
    return message


def nonsense(field: FieldDescriptor, dice: random.Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            length = dice.choice([0, 1, 16, 255, 300])
            if field.type == FieldDescriptor.TYPE_BYTES:
                return dice.randbytes(length)
            return "".join(dice.choice("aé\x00\N{GRINNING FACE}") for _ in range(length))
        case FieldDescriptor.CPPTYPE_BOOL:
            return dice.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return dice.choice([0, 1, 2, 99])
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return dice.choice([0.0, -1.0, float("nan"), float("inf")])
        case FieldDescriptor.CPPTYPE_INT32:
            return dice.choice([0, -1, 1, 2**31 - 1, -(2**31)])
        case FieldDescriptor.CPPTYPE_UINT32:
            return dice.choice([0, 1, 2, 64, 2**32 - 1])
        case _:
            return dice.choice([0, 1, 2, 8, 2**63, 2**64 - 1])


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_nonsense_of_the_right_types_is_refused_with_a_reason(
    callers: dict[str, Caller], method: MethodDescriptor
) -> None:
    if method.name in DISRUPTIVE:
        pytest.skip("some nonsense is a proper request")
    message_class = GetMessageClass(method.input_type)
    for seed in range(40):
        content = scrambled(message_class(), random.Random(seed)).SerializeToString()
        error = send(callers, method, content)
        if hasattr(error, "code"):
            assert reason_of(error) in STATUS_OF, (seed, error)
            assert reason_of(error) != "INTERNAL", (seed, error)


def test_steps_of_nonsense_are_refused_one_by_one(engine: RawEngine) -> None:
    scheduler = engine.scheduler
    reasons = set()
    for seed in range(200):
        step = scrambled(engine_pb2.Step(), random.Random(seed))
        assert isinstance(step, engine_pb2.Step)
        scheduler.sequence += 1
        step.sequence = scheduler.sequence
        del step.released_leases[:]
        scheduler.send(step=step)
        while True:
            response = scheduler.responses.get(timeout=25)
            if response.WhichOneof("kind") == "refused":
                reasons.add(response.refused.reason)
                break
            if response.WhichOneof("kind") == "step":
                break
    assert reasons <= STATUS_OF.keys()
    assert "INTERNAL" not in reasons
    assert len(reasons) > 2


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"queries": []}, "TOO_MANY_PARTS"),
    ({"queries": [query([1])] * 1025}, "TOO_MANY_PARTS"),
    ({"queries": [query(list(range(9000)))] * 2}, "TOO_MANY_KEYS"),
    ({"queries": [engine_pb2.Query(run=common_pb2.KeyRun(hashes=hashes(1)))]}, "INVALID_ARGUMENT"),
    ({"queries": [engine_pb2.Query(context=context())]}, "HASH_BYTES"),
    (
        {
            "queries": [
                engine_pb2.Query(
                    context=context(), run=common_pb2.KeyRun(group=1, hashes=hashes(1))
                )
            ]
        },
        "INVALID_ARGUMENT",
    ),
    (
        {
            "queries": [
                engine_pb2.Query(
                    context=common_pb2.ReqContext(request_id="r", account="a" * 257),
                    run=common_pb2.KeyRun(hashes=hashes(1)),
                )
            ]
        },
        "STRING_TOO_LONG",
    ),
]


@pytest.mark.parametrize(("fields", "reason"), LIMITS)
def test_the_limits_of_a_lookup_are_kept(
    engine: RawEngine, fields: dict[str, Any], reason: str
) -> None:
    scheduler = engine.scheduler
    request = engine_pb2.LookupRequest(session_id=scheduler.id, **fields)
    code, found, _ = refusal(lambda: scheduler.call(scheduler.engine.Lookup, request))
    assert (code, found) == ("INVALID_ARGUMENT", reason)


def test_kept_parameters_have_a_limit(engine: RawEngine) -> None:
    request = query([1])
    request.context.hints.update({"advice": "x" * 20_000})
    call = engine_pb2.LookupRequest(session_id=engine.scheduler.id, queries=[request])
    scheduler = engine.scheduler
    _, reason, field = refusal(lambda: scheduler.call(scheduler.engine.Lookup, call))
    assert (reason, field) == ("STRING_TOO_LONG", "context.hints")


def test_a_message_over_8_mib_is_refused(engine: RawEngine) -> None:
    scheduler = engine.scheduler
    run = common_pb2.KeyRun(hashes=bytes(9 << 20))
    large = engine_pb2.LookupRequest(
        session_id=scheduler.id, queries=[engine_pb2.Query(context=context(), run=run)]
    )
    with pytest.raises(grpc.RpcError) as caught:
        scheduler.call(scheduler.engine.Lookup, large)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert scheduler.statuses([1]) == [1]


def test_engine_blocks_beyond_the_registered_memory_fail_their_job_alone(
    engine: RawEngine,
) -> None:
    job = engine_pb2.StoreJob(job_id=900, context=context(), runs=[transfer_run([77], [10_000])])
    (verdict,) = engine.scheduler.step(stores=[job]).verdicts
    if verdict.accepted:
        engine.worker.ready(900)
        assert engine.ended(900).status != common_pb2.JOB_STATUS_DONE
    assert engine.scheduler.statuses([77]) == [0]


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def test_refusals_leave_the_daemons_memory_as_it_was(
    running: RunningDaemon, engine: RawEngine
) -> None:
    scheduler = engine.scheduler
    too_many = engine_pb2.LookupRequest(
        session_id=scheduler.id, queries=[query(list(range(9000)))] * 2
    )

    def refuse(times: int) -> None:
        for _ in range(times):
            assert refusal(lambda: scheduler.call(scheduler.engine.Lookup, too_many))[1]

    refuse(100)
    before = resident_kib(running.pid)
    refuse(300)  # 170 MB of requests
    assert resident_kib(running.pid) - before < 8 * 1024


@pytest.mark.parametrize("path", ["/kvd.v1.OperatorService/Status", "/grpc.health.v1.Health/Check"])
def test_a_call_that_ends_without_its_message_is_told_so(
    callers: dict[str, Caller], path: str
) -> None:
    caller = callers["TOOL"]
    unsaid: Any = caller.channel.stream_unary(path)  # on the wire it is what a unary call is
    with pytest.raises(grpc.RpcError) as refused:
        unsaid(iter(()), timeout=25, metadata=caller.metadata)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "the call came without a message"
