"""The doctor finds what is wrong: each fault is planted, and named with its fix."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvd import config, native
from kvd.__main__ import main
from kvd.cli.doctor import checks
from kvd.cli.doctor.checks import MAX_SESSIONS_SHOWN, Diagnosis, Subject, findings
from kvd.cli.doctor.system import OWN_VERSION, System
from kvd.cli.status import as_text
from kvd.config.tiers import TierRule
from kvd.linux import limits
from kvd.tiers.store import LibraryMissing
from kvd_proto.v1 import operator_pb2 as pb
from tests.control.daemon_rig import RawScheduler, identity
from tests.control.running_daemon import daemon

GIB = 1 << 30
SOUND = System(
    processor="x86_64",
    kernel=(6, 12),
    descriptors=1 << 20,
    locked_bytes=-1,
    node_bytes=(64 * GIB,),
    processors_allowed=None,
    gpus=(),
    gpus_closed=(),
    has_gpu_driver=False,
    cuda_problem="",
    has_cupy=True,
    native_problem="",
    client_version=OWN_VERSION,
)


@pytest.fixture
def place(shared_directory: Path) -> Path:
    pool = shared_directory / "pool"
    pool.mkdir(mode=0o700)
    return shared_directory


def subject(place: Path, system: System = SOUND, **settings: Any) -> Subject:
    """A sound machine and a daemon on it that answers, but for what is given."""
    flags = {"pool_directory": str(place / "pool"), "pool_bytes": "64MiB"} | settings
    flags = {"socket": str(place / "kvd.sock"), "http_port": "0", **flags}
    read = config.load(flags, {"KVD_CONFIG": os.devnull})
    return Subject(system, read, pb.StatusResponse(version=OWN_VERSION, state="ready"))


def faults(on: Subject) -> list[Diagnosis]:
    return [found for found in findings(on) if found.is_fault]


def test_on_a_sound_machine_nothing_is_wrong(place: Path) -> None:
    assert faults(subject(place)) == []


GPU = replace(SOUND, gpus=("/dev/nvidia0",))
ON_THE_MACHINE = {
    "no shared memory": (SOUND, {"pool_directory": "/proc/none"}, "is not there", "mount -t tmpfs"),
    "not in memory": (SOUND, {"pool_directory": "/usr"}, "not on tmpfs", "Mount one there"),
    "too large": (SOUND, {"pool_bytes": "7TiB"}, "the pool needs", "enlarge it"),
    "few descriptors": (replace(SOUND, descriptors=64), {}, "64 file", "LimitNOFILE"),
    "half a processor": (replace(SOUND, processors_allowed=0.5), {}, "0.50", "CPUQuota"),
    "another processor": (replace(SOUND, processor="aarch64"), {}, "aarch64", "x86-64"),
    "memlock": (replace(GPU, locked_bytes=65536), {}, "lock 64 KiB", "LimitMEMLOCK"),
    "hidden GPUs": (replace(SOUND, has_gpu_driver=True), {}, "no /dev/nvidia", "--gpus all"),
    "closed GPUs": (replace(GPU, gpus_closed=GPU.gpus), {}, "not open /dev/nvidia0", "group"),
    "no libcuda": (replace(GPU, cuda_problem="no such file"), {}, "no such file", "driver"),
    "no CuPy": (replace(GPU, has_cupy=False), {}, "CuPy", "'.[cuda12]'"),
    "another client": (replace(SOUND, client_version="0.0.1"), {}, "kvd-client 0.0.1", "pip"),
}


@pytest.mark.parametrize("fault", ON_THE_MACHINE)
def test_a_fault_of_the_machine_is_found_with_its_fix(place: Path, fault: str) -> None:
    system, settings, problem, fix = ON_THE_MACHINE[fault]
    on = replace(subject(place, system, **settings), status=None, before_start=True)
    (found,) = faults(on)
    assert problem in found.problem
    assert fix in found.fix or fix in found.problem


@pytest.mark.parametrize("command", ["doctor", "serve --check"])
@pytest.mark.parametrize("fault", ON_THE_MACHINE)
def test_both_commands_tell_each_planted_fault_and_fail(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    command: str,
) -> None:
    system, settings, problem, fix = ON_THE_MACHINE[fault]
    monkeypatch.setattr(System, "read", classmethod(lambda *_: system))
    flags = {"pool_directory": str(place / "pool"), "pool_bytes": "64MiB"} | settings
    flags |= {"socket": str(place / "kvd.sock"), "http_port": "0"}
    file = tmp_path / "kvd.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in flags.items()))
    assert main([*command.split(), "--config", str(file)]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert problem in said
    assert fix in said


@pytest.mark.parametrize(
    ("system", "settings", "problem"),
    [
        (replace(SOUND, kernel=(5, 10)), {}, "Linux 5.10"),
        (replace(SOUND, native_problem="no compiler"), {}, "no compiler"),
        (replace(SOUND, node_bytes=(GIB, GIB)), {"pool_bytes": "4GiB"}, "2 nodes"),
        (replace(SOUND, descriptors=512), {}, "512 file"),
    ],
    ids=["kernel", "numpy", "NUMA", "descriptors"],
)
def test_what_could_be_better_is_no_fault(
    place: Path, system: System, settings: dict[str, str], problem: str
) -> None:
    on = subject(place, system, **settings)
    assert faults(on) == []
    assert any(problem in found.problem for found in findings(on))


@pytest.mark.parametrize(
    ("chosen", "fix"),
    [
        ("off", "set KVD_NATIVE to auto"),
        ("fastest", "set KVD_NATIVE to auto"),
        ("auto", "pip install --force-reinstall --no-deps --no-cache-dir"),
    ],
)
def test_the_fix_for_slower_copies_is_for_their_reason(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, fix: str
) -> None:
    monkeypatch.setenv(native.VARIABLE, chosen)
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "copies.so")  # where none was built
    _, problem = native.find()
    (found,) = (
        found
        for found in findings(subject(place, replace(SOUND, native_problem=problem)))
        if problem in found.problem
    )
    assert found.fix.startswith(fix) or f"({fix})" in found.fix


@pytest.mark.parametrize("ready", [0, 3])
@pytest.mark.parametrize("more", [-1, 0, 1, 400])
def test_of_many_sessions_that_serve_nothing_the_first_are_named_and_the_rest_counted(
    place: Path, more: int, ready: int
) -> None:
    status = pb.StatusResponse(version=OWN_VERSION, state="ready")
    for number in range(ready):
        status.sessions.add(session_id=number, engine_id="ready", usable=True)
    for number in range(MAX_SESSIONS_SHOWN + more):
        status.sessions.add(session_id=100 + number, engine_id=f"e{number}", world_size=2)
    told = [found.problem for found in faults(replace(subject(place), status=status))]
    named = [each for each in told if "has 0 of 2 ranks" in each]
    assert len(named) == MAX_SESSIONS_SHOWN + min(more, 0)
    assert [each for each in told if each.startswith("session 100 of e0 ")]
    assert [each for each in told if "more sessions" in each] == (
        [f"{more} more sessions serve nothing, as these"] if more > 0 else []
    )


def test_what_the_daemon_says_of_itself_is_told(place: Path) -> None:
    status = pb.StatusResponse(version="9.9.9", state="draining")
    status.sessions.add(engine_id="e", world_size=2)
    status.tiers.add(name="disk", problem="it is full")
    on = replace(subject(place), status=status)
    said = " ".join(found.problem + found.fix for found in faults(on))
    for wanted in ("9.9.9", "kvd undrain", "0 of 2 ranks", "it is full"):
        assert wanted in said
    assert "workers" not in said  # who can't come in while it drains
    status.state = "serving"
    (fix,) = [found.fix for found in faults(on) if "workers" in found.fix]
    assert "want of memory" in fix  # of its movers, which the workers can't know


@pytest.mark.parametrize(
    ("engine_id", "world_size"), [("e", 1), ("", 0)], ids=["it lives", "it has ended"]
)
def test_a_session_whose_mover_does_not_end_lacks_no_worker(
    place: Path, engine_id: str, world_size: int
) -> None:
    on = subject(place)
    assert on.status is not None
    session = on.status.sessions.add(engine_id=engine_id, world_size=world_size)
    session.ranks.add(mover_pid=4711)
    (found,) = faults(on)
    assert "an end among its movers (pid 4711)" in found.problem
    assert "workers" not in found.fix
    shown = "\n".join(as_text(on.status))  # `kvd status`
    assert "waiting for movers' ends" in shown
    assert "waiting for ranks" not in shown


@pytest.mark.parametrize(("short_lives", "said"), [(0, False), (1, False), (2, True)])
def test_a_tier_that_ends_again_and_again_is_not_well_while_it_serves(
    place: Path, short_lives: int, said: bool
) -> None:
    on = subject(place)
    assert on.status is not None
    on.status.tiers.add(
        name="disk", serving=True, problem="killed by SIGKILL", short_lives=short_lives
    )
    found = [each.problem for each in faults(on)]
    told = [line for line in as_text(on.status) if "WARNING" in line]  # `kvd status`
    for lines in (found, told):
        assert any("2 times in a row" in each and "SIGKILL" in each for each in lines) is said


def test_what_a_tier_notes_while_it_serves_is_told(place: Path) -> None:
    """As of a disk that somebody else has filled, or that the kernel made read-only."""
    on = subject(place)
    assert on.status is not None
    before = findings(on)
    on.status.tiers.add(name="disk", serving=True, notes=["/data: writes fail: it is full"])
    (found,) = (found for found in findings(on) if found not in before)
    assert found.problem == "tier disk: /data: writes fail: it is full"
    assert not found.is_fault


@pytest.mark.parametrize(
    ("count", "every", "said"),
    [(0, False, ""), (1, False, "1 namespace,"), (2, False, "2 namespaces,"), (0, True, "every ")],
)
def test_status_says_what_a_shared_tier_has_yet_to_delete(
    place: Path, count: int, every: bool, said: str
) -> None:
    on = subject(place)
    assert on.status is not None
    on.status.tiers.add(name="far", serving=True, namespaces_undeleted=count, all_undeleted=every)
    told = [line for line in as_text(on.status) if "yet to delete" in line]
    assert [said in line for line in told] == ([True] if said else [])
    assert not faults(on)


def test_what_a_library_that_is_missing_needs_is_told_whole(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise LibraryMissing("no library (module: none)", "as root: pip install it")

    monkeypatch.setattr(checks, "require_library", refuse)
    tier = TierRule("below", "kvd.tiers.kinds:open_s3", options={"bucket": "cache"})
    on = subject(place)
    on = replace(on, config=replace(on.config, tiers=(tier,)), status=None, before_start=True)
    (found,) = faults(on)
    assert found.problem == "tier below could not start: no library (module: none)"
    assert found.fix == "as root: pip install it"


@pytest.mark.parametrize("answers", [True, False])
def test_a_pool_that_is_closed_to_an_engines_user_is_no_fault_of_a_daemon_that_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """As under systemd, whose /var/lib/kvd nobody else may enter."""

    def refuse(_: Subject) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checks, "_require_place", refuse)
    on = subject(place)
    found = faults(on if answers else replace(on, status=None))
    assert any("can't be used by uid" in each.problem for each in found) is not answers


@pytest.mark.parametrize("closed", ["kvd", "kvd/kvd.sock.companion"])
def test_who_may_not_reach_the_socket_hears_of_no_pool(
    place: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """An engine's user needs the socket alone, and could do nothing about another's pool."""

    def refuse(_: Subject) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (place / "kvd").mkdir()
    if closed != "kvd":  # what is in a directory that he may not enter he does not see
        (place / closed).touch()
    monkeypatch.setattr(checks, "_require_place", refuse)
    monkeypatch.setattr(os, "access", lambda path, _: path != place / closed)
    for pool in (place / "pool", "/proc/none"):
        on = subject(place, socket=str(place / "kvd" / "kvd.sock"), pool_directory=str(pool))
        (found,) = faults(replace(on, status=None))
        assert found.about == "socket"
        assert "this user may not" in found.problem


@pytest.mark.parametrize("fault", ["nobody", "a folder", "left behind", "closed", "kept out"])
def test_a_socket_that_cannot_be_asked_is_explained(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    companion = place / "kvd.sock.companion"
    if fault == "a folder":  # as Docker makes of a mount that is not there
        (place / "kvd.sock").mkdir()
    elif fault != "nobody":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(companion))
    if fault == "closed":
        if os.geteuid() == 0:
            pytest.skip("root may open every socket")
        companion.chmod(0)
    if fault == "kept out":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(place / "kvd.sock"))
        monkeypatch.setattr(os, "access", lambda path, _: path != place / "kvd.sock")
    (found,) = faults(replace(subject(place), status=None))
    wanted = {
        "nobody": "no daemon has",
        "a folder": "is no socket",
        "left behind": "nobody answers",
        "closed": "may not open",
        "kept out": "connects again and again",
    }
    assert wanted[fault] in found.problem


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the test is whatever it is: only what is planted counts."""
    monkeypatch.setattr(System, "read", classmethod(lambda *_: SOUND))


