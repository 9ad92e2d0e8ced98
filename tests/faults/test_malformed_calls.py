"""Every RPC against what may not be sent: one typed refusal each, no growth, nobody disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvd.control.errors import STATUS_OF
from kvd.control.memory_return import GROWN_BYTES
from kvd_proto.v1 import common_pb2, engine_pb2, events_pb2, operator_pb2, worker_pb2
from tests.control.daemon_rig import (
    context,
    group_layout,
    hashes,
    load_job,
    memory,
    query,
    store_job,
    transfer_run,
)
from tests.faults.stand import Build, Refusal, Stand, resident_kib, standing

METHODS = [
    f"{service.name}.{method.name}"
    for module in (engine_pb2, worker_pb2, operator_pb2, events_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
VERBS = [m for m in METHODS if m.startswith("EngineService.") and not m.endswith(".Session")]
NUMBERED = [m for m in VERBS if m.split(".")[1] not in ("Lookup", "Flush")]

INVALID = ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
MANY_PARTS = ("INVALID_ARGUMENT", "TOO_MANY_PARTS")
MANY_KEYS = ("INVALID_ARGUMENT", "TOO_MANY_KEYS")
HASH_BYTES = ("INVALID_ARGUMENT", "HASH_BYTES")
LONG = ("INVALID_ARGUMENT", "STRING_TOO_LONG")
MATRIX = ("INVALID_ARGUMENT", "BLOCKS_PER_BLOCK")
RANKS = ("INVALID_ARGUMENT", "RANK_COUNT")
GROUPS = ("INVALID_ARGUMENT", "GROUP_COUNT")


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    with standing() as made:
        yield made


# -- every method alike -----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_call_without_a_token_is_unauthenticated(stand: Stand, method: str) -> None:
    for metadata in ((), (("kvd-token", "guess"),), (("kvd-token", ""),)):
        assert stand.send(method, b"", metadata) == ("UNAUTHENTICATED", "UNAUTHENTICATED")


@pytest.mark.parametrize("method", [m for m in METHODS if "Engine" in m or "Worker" in m])
def test_call_with_the_token_of_another_role_is_denied(stand: Stand, method: str) -> None:
    for metadata in (stand.tool.metadata, other_role(stand, method)):
        assert stand.send(method, b"", metadata) == ("PERMISSION_DENIED", "PERMISSION_DENIED")


def other_role(stand: Stand, method: str) -> Any:
    engine = stand.engine
    return (engine.worker if "Engine" in method else engine.scheduler).metadata


@pytest.mark.parametrize("method", METHODS)
def test_bytes_that_are_no_message_are_malformed(stand: Stand, method: str) -> None:
    for garbage in (b"\xff" * 9, b"\x0a\x7f", bytes([8]) * 3, b"\x12\xff\xff\xff\xff\x0f"):
        assert stand.send(method, garbage) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")


@pytest.mark.parametrize("method", METHODS)
def test_frame_over_8_mib_is_refused_before_it_is_read(stand: Stand, method: str) -> None:
    # gRPC itself refuses it, before any of our code could name a reason.
    assert stand.send(method, bytes(9 << 20))[0] == "RESOURCE_EXHAUSTED"


def verb(method: str, **fields: Any) -> Any:
    """A request of a session's verb with these fields, as far as it has them."""
    message = getattr(engine_pb2, f"{method.split('.')[1]}Request")()
    for name, value in fields.items():
        if name in message.DESCRIPTOR.fields_by_name:
            setattr(message, name, value)
    return message


@pytest.mark.parametrize("method", VERBS)
def test_verb_of_an_unknown_session_or_of_somebody_elses_is_refused(
    stand: Stand, method: str
) -> None:
    for session in (0, 10**6, 2**64 - 1, stand.stranger.scheduler.id):
        request = verb(method, session_id=session, sequence=1, deadline_ms=1)
        answer = stand.send(method, request.SerializeToString())
        assert answer == ("NOT_FOUND", "UNKNOWN_SESSION")


