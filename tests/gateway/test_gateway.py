"""Operators of other machines: who gets in, who may do what, and what strangers can't do."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvd.gateway import server
from kvd.gateway.certificates import CertificateFiles, Renewal
from kvd.gateway.server import (
    HANDSHAKE_SECONDS,
    IDLE_SECONDS,
    MAX_CONNECTIONS,
    MAX_MESSAGE_BYTES,
    MAX_STREAMS,
)
from kvd.gateway.servicer import (
    CALLS_FOR_OPERATORS,
    MAX_CALLS_AT_ONCE,
    MAX_CALLS_OF_A_CALLER,
    MESSAGE_SECONDS,
    Gateway,
)
from kvd.gateway.upstream import Upstream
from kvd.linux.plain_file import MAX_PEM_BYTES
from kvd_proto.v1 import operator_pb2 as pb
from kvd_proto.v1 import operator_pb2_grpc
from tests.control.daemon_rig import RunningDaemon, daemon
from tests.forked import run
from tests.gateway.gateway_rig import Authority, GatewayProcess, Identity, channel_to
from tests.waiting import wait_until

CALL_SECONDS = 20.0
UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "kvd-gateway.service"
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def running() -> Iterator[RunningDaemon]:
    with daemon() as running:
        yield running


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def gateway(
    running: RunningDaemon, authority: Authority, tmp_path: Path
) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path, authority, running.socket, r"alice, ops.example, Doe\, Jo,")
    try:
        yield process
    finally:
        process.end()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="there is no IPv6 here")
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_either_wildcard_is_every_address(authority: Authority, tmp_path: Path, host: str) -> None:
    process = GatewayProcess(tmp_path, authority, str(tmp_path / "none.sock"), "", host)
    try:
        for own in ("127.0.0.1", "::1"):
            socket.create_connection((own, process.port), CALL_SECONDS).close()
    finally:
        process.end()


def status_of(stub: operator_pb2_grpc.OperatorServiceStub) -> pb.StatusResponse:
    answer: pb.StatusResponse = stub.Status(pb.StatusRequest(), timeout=CALL_SECONDS)
    return answer


@dataclass(frozen=True)
class Refusal:
    code: grpc.StatusCode
    said: str
    details: Any  # google.rpc.Status, as bytes; None where there is none


def refusal(call: Any, request: object) -> Refusal:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=CALL_SECONDS)
    error: Any = caught.value
    trailers = {e.key: e.value for e in error.trailing_metadata() or ()}
    return Refusal(error.code(), str(error.details()), trailers.get("grpc-status-details-bin"))


def unary(channel: grpc.Channel, method: str) -> Any:
    call: Any = channel.unary_unary(method)
    return call


def test_a_certificate_of_the_authority_may_look_and_change_nothing(
    gateway: GatewayProcess, authority: Authority, running: RunningDaemon
) -> None:
    with gateway.called_by(authority.vouch("bob")) as stub:
        assert status_of(stub).process_id == running.pid
        assert len(stub.ListNamespaces(pb.ListNamespacesRequest()).namespaces) == 0
        for call, request in (
            (stub.Clear, pb.ClearRequest()),
            (stub.SetQuota, pb.SetQuotaRequest(tenant="default")),
            (stub.Drain, pb.DrainRequest()),
        ):
            error = refusal(call, request)
            assert error.code is Code.PERMISSION_DENIED
            assert "bob is no operator" in error.said
        assert status_of(stub).state == "ready"
    assert "Drain was refused to bob" in gateway.said


@pytest.mark.parametrize(
    ("name", "host"),
    [("alice", "a.example"), ("carol", "ops.example"), ("Doe, Jo", "d.example")],
)
def test_a_named_certificate_may_change_things_by_either_of_its_names(
    gateway: GatewayProcess, authority: Authority, running: RunningDaemon, name: str, host: str
) -> None:
    with gateway.called_by(authority.vouch(name, host)) as stub:
        assert stub.Clear(pb.ClearRequest(), timeout=CALL_SECONDS).blocks_removed == 0
    wait_until(lambda: f"Clear is carried out for {name}" in gateway.said, "its line in the log")
    [*_, audited] = [s for s in running.log.read_text().splitlines() if "operator: clear" in s]
    assert f"on_behalf_of='{name}'" in audited


def test_a_certificate_without_a_common_name_is_called_by_its_host(
    gateway: GatewayProcess, authority: Authority, running: RunningDaemon
) -> None:
    with gateway.called_by(authority.vouch("", "ops.example")) as stub:
        stub.Clear(pb.ClearRequest(), timeout=CALL_SECONDS)
    wait_until(lambda: "Clear is carried out for ops.example" in gateway.said, "its line")
    [*_, audited] = [s for s in running.log.read_text().splitlines() if "operator: clear" in s]
    assert "on_behalf_of='ops.example'" in audited


def test_what_stands_before_a_nul_of_a_longer_name_is_nobodys(
    gateway: GatewayProcess, authority: Authority
) -> None:
    with gateway.called_by(authority.vouch("alice\0.example")) as stub:
        error = refusal(stub.Clear, pb.ClearRequest())
        assert error.code is Code.PERMISSION_DENIED
        assert "a certificate without a name is no operator" in error.said


def test_the_daemons_refusal_comes_back_with_its_reason(
    gateway: GatewayProcess, authority: Authority
) -> None:
    with gateway.called_by(authority.vouch("alice")) as stub:
        error = refusal(stub.SetQuota, pb.SetQuotaRequest(tenant="nobody"))
    assert error.code is Code.INVALID_ARGUMENT
    assert "there is no tenant 'nobody'" in error.said
    assert b"INVALID_ARGUMENT" in error.details


def test_nobody_gets_in_without_a_certificate_of_the_authority(
    gateway: GatewayProcess, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").vouch("alice")
    for identity in (None, stranger):
        with gateway.called_by(identity) as stub:
            assert refusal(stub.Status, pb.StatusRequest()).code is Code.UNAVAILABLE
    with grpc.insecure_channel(gateway.target) as plain:
        assert refusal(unary(plain, "/kvd.v1.OperatorService/Status"), b"").code is Code.UNAVAILABLE
    with gateway.called_by(authority.vouch("bob")) as stub:
        assert status_of(stub).state == "ready"


def test_under_systemd_handshakes_that_fail_are_no_lines_of_the_log(
    authority: Authority, running: RunningDaemon, tmp_path: Path
) -> None:
    said = UNIT.read_text()
    environment = dict(re.findall(r"^Environment=(\w+)=(.*)$", said, re.MULTILINE))
    process = GatewayProcess(tmp_path, authority, running.socket, "", environment=environment)
    try:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", process.port), CALL_SECONDS) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    stranger.recv(4096)  # once it has been refused
        with process.called_by(authority.vouch("bob")) as stub:
            assert status_of(stub).state == "ready"
    finally:
        process.end()
    lines = process.log.read_text().splitlines()
    assert [line for line in lines if " kvd." not in line] == []


def test_only_the_operators_service_is_carried(
    gateway: GatewayProcess, authority: Authority
) -> None:
    alice = authority.vouch("alice")
    credentials = grpc.ssl_channel_credentials(
        authority.file.read_bytes(), alice.key.read_bytes(), alice.certificate.read_bytes()
    )
    with grpc.secure_channel(gateway.target, credentials) as channel:
        for method in (
            "/kvd.v1.EngineService/Session",
            "/kvd.v1.WorkerService/RegisterRank",
            "/kvd.v1.OperatorService/NoSuch",
            "/grpc.health.v1.Health/Check",
        ):
            assert refusal(unary(channel, method), b"").code is Code.UNIMPLEMENTED
        clear = unary(channel, "/kvd.v1.OperatorService/Clear")
        assert refusal(clear, b"\xff\xff").code is Code.INVALID_ARGUMENT
        large = refusal(clear, bytes(MAX_MESSAGE_BYTES + 1))
        assert large.code is Code.RESOURCE_EXHAUSTED


def test_it_finds_the_next_daemon_by_itself(authority: Authority, tmp_path: Path) -> None:
    with daemon() as running:
        gateway = GatewayProcess(tmp_path, authority, running.socket, "alice")
        try:
            with gateway.called_by(authority.vouch("alice")) as stub:
                first = status_of(stub).incarnation
                running.kill()
                error = refusal(stub.Status, pb.StatusRequest())
                assert error.code is Code.UNAVAILABLE
                running.start()
                assert status_of(stub).incarnation != first
                running.kill()
                running.start()  # nobody asked in between: it holds the old one's token
                assert status_of(stub).state == "ready"
        finally:
            assert gateway.end() == 0


def test_calls_at_once_all_find_the_next_daemon(authority: Authority, tmp_path: Path) -> None:
    with daemon() as running:
        gateway = GatewayProcess(tmp_path, authority, running.socket, "")
        try:
            with gateway.called_by(authority.vouch("bob")) as stub:
                first = status_of(stub).incarnation
                running.kill()
                running.start()  # all of them hold the old one's token
                calls = [
                    stub.Status.future(pb.StatusRequest(), timeout=CALL_SECONDS)
                    for _ in range(MAX_CALLS_OF_A_CALLER)
                ]
                found = {call.result().incarnation for call in calls}
            assert len(found) == 1
            assert first not in found
        finally:
            assert gateway.end() == 0


def test_it_starts_before_its_daemon(authority: Authority, tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, authority, str(tmp_path / "none.sock"), "")
    try:
        with gateway.called_by(authority.vouch("bob")) as stub:
            error = refusal(stub.Status, pb.StatusRequest())
        assert error.code is Code.UNAVAILABLE
        assert "no daemon answers on" in error.said
    finally:
        gateway.end()


def test_renewed_certificates_are_taken_and_broken_ones_are_not(
    gateway: GatewayProcess, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    renewed = Authority(tmp_path / "new", "renewed")
    old_bob = authority.vouch("bob")
    gateway.own.certificate.write_text("half a certificate")
    with gateway.called_by(old_bob) as stub:
        assert status_of(stub).state == "ready"
    assert "can't be used" in gateway.said
    own = renewed.vouch("gateway", "localhost")
    for made, at in (
        (own.key, gateway.own.key),
        (renewed.file, authority.file),
        (own.certificate, gateway.own.certificate),
    ):
        shutil.copy(made, at)
    with gateway.called_by(renewed.vouch("carol"), renewed) as stub:
        assert status_of(stub).state == "ready"
    with gateway.called_by(old_bob, renewed) as stub:
        assert refusal(stub.Status, pb.StatusRequest()).code is Code.UNAVAILABLE


def test_a_pipe_or_a_huge_file_in_a_files_place_keeps_nobody_out(
    gateway: GatewayProcess, authority: Authority, tmp_path: Path
) -> None:
    bob = authority.vouch("bob")
    own = gateway.own.certificate.read_bytes()
    trusting = copy.copy(authority)
    trusting.file = tmp_path / "copy.pem"
    shutil.copy(authority.file, trusting.file)
    gateway.own.certificate.unlink()
    os.mkfifo(gateway.own.certificate)
    for _ in range(2):
        with gateway.called_by(bob) as stub:
            assert status_of(stub).state == "ready"
    assert f"--certificate {gateway.own.certificate} is no plain file" in gateway.said
    gateway.own.certificate.unlink()
    gateway.own.certificate.write_bytes(own)
    with authority.file.open("ab") as file:
        file.truncate(MAX_PEM_BYTES + 1)
    with gateway.called_by(bob, trusting) as stub:
        assert status_of(stub).state == "ready"
    assert f"has more than {MAX_PEM_BYTES} bytes" in gateway.said
    assert "were renewed" not in gateway.said


def test_a_connection_does_not_outlive_its_certificate_for_long(
    running: RunningDaemon,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "CONNECTION_SECONDS", 1.0)
    own, soon = authority.vouch("gateway", "localhost"), time.time() + 6.0
    bob = authority.vouch("bob", not_after=datetime.fromtimestamp(soon, UTC))
    files = CertificateFiles(own.certificate, own.key, authority.file)
    upstream = Upstream(running.socket)
    serving, port = server.begin("127.0.0.1:0", Renewal(files), Gateway(upstream, frozenset()))
    try:
        with channel_to(f"localhost:{port}", authority, bob) as channel:
            stub = operator_pb2_grpc.OperatorServiceStub(channel)
            assert status_of(stub).state == "ready"

            def is_shut_out() -> bool:
                try:
                    stub.Status(pb.StatusRequest(), timeout=CALL_SECONDS)
                except grpc.RpcError as error:
                    return error.code() is Code.UNAVAILABLE
                return False

            wait_until(is_shut_out, "its end")
            assert time.time() >= soon - 1.0, "not before"
    finally:
        serving.stop(0).wait()
        upstream.close()


def wait_until_let_in(gateway: GatewayProcess, caller: Identity, running: RunningDaemon) -> None:
    def gets_in() -> bool:
        with gateway.called_by(caller) as stub:
            try:
                return status_of(stub).process_id == running.pid
            except grpc.RpcError:
                return False

    wait_until(gets_in, "the caller to get in")


def test_strangers_who_say_nothing_keep_nobody_out_for_longer_than_a_handshake(
    gateway: GatewayProcess, authority: Authority, running: RunningDaemon
) -> None:
    bob = authority.vouch("bob")
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
        began = time.monotonic()
        wait_until_let_in(gateway, bob, running)
    assert time.monotonic() - began < HANDSHAKE_SECONDS + CALL_SECONDS


def test_who_keeps_all_connections_open_keeps_no_operator_out_for_long(
    gateway: GatewayProcess, authority: Authority, running: RunningDaemon
) -> None:
    looker, alice = authority.vouch("looker"), authority.vouch("alice")
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            channel = stack.enter_context(gateway.channel_of(looker))
            grpc.channel_ready_future(channel).result(CALL_SECONDS)
        began = time.monotonic()
        with gateway.called_by(alice) as stub:
            assert refusal(stub.Status, pb.StatusRequest()).code is Code.UNAVAILABLE
        wait_until_let_in(gateway, alice, running)
    assert time.monotonic() - began < IDLE_SECONDS + CALL_SECONDS


@contextlib.contextmanager
def half_said_calls(
    gateway: GatewayProcess, caller: Identity, connections: int
) -> Iterator[list[Any]]:
    """As many calls as so many connections may have, whose message does not come."""
    calls: list[Any] = []
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    with contextlib.ExitStack() as stack:
        for _ in range(connections):
            channel = stack.enter_context(gateway.channel_of(caller))
            method: Any = channel.stream_unary("/kvd.v1.OperatorService/Status")
            calls += [method.future(nothing()) for _ in range(MAX_STREAMS)]
        stack.callback(over.set)
        yield calls


def test_who_half_says_many_calls_keeps_no_operator_out(
    gateway: GatewayProcess, authority: Authority, running: RunningDaemon
) -> None:
    lookers = [authority.vouch(name) for name in ("looker", "watcher")]
    alice = authority.vouch("alice")
    with (
        half_said_calls(gateway, lookers[0], 2) as many,
        half_said_calls(gateway, lookers[1], 2) as more,
    ):
        refused = 2 * (MAX_STREAMS * 2) - (MAX_CALLS_AT_ONCE - CALLS_FOR_OPERATORS)
        wait_until(lambda: sum(c.done() for c in (*many, *more)) >= refused, "those beyond a share")
        with gateway.called_by(alice) as stub:
            assert status_of(stub).process_id == running.pid


def test_an_operator_beyond_all_places_is_told_how_many_there_are(
    gateway: GatewayProcess, authority: Authority
) -> None:
    lookers = [authority.vouch(name) for name in ("looker", "watcher")]
    alice, other = authority.vouch("alice"), authority.vouch("other", "ops.example")
    with contextlib.ExitStack() as stack:
        calls = [
            call
            for caller in (*lookers, alice)
            for call in stack.enter_context(half_said_calls(gateway, caller, 1))
        ]
        refused = len(calls) - MAX_CALLS_AT_ONCE
        wait_until(lambda: sum(call.done() for call in calls) >= refused, "all places to be taken")
        with gateway.called_by(other) as stub:
            error = refusal(stub.Status, pb.StatusRequest())
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert f"all together {MAX_CALLS_AT_ONCE}: call again" in error.said


@contextlib.contextmanager
def calls_again_and_again(channels: list[grpc.Channel]) -> Iterator[None]:
    """As many calls as these connections may have; where one ends, the next one begins."""
    over = threading.Event()

    def call(method: Any) -> None:
        if not over.is_set():
            method.future(b"").add_done_callback(lambda _: call(method))

    for channel in channels * MAX_STREAMS:
        call(unary(channel, "/kvd.v1.OperatorService/Status"))
    try:
        yield
    finally:
        over.set()


def test_who_has_many_calls_refused_keeps_no_operator_out(
    gateway: GatewayProcess, authority: Authority, running: RunningDaemon
) -> None:
    looker, alice = authority.vouch("looker"), authority.vouch("alice")
    with contextlib.ExitStack() as stack:
        channels = [stack.enter_context(gateway.channel_of(looker)) for _ in range(8)]
        stub = stack.enter_context(gateway.called_by(alice))
        assert status_of(stub).process_id == running.pid
        with calls_again_and_again(channels):
            for _ in range(40):
                assert status_of(stub).process_id == running.pid
                time.sleep(0.05)


def test_a_call_whose_message_does_not_come_gives_its_place_back(
    gateway: GatewayProcess, authority: Authority, running: RunningDaemon
) -> None:
    looker = authority.vouch("looker")
    began = time.monotonic()
    with half_said_calls(gateway, looker, 1) as calls:
        wait_until(lambda: all(call.done() for call in calls), "the calls to be ended")
        assert time.monotonic() - began >= MESSAGE_SECONDS / 2
        assert {call.code() for call in calls} == {Code.CANCELLED}
        with gateway.called_by(looker) as stub:
            assert status_of(stub).process_id == running.pid


def test_a_call_without_a_message_is_refused(gateway: GatewayProcess, authority: Authority) -> None:
    with gateway.channel_of(authority.vouch("looker")) as channel:
        method: Any = channel.stream_unary("/kvd.v1.OperatorService/Status")
        with pytest.raises(grpc.RpcError) as caught:
            method(iter(()), timeout=CALL_SECONDS)
        error: Any = caught.value
        assert error.code() is Code.INVALID_ARGUMENT


def test_status_of_a_remote_daemon_by_the_command(
    gateway: GatewayProcess, authority: Authority, running: RunningDaemon
) -> None:
    bob = authority.vouch("bob")
    files = ["--certificate", str(bob.certificate), "--key", str(bob.key)]
    command = ["status", "--json", "--remote", gateway.target, *files]
    done = run(*command, "--authority", str(authority.file))
    assert json.loads(done.stdout)["process_id"] == running.pid
    short = run(*command)
    assert (short.returncode, short.stdout) == (2, "")
    assert "--remote needs --authority FILE" in short.stderr


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ("expired", "--certificate may not be valid now"),
        ("stranger", "or be of another authority"),
        ("authority", "is not of --authority, or not valid now"),
        ("name", "give --server-name NAME"),
    ],
)
def test_a_caller_whom_tls_keeps_out_is_told_what_to_change(
    gateway: GatewayProcess, authority: Authority, tmp_path: Path, wrong: str, flag: str
) -> None:
    other = Authority(tmp_path, "other")
    past = datetime(2020, 1, 1, tzinfo=UTC)
    own = (other if wrong == "stranger" else authority).vouch(
        "caller", "here", not_after=past if wrong == "expired" else None
    )
    trusted = other if wrong == "authority" else authority
    words = ["--server-name", "nobody"] if wrong == "name" else []
    words += ["--certificate", str(own.certificate), "--key", str(own.key)]
    words += ["--authority", str(trusted.file)]
    done = run("status", "--remote", gateway.target, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"kvd: the gateway on {gateway.target}: " in done.stderr
    assert flag in done.stderr


@pytest.mark.parametrize("named", ["certificate", "key", "authority"])
@pytest.mark.parametrize("broken", ["not PEM", "a pipe"])
def test_a_callers_file_that_cant_be_used_is_named_and_nothing_else_said(
    authority: Authority, tmp_path: Path, named: str, broken: str
) -> None:
    own = authority.vouch("looker")
    wrong = tmp_path / "wrong.pem"
    if broken == "a pipe":
        os.mkfifo(wrong)
    else:
        wrong.write_text("hello")
    files = {"certificate": own.certificate, "key": own.key, "authority": authority.file}
    words = [f"--{flag}={path}" for flag, path in (files | {named: wrong}).items()]
    done = run("status", "--remote", "127.0.0.1:1", *words)
    assert done.returncode == 2
    assert f"--{named} {wrong}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("broken", ["missing", "not PEM", "another's key", "a pipe"])
def test_files_that_cant_be_used_are_named(
    authority: Authority, tmp_path: Path, broken: str
) -> None:
    own = authority.vouch("gateway", "localhost")
    if broken == "missing":
        own.key.unlink()
    elif broken == "not PEM":
        own.certificate.write_text("hello")
    elif broken == "a pipe":
        own.key.unlink()
        os.mkfifo(own.key)
    else:
        shutil.copy(authority.vouch("other").key, own.key)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvd", "gateway", "--address", "127.0.0.1:0"),
            *("--certificate", str(own.certificate), "--key", str(own.key)),
            *("--authority", str(authority.file)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"KVD_SOCKET": str(tmp_path / "none.sock")},
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("kvd: --")
    assert str(own.key) in line


@pytest.mark.parametrize("names", [",,a,", "a,,", ",a", " , "])
def test_an_operator_without_a_name_is_refused(names: str) -> None:
    words = ["--certificate=/none", "--key=/none", "--authority=/none"]
    done = run("gateway", *words, "--operators", names)
    assert done.returncode == 2
    assert f"'--operators': {names!r} must be names with one comma between two" in done.stderr
    assert "--certificate /none" in run("gateway", *words, "--operators", "").stderr
