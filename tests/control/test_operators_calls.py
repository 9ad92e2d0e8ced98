"""What operators do is in the log, whatever its level, and a drain can be taken back."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from kvd.control.access.tenants import TenantPolicy
from kvd_proto.v1 import operator_pb2 as pb
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    RawScheduler,
    RawWorker,
    RunningDaemon,
    block,
    daemon,
    disk_config,
    identity,
    namespace,
    refusal,
    store_job,
)
from tests.ports import free_port
from tests.waiting import wait_until

FOR_EVERYONE = {"Status", "ListNamespaces", "Explain"}  # of what the caller may see


def audited(running: RunningDaemon) -> list[dict[str, Any]]:
    lines = map(json.loads, running.log.read_text().splitlines())
    return [line["audit"] for line in lines if "audit" in line]


def readiness(port: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_every_call_of_an_operator_is_one_structured_line() -> None:
    with daemon("--log-format", "json", "--log-level", "error") as running:
        engine = RawEngine(running.socket)
        engine.store({1: block(1)})
        operator = Caller(running.socket)
        stub = operator.operator
        [namespace] = operator.status().namespaces
        operator.call(stub.SetQuota, pb.SetQuotaRequest(tenant="default", quota_bytes=1 << 20))
        operator.call(stub.Clear, pb.ClearRequest(namespace_id=namespace.namespace_id))
        operator.call(stub.Clear, pb.ClearRequest())
        operator.call(stub.Drain, pb.DrainRequest(deadline_ms=0))
        operator.call(stub.Undrain, pb.UndrainRequest())
        engine.close()
        operator.close()
        uid = os.getuid()
        assert audited(running) == [
            {
                "action": "quota",
                "uid": uid,
                "tenant": "default",
                "quota_bytes": 1 << 20,
                "quota_bytes_before": 0,
                "blocks_evicted": 0,
            },
            {
                "action": "clear",
                "uid": uid,
                "namespace": namespace.namespace_id,
                "namespaces": 1,
                "tenants": ["default"],
                "blocks_removed": 1,
            },
            {
                "action": "clear",
                "uid": uid,
                "namespace": "all",
                "namespaces": 1,
                "tenants": ["default"],
                "blocks_removed": 0,
            },
            {"action": "drain", "uid": uid, "deadline_ms": 0},
            {"action": "drained", "uid": uid, "jobs_left": 0},
            {"action": "undrain", "uid": uid, "was_draining": True},
        ]


def test_a_clear_whose_caller_does_not_wait_for_its_end_is_in_the_log_too() -> None:
    running = RunningDaemon("--log-format", "json")
    running.module = "tests.faults.slow_clear"
    try:
        running.start()
        engine = RawEngine(running.socket)
        engine.store({number: block(number) for number in range(1, 6)})
        operator = Caller(running.socket)
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            operator.operator.Clear(pb.ClearRequest(), timeout=0.5, metadata=operator.metadata)
        assert operator.status().pool.slots_ready == 2, "it was begun"
        wait_until(lambda: bool(audited(running)), "the line")
        [line] = audited(running)
        assert (line["action"], line["namespace"], line["namespaces"]) == ("clear", "all", 1)
        assert "blocks_removed" not in line
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):  # the first one goes on
            operator.operator.Clear(pb.ClearRequest(), timeout=0.5, metadata=operator.metadata)
        wait_until(lambda: len(audited(running)) == 2, "the line")
        assert audited(running)[1]["namespaces"] == 0, "its turn had not come"
        engine.close()
        operator.close()
    finally:
        running.kill()
        running.remove()


def test_a_clear_of_one_namespace_leaves_in_a_tier_what_others_have(tmp_path: Path) -> None:
    with daemon("--config", str(disk_config(tmp_path, 'write = "through"\n'))) as running:
        operator = Caller(running.socket)
        wait_until(lambda: operator.status().tiers[0].serving, "the tier")
        engines = [
            RawEngine(running.socket, identity=identity(name), namespace=namespace(model=name))
            for name in ("cleared", "kept")
        ]
        for engine in engines:
            engine.store({1: block(1)})
        wait_until(lambda: operator.status().tiers[0].blocks == 2, "both blocks below")
        number = engines[0].scheduler.opened.namespace_id
        operator.call(operator.operator.Clear, pb.ClearRequest(namespace_id=number))
        wait_until(lambda: operator.status().tiers[0].blocks < 2, "the end of what was cleared")
        assert operator.status().tiers[0].blocks == 1
        for engine in engines:
            engine.close()
        operator.close()


def test_who_waits_for_a_drain_that_is_taken_back_is_told_so_at_once() -> None:
    with daemon() as running:
        engine = RawEngine(running.socket)
        (verdict,) = engine.scheduler.step(stores=[store_job(1, [1], [0])]).verdicts
        assert verdict.accepted  # and its worker never says ready
        operator = Caller(running.socket)
        waiting = operator.operator.Drain.future(
            pb.DrainRequest(deadline_ms=60_000), timeout=10, metadata=operator.metadata
        )
        wait_until(lambda: operator.status().state == "draining", "the drain")
        operator.call(operator.operator.Undrain, pb.UndrainRequest())
        assert refusal(waiting.result) == ("FAILED_PRECONDITION", "DRAIN_TAKEN_BACK", "")
        assert operator.call(operator.operator.Drain, pb.DrainRequest()).jobs_left == 1
        engine.close()
        operator.close()


def test_a_drain_that_is_taken_back_makes_the_daemon_ready_and_stores_go_on() -> None:
    port = free_port()
    with daemon("--http-port", str(port)) as running:
        engine = RawEngine(running.socket)
        operator = Caller(running.socket)
        for _ in range(2):  # a second one changes nothing
            operator.call(operator.operator.Drain, pb.DrainRequest())
        assert readiness(port) == (503, "draining\n")
        assert operator.status().state == "draining"
        late = RawWorker(running.socket)
        assert refusal(late.register)[1] == "DRAINING"
        late.close()
        undrained = [
            operator.call(operator.operator.Undrain, pb.UndrainRequest()).was_draining
            for _ in range(2)
        ]
        assert undrained == [True, False]
        assert readiness(port) == (200, "ready\n")
        assert operator.status().state == "ready"
        assert engine.store({1: block(1)}).blocks == 1
        assert engine.load([1]) == [block(1)]
        engine.close()
        operator.close()


def test_a_socket_that_somebody_removed_makes_the_daemon_unready() -> None:
    port = free_port()
    with daemon("--http-port", str(port)) as running:
        assert readiness(port) == (200, "ready\n")
        socket = Path(running.socket)
        aside = socket.with_name("aside")
        socket.rename(aside)
        status, said = readiness(port)
        assert status == 503
        assert str(socket) in said
        assert "restart kvd" in said
        socket.touch()  # another file of its name is not its socket
        assert readiness(port)[0] == 503
        socket.unlink()
        aside.rename(socket)
        assert readiness(port) == (200, "ready\n")
        Path(f"{socket}.companion").unlink()
        assert readiness(port)[0] == 503


@pytest.mark.parametrize("root", [False, True], ids=["not root", "root"])
def test_root_operates_unless_it_may_not(root: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (0, 10001):
        monkeypatch.setattr(os, "getuid", lambda own=own: own)
        policy = TenantPolicy(operators=[77], root=root)
        assert policy.user_operates(0) is root
        assert policy.user_operates(10001) is (own == 10001)
        assert policy.user_operates(77)
        assert TenantPolicy(operators=[0], root=root).user_operates(0), "named, it is one"


@pytest.mark.skipif(os.getuid() != 0, reason="takes root")
def test_a_root_that_may_not_operate_may_only_look_and_still_stores() -> None:
    with daemon("--root-operates", "false") as running:
        engine = RawScheduler(running.socket)
        assert engine.opened.session_id
        methods = pb.DESCRIPTOR.services_by_name["OperatorService"].methods
        denied = {method.name for method in methods if is_denied(engine, method)}
        assert denied == {method.name for method in methods} - FOR_EVERYONE
        status = engine.status()
        assert status.state == "ready"
        assert [s.session_id for s in status.sessions] == [engine.opened.session_id]
        engine.close()


def is_denied(caller: Caller, method: MethodDescriptor) -> bool:
    request = getattr(pb, method.input_type.name)

    def call() -> None:
        answer = caller.call(getattr(caller.operator, method.name), request())
        if method.server_streaming:
            next(answer)

    try:
        return refusal(call)[0] == "PERMISSION_DENIED"
    except AssertionError:  # it was answered
        return False


def test_a_look_at_the_status_leaves_no_line_in_the_log() -> None:
    with daemon() as running:
        before = running.log.read_text()
        for _ in range(3):
            caller = Caller(running.socket)
            caller.status()
            caller.close()
        engine = RawScheduler(running.socket)  # its coming is news
        wait_until(lambda: "peer SCHEDULER" in running.log.read_text())
        engine.close()
        assert "TOOL" not in running.log.read_text()[len(before) :]
