"""What a newcomer and an operator are told when something is not as it should be."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvd.config import settings
from kvd.config.values import gid_of, read_group
from kvd_client.daemon import DaemonLink, greeted
from kvd_proto.v1 import operator_pb2
from tests.control.daemon_rig import Caller, RawEngine, block, daemon, identity, namespace
from tests.forked import run as kvd
from tests.ports import free_port
from tests.waiting import wait_until

SMALL = ["--pool-bytes", "8MiB", "--extent-bytes", "4MiB"]


def refused(pool: Path, *flags: str) -> str:
    """The one line with which `kvd serve` refuses to start; no traceback."""
    told = kvd("serve", "--pool-directory", str(pool / "pool"), *SMALL, *flags)
    assert told.returncode in (1, 2)
    assert "Traceback" not in told.stderr, told.stderr
    last = told.stderr.splitlines()[-1]
    assert last.startswith("kvd: ") or "CRITICAL kvd.cli.serve: " in last
    return last


@pytest.fixture
def taken_port() -> object:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_group_that_is_not_there_is_a_wrong_setting(shared_directory: Path) -> None:
    said = refused(shared_directory, "--socket-group", "no-such-group")
    assert "socket_group is 'no-such-group'" in said


@pytest.mark.parametrize("group", [0, "0", "4294967294", "root"])
def test_the_sockets_group_may_be_a_number_that_no_name_has(group: int | str) -> None:
    assert gid_of(read_group(group)) == (0 if group == "root" else int(group))


@pytest.mark.parametrize("group", ["-1", "4294967295", "1" * 30, "two", "\udc80"])
def test_what_is_no_group_is_refused(group: str) -> None:
    with pytest.raises(ValueError, match="a group of this system"):
        read_group(group)


def test_a_taken_port_is_said_with_the_setting_and_what_to_do(
    shared_directory: Path, tmp_path: Path, taken_port: int
) -> None:
    place = ["--socket", str(tmp_path / "k.sock"), "--http-port", str(taken_port)]
    said = refused(shared_directory, *place)
    assert "http_port" in said
    assert "another --http-port" in said


def test_a_socket_that_cannot_be_made_is_said_and_leaves_nothing(
    shared_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "k.sock").mkdir()
    place = ["--socket", str(tmp_path / "k.sock"), "--http-port", "0"]
    assert "another --socket" in refused(shared_directory, *place)
    assert [path.name for path in tmp_path.iterdir()] == ["k.sock"]


def test_a_socket_directory_that_cannot_be_made_is_said_before_the_pool_is_touched(
    shared_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    place = ["--socket", str(tmp_path / "file" / "k.sock"), "--http-port", "0"]
    assert "another --socket" in refused(shared_directory, *place)
    assert not (shared_directory / "pool").exists()


def test_a_tenants_wrong_value_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text('[tenants.acme]\nuids = [1]\nquota = "lots"\n')
    said = kvd("serve", "--config", str(file), "--print-config").stderr
    assert "tenants.acme.quota is 'lots'" in said


def test_a_switch_needs_no_value_and_takes_one() -> None:
    for flags, expected in (
        ([], "false"),
        (["--any-filesystem"], "true"),
        (["--any-filesystem", "false"], "false"),
    ):
        shown = kvd("serve", "--print-config", *flags).stdout
        assert f"any_filesystem = {expected}" in shown


def test_help_tells_what_kind_of_value_a_setting_takes() -> None:
    shown = kvd("serve", "--help").stdout
    assert "VALUE" not in shown
    for setting in settings.SETTINGS:
        assert setting.flag in shown


def test_status_explains_a_socket_that_it_may_not_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvd import __main__
    from kvd.cli import calls

    def denied(*_who: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(calls, "greeted", denied)
    assert __main__.main(["status", "--socket", "/run/kvd/kvd.sock"]) == 1
    said = capsys.readouterr().err
    assert "may not open /run/kvd/kvd.sock:" in said
    assert "no daemon answers" not in said


def test_a_daemon_that_stands_still_is_not_said_to_be_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvd import __main__

    path = str(tmp_path / "kvd.sock")
    with socket.socket(socket.AF_UNIX) as still:
        still.bind(f"{path}.companion")
        still.listen()
        assert __main__.main(["status", "--socket", path, "--timeout", "0.1"]) == 1
    said = capsys.readouterr().err
    assert "does not answer in time" in said
    assert "--timeout" in said
    assert "no daemon answers" not in said


def test_a_refused_status_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvd import __main__
    from kvd.cli import calls

    @contextmanager
    def without_token(*who: Any) -> Iterator[DaemonLink]:
        with greeted(*who) as link:
            yield link._replace(metadata=())

    monkeypatch.setattr(calls, "greeted", without_token)
    with daemon() as running:
        assert __main__.main(["status", "--socket", running.socket]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "UNAUTHENTICATED" in line


def page(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=25) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("companion", ["", ".companion"])
def test_a_socket_that_somebody_removed_is_told_until_it_is_back(companion: str) -> None:
    port = free_port()
    with daemon("--http-port", str(port)) as running:
        path = Path(f"{running.socket}{companion}")
        assert "\nkvd_socket_lost 0.0\n" in page(port, "/metrics")[1]
        moved = path.rename(f"{path}-moved")
        said = f"somebody removed {path}: no engine can connect any more; restart kvd"
        wait_until(lambda: said in running.log.read_text(), "the log tells of it")
        wait_until(lambda: "\nkvd_socket_lost 1.0\n" in page(port, "/metrics")[1], "a new page")
        moved.rename(path)
        wait_until(lambda: f"{path} is back" in running.log.read_text(), "the log tells of that")
        assert running.log.read_text().count(said) == 1


def test_a_daemon_that_an_operator_drains_is_alive_but_not_ready() -> None:
    port = free_port()
    with daemon("--http-port", str(port)) as running:
        assert page(port, "/readyz") == (200, "ready\n")
        operator = Caller(running.socket)
        operator.call(operator.operator.Drain, operator_pb2.DrainRequest(deadline_ms=100))
        assert page(port, "/readyz") == (503, "draining\n")
        assert page(port, "/healthz") == (200, "alive\n")
        operator.close()


def test_messages_of_a_session_are_timed_by_kind() -> None:
    port = free_port()
    with daemon("--http-port", str(port)) as running:
        engine = RawEngine(running.socket)
        engine.store({1: block(1)})
        _, text = page(port, "/metrics")
        assert 'kvd_session_message_seconds_count{kind="step"} 1.0' in text
        assert 'kvd_session_message_seconds_count{kind="lookup"} 0.0' in text
        engine.close()


def test_status_says_once_in_which_fields_two_namespaces_differ() -> None:
    with daemon() as running:
        engines = [
            RawEngine(running.socket, identity=identity(name), namespace=namespace(kv_dtype=dtype))
            for name, dtype in (("one", "float32"), ("two", "float16"))
        ]
        shown = kvd("status", "--socket", running.socket).stdout
        (line,) = [text for text in shown.splitlines() if "differ" in text]
        assert "namespaces 1 and 2 differ in kv_dtype: 'float32', 'float16'" in line
        for engine in engines:
            engine.close()