@pytest.mark.parametrize("method", NUMBERED)
def test_verb_that_skips_a_sequence_number_is_refused_and_uses_none_up(
    stand: Stand, method: str
) -> None:
    due = stand.engine.scheduler.sequence + 1
    for sequence in (0, due + 1, 2**64 - 1):
        request = verb(method, session_id=stand.session, sequence=sequence)
        answer = stand.send(method, request.SerializeToString())
        assert answer == ("FAILED_PRECONDITION", "SEQUENCE_GAP")
    assert stand.engine.scheduler.step(end_step=True).sequence == due


# -- each method's own fields -----------------------------------------------------------------


def lookup(*queries: engine_pb2.Query) -> Build:
    return lambda s: engine_pb2.LookupRequest(session_id=s.session, queries=queries)


def store(**changes: Any) -> Build:
    return lambda s: engine_pb2.PrepareStoreRequest(
        session_id=s.session, sequence=s.next_sequence(), job=job(engine_pb2.StoreJob, changes)
    )


def load(**changes: Any) -> Build:
    return lambda s: engine_pb2.PrepareLoadRequest(
        session_id=s.session, sequence=s.next_sequence(), job=job(engine_pb2.LoadJob, changes)
    )


def job(kind: Any, changes: dict[str, Any]) -> Any:
    fields = {"job_id": 10**9, "context": context(), "runs": [transfer_run([5], [0])]}
    return kind(**{**fields, **changes})


def touch(**changes: Any) -> Build:
    fields = {"context": context(), "runs": [common_pb2.KeyRun(hashes=hashes(5))]}
    return lambda s: engine_pb2.TouchRequest(
        session_id=s.session,
        sequence=s.next_sequence(),
        touch=engine_pb2.Touch(**{**fields, **changes}),
    )


def numbered(kind: Any, **fields: Any) -> Build:
    return lambda s: kind(session_id=s.session, sequence=s.next_sequence(), **fields)


def flush(**fields: Any) -> Build:
    return lambda s: engine_pb2.FlushRequest(session_id=s.session, **fields)


def register(**changes: Any) -> Build:
    return lambda s: s.engine.worker.request(**changes)


def keys(count: int, group: int = 0) -> common_pb2.KeyRun:
    return common_pb2.KeyRun(group=group, hashes=bytes(32 * count))


MANY_FRAGMENTS = [worker_pb2.Fragment(memory=0, base=0, stride=8, bytes=8)] * 4096


def run(count: int, blocks: int, **changes: Any) -> common_pb2.TransferRun:
    fields = {"hashes": bytes(32 * count), "engine_blocks": bytes(4 * blocks)}
    return common_pb2.TransferRun(**{**fields, **changes})


def asking(count: int = 1, **changes: Any) -> engine_pb2.Query:
    fields = {"context": context(), "run": keys(count)}
    return engine_pb2.Query(**{**fields, **changes})


def fragment(**changes: Any) -> worker_pb2.GroupLayout:
    fields = {"memory": 0, "base": 0, "stride": 4096, "bytes": 4096}
    return group_layout(fragments=[worker_pb2.Fragment(**{**fields, **changes})])


def later(message: Any) -> Any:
    """With a field that only a later release has."""
    message.MergeFromString(b"\xf8\x07\x01")
    return message


LATER_FRAGMENT = fragment()
later(LATER_FRAGMENT.fragments[0])


def large_struct() -> common_pb2.ReqContext:
    message = context()
    message.kv_transfer_params.update({"advice": "x" * 20_000})
    return message


MANY_IDS = list(range(1, 16386))
WIDE = context("r" * 257)
GPU = worker_pb2.GpuMemory(free_bytes=1 << 30, total_bytes=1 << 30)
CUDA = worker_pb2.MemoryHandle(cuda_ipc=worker_pb2.CudaIpc(handle=bytes(64), bytes=4096))

