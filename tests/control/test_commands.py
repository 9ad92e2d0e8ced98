"""Each command as an operator calls it, against a daemon in which an engine has stored blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvd.__main__ import main
from kvd.cli import watching
from kvd.cli.commands import COMMANDS
from kvd.config.values import place
from tests.control.running_daemon import RunningDaemon

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed_engine.py"
BLOCKS = 5  # that the example stores
TOO_LARGE = str(1 << 64)  # for a message
NO_TEXT = "\udcff"  # as Python has a byte that is no UTF-8


@pytest.fixture
def stored(running: RunningDaemon) -> RunningDaemon:
    """The daemon, with the example's blocks in it."""
    command = [sys.executable, str(EXAMPLE), running.socket]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return running


def said(capsys: pytest.CaptureFixture[str], running: RunningDaemon, *words: str) -> str:
    """What a command prints that goes well."""
    assert main([*words, "--socket", running.socket]) == 0, capsys.readouterr()
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], running: RunningDaemon, *words: str) -> Any:
    return json.loads(said(capsys, running, *words, "--json"))


def test_namespaces_are_listed(stored: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    (namespace,) = told(capsys, stored, "namespaces")["namespaces"]
    assert namespace["blocks"] == BLOCKS
    assert namespace["fields"]["model"] in said(capsys, stored, "namespaces")


def test_events_are_the_blocks_that_are_there(
    stored: RunningDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, stored, "events", "--json").splitlines()
    found = [json.loads(line) for line in lines]
    assert len({each["hash"] for each in found}) == BLOCKS
    assert {each["kind"] for each in found} == {"stored"}
    assert len(said(capsys, stored, "events").splitlines()) == BLOCKS
    assert len(said(capsys, stored, "events", "--count", "2").splitlines()) == 2


def test_events_are_followed_from_now_on(stored: RunningDaemon) -> None:
    command = [sys.executable, "-m", "kvd", "events", "--follow", "--json", "--count", "1"]
    following = subprocess.Popen(
        [*command, "--socket", stored.socket], stdout=subprocess.PIPE, text=True
    )
    try:
        # It may not watch yet: what it is to see is done again until it does.
        for _ in range(100):
            subprocess.run(
                [sys.executable, "-m", "kvd", "clear", "--yes", "--socket", stored.socket],
                check=True,
                capture_output=True,
            )
            try:
                out, _ = following.communicate(timeout=1)
                break
            except subprocess.TimeoutExpired:
                continue
        assert json.loads(out)["kind"] == "cleared"
    finally:
        following.kill()
        following.wait()


def test_clear_asks_first(stored: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "kvd", "clear", "--socket", stored.socket]

    def answered(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    declined, silent = answered("n\n"), answered("")
    assert (declined.returncode, silent.returncode) == (1, 1)
    assert f"Forget {BLOCKS} blocks" in declined.stderr
    assert "--yes" in silent.stderr
    agreed = answered("y\n")
    assert (agreed.returncode, agreed.stdout) == (0, f"{BLOCKS} blocks were forgotten\n")


def test_one_namespace_is_cleared(
    stored: RunningDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    (namespace,) = told(capsys, stored, "namespaces")["namespaces"]
    wanted = str(namespace["namespace_id"])
    assert told(capsys, stored, "clear", "--yes", "--namespace", wanted) == {
        "blocks_removed": BLOCKS
    }
    nowhere = ["clear", "--yes", "--namespace", "4242", "--socket", stored.socket]
    assert main(nowhere) == 4
    assert "refused" in capsys.readouterr().err


def test_a_drain_and_its_end(running: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, running, "drain", "--wait", "0") == {"jobs_left": 0}
    assert told(capsys, running, "status")["state"] == "draining"
    assert main(["doctor", "--socket", running.socket]) == 3
    assert "kvd undrain" in capsys.readouterr().out
    assert told(capsys, running, "undrain") == {"was_draining": True}
    assert "not draining" in said(capsys, running, "undrain")


@pytest.mark.parametrize("quota", ["1MiB", "50%", "none"])
def test_a_quota_is_set_and_shown(
    stored: RunningDaemon, capsys: pytest.CaptureFixture[str], quota: str
) -> None:
    (tenant,) = (each["tenant"] for each in told(capsys, stored, "quota")["tenants"])
    told(capsys, stored, "quota", tenant, quota)
    expected = {"1MiB": 1 << 20, "50%": stored.pool_bytes // 2, "none": 0}[quota]
    (shown,) = told(capsys, stored, "quota")["tenants"]
    assert shown["quota_bytes"] == expected
    assert tenant in said(capsys, stored, "quota")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["quota", "nobody", "1GiB"], 4),
        (["quota", "nobody"], 2),
        (["quota", "nobody", "much"], 2),
        (["quota", "default", "25"], 2),  # a share without its sign would clear the tenant
        (["drain", "--wait", "601"], 2),
        (["clear", "--namespace", "0"], 2),
        (["status", "--every", "0"], 2),
        (["clear", "--yes", "--namespace", TOO_LARGE], 2),
        (["events", "--namespace", TOO_LARGE], 2),
        (["record", "/nowhere/trace", "--namespace", TOO_LARGE], 2),
        (["quota", "nobody", TOO_LARGE], 2),
        (["quota", NO_TEXT, "1GiB"], 2),
        (["explain", NO_TEXT], 2),
        (["status", "--remote", NO_TEXT], 2),
        (["gateway", "--address", NO_TEXT, "--certificate=/a", "--key=/a", "--authority=/a"], 2),
    ],
)
def test_a_misuse_and_a_refusal_have_their_own_exit_codes(
    running: RunningDaemon, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    assert main([*words, "--socket", running.socket]) == status
    assert "Traceback" not in capsys.readouterr().err


WRONG_PLACES = ("h:-1", "h:65536", "h:70000", "h:", "h", ":1", "h:x", "::1:1", "h:1/", "h h:1")
PEM = ("--certificate=/a", "--key=/a", "--authority=/a")


@pytest.mark.parametrize("wrong", WRONG_PLACES)
def test_a_place_without_a_port_that_can_be_is_refused_with_the_option(
    capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    for words in (["gateway", f"--address={wrong}"], ["status", f"--remote={wrong}"]):
        assert main([*words, *PEM]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert words[1].partition("=")[0] in said
        assert "HOST:PORT with a port from" in said


def test_places_that_can_be_are_taken() -> None:
    for text in ("127.0.0.1:0", "[::]:9471", "node-7.example:65535", "[fe80::1%eth0]:1"):
        assert place(0)(text) == text
    with pytest.raises(ValueError, match="from 1 to 65535"):
        place(1)("127.0.0.1:0")


def test_the_status_is_watched(stored: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("status", "--watch", "--every", "0.2", "--count", "2")
    lines = said(capsys, stored, *words).splitlines()
    assert len(lines) == 2
    assert all(f"blocks {BLOCKS}" in line and "GB/s" in line for line in lines)


def test_the_live_screen_names_sessions_and_what_moved(
    stored: RunningDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from kvd.cli.status import ask

    now = watching.Glance(ask(stored.socket, 5), 2.0)
    before = watching.Glance(type(now.status)(), 1.0)
    before.status.CopyFrom(now.status)
    now.status.blocks_evicted += 7
    session = now.status.sessions.add(engine_id="[red]engine", world_size=2)
    session.ranks.add(transport="host-shm", bytes_stored=3 * 10**9)
    since = watching.moved(before, now)
    assert since is not None
    assert (since.evicted_per_s, since.stored_per_s) == (7, 3e9)
    Console(width=120).print(watching.screen(now, since))
    shown = capsys.readouterr().out
    for wanted in ("[red]engine", "host-shm", "7 blocks/s", "3.00 GB/s", "1/2"):
        assert wanted in shown
    now.status.incarnation = b"another"
    assert watching.moved(before, now) is None


def test_every_command_helps_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, _, _ in COMMANDS:
        assert f"  {name} " in shown
        if name != "demo":
            assert main([name, "--help"]) == 0
            assert f"Usage: kvd {name}" in capsys.readouterr().out


def test_help_loads_nothing_that_takes_long() -> None:
    code = (
        "import sys; from kvd.__main__ import main; main(['--help']); "
        "print([m for m in ('numpy', 'grpc', 'google.protobuf', 'rich', 'uvloop',"
        " 'prometheus_client') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert shown.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "expected"),
    [("kvd sta", "status"), ("kvd status --wat", "--watch"), ("kvd replay --poli", "--policy")],
    ids=["command", "option", "other option"],
)
def test_a_shell_completes_words(words: str, expected: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    shown = subprocess.run(
        [sys.executable, "-m", "kvd"],
        env=os.environ | asked | {"_KVD_COMPLETE": "bash_complete"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert expected in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed_for_each_shell(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    assert "_KVD_COMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["status", "verify", "namespaces", "events", "quota", "clear"])
def test_every_command_looks_where_the_file_puts_the_daemon(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text(f'socket = "{tmp_path}/elsewhere.sock"\n')
    assert main([name, "--config", str(file)]) == 1
    assert f"{tmp_path}/elsewhere.sock" in capsys.readouterr().err
    assert main([name, "--config", f"{tmp_path}/none.toml"]) == 2


def test_the_gateway_looks_there_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [word for n in ("certificate", "key", "authority") for word in (f"--{n}", "/x")]
    assert main(["gateway", *files, "--config", f"{tmp_path}/none.toml"]) == 2
    assert "none.toml" in capsys.readouterr().err
