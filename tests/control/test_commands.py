"""Each command as an operator calls it, against a daemon in which an engine has stored blocks."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from kvd.__main__ import main
from kvd.cli import events, explain, watching
from kvd.cli.commands import COMMANDS
from kvd.cli.status import as_json
from kvd.config.values import place
from kvd_client.daemon import greeted
from kvd_proto.v1 import companion_pb2, events_pb2, events_pb2_grpc, operator_pb2
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


def on_terminal(
    *words: str, typed: bytes = b"", after: str = "", ends: bool = False, **variables: str
) -> tuple[int, str]:
    """How a command ends on a terminal of its own.

    `typed` is typed again and again once it has said `after`: of one Ctrl-C that comes just
    before it reads, Python says nothing until the next key. Where it `ends`, SIGTERM comes then.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "kvd", *words]
        os.execve(sys.executable, command, os.environ | variables)
    said = ""
    try:
        while True:
            if select.select([terminal], [], [], 0.5)[0]:
                said += os.read(terminal, 65536).decode(errors="replace")
            elif after in said:
                os.write(terminal, typed)
                if ends:
                    os.kill(pid, signal.SIGTERM)
    except OSError:  # EIO: it has ended
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said
    finally:
        os.close(terminal)


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


def test_a_list_of_blocks_is_not_waited_for_longer_than_was_said(stored: RunningDaemon) -> None:
    with greeted(stored.socket, companion_pb2.PEER_ROLE_TOOL, "test", 10.0) as link:
        stub = events_pb2_grpc.EventServiceStub(link.channel)
        os.kill(stored.pid, signal.SIGSTOP)
        try:
            request = events_pb2.WatchEventsRequest()
            stream = stub.WatchEvents(request, metadata=link.metadata)
            with pytest.raises(TimeoutError):
                list(events.messages(stream, 0.5))
        finally:
            os.kill(stored.pid, signal.SIGCONT)


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
        (["status", "--count", "2"], 2),
        (["status", "--every", "2"], 2),
        (["quota", "--certificate=/a"], 2),
        (["size", "--server-name=node"], 2),
        (["clear", "--yes", "--key=/a"], 2),
        (["gateway", "--address", NO_TEXT, "--certificate=/a", "--key=/a", "--authority=/a"], 2),
    ],
)
def test_a_misuse_and_a_refusal_have_their_own_exit_codes(
    running: RunningDaemon, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    assert main([*words, "--socket", running.socket]) == status
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["status"], ["events"], ["verify"], ["doctor"], ["record", "f"]])
def test_a_socket_that_no_daemon_can_have_is_a_misuse_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    long = f"/{'x' * 97}"
    assert main([*words, "--socket", long]) == 2
    assert f"socket is '{long}'; it must be a path of at most 97 bytes" in capsys.readouterr().err
    file = tmp_path / "kvd.toml"
    file.write_text("socket = 7\n")
    assert main([*words, "--config", str(file)]) == (3 if words == ["doctor"] else 2)
    said = capsys.readouterr()
    assert "socket is 7 (configuration file); it must be an absolute path" in said.out + said.err


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


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("status", 0),
        ("status --watch --every 0.2", 0),
        ("events", 0),
        ("namespaces", 0),
        ("explain", 0),
        ("quota", 0),
        ("doctor", 1),  # its status is its verdict, and nobody has heard it
    ],
)
def test_a_list_whose_reader_has_enough_has_ended_well(
    stored: RunningDaemon, words: str, status: int
) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "kvd", *words.split(), "--socket", stored.socket]
    try:
        ended = subprocess.run(
            command, stdout=theirs, stderr=subprocess.PIPE, check=False, timeout=60
        )
    finally:
        os.close(theirs)
    assert (ended.returncode, ended.stderr) == (status, b"")


def _incarnation(lines: IO[str]) -> str:
    return next(line for line in lines if '"incarnation"' in line)