@pytest.mark.usefixtures("quiet")
def test_the_command_has_an_exit_code_for_each_outcome(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon() as running:
        file = tmp_path / "kvd.toml"
        file.write_text(
            f'socket = "{running.socket}"\npool_directory = "{running.pool}"\n'
            'pool_bytes = "32MiB"\nextent_bytes = "4MiB"\n'
        )
        words = ["doctor", "--config", str(file), "--json"]
        assert main(words) == 0, capsys.readouterr()
        assert json.loads(capsys.readouterr().out)["faults"] == 0
        # The place is taken, so another daemon could not start there.
        assert main(["serve", "--check", "--config", str(file)]) == 3
        assert "another daemon answers" in capsys.readouterr().out
    assert main(words) == 3
    capsys.readouterr()
    file.write_text('pool_bytes = "many"\n')
    assert main(words) == 3
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["about"] == "settings"
    free = ["--pool-directory", str(place / "pool"), "--socket", str(place / "kvd.sock")]
    free += ["--http-port", "0"]
    assert main(["serve", "--check", "--pool-bytes", "64MiB", *free]) == 0
    assert list((place / "pool").iterdir()) == []


@pytest.mark.usefixtures("quiet")
def test_an_engines_id_neither_moves_the_cursor_nor_looks_like_a_finding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "e\x1b[2J\u202e\x85\nWRONG  pool: it is gone\n       fix: rm -r /"
    with daemon() as running:
        scheduler = RawScheduler(running.socket, identity=identity(name))
        assert scheduler.opened.session_id
        assert main(["doctor", "--socket", running.socket]) == 3
        scheduler.close()
    said = capsys.readouterr().out
    assert "has 0 of 1 ranks" in said
    assert all(line.isprintable() for line in said.split("\n"))
    assert not [line for line in said.split("\n") if line.startswith("WRONG  pool")]


@pytest.mark.usefixtures("quiet")
def test_a_daemon_with_flags_of_its_own_is_judged_by_its_own_pool(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with daemon() as running:
        assert main(["doctor", "--socket", running.socket]) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("quiet")
def test_a_daemon_whose_socket_was_removed_is_to_be_restarted_not_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with daemon() as running:
        Path(running.socket).unlink()
        assert main(["doctor", "--socket", running.socket]) == 3
        said = capsys.readouterr().out
        assert "somebody removed it" in said
        assert "systemctl restart kvd" in said
        assert main(["status", "--socket", running.socket]) == 1
        said = capsys.readouterr().err
        assert "somebody removed it" in said
        assert "restart it (systemctl restart kvd)" in said


@pytest.mark.usefixtures("quiet")
def test_a_daemon_whose_companion_socket_was_removed_is_to_be_restarted_not_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with daemon() as running:
        Path(f"{running.socket}.companion").unlink()
        assert main(["doctor", "--socket", running.socket]) == 3
        said = capsys.readouterr().out
        assert f"a daemon answers on {running.socket}, and {running.socket}.companion is" in said
        assert "systemctl restart kvd" in said
        assert "start it" not in said
        assert main(["status", "--socket", running.socket]) == 1
        assert "its .companion is not beside it" in capsys.readouterr().err


@pytest.mark.usefixtures("quiet")
def test_a_daemon_that_has_the_pool_and_no_socket_is_not_to_be_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As while it begins: a start beside it would be refused."""
    file = tmp_path / "kvd.toml"
    with daemon() as running:
        file.write_text(f'pool_directory = "{running.pool}"\nsocket = "{tmp_path}/kvd.sock"\n')
        assert main(["doctor", "--config", str(file)]) == 3
        said = capsys.readouterr().out
    assert f"pid {running.pid} has the pool {running.pool}: it begins" in said
    assert "start it" not in said


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("left", ["nothing", "a killed daemon's socket"])
def test_a_daemon_that_begins_is_told_from_one_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], left: str
) -> None:
    """Its socket comes last, and one that a killed daemon left is there until then."""
    file = tmp_path / "kvd.toml"
    if left != "nothing":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(tmp_path / "kvd.sock.companion"))
    with daemon() as running:
        file.write_text(f'pool_directory = "{running.pool}"\nsocket = "{tmp_path}/kvd.sock"\n')
        begins = f"pid {running.pid} has the pool {running.pool}: it begins"
        for command in ("status", "events", "verify"):
            assert main([command, "--config", str(file)]) == 1
            assert begins in capsys.readouterr().err, command
        assert main(["doctor", "--config", str(file)]) == 3
        said = capsys.readouterr().out
        assert begins in said
        assert "wait" in said
        assert "start it again" not in said
    assert main(["status", "--config", str(file)]) == 1
    assert "it begins" not in capsys.readouterr().err


@pytest.mark.usefixtures("quiet")
def test_flags_of_a_daemon_count_before_a_file_of_another_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of these extents the daemon's pool could not have a single one."""
    file = tmp_path / "kvd.toml"
    file.write_text('pool_bytes = "16GiB"\nextent_bytes = "1GiB"\npool_directory = "/proc/none"\n')
    with daemon() as running:
        words = ["doctor", "--config", str(file), "--socket", running.socket]
        assert main(words) == 0, capsys.readouterr().out


def test_limits_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    for name, meminfo in (("node0", "Node 0 MemTotal:  2048 kB\n"), ("node1", "MemTotal: 0 kB")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meminfo").write_text(meminfo)
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "limits").write_text(
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max locked memory         65536                unlimited            bytes     \n"
        "Max open files            unlimited            524288               files     \n"
    )
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert limits.node_bytes(tmp_path) == (2048 << 10,)
    assert limits.limits_of(7, tmp_path) == (-1, 65536)
    assert limits.processor_quota(tmp_path / "cpu.max") == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert limits.processor_quota(tmp_path / "cpu.max") is None
    assert limits.kernel_release("6.1.0-18-amd64") == (6, 1)
    assert "nothing.so" in limits.why_not_loaded("nothing.so")
    assert System.read().processor


@pytest.fixture
def other_settings(tmp_path: Path) -> Path:
    """A file of settings whose pool is not there: the daemon's own is given by flags."""
    file = tmp_path / "kvd.toml"
    file.write_text(f'pool_directory = "{tmp_path}/none"\n')
    return file


def test_of_a_daemon_that_does_not_answer_no_other_place_is_looked_at(
    other_settings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own was given by flags, and what the settings name is not there."""
    with daemon() as running:
        command = ["doctor", "--socket", running.socket, "--config", str(other_settings)]
        os.kill(running.pid, signal.SIGSTOP)
        try:
            assert main([*command, "--timeout", "0.5"]) == 3
        finally:
            os.kill(running.pid, signal.SIGCONT)
    said = capsys.readouterr().out
    assert "does not answer in time" in said
    assert "systemctl restart kvd" in said
    assert "shared memory" not in said


def test_of_a_daemon_that_was_killed_no_other_pool_is_asked_for(
    other_settings: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own was given by flags: the one of the settings was never meant to be there."""
    with daemon() as running:
        running.stop(signal.SIGKILL)
        assert main(["doctor", "--socket", running.socket, "--config", str(other_settings)]) == 3
    said = capsys.readouterr().out
    assert "the daemon that made it is gone" in said
    assert "and start it again" in said
    assert "shared memory" not in said
