"""Starting, serving, stopping: what systemd, Kubernetes and an operator see."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvd import native
from kvd.linux import signals
from kvd_proto.v1 import events_pb2, operator_pb2
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    RawScheduler,
    RunningDaemon,
    block,
    daemon,
    identity,
    refusal,
    store_job,
)
from tests.forked import run as kvd
from tests.ports import free_port
from tests.waiting import wait_until

PORT = free_port()


@pytest.fixture(scope="module")
def running() -> Iterator[RunningDaemon]:
    with daemon("--http-port", str(PORT), "--log-format", "json") as started:
        yield started


@pytest.fixture(scope="module")
def engine(running: RunningDaemon) -> Iterator[RawEngine]:
    made = RawEngine(running.socket)
    made.store({1: block(1), 2: block(2)})
    yield made
    made.close()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_daemon_without_standard_streams_serves_and_stops(closed: str) -> None:
    port = free_port()
    running = RunningDaemon("--http-port", str(port))
    running.behind = ("sh", "-c", f'exec "$@" {closed}', "sh")
    try:
        running.start()
        for _ in range(3):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10).close()
        caller = Caller(running.socket)
        assert caller.status().state == "ready"
        caller.close()
        assert running.stop() == 0
    finally:
        running.remove()


LIBRARY = native.library()
COPIER = "numpy" if LIBRARY is None else f"native-{LIBRARY.level}"


def get(path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=25) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_status_shows_sessions_pool_and_ranks(running: RunningDaemon, engine: RawEngine) -> None:
    shown = kvd("status", "--socket", running.socket)
    assert shown.returncode == 0, shown.stderr
    assert "2 ready" in shown.stdout
    (line,) = [text for text in shown.stdout.splitlines() if "host-shm" in text]
    assert str(engine.mover_pid) in line
    told = json.loads(kvd("status", "--socket", running.socket, "--json").stdout)
    assert told["pool"]["slots_ready"] == 2
    assert told["process_id"] == running.pid
    (rank,) = told["sessions"][0]["ranks"]
    assert rank["bytes_stored"] == 2 * 4096
    assert [rank[name] for name in ("transport", "copier")] == ["host-shm", COPIER]
    assert "gpu" not in rank
    assert told["namespaces"][0]["fields"]["model"] == "test-model"


def test_status_says_when_nobody_answers() -> None:
    shown = kvd("status", "--socket", "/nowhere/kvd.sock")
    assert shown.returncode == 1
    assert "no daemon answers on /nowhere/kvd.sock" in shown.stderr


def test_metrics_count_what_was_done(engine: RawEngine) -> None:
    engine.load([1])
    status, text = get("/metrics")
    assert status == 200
    for line in (
        "kvd_stored_blocks_total 2.0",
        "kvd_loaded_blocks_total 1.0",
        'kvd_slots{state="ready"} 2.0',
        "kvd_sessions_usable 1.0",
        'kvd_transfer_bytes_total{kind="store"} 8192.0',
        'kvd_jobs_ended_total{kind="load",status="done"} 1.0',
        'kvd_tenant_bytes{tenant="default"}',
        'kvd_rpc_seconds_count{code="OK",method="WorkerService/RegisterRank"} 1.0',
        f'kvd_rank_transport_info{{copier="{COPIER}",gpu="",rank="0"',
    ):
        assert line in text, line


def test_every_metric_has_a_help_text(engine: RawEngine) -> None:
    _, text = get("/metrics")
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name for name in typed if not name.endswith("_created")} <= helped
    for line in text.splitlines():
        if line.startswith("# HELP"):
            assert len(line.split()) > 4, line


def test_health_pages_answer_and_others_do_not(running: RunningDaemon) -> None:
    assert get("/healthz") == (200, "alive\n")
    assert get("/readyz") == (200, "ready\n")
    assert get("/debug/pprof")[0] == 404
    with socket.create_connection(("127.0.0.1", PORT), 5) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert b"there are /healthz /metrics /readyz /status " in raw.makefile("rb").read()
    assert f"port {PORT}: /healthz /metrics /readyz /status " in running.log.read_text()
    with socket.create_connection(("127.0.0.1", PORT), 5) as raw:
        raw.sendall(b"POST /metrics HTTP/1.1\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 405")
    with socket.create_connection(("127.0.0.1", PORT), 5) as raw:
        raw.sendall(b"x" * 20_000)
        with contextlib.suppress(ConnectionResetError):  # as good as an end of file
            assert raw.recv(100) == b""


def test_each_service_has_its_health(running: RunningDaemon) -> None:
    with grpc.insecure_channel(f"unix:{running.socket}") as channel:
        stub = health_stub(channel)
        for service in ("", "kvd.v1.EngineService", "kvd.v1.WorkerService"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=25)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="kvd.v1.Nothing"), timeout=25)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services(running: RunningDaemon) -> None:
    with grpc.insecure_channel(f"unix:{running.socket}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=25)
        listed = {service.name for service in answer.list_services_response.service}
    assert {"kvd.v1.EngineService", "kvd.v1.OperatorService", "grpc.health.v1.Health"} <= listed


def test_the_log_is_one_json_object_a_line_and_its_level_changes(running: RunningDaemon) -> None:
    lines = [json.loads(line) for line in running.log.read_text().splitlines()]
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
    os.kill(running.pid, signal.SIGUSR1)
    wait_until(lambda: "log level is debug now" in running.log.read_text(), "the level's change")
    os.kill(running.pid, signal.SIGUSR1)
    wait_until(lambda: "log level is info now" in running.log.read_text(), "the level's change")


def test_events_begin_with_a_snapshot_and_go_on_without_a_gap(
    running: RunningDaemon, engine: RawEngine
) -> None:
    watcher = Caller(running.socket)
    ask = events_pb2.WatchEventsRequest()
    stream = watcher.events.WatchEvents(ask, timeout=20, metadata=watcher.metadata)
    first = next(stream)
    assert (first.snapshot, first.snapshot_end) == (True, True)
    assert sum(len(e.hashes) // e.hash_bytes for e in first.events) >= 2
    engine.store({3: block(3)})
    second = next(stream)
    assert not second.snapshot
    assert second.events[0].kind == events_pb2.CacheEvent.KIND_STORED
    assert second.events[0].medium == "CPU"
    stream.cancel()
    ask = events_pb2.WatchEventsRequest(
        incarnation=first.incarnation, after_sequence=first.sequence
    )
    again = watcher.events.WatchEvents(ask, timeout=20, metadata=watcher.metadata)
    assert next(again) == second
    again.cancel()
    watcher.close()


def test_an_operator_clears_a_namespace_and_sets_a_quota(
    running: RunningDaemon, engine: RawEngine
) -> None:
    operator = Caller(running.socket)
    clear = operator_pb2.ClearRequest(namespace_id=engine.scheduler.opened.namespace_id)
    assert operator.call(operator.operator.Clear, clear).blocks_removed >= 2
    assert engine.scheduler.statuses([1, 2]) == [0, 0]
    quota = operator_pb2.SetQuotaRequest(tenant="default", quota_bytes=8192)
    operator.call(operator.operator.SetQuota, quota)
    (tenant,) = operator.status().tenants
    assert (tenant.quota_bytes, tenant.bytes_used <= 8192) == (8192, True)
    quota.quota_bytes = 0
    operator.call(operator.operator.SetQuota, quota)
    unknown = operator_pb2.SetQuotaRequest(tenant="nobody", quota_bytes=1)
    assert refusal(lambda: operator.call(operator.operator.SetQuota, unknown))[1] == (
        "INVALID_ARGUMENT"
    )
    operator.close()


def test_a_second_daemon_on_the_same_socket_or_pool_is_refused(running: RunningDaemon) -> None:
    size = ["--pool-bytes", "8MiB", "--extent-bytes", "4MiB", "--http-port", "0"]
    taken = kvd(
        "serve", "--socket", running.socket + "2", "--pool-directory", str(running.pool), *size
    )
    assert taken.returncode == 1
    assert "CRITICAL kvd.cli.serve: " in taken.stderr.splitlines()[-1]
    other = running.pool.with_name(running.pool.name + "-b")
    try:
        taken = kvd("serve", "--socket", running.socket, "--pool-directory", str(other), *size)
        assert taken.returncode == 1
        assert f"another daemon answers on {running.socket};" in taken.stderr
    finally:
        subprocess.run(["rm", "-rf", str(other)], check=True)


def test_an_idle_daemon_takes_little(running: RunningDaemon) -> None:
    # Beside busy neighbours the same work takes longer now and then, but hardly each time.
    shares: list[float] = []
    while not shares or (shares[-1] >= 0.02 and len(shares) < 5):
        shares.append(share_of_a_processor(running.pid, seconds=3.0))
    assert min(shares) < 0.02  # the bar is 1 % over a longer time; one tick of 3 s is 0.33 %
    rollup = Path(f"/proc/{running.pid}/smaps_rollup").read_text().splitlines()
    anonymous = next(int(line.split()[1]) for line in rollup if line.startswith("Pss_Anon:"))
    assert anonymous < 150 * 1024


def share_of_a_processor(pid: int, seconds: float) -> float:
    """How much of one processor a process takes in the next seconds."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before, since = ticks(), time.monotonic()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - since)