def test_a_restart_is_watched_to_its_end() -> None:
    running = RunningDaemon()
    running.start()
    command = [sys.executable, "-m", "kvd", "status", "--watch", "--every", "0.2", "--json"]
    try:
        with subprocess.Popen(
            [*command, "--socket", running.socket],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as watching_it:
            assert watching_it.stdout is not None
            assert watching_it.stderr is not None
            try:
                first = _incarnation(watching_it.stdout)
                running.stop()
                while "no daemon answers" not in watching_it.stderr.readline():
                    assert watching_it.poll() is None
                running.start()
                while _incarnation(watching_it.stdout) == first:
                    assert watching_it.poll() is None
            finally:
                watching_it.kill()
    finally:
        running.remove()


def test_a_daemon_that_is_not_there_is_not_watched_for(tmp_path: Path) -> None:
    assert main(["status", "--watch", "--socket", str(tmp_path / "kvd.sock")]) == 1


@pytest.mark.parametrize(
    ("terminal", "words", "shown"),
    [("dumb", (), "GB/s"), ("xterm", ("--json",), '"incarnation"'), ("xterm", (), "\x1b[?1049h")],
    ids=["that cannot move its cursor", "that wants objects", "that has a screen"],
)
def test_a_terminal_is_shown_what_it_can_show(
    stored: RunningDaemon, terminal: str, words: tuple[str, ...], shown: str
) -> None:
    command = ["status", "--watch", "--count", "1", *words, "--socket", stored.socket]
    status, said = on_terminal(*command, TERM=terminal)
    assert (status, shown in said) == (0, True), said


@pytest.mark.parametrize("by", ["SIGTERM", "Ctrl-C"])
def test_a_watch_that_is_ended_leaves_the_terminal_as_it_was(
    stored: RunningDaemon, by: str
) -> None:
    command = ("status", "--watch", "--socket", stored.socket)
    typed = b"" if by == "SIGTERM" else b"\x03"
    status, said = on_terminal(
        *command, typed=typed, after="\x1b[?1049h", ends=by == "SIGTERM", TERM="xterm"
    )
    assert status == (-signal.SIGTERM if by == "SIGTERM" else 130)
    assert "\x1b[?1049l" in said
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")


def test_ctrl_c_is_no_answer_to_a_question(stored: RunningDaemon) -> None:
    status, said = on_terminal("clear", "--socket", stored.socket, typed=b"\x03", after="[y/N]")
    assert status == 130
    assert "nobody answered" not in said


def test_colours_are_left_out_where_nobody_wants_them() -> None:
    words = ("doctor", "--socket", "/nowhere/kvd.sock")
    assert "\x1b[" in on_terminal(*words, TERM="xterm", NO_COLOR="")[1]
    assert "\x1b[" not in on_terminal(*words, TERM="xterm", NO_COLOR="1")[1]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", ["status --watch --count 1", "clear"])
def test_a_command_without_standard_streams_ends_as_it_would_with_them(
    stored: RunningDaemon, words: str, closed: str
) -> None:
    command = f'exec "$@" {words} --socket {stored.socket} {closed}'
    ended = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-m", "kvd"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == (1 if words == "clear" else 0)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("slow", ["click", "kvd.cli.status"])
def test_ctrl_c_during_an_import_prints_no_traceback(slow: str) -> None:
    """Half a second of each command is imports."""
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == '{slow}':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from kvd.__main__ import main\n"
        "sys.exit(main(['status', '--socket', '/nowhere/kvd.sock']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def test_what_a_later_daemon_tells_is_shown_by_its_number() -> None:
    told = operator_pb2.ExplainedRequest(missed_hash=b"h", cause=99)  # type: ignore[arg-type]
    assert explain.as_json(told)["missed"]["cause"] == "cause_99"
    assert any("cause_99" in line for line in explain.lines(told))
    event = events_pb2.CacheEvent(kind=99, namespace_id=1)  # type: ignore[arg-type]
    told_events = events_pb2.WatchEventsResponse(sequence=1, events=[event])
    (line,) = events.lines(told_events, as_json=True)
    assert json.loads(line)["kind"] == "kind_99"


def test_every_cause_has_its_words() -> None:
    named = {name.removeprefix("MISS_CAUSE_") for name in operator_pb2.MissCause.keys()}  # noqa: SIM118 - no dict
    assert explain._SAID.keys() == named - {"UNSPECIFIED"}


def test_fields_of_a_namespace_have_one_order(
    stored: RunningDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """A protobuf map has none, and whoever compares two answers would see a difference."""
    (namespace,) = told(capsys, stored, "namespaces")["namespaces"]
    assert list(namespace["fields"]) == sorted(namespace["fields"])
    other = operator_pb2.NamespaceStatus(differs={str(n): "model" for n in (10, 9, 100)})
    told_json: Any = as_json(operator_pb2.StatusResponse(namespaces=[other]))
    assert list(told_json["namespaces"][0]["differs"]) == ["9", "10", "100"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["quota", "default", "much"], 'a share of the pool such as "60%"'),
        (["size", "/nowhere", "--pool-bytes", "much"], '"4GiB"'),
        (["size", "/nowhere", "--pool-bytes", "5%"], '"4GiB"'),
    ],
)
def test_a_size_is_asked_for_as_it_may_be_given(
    running: RunningDaemon, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert main([*words, "--socket", running.socket]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert named in said
    assert "memory" not in said


def test_where_there_is_no_such_tenant_it_is_said_where_tenants_are(
    running: RunningDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quota", "nobody", "1GiB", "--socket", running.socket]) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "no tenant 'nobody': `kvd quota` lists those that there are; `tenants` in" in said


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
    console = Console(width=120)
    console.print(watching.screen(now, since, console.size))
    shown = capsys.readouterr().out
    for wanted in ("[red]engine", "host-shm", "7 blocks/s", "3.00 GB/s", "1/2"):
        assert wanted in shown
    now.status.incarnation = b"another"
    assert watching.moved(before, now) is None


def test_the_live_screen_says_that_there_are_no_sessions_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rich.console import Console

    nothing = watching.Glance(operator_pb2.StatusResponse(), 1.0)
    console = Console(width=40)
    console.print(watching.screen(nothing, None, console.size))
    assert "no sessions" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_live_screen_says_of_each_session_it_shows_whether_it_is_usable_and_counts_the_rest(
    columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    status = operator_pb2.StatusResponse(version="0.1.0", state="ready", uptime_seconds=1e5)
    for number in range(200):
        session = status.sessions.add(session_id=number, engine_id="e" * 200, world_size=2)
        session.ranks.add(transport="host_shm", copier="native-avx512")
    console = Console(width=columns, height=24)
    console.print(watching.screen(watching.Glance(status, 1.0), None, console.size))
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    sessions = shown.count("waiting for ranks")
    assert sessions > 5
    assert shown.count("1/2") == sessions
    assert f"and {200 - sessions} more sessions" in shown


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
