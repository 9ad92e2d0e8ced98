"""SIGHUP reloads what may change while the daemon runs, and refuses the rest by name."""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.__main__ import main
from kvd.cli.reload import CHANGEABLE, QUOTA_UNITS, Reloader
from kvd.config import SETTINGS, Config, load
from kvd.config.settings import MAX_CONFIG_BYTES
from kvd.control.access.tenants import TenantPolicy
from kvd.control.sessions.session import SessionTerms
from kvd.core.events import QuotaSet
from kvd.runtime.turns import UNITS_AT_ONCE, FairQueue
from kvd_proto.v1 import engine_pb2, events_pb2, operator_pb2
from tests.control.daemon_of_small_bounds import VARIABLE
from tests.control.daemon_rig import (
    HASH_BYTES,
    Caller,
    RawEngine,
    RawScheduler,
    RunningDaemon,
    block,
    hashes,
    identity,
    query,
    refusal,
    store_job,
)
from tests.waiting import wait_until

IGNORING = (
    "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
HEEDING = IGNORING.replace("SIG_IGN", "SIG_DFL")  # whoever runs the tests may ignore it (nohup)
# A name service that doesn't answer when it is asked for a user.
SILENT_NAMES = (
    "import pwd, runpy, signal, sys, time; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
    "pwd.getpwnam = lambda name: time.sleep(3600); sys.argv[:] = sys.argv[3:];"
    "runpy.run_module('kvd', run_name='__main__', alter_sys=True)"
)
DONE = "the settings were reloaded"
HIT = 1


class Configured(RunningDaemon):
    """A daemon whose settings lie in a file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.file = self.directory / "kvd.toml"
        self.file.write_text(text)
        self.more_flags = ("--config", str(self.file))
        self.behind = (sys.executable, "-c", HEEDING)

    def reload(self, text: str) -> str:
        """Write the file and tell the daemon; what it logged of that."""
        self.file.write_text(text)
        return self.tell_to_reload()

    def tell_to_reload(self, pid: int = 0) -> str:
        """Tell it, whatever lies in the file's place."""
        said = self.log.stat().st_size
        os.kill(pid or self.pid, signal.SIGHUP)
        wait_until(lambda: "reloaded" in self.log.read_text()[said:])
        return self.log.read_text()[said:]


@pytest.fixture
def running() -> Iterator[Configured]:
    running = Configured(f'[tenants.acme]\ngids = [{os.getgid()}]\nquota = "8MiB"\n')
    try:
        running.start()
        yield running
    finally:
        running.remove()


def quotas(running: RunningDaemon) -> dict[str, int]:
    caller = Caller(running.socket)
    told = {tenant.tenant: tenant.quota_bytes for tenant in caller.status().tenants}
    caller.close()
    return told


def test_tenants_quotas_and_log_level_change_while_engines_go_on(running: Configured) -> None:
    engine = RawScheduler(running.socket)
    engine.step(end_step=True)
    gid = os.getgid()
    said = running.reload(
        'log_level = "warning"\n'
        f'[tenants.acme]\ngids = [{gid}]\nquota = "4MiB"\n'
        '[tenants.new]\nuids = [4242]\nquota = "1MiB"\n'
    )
    assert f"{DONE}; changed: log_level, tenants" in said
    assert quotas(running) == {"acme": 4 << 20, "new": 1 << 20}
    assert "operator: reload tenant='acme' quota_bytes=4194304" in said
    engine.step(end_step=True)
    engine.close()
    assert running.stop() == 0
    assert "INFO kvd.cli.serve: draining" not in running.log.read_text()


def test_what_an_engine_may_hold_and_open_changes_while_it_goes_on(running: Configured) -> None:
    tenant = running.file.read_text()
    engine = RawEngine(running.socket)
    engine.store({number: block(number) for number in range(64)})
    asked = engine_pb2.LookupRequest(
        session_id=engine.scheduler.id, queries=[query(list(range(64)))]
    )

    def leased() -> int:
        (answer,) = engine.scheduler.call(engine.scheduler.engine.Lookup, asked).answers
        return sum(status & 3 == HIT for status in answer.statuses)

    said = running.reload(f"lease_share = 0.01\nsessions_per_user = 1\n{tenant}")
    assert f"{DONE}; changed: sessions_per_user, lease_share" in said
    assert leased() == 20  # 0.01 of 8 MiB
    other = RawScheduler(running.socket, identity=identity("e1"))
    assert refusal(lambda: other.opened)[1] == "LIMIT_EXCEEDED"
    other.close()
    running.reload(f"lease_share = 0.25\nsubmit_deadline_seconds = 0.5\n{tenant}")
    assert leased() == 64
    second = RawScheduler(running.socket, identity=identity("e1"))
    assert second.opened.session_id
    second.close()
    job = store_job(99, [1000], [0])
    engine.scheduler.step(stores=[job], end_step=True)  # whose rank says nothing
    assert engine.ended(99).reason == "EXPIRED"
    engine.close()


def test_systemd_hears_of_drains_of_what_needs_a_restart_and_that_a_reload_failed(
    tmp_path: Path,
) -> None:
    running = Configured("")
    running.environment["NOTIFY_SOCKET"] = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(running.environment["NOTIFY_SOCKET"])
        systemd.settimeout(30)

        def hears(status: str) -> bool:
            return any(systemd.recv(4096).decode() == f"STATUS={status}" for _ in range(1000))

        try:
            running.start()
            serving = f"serving on {running.socket}"
            running.file.write_text('log_level = "error"\npolicy = "arc"\nsocket_mode = "0600"\n')
            os.kill(running.pid, signal.SIGHUP)  # of which the log says nothing
            assert hears(f"{serving}; need a restart: socket_mode, policy")
            running.file.write_text("no toml")
            running.tell_to_reload()
            assert hears(f"{serving}; the last reload changed nothing: the log says why")
            running.reload('log_level = "info"\n')
            assert hears(serving)
            running.reload('policy = "arc"\n')
            assert main(["drain", "--socket", str(running.socket)]) == 0
            draining = f"draining, until `kvd undrain`, on {running.socket}"
            assert hears(f"{draining}; need a restart: policy")
            running.reload('log_level = "info"\n')
            assert hears(draining)
            assert main(["undrain", "--socket", str(running.socket)]) == 0
            assert hears(serving)
            assert running.stop() == 0
        finally:
            running.remove()


def test_what_needs_a_restart_is_refused_by_name_and_the_rest_is_taken(
    running: Configured,
) -> None:
    gid = os.getgid()
    said = running.reload(
        f'policy = "arc"\nlease_ttl_ms = 500\n[tenants.acme]\ngids = [{gid}]\nquota = "2MiB"\n'
    )
    assert "these settings need a restart and stay as they were: policy, lease_ttl_ms" in said
    assert quotas(running) == {"acme": 2 << 20}
    caller = Caller(running.socket)
    assert caller.status().policy == "lru"
    caller.close()


@pytest.mark.parametrize(
    "text",
    ["no toml", 'pool_size = "4GiB"\n', '[tenants.acme]\nuids = ["no-such"]\n', "", "# of kvd\n"],
    ids=["no toml", "unknown key", "unknown user", "emptied", "comments alone"],
)
def test_settings_that_cannot_be_read_change_nothing(running: Configured, text: str) -> None:
    before = quotas(running)
    said = running.reload(text)
    assert "were not reloaded, and nothing has changed" in said
    assert quotas(running) == before


def test_a_pipe_in_the_files_place_is_not_waited_for(running: Configured) -> None:
    before = quotas(running)
    running.file.unlink()
    os.mkfifo(running.file)
    assert "is no plain file; put a plain file there" in running.tell_to_reload()
    assert quotas(running) == before


def test_a_huge_file_is_not_read_through(running: Configured) -> None:
    before = quotas(running)
    with running.file.open("ab") as file:
        file.truncate(1 << 30)
    assert f"has more than {MAX_CONFIG_BYTES} bytes" in running.tell_to_reload()
    highest = Path(f"/proc/{running.pid}/status").read_text().split("VmHWM:")[1].split()[0]
    assert int(highest) << 10 < 1 << 30
    assert quotas(running) == before


def test_settings_that_came_by_a_pipe_are_not_taken_back(running: Configured) -> None:
    before = quotas(running)
    running.stop()
    running.behind = ("sh", "-c", f'cat {running.file} | exec "$@"', "sh", *running.behind)
    running.more_flags = ("--config", "/dev/stdin")
    running.start()
    assert quotas(running) == before
    caller = Caller(running.socket)
    daemon = caller.status().process_id
    caller.close()
    assert "is no plain file; put a plain file there" in running.tell_to_reload(daemon)
    assert quotas(running) == before
    os.kill(daemon, signal.SIGTERM)


def test_a_file_that_is_gone_takes_nothing_back(
    running: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = quotas(running)
    running.stop()
    # As the default file's place, which may be empty.
    code = (
        f"import pathlib, kvd.config.settings as s; s.DEFAULT_FILE = pathlib.Path('{running.file}')"
    )
    (running.directory / "sitecustomize.py").write_text(code)
    path = f"{running.directory}:{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    running.more_flags = ()
    running.start()
    assert quotas(running) == before
    running.file.unlink()
    assert "can't be read: No such file" in running.tell_to_reload()
    assert quotas(running) == before


def test_a_reload_asks_anew_whom_a_name_means(running: Configured) -> None:
    engine = RawScheduler(running.socket)
    name = pwd.getpwuid(os.getuid()).pw_name
    said = running.reload(f'[tenants.acme]\nuids = ["{name}"]\nquota = "8MiB"\n')
    assert f"{DONE}; changed: tenants" in said
    engine.step(end_step=True)  # it is the same tenant's still
    engine.close()
    assert quotas(running) == {"acme": 8 << 20}


def test_a_name_service_that_stands_still_keeps_no_daemon_from_its_end(
    running: Configured,
) -> None:
    running.stop()
    running.behind = (sys.executable, "-c", SILENT_NAMES)
    running.start()
    said = running.log.stat().st_size
    running.file.write_text('[tenants.acme]\nuids = ["silent"]\n')
    os.kill(running.pid, signal.SIGHUP)
    wait_until(lambda: "has not ended yet" in running.log.read_text()[said:])
    os.kill(running.pid, signal.SIGHUP)  # which waits for the one under way
    assert quotas(running) == {"acme": 8 << 20}, "it serves on"
    assert running.stop() == 0


def test_what_counts_before_the_file_is_named() -> None:
    running = Configured("")
    running.more_flags += ("--lease-share", "0.5")
    running.environment["KVD_DRAIN_SECONDS"] = "20"
    try:
        running.start()
        said = running.reload("lease_share = 0.125\ndrain_seconds = 30\n")
        named = "lease_share (flag --lease-share), drain_seconds (variable KVD_DRAIN_SECONDS)"
        assert f"counts before it: {named}" in said
        assert "changed: nothing" in said
        said = running.reload("lease_share = 0.5\n")  # which says the same
        assert "counts before" not in said
    finally:
        running.remove()


def test_a_reload_that_changes_nothing_keeps_what_an_operator_set(running: Configured) -> None:
    text = running.file.read_text()
    said = running.reload(text)
    assert f"{DONE}; changed: nothing" in said
    assert "operator:" not in said


def test_a_tenants_letters_turn_no_terminal_around_where_its_quota_is_set(
    running: Configured, capsys: pytest.CaptureFixture[str]
) -> None:
    running.reload('[tenants."t\\u202e"]\nuids = [4242]\n')
    assert main(["quota", "t\u202e", "1MiB", "--socket", running.socket]) == 0
    assert capsys.readouterr().out.startswith("quota of t\\u202e: 1.0 MiB")


def test_a_tenant_that_the_file_names_no_more_has_no_quota(running: Configured) -> None:
    running.reload(f"[tenants.other]\ngids = [{os.getgid()}]\n")
    assert quotas(running)["acme"] == 0


def test_sessions_of_a_user_who_lost_the_tenant_end(running: Configured) -> None:
    engine = RawScheduler(running.socket)
    assert engine.opened.session_id
    said = running.reload("[tenants.acme]\nuids = [4242]\n")
    assert f"operator: reload session_ended={engine.opened.session_id}" in said
    caller = Caller(running.socket)
    wait_until(lambda: not caller.status().sessions)
    caller.close()
    engine.close()


@pytest.mark.skipif(os.getuid() != 0, reason="the daemon's own user operates, but for root")
def test_who_is_given_a_tenant_is_told_what_it_has(running: Configured) -> None:
    tenant = f'[tenants.acme]\ngids = [{os.getgid()}]\nquota = "8MiB"\n'
    running.reload(f"root_operates = false\n{tenant}")
    engine = RawEngine(running.socket)
    engine.store({number: block(number) for number in range(4)})
    running.reload(f"root_operates = false\n{tenant.replace('[tenants.acme]', '[tenants.new]')}")
    watcher = Caller(running.socket)
    told = watcher.events.WatchEvents(
        events_pb2.WatchEventsRequest(), metadata=watcher.metadata, timeout=15
    )
    assert not next(told).events
    running.reload(f"root_operates = false\n{tenant}[tenants.new]\ngids = [{os.getgid()}]\n")
    snapshot = next(told)
    assert (snapshot.snapshot_end, sum(len(event.hashes) for event in snapshot.events)) == (
        True,
        4 * HASH_BYTES,
    )
    told.cancel()
    watcher.close()
    engine.close()


@pytest.mark.skipif(os.getuid() != 0, reason="the daemon's own user operates, but for root")
def test_who_operates_no_more_records_no_more(running: Configured) -> None:
    engine, reader = RawScheduler(running.socket), Caller(running.socket)
    recording = reader.operator.Record(
        operator_pb2.RecordRequest(), metadata=reader.metadata, timeout=15
    )
    next(recording)
    tenant = f"[tenants.acme]\ngids = [{os.getgid()}]\n"
    running.reload(f"root_operates = false\n{tenant}")
    request = engine_pb2.RequestLookup(request_id="r", prompt_tokens=17, prompt_hashes=hashes(1))
    engine.step(requests=[request], end_step=True)
    assert refusal(lambda: list(recording))[0] == "PERMISSION_DENIED"
    reader.close()
    engine.close()


@pytest.mark.skipif(os.getuid() != 0, reason="the daemon's own user operates, but for root")
def test_who_loses_a_tenant_is_told_of_its_requests_and_namespaces_no_more(
    running: Configured,
) -> None:
    mine, tool = f"gids = [{os.getgid()}]\n", Caller(running.socket)
    running.reload(f"root_operates = false\n[tenants.acme]\n{mine}")
    engine = RawScheduler(running.socket)
    number = engine.opened.namespace_id
    engine.step(requests=[engine_pb2.RequestLookup(request_id="secret")], end_step=True)
    explain = operator_pb2.ExplainRequest(request_id="secret")
    every = operator_pb2.ListNamespacesRequest()
    (told,) = tool.call(tool.operator.Explain, explain).requests
    assert (told.request_id, told.tenant) == ("secret", "acme")
    assert tool.call(tool.operator.ListNamespaces, every).namespaces[0].namespace_id == number
    running.reload(f"root_operates = false\n[tenants.new]\n{mine}[tenants.acme]\nuids = [4242]\n")
    assert not tool.call(tool.operator.Explain, explain).requests
    assert not tool.call(tool.operator.ListNamespaces, every).namespaces
    assert [each.tenant for each in tool.status().tenants] == ["new"]
    tool.close()
    engine.close()


def test_many_reloads_at_once_and_one_before_the_daemon_serves_do_no_harm() -> None:
    running = Configured("")
    try:
        running.start()
        for _ in range(20):
            running.process.send_signal(signal.SIGHUP)
        caller = Caller(running.socket)
        assert caller.status().state == "ready"
        caller.close()
        assert running.stop() == 0
    finally:
        running.remove()


def test_however_often_settings_are_reloaded_the_last_outcome_is_told() -> None:
    running = Configured("")
    floods = "kvd.observability.floods"
    running.environment = {VARIABLE: f"{floods}:LINES_AT_ONCE=2 {floods}:LINE_SECONDS=3600.0"}
    running.module = "tests.control.daemon_of_small_bounds"
    try:
        running.start()
        for seconds in range(1, 6):
            assert "nothing has changed" in running.reload("nonsense = 1\n")
            assert "drain_seconds" in running.reload(f"drain_seconds = {seconds}\n")
    finally:
        running.remove()


def test_under_nohup_a_hangup_is_ignored() -> None:
    running = RunningDaemon()
    running.behind = (
        sys.executable,
        "-c",
        IGNORING,
    )
    try:
        running.start()
        running.process.send_signal(signal.SIGHUP)
        caller = Caller(running.socket)
        assert caller.status().state == "ready"
        caller.close()
        running.stop()
        assert DONE not in running.log.read_text()
    finally:
        running.remove()


class CountingDriver:
    """Takes events; knows between how many turns of the loop they came."""

    def __init__(self) -> None:
        self.turns = FairQueue()
        self.long_work = self
        self.quotas: dict[str, int] = {}

    def next_token(self) -> int:
        return 1

    def call(self, event: QuotaSet) -> None:
        self.quotas[event.tenant] = event.quota_bytes


def of_tenants(quota: str) -> str:
    return "".join(f'[tenants.t{n}]\nuids = [{n}]\nquota = "{quota}"\n' for n in range(1000))


async def test_others_have_their_turns_while_thousands_of_quotas_change(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"

    def read() -> Config:
        assert threading.current_thread() is not threading.main_thread(), "the loop waits"
        return load({"config": str(file)}, {})

    file.write_text(of_tenants("1MiB"))
    reloader = Reloader(load({"config": str(file)}, {}), read)
    file.write_text(of_tenants("2MiB"))
    driver, terms = CountingDriver(), SessionTerms(2000, 1)

    async def none_lost(_pace: object) -> None:
        """No user has lost a tenant."""

    common = SimpleNamespace(end_other_tenants=none_lost, terms=terms, draining=False)
    control: Any = SimpleNamespace(
        driver=driver, tenants=TenantPolicy(), common=common, stopping=False
    )
    reloading = asyncio.ensure_future(reloader.reload(control))
    seen: set[int] = set()
    while not reloading.done():
        await asyncio.sleep(0)
        seen.add(len(driver.quotas))
    reloading.result()
    assert set(driver.quotas.values()) == {2 << 20}
    most_at_once = max(b - a for a, b in itertools.pairwise(sorted(seen)))
    assert most_at_once <= UNITS_AT_ONCE // QUOTA_UNITS


def test_a_reload_that_comes_during_another_is_done_after_it(running: Configured) -> None:
    """The last file counts, whatever was being read when it came."""
    for mebibytes in range(1, 30):
        running.file.write_text(
            f'[tenants.acme]\ngids = [{os.getgid()}]\nquota = "{mebibytes}MiB"\n'
        )
        os.kill(running.pid, signal.SIGHUP)
    wait_until(lambda: quotas(running) == {"acme": 29 << 20})


def test_tenants_that_a_reload_takes_out_are_shown_no_longer(running: Configured) -> None:
    """Else they stand in the place of those that come, where there is room for so many."""
    for number in range(3):
        table = f"[tenants.day-{number}]\ngids = [{os.getgid()}]\n"
        running.reload(table + f'[tenants.night-{number}]\nuids = [1]\nquota = "1MiB"\n')
    wait_until(lambda: quotas(running) == {"day-2": 0, "night-2": 1 << 20})


def test_settings_that_may_change_are_settings() -> None:
    assert set(CHANGEABLE) <= {setting.name for setting in SETTINGS} | {"tenants"}


def test_the_guide_names_what_may_change() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text()
    [line] = [line for line in text.split("\n\n") if line.startswith("SIGHUP")]
    assert all(f"`{name}`" in line for name in CHANGEABLE)
