"""Hand-offs on the wire: parts of a Step, with their limits, seen in the metrics."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest

from kvd.control.convert import DEFAULT_HAND_OFF_MS, KeyBudget, hand_off_events
from kvd.core.errors import InvalidArgument, KvdError
from kvd.core.keys import SessionId, TenantId
from kvd.core.machine import Machine, MachineConfig
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd.observability.metrics import Metrics
from kvd_proto.groups import GroupKind
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE
from kvd_proto.v1 import common_pb2, engine_pb2
from tests.control.daemon_rig import (
    RawEngine,
    RunningDaemon,
    block,
    context,
    hashes,
    identity,
)

SPEC = NamespaceSpec("f", TenantId("t"), 32, (GroupSpec(GroupKind.FULL_ATTENTION, 1, (4096,)),) * 2)


def message(*keys: int, **changes: Any) -> engine_pb2.HandOff:
    run = common_pb2.KeyRun(group=0, hashes=hashes(*keys))
    fields: dict[str, Any] = {"context": context(), "runs": [run], **changes}
    return engine_pb2.HandOff(**fields)


def refused_for(sent: engine_pb2.HandOff) -> tuple[str, str]:
    with pytest.raises(KvdError) as refused:
        hand_off_events(SessionId(1), sent, SPEC, KeyBudget())
    return refused.value.reason, refused.value.field


def test_each_run_is_an_event_with_the_deadline_from_now() -> None:
    runs = [common_pb2.KeyRun(group=g, hashes=hashes(g, 7)) for g in (0, 1)]
    events = hand_off_events(SessionId(1), message(runs=runs, deadline_ms=1500), SPEC, KeyBudget())
    assert [(e.group, len(e.keys), e.lasting_ns) for e in events] == [
        (0, 2, 1_500_000_000),
        (1, 2, 1_500_000_000),
    ]


def test_no_deadline_means_the_default() -> None:
    (event,) = hand_off_events(SessionId(1), message(1), SPEC, KeyBudget())
    assert event.lasting_ns == DEFAULT_HAND_OFF_MS * 1_000_000


ONE_RUN = common_pb2.KeyRun(hashes=hashes(1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"deadline_ms": 600_001}, ("INVALID_ARGUMENT", "deadline_ms")),
        ({"runs": []}, ("TOO_MANY_PARTS", "hand_offs.runs")),
        ({"runs": [ONE_RUN] * 65}, ("TOO_MANY_PARTS", "hand_offs.runs")),
        ({"runs": [common_pb2.KeyRun(hashes=b"short")]}, ("HASH_BYTES", "hashes")),
        ({"runs": [common_pb2.KeyRun(group=2, hashes=hashes(1))]}, ("INVALID_ARGUMENT", "group")),
        ({"context": None}, ("INVALID_ARGUMENT", "context.request_id")),
    ],
)  # fmt: skip
def test_what_can_not_be_meant_is_refused(changes: dict[str, Any], reason: tuple[str, str]) -> None:
    assert refused_for(message(1, **changes)) == reason


def test_keys_of_hand_offs_count_with_the_rest_of_the_message() -> None:
    budget = KeyBudget()
    many = common_pb2.KeyRun(hashes=hashes(*range(MAX_KEYS_PER_MESSAGE)))
    hand_off_events(SessionId(1), message(runs=[many]), SPEC, budget)
    with pytest.raises(InvalidArgument) as refused:
        hand_off_events(SessionId(1), message(1), SPEC, budget)
    assert refused.value.reason == "TOO_MANY_KEYS"


def test_metrics_show_hand_offs() -> None:
    metrics = Metrics("test")
    metrics.watch(Machine(MachineConfig(extents=1, extent_bytes=65536)).statistics)
    shown = generate_latest(metrics.registry).decode()
    for name in (
        "kvd_hand_offs 0.0",
        "kvd_hand_off_blocks 0.0",
        "kvd_handed_off_blocks_total 0.0",
        "kvd_hand_off_taken_blocks_total 0.0",
        "kvd_hand_off_expired_blocks_total 0.0",
        "kvd_hand_off_unheld_blocks_total 0.0",
    ):
        assert f"\n{name}\n" in shown


# -- with a real daemon -------------------------------------------------------------------------


def leased_bytes(engine: RawEngine) -> int:
    return sum(tenant.bytes_leased for tenant in engine.scheduler.status().tenants)


def test_a_step_hands_off_what_it_named_until_another_engine_has_loaded_it(
    running: RunningDaemon,
) -> None:
    prefill = RawEngine(running.socket, identity=identity("prefill"))
    contents = {key: block(key) for key in range(4)}
    prefill.store(contents)
    prefill.scheduler.step(hand_offs=[message(*contents)], finished_request_ids=["r0"])
    prefill.close()
    decode = RawEngine(running.socket, identity=identity("decode"))
    try:
        assert leased_bytes(decode) == 4 * 4096
        assert decode.load(list(contents)) == list(contents.values())
        assert leased_bytes(decode) == 0
    finally:
        decode.close()


def test_too_many_hand_offs_refuse_the_whole_step(running: RunningDaemon) -> None:
    engine = RawEngine(running.socket, identity=identity("many"))
    try:
        engine.store({9: block(9)})
        scheduler = engine.scheduler
        scheduler.sequence += 1
        scheduler.send(
            step=engine_pb2.Step(sequence=scheduler.sequence, hand_offs=[message(9)] * 1025)
        )
        assert scheduler.next("refused").reason == "TOO_MANY_PARTS"
        assert leased_bytes(engine) == 0
    finally:
        engine.close()
