"""The command line: a slip is refused; a start that fails says why, and leaves nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import kvd
from kvd.cli.calls import said_plainly
from kvd.config import settings
from kvd.config.settings import ConfigError, socket_of, unknown_variables
from kvd.control.http import HttpServer
from tests.forked import run

IPV6 = Path("/proc/net/if_inet6")
HAS_IPV6 = IPV6.exists() and " lo\n" in IPV6.read_text()


def test_the_version_is_a_flag_too() -> None:
    assert run("--version").stdout == f"kvd {kvd.__version__}\n"


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "soon"])
def test_a_time_that_cannot_be_waited_is_refused(seconds: str) -> None:
    ended = run("status", "--timeout", seconds)
    assert ended.returncode == 2
    assert "must be a number" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", ["version", "--help", "serve --print-config"])
def test_output_that_there_is_no_room_for_is_an_error_in_a_line(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "kvd", *words.split()]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "kvd: the output can't be written: No space left on device\n"


def test_room_that_is_missing_for_the_output_is_not_told_of_the_daemon() -> None:
    with pytest.raises(OSError, match="No space"), said_plainly("/place"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_flags_are_not_abbreviated() -> None:
    ended = run("serve", "--pool-b", "1GiB", "--print-config")
    assert ended.returncode == 2
    assert "--pool-b" in ended.stderr


def test_a_misspelt_variable_is_refused_with_the_name_that_would_do() -> None:
    ended = run("serve", "--print-config", KVD_POOL_BYTE="1GiB")
    assert ended.returncode == 2
    assert "KVD_POOL_BYTE " in ended.stderr
    assert "KVD_POOL_BYTES" in ended.stderr


def test_variables_that_kubernetes_sets_are_nobodys_slip() -> None:
    service = {
        "KVD_SERVICE_HOST": "10.0.0.1",
        "KVD_SERVICE_PORT": "9470",
        "KVD_PORT": "tcp://10.0.0.1:9470",
        "KVD_PORT_9470_TCP_ADDR": "10.0.0.1",
    }
    assert unknown_variables(service) == []
    assert unknown_variables({"KVD_FRUIT": "1", "PATH": "/"}) == ["KVD_FRUIT"]
    with pytest.raises(ConfigError, match="KVD_HTTP_PORT"):
        unknown_variables({"KVD_HTP_PORT": "9470"})


def test_a_command_looks_where_the_file_puts_the_daemon(tmp_path: Path) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text('socket = "/file.sock"\n')
    variables = {"KVD_CONFIG": str(file)}
    assert socket_of(None, variables) == "/file.sock"
    assert socket_of(None, {}, str(file)) == "/file.sock"
    assert socket_of(None, variables | {"KVD_SOCKET": "/variable.sock"}) == "/variable.sock"
    assert socket_of("/flag.sock", variables) == "/flag.sock"
    with pytest.raises(ConfigError, match="can't be read"):
        socket_of(None, {"KVD_CONFIG": "/nowhere/kvd.toml"})


@pytest.mark.parametrize("name", ["config", "socket"])
@pytest.mark.parametrize("command", ["serve --print-config", "status", "doctor"])
@pytest.mark.parametrize("by_flag", [True, False])
def test_an_empty_path_is_refused_by_name_and_not_the_default(
    name: str, command: str, by_flag: bool
) -> None:
    flags, variables = ([f"--{name}", ""], {}) if by_flag else ([], {f"KVD_{name.upper()}": ""})
    ended = run(*command.split(), *flags, **variables)
    source = f"flag --{name}" if by_flag else f"variable KVD_{name.upper()}"
    assert f"{name} is '' ({source})" in ended.stdout + ended.stderr
    assert ended.returncode == (3 if "settings" in ended.stdout else 2)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_socket_is_not_called_missing(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "kvd.sock"
    place.touch() if kind == "file" else place.mkdir()
    ended = run("status", "--socket", str(place))
    assert ended.stderr.startswith(f"kvd: {place} is there and is no socket: name ")
    assert ended.returncode == 1


@pytest.mark.parametrize("name", ["unix:/run/kvd.sock", "/run/no/kvd.sock.companion"])
def test_a_socket_named_otherwise_than_by_its_path_is_told(name: str) -> None:
    ended = run("status", "--socket", name)
    fix = "alone, without unix:" if name.startswith("unix") else "without .companion"
    assert ended.stderr.endswith(f"{fix}\n")
    assert ended.returncode == 1


@pytest.mark.parametrize("flag", ["--socket", "--config"])
def test_one_call_goes_to_one_daemon(flag: str) -> None:
    ended = run("status", "--remote", "far:1", flag, "/near")
    assert ended.stderr == f"kvd: {flag} and --remote name two daemons: give one\n"
    assert ended.returncode == 2


@pytest.mark.parametrize("command", ["size", "record", "replay --trace", "status --key"])
def test_an_empty_path_of_a_file_is_refused(command: str) -> None:
    ended = run(*command.split(), "")
    assert "'' must be a path" in ended.stderr
    assert ended.returncode == 2


def test_a_default_file_that_cannot_be_looked_at_is_passed_over_but_for_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = Path("/etc") / ("x" * 300)  # fails for root too, as a closed folder does for others
    monkeypatch.setattr(settings, "DEFAULT_FILE", closed)
    assert socket_of(None, {}) == "/run/kvd/kvd.sock"
    with pytest.raises(ConfigError, match="can't be read"):
        settings.load({}, {})


@pytest.mark.parametrize("case", ["file at socket", "folder at socket", "pool file", "no tmpfs"])
def test_a_start_that_fails_says_why_in_the_log_and_leaves_nothing(
    case: str, tmp_path: Path
) -> None:
    pool, place = tmp_path / "new" / "pool", tmp_path / "kvd.sock"
    named, fix = place, "--socket"
    match case:
        case "file at socket":
            place.write_text("mine")
        case "folder at socket":
            place.mkdir()
        case "pool file":
            pool = named = tmp_path / "file"
            pool.write_text("mine")
            fix = "pool_directory"
        case _:
            named, fix = pool, "--any-filesystem"
    before = sorted(tmp_path.rglob("*"))
    if case == "no tmpfs" and "tmpfs" in _filesystem(tmp_path):
        pytest.skip("temporary files lie on a tmpfs here")
    flags = {"socket": place, "pool-directory": pool, "pool-bytes": "64MiB", "http-port": 0}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    ended = run("serve", *words, "--log-format", "json")
    assert ended.returncode == 1
    last = json.loads(ended.stderr.splitlines()[-1])
    assert last["level"] == "critical"
    assert str(named) in last["message"]
    assert fix in last["message"]
    assert sorted(tmp_path.rglob("*")) == before
    if case == "file at socket":
        assert place.read_text() == "mine"


AS_JSON = {"KVD_LOG_FORMAT": "json"}


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["serve", "--log-format=json", "--nosuch"], {}, "No such option '--nosuch'"),
        (["serve", "--nosuch", "--log-format", "json", "--policy"], {}, "'--nosuch'"),
        (["serve", "--policy"], AS_JSON, "'--policy' requires an argument: see kvd serve"),
        (["serve", "more"], {"KVD_CONFIG": "kvd.toml"}, "unexpected extra argument"),
        (["gateway", "--log-format", "json"], {}, "Missing option '--certificate'"),
    ],
)
def test_a_misuse_of_a_service_whose_log_a_program_reads_is_one_line_of_json(
    tmp_path: Path, words: list[str], variables: dict[str, str], said: str
) -> None:
    if file := variables.get("KVD_CONFIG"):
        (tmp_path / file).write_text('log_format = "json"\n')
        variables = {"KVD_CONFIG": str(tmp_path / file)}
    ended = run(*words, **variables)
    (line,) = ended.stderr.splitlines()
    assert said in json.loads(line)["message"]
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["serve", "--nosuch"], {}),
        (["serve", "--check", "--nosuch"], AS_JSON),
        (["gateway", "--log-format", "yaml"], {}),
    ],
)
def test_people_read_a_misuse_of_a_service_as_that_of_any_command(
    words: list[str], variables: dict[str, str]
) -> None:
    ended = run(*words, **variables)
    assert ended.stderr.startswith(f"Usage: kvd {words[0]} [OPTIONS]")
    assert ended.returncode == 2


def _filesystem(path: Path) -> str:
    return subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("address", ["a..b", "x" * 300, "\udcff", "a\0b"])
async def test_an_address_that_is_no_name_is_named_with_the_settings(address: str) -> None:
    with pytest.raises(OSError, match=r"http_address.*choose another"):
        await HttpServer({}).listen(address, 1)


async def test_every_address_is_of_both_families() -> None:
    server = HttpServer({})
    await server.listen("::", 0)
    try:
        await _reach("127.0.0.1", server.port)
        if HAS_IPV6:
            await _reach("::1", server.port)
    finally:
        await server.close()


async def test_without_ipv6_every_address_is_every_one_of_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.socket

    def refuse(family: int = socket.AF_INET, *rest: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *rest)

    server = HttpServer({})
    with monkeypatch.context() as patched:
        patched.setattr("kvd.control.http.socket.socket", refuse)
        await server.listen("::", 0)
    try:
        await _reach("127.0.0.1", server.port)
    finally:
        await server.close()


async def _reach(address: str, port: int) -> None:
    _reader, writer = await asyncio.open_connection(address, port)
    writer.close()