CASES: list[tuple[str, Build, Refusal]] = [
    ("EngineService.Lookup", lookup(), MANY_PARTS),
    ("EngineService.Lookup", lookup(*[query([1])] * 1025), MANY_PARTS),
    ("EngineService.Lookup", lookup(asking(9000), asking(9000)), MANY_KEYS),
    ("EngineService.Lookup", lookup(asking(0)), HASH_BYTES),
    ("EngineService.Lookup", lookup(asking(run=common_pb2.KeyRun(hashes=bytes(31)))), HASH_BYTES),
    ("EngineService.Lookup", lookup(asking(run=keys(1, group=1))), INVALID),
    ("EngineService.Lookup", lookup(asking(run=keys(1, group=2**32 - 1))), INVALID),
    ("EngineService.Lookup", lookup(asking(lease=99)), INVALID),
    ("EngineService.Lookup", lookup(engine_pb2.Query(run=keys(1))), INVALID),
    ("EngineService.Lookup", lookup(asking(context=WIDE)), LONG),
    ("EngineService.Lookup", lookup(asking(context=large_struct())), LONG),
    ("EngineService.PrepareStore", store(job_id=0), INVALID),
    ("EngineService.PrepareStore", store(context=None), INVALID),
    ("EngineService.PrepareStore", store(runs=[]), MANY_PARTS),
    ("EngineService.PrepareStore", store(runs=[run(1, 1)] * 65), MANY_PARTS),
    ("EngineService.PrepareStore", store(runs=[run(9000, 9000)] * 2), MANY_KEYS),
    ("EngineService.PrepareStore", store(runs=[run(2, 1)]), MATRIX),
    ("EngineService.PrepareStore", store(runs=[run(1, 1, engine_blocks=b"abc")]), MATRIX),
    ("EngineService.PrepareStore", store(runs=[run(1, 1, hashes=bytes(33))]), HASH_BYTES),
    ("EngineService.PrepareStore", store(runs=[run(1, 1, group=7)]), INVALID),
    ("EngineService.PrepareLoad", load(job_id=0), INVALID),
    ("EngineService.PrepareLoad", load(context=WIDE), LONG),
    ("EngineService.CompleteLoad", numbered(engine_pb2.CompleteLoadRequest), INVALID),
    ("EngineService.CompleteLoad", numbered(engine_pb2.CompleteLoadRequest, context=WIDE), LONG),
    ("EngineService.PrepareLoad", load(runs=[]), MANY_PARTS),
    ("EngineService.PrepareLoad", load(runs=[run(1, 1)] * 65), MANY_PARTS),
    ("EngineService.PrepareLoad", load(runs=[run(9000, 9000)] * 2), MANY_KEYS),
    ("EngineService.PrepareLoad", load(runs=[run(1, 0)]), MATRIX),
    ("EngineService.PrepareLoad", load(runs=[run(1, 1, hashes=b"")]), HASH_BYTES),
    ("EngineService.PrepareLoad", load(runs=[run(1, 1, group=64)]), INVALID),
    ("EngineService.Touch", touch(runs=[]), MANY_PARTS),
    ("EngineService.Touch", touch(runs=[keys(1)] * 65), MANY_PARTS),
    ("EngineService.Touch", touch(runs=[keys(9000)] * 2), MANY_KEYS),
    ("EngineService.Touch", touch(context=None), INVALID),
    ("EngineService.Touch", touch(runs=[keys(1, group=3)]), INVALID),
    (
        "EngineService.ReleaseLease",
        numbered(engine_pb2.ReleaseLeaseRequest, lease_ids=MANY_IDS),
        MANY_PARTS,
    ),
    (
        "EngineService.EndStep",
        numbered(engine_pb2.EndStepRequest, finished_request_ids=["r"] * 16385),
        MANY_PARTS,
    ),
    (
        "EngineService.EndStep",
        numbered(engine_pb2.EndStepRequest, preempted_request_ids=["r" * 257]),
        LONG,
    ),
    ("EngineService.Flush", flush(deadline_ms=0), INVALID),
    ("EngineService.Flush", flush(deadline_ms=60_001), INVALID),
    ("EngineService.Flush", flush(deadline_ms=5, job_ids=MANY_IDS), MANY_PARTS),
    ("WorkerService.RegisterRank", register(identity=None), INVALID),
    ("WorkerService.RegisterRank", register(rank=1), RANKS),
    ("WorkerService.RegisterRank", register(world_size=0), RANKS),
    ("WorkerService.RegisterRank", register(world_size=257), RANKS),
    ("WorkerService.RegisterRank", register(shard=1), RANKS),
    ("WorkerService.RegisterRank", register(groups=[]), GROUPS),
    ("WorkerService.RegisterRank", register(groups=[group_layout()] * 65), GROUPS),
    ("WorkerService.RegisterRank", register(groups=[group_layout(group=1)]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[group_layout(num_blocks=0)]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[group_layout(num_blocks=2**32)]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[group_layout(num_blocks=65)]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[group_layout(fragments=[])]), MANY_PARTS),
    (
        "WorkerService.RegisterRank",
        register(groups=[group_layout(group=n, fragments=MANY_FRAGMENTS) for n in range(5)]),
        MANY_PARTS,
    ),
    ("WorkerService.RegisterRank", register(groups=[group_layout(blocks_per_block=65)]), MATRIX),
    ("WorkerService.RegisterRank", register(groups=[fragment(memory=1)]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[fragment(base=4)]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[fragment(base=2**63)]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[fragment(stride=2**63)]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[fragment(bytes=0)]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[fragment(stride=8)]), INVALID),
    ("WorkerService.RegisterRank", register(memories=[]), MANY_PARTS),
    ("WorkerService.RegisterRank", register(memories=[memory()] * 257), MANY_PARTS),
    ("WorkerService.RegisterRank", register(memories=[worker_pb2.MemoryHandle()]), INVALID),
    ("WorkerService.RegisterRank", register(memories=[memory(memory_token=8)]), INVALID),
    ("WorkerService.RegisterRank", register(memories=[memory(offset=8)]), INVALID),
    ("WorkerService.RegisterRank", register(memories=[memory(offset=2**63)]), INVALID),
    ("WorkerService.RegisterRank", register(memories=[memory(bytes=0)]), INVALID),
    ("WorkerService.RegisterRank", register(memories=[memory(bytes=2**64 - 8)]), INVALID),
    ("WorkerService.RegisterRank", register(memories=[later(memory())]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[later(group_layout())]), INVALID),
    ("WorkerService.RegisterRank", register(groups=[LATER_FRAGMENT]), INVALID),
    ("WorkerService.RegisterRank", register(memories=[CUDA]), INVALID),  # without gpu_memory
    ("WorkerService.RegisterRank", register(memories=[CUDA], gpu_memory=GPU), INVALID),  # no UUID
    ("WorkerService.RegisterRank", register(memories=[memory(), CUDA], gpu_memory=GPU), INVALID),
    (
        "WorkerService.UnregisterRank",
        lambda s: worker_pb2.UnregisterRankRequest(registration_id=10**6),
        ("NOT_FOUND", "UNKNOWN_REGISTRATION"),
    ),
    (
        "WorkerService.UnregisterRank",
        lambda s: worker_pb2.UnregisterRankRequest(registration_id=s.stranger.worker.registration),
        ("NOT_FOUND", "UNKNOWN_REGISTRATION"),
    ),
    (
        "WorkerService.MarkReady",
        lambda s: worker_pb2.MarkReadyRequest(registration_id=s.stranger.worker.registration),
        ("NOT_FOUND", "UNKNOWN_REGISTRATION"),
    ),
    (
        "WorkerService.MarkReady",
        lambda s: worker_pb2.MarkReadyRequest(registration_id=s.registration, job_ids=MANY_IDS),
        MANY_PARTS,
    ),
    (
        "OperatorService.Clear",
        lambda s: operator_pb2.ClearRequest(namespace_id=10**6),
        ("NOT_FOUND", "UNKNOWN_NAMESPACE"),
    ),
    ("OperatorService.SetQuota", lambda s: operator_pb2.SetQuotaRequest(tenant="nobody"), INVALID),
    ("OperatorService.SetQuota", lambda s: operator_pb2.SetQuotaRequest(tenant="x" * 257), LONG),
    (
        "OperatorService.SetQuota",
        lambda s: operator_pb2.SetQuotaRequest(tenant="default", quota_bytes=2**64 - 1),
        INVALID,
    ),
    ("OperatorService.Drain", lambda s: operator_pb2.DrainRequest(deadline_ms=600_001), INVALID),
    ("OperatorService.Explain", lambda s: operator_pb2.ExplainRequest(request_id="r" * 257), LONG),
    (
        "OperatorService.Verify",
        lambda _: operator_pb2.VerifyRequest.FromString(b"\x08\x63"),  # part: 99
        INVALID,
    ),
    (
        "OperatorService.Record",
        lambda s: operator_pb2.RecordRequest(namespace_id=2**64 - 1),
        ("NOT_FOUND", "UNKNOWN_NAMESPACE"),
    ),
    (
        "EventService.WatchEvents",
        lambda s: events_pb2.WatchEventsRequest(incarnation=b"short"),
        INVALID,
    ),
    (
        "EventService.WatchEvents",
        lambda s: events_pb2.WatchEventsRequest(namespace_id=2**64 - 1),
        ("NOT_FOUND", "UNKNOWN_NAMESPACE"),
    ),
]