def health_stub(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)  # its stubs know no methods


class NotifySocket:
    """systemd's end of sd_notify."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(10)
        self.heard: list[str] = []

    def wait_for(self, line: str) -> None:
        while line not in self.heard:
            self.heard += self._socket.recv(4096).decode().splitlines()

    def close(self) -> None:
        self._socket.close()


def test_systemd_hears_of_each_stage_and_of_life(tmp_path: Path) -> None:
    systemd = NotifySocket(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "200000"}
    with daemon(environment=environment) as running:
        systemd.wait_for("READY=1")
        assert "EXTEND_TIMEOUT_USEC=30000000" in systemd.heard
        for _ in range(3):
            systemd.heard.clear()
            systemd.wait_for("WATCHDOG=1")
        assert running.stop() == 0
        systemd.wait_for("STOPPING=1")
    systemd.close()


def test_systemd_waits_for_as_long_as_the_daemon_may_drain(tmp_path: Path) -> None:
    systemd = NotifySocket(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": str(systemd.path)}
    with daemon("--drain-seconds", "600", environment=environment) as running:
        systemd.wait_for("READY=1")
        systemd.heard.clear()
        assert running.stop() == 0
        systemd.wait_for("STOPPING=1")
        assert "EXTEND_TIMEOUT_USEC=630000000" in systemd.heard
    systemd.close()


def test_sigterm_waits_for_copies_and_leaves_no_socket_but_the_pool() -> None:
    with daemon("--drain-seconds", "5") as running:
        engine = RawEngine(running.socket, identity=identity("draining"))
        assert engine.scheduler.step(stores=[store_job(5, [5], [0])]).verdicts[0].accepted
        os.kill(running.pid, signal.SIGTERM)
        wait_until(lambda: "draining" in running.log.read_text(), "the drain")
        refused = RawScheduler(running.socket, identity=identity("late"))
        assert refusal(lambda: refused.opened)[1] == "DRAINING"
        refused.close()
        assert not running.ended
        engine.worker.ready(5)
        assert engine.ended(5).blocks == 1
        assert running.process is not None
        assert running.process.wait(25) == 0
        engine.close()
        assert [p.name for p in running.directory.iterdir()] == ["log"]
        assert (running.pool / "slots.table").exists()


@pytest.mark.parametrize("what", ["events", "record"])
def test_who_reads_a_stream_is_told_that_the_daemon_stops(what: str) -> None:
    """Not that he is unknown: many clients take that for a refusal that stands."""
    with daemon() as running:
        tool = Caller(running.socket)
        if what == "events":
            asked = events_pb2.WatchEventsRequest()
            stream = tool.events.WatchEvents(asked, metadata=tool.metadata, timeout=20)
        else:
            request = operator_pb2.RecordRequest()
            stream = tool.operator.Record(request, metadata=tool.metadata, timeout=20)
        assert next(stream) is not None
        running.stop()
        assert refusal(lambda: list(stream))[:2] == ("UNAVAILABLE", "DRAINING")
        tool.close()


def test_a_second_sigterm_does_not_wait() -> None:
    with daemon("--drain-seconds", "60") as running:
        engine = RawEngine(running.socket, identity=identity("hurry"))
        assert engine.scheduler.step(stores=[store_job(5, [5], [0])]).verdicts[0].accepted
        os.kill(running.pid, signal.SIGTERM)
        wait_until(lambda: "draining" in running.log.read_text(), "the drain")
        began = time.monotonic()
        assert running.stop() == 0
        assert time.monotonic() - began < 10
        engine.close()


def test_copies_have_their_deadlines_while_the_daemon_drains() -> None:
    with daemon("--drain-seconds", "60", "--submit-deadline-seconds", "2") as running:
        engine = RawEngine(running.socket, identity=identity("late"))
        assert engine.scheduler.step(stores=[store_job(5, [5], [0])]).verdicts[0].accepted
        began = time.monotonic()
        assert running.stop() == 0  # its worker never says that it is ready
        assert time.monotonic() - began < 15
        engine.close()


def test_a_daemon_that_loses_its_pool_while_it_drains_waits_no_longer() -> None:
    with daemon("--drain-seconds", "60") as running:
        engine = RawEngine(running.socket, identity=identity("robbed"))
        assert engine.scheduler.step(stores=[store_job(5, [5], [0])]).verdicts[0].accepted
        os.kill(running.pid, signal.SIGTERM)
        wait_until(lambda: "draining" in running.log.read_text(), "the drain")
        shutil.rmtree(running.pool)
        assert running.process.wait(15) == 1
        assert running.log.read_text().count("CRITICAL") == 1
        assert "the pool is lost" in running.log.read_text()
        engine.close()


def test_systemd_hears_of_life_while_the_daemon_drains(tmp_path: Path) -> None:
    systemd = NotifySocket(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "200000"}
    with daemon("--drain-seconds", "60", environment=environment) as running:
        engine = RawEngine(running.socket, identity=identity("alive"))
        assert engine.scheduler.step(stores=[store_job(5, [5], [0])]).verdicts[0].accepted
        os.kill(running.pid, signal.SIGTERM)
        systemd.wait_for("STOPPING=1")
        for _ in range(3):
            systemd.heard.clear()
            systemd.wait_for("WATCHDOG=1")
        assert running.stop() == 0
        engine.close()
    systemd.close()


@pytest.mark.parametrize("number", signals.STOPPING, ids=lambda number: number.name)
def test_a_signal_that_asks_for_an_end_gets_one_in_order(number: int) -> None:
    with daemon() as running:
        engine = RawEngine(running.socket, identity=identity("stopping"))
        assert running.stop(number) == 0
        engine.close()
        assert [p.name for p in running.directory.iterdir()] == ["log"]


def test_a_daemon_whose_sockets_directory_was_removed_stops_in_order() -> None:
    with daemon() as running:
        place = Path(running.socket).parent
        moved = place.with_name(f"{place.name}-moved")
        place.rename(moved)
        try:
            assert running.stop() == 0
        finally:
            moved.rename(place)


def test_signals_without_a_meaning_leave_daemon_and_movers_alone() -> None:
    with daemon() as running:
        engine = RawEngine(running.socket, identity=identity("signalled"))
        engine.store({1: block(1)})
        for number in signals.IGNORED:
            os.kill(running.pid, number)
            os.kill(engine.mover_pid, number)
        assert engine.load([1]) == [block(1)]
        assert running.movers() == [engine.mover_pid]
        engine.close()


def test_signals_that_come_while_the_daemon_begins_are_heeded_once_it_can() -> None:
    running = RunningDaemon()
    running.module = "tests.control.daemon_signalled_early"
    try:
        running.start()
        wait_until(lambda: "the settings were reloaded" in running.log.read_text(), "a reload")
        assert running.stop() == 0
        assert "log level is debug now" in running.log.read_text()
    finally:
        running.remove()


def test_an_operators_drain_refuses_sessions_and_says_not_serving() -> None:
    with daemon() as running:
        operator = Caller(running.socket)
        drain = operator_pb2.DrainRequest(deadline_ms=100)
        assert operator.call(operator.operator.Drain, drain).jobs_left == 0
        assert operator.status().state == "draining"
        stub = health_stub(operator.channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=25)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        late = RawScheduler(running.socket, identity=identity("late"))
        with pytest.raises(grpc.RpcError) as refused:
            late.next("opened")
        assert "until `kvd undrain`" in str(refused.value)  # it is not about to stop
        for each in (late, operator):
            each.close()


def test_a_caller_without_rights_is_refused() -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    script = """
import grpc, os, sys
from kvd_proto.v1 import operator_pb2
from tests.control.daemon_rig import Caller, refusal, RawScheduler, identity
os.setgid(12345); os.setuid(12345)
c = Caller(sys.argv[1])
print(refusal(lambda: c.call(c.operator.Clear, operator_pb2.ClearRequest()))[0])
try:
    c.call(c.operator.Clear, operator_pb2.ClearRequest())
except grpc.RpcError as error:
    print("name the user in `operators`" in error.details())
print([t.tenant for t in c.status().tenants])
c.close()
s = RawScheduler(sys.argv[1], identity=identity("foreign"))
print(s.opened.isolated)
s.close()
"""
    with daemon("--socket-mode", "0666") as running:
        running.directory.chmod(0o755)
        engine = RawEngine(running.socket)
        engine.store({1: block(1)})
        told = subprocess.run(
            [sys.executable, "-c", script, running.socket],
            capture_output=True,
            text=True,
            check=False,
            timeout=90,  # a stream that gRPC does not end is waited for
        )
        assert told.stdout.split("\n")[:4] == [
            "PERMISSION_DENIED",
            "True",
            "['default']",
            "True",
        ], told.stderr
        engine.close()


def test_serve_says_what_is_wrong_with_its_settings() -> None:
    wrong = kvd("serve", "--pool-bytes", "many")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("kvd: pool_bytes is 'many' (flag --pool-bytes)")
    shown = kvd("serve", "--print-config", "--policy", "arc")
    assert shown.returncode == 0
    assert 'policy = "arc"' in shown.stdout


def test_version_is_printed() -> None:
    assert kvd("version").stdout.startswith("kvd 0.")