@pytest.mark.parametrize(
    ("method", "build", "due"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)]
)
def test_field_that_breaks_a_rule_is_refused_with_its_reason(
    stand: Stand, method: str, build: Build, due: Refusal
) -> None:
    assert stand.send(method, build(stand).SerializeToString()) == due


def test_every_method_that_takes_fields_stands_in_the_table() -> None:
    without = {"EngineService.Session"} | {
        f"OperatorService.{name}" for name in ("Status", "ListNamespaces", "Undrain")
    }
    assert {case[0] for case in CASES} == set(METHODS) - without
    assert {case[2][1] for case in CASES} <= STATUS_OF.keys()


def test_job_that_clashes_with_the_session_is_refused_in_its_verdict(stand: Stand) -> None:
    scheduler = stand.engine.scheduler
    (held,) = scheduler.step(stores=[store_job(500, [500], [3])]).verdicts
    assert held.accepted
    verdicts = scheduler.step(
        stores=[store_job(500, [501], [4])], loads=[load_job(501, [999], [5])]
    ).verdicts
    assert {v.job_id: v.reason for v in verdicts} == {500: "DUPLICATE_JOB", 501: "KEY_MISSING"}
    request = engine_pb2.FlushRequest(session_id=stand.session, deadline_ms=20)
    refused = stand.send("EngineService.Flush", request.SerializeToString())
    assert refused == ("DEADLINE_EXCEEDED", "DEADLINE")
    stand.engine.worker.ready(500)
    assert stand.engine.ended(500).status == common_pb2.JOB_STATUS_DONE


def test_thousands_of_bad_requests_leave_the_daemons_memory_as_it_was(stand: Stand) -> None:
    stand.bystander.order("churn", prefixes=["a", "b", "c"], rounds=60, most=64)

    def throw_all(rounds: int) -> None:
        for _ in range(rounds):
            for method, build, due in CASES:
                assert stand.send(method, build(stand).SerializeToString()) == due

    throw_all(3)
    before = resident_kib(stand.scene.daemon.pid)
    throw_all(30)
    grown = resident_kib(stand.scene.daemon.pid) - before
    churned = stand.bystander.answer()
    assert churned["wrong"] == []
    assert churned["stored"]
    # Below that the daemon leaves to its allocator what is free.
    assert grown < GROWN_BYTES >> 10, f"{grown} KiB after {30 * len(CASES)} requests"
