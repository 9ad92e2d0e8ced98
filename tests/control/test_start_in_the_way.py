"""What keeps a daemon from starting is named with its fix, by the start and by its check alike."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.__main__ import main
from kvd.pool import PoolConfig
from tests.control.running_daemon import daemon
from tests.ports import free_port
from tests.small_tmpfs import small_tmpfs

OUTSIDER = 65534  # nobody
# All that is imported later lies where an outsider may not look.
SERVE = """
import encodings.idna, os, sys
import kvd.cli.serve, kvd.cli.doctor.command
from kvd.__main__ import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
checked = main(["serve", "--check", *sys.argv[1:]])
print("START", flush=True)
started = main(["serve", *sys.argv[1:]])
sys.exit(10 * checked + started)
"""
NO_PROC = ("unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "sh")
MOUNT_OF_PROCESSES = 'mount -t proc -o subset=pid proc /proc && exec "$@"'
ONLY_PROCESSES = ("unshare", "--mount", "sh", "-c", MOUNT_OF_PROCESSES, "sh")
ANOTHERS_PROC = ("unshare", "--pid", "--fork", "--kill-child")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def as_outsider(*words: str) -> tuple[int, str, str]:
    """Both exit codes, in one number, and what the check and what the start said."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=30,
    )
    checked, _, started = done.stdout.partition("START")
    return done.returncode, checked, started


@pytest.fixture
def open_place(shared_directory: Path) -> Path:
    """A directory that everybody may enter, with a pool and a socket's directory of nobody's."""
    shared_directory.chmod(0o755)
    for name in ("pool", "run"):
        made = shared_directory / name
        made.mkdir(mode=0o700)
        os.chown(made, OUTSIDER, OUTSIDER)
    return shared_directory


def socket_is_roots(place: Path, _flags: dict[str, str]) -> None:
    """As /run/kvd is, where the daemon is another user's."""
    (place / "run").chmod(0o750)
    os.chown(place / "run", 0, 0)


def socket_was_left_by_root(place: Path, _flags: dict[str, str]) -> None:
    """As a daemon of another user leaves it that was killed; the directory is the new one's."""
    left = place / "run" / "kvd.sock.companion"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(str(left))
    left.chmod(0o660)


def socket_has_no_place(place: Path, flags: dict[str, str]) -> None:
    flags["--socket"] = str(place / "none" / "kvd.sock")


def group_is_roots(_place: Path, flags: dict[str, str]) -> None:
    flags["--socket-group"] = "root"


def pool_is_roots(place: Path, _flags: dict[str, str]) -> None:
    os.chown(place / "pool", 0, 0)


def pool_cannot_be_made(place: Path, flags: dict[str, str]) -> None:
    flags["--pool-directory"] = str(place / "none")


def pool_is_behind_a_wall(place: Path, flags: dict[str, str]) -> None:
    (place / "wall").mkdir(mode=0o700)
    flags["--pool-directory"] = str(place / "wall" / "pool")


def pool_is_closed_for_writing(place: Path, _flags: dict[str, str]) -> None:
    (place / "pool").chmod(0o500)


def extents_are_roots(place: Path, flags: dict[str, str]) -> None:
    (place / "far").mkdir(mode=0o700)
    flags["--extents-directory"] = str(place / "far")


def extents_are_open_to_all(place: Path, flags: dict[str, str]) -> None:
    extents_are_roots(place, flags)
    os.chown(place / "far", OUTSIDER, OUTSIDER)
    (place / "far").chmod(0o777)


def extents_are_closed_for_writing(place: Path, flags: dict[str, str]) -> None:
    extents_are_open_to_all(place, flags)
    (place / "far").chmod(0o500)


def extents_cannot_be_made(place: Path, flags: dict[str, str]) -> None:
    flags["--extents-directory"] = str(place / "far")


def socket_is_open_to_all(place: Path, _flags: dict[str, str]) -> None:
    (place / "run").chmod(0o777)


def port_is_roots(_place: Path, flags: dict[str, str]) -> None:
    flags["--http-port"] = "80"


IN_THE_WAY: dict[Callable[[Path, dict[str, str]], None], tuple[str, str]] = {
    socket_is_roots: ("{place}/run/kvd.sock.companion (Permission denied)", "another --socket"),
    socket_was_left_by_root: ("{place}/run/kvd.sock.companion (Permission denied)", "give it and"),
    socket_has_no_place: ("the socket's directory {place}/none", "choose another --socket"),
    group_is_roots: ("is not in socket_group 'root'", "usermod -aG root"),
    pool_is_roots: ("pool_directory {place}/pool is not safe", "or name another"),
    pool_cannot_be_made: ("pool_directory {place}/none", ""),
    pool_is_behind_a_wall: ("pool_directory {place}/wall/pool can't be used", "name a directory"),
    pool_is_closed_for_writing: ("pool_directory {place}/pool can't be written to", "or name"),
    extents_are_roots: ("extents_directory {place}/far is not safe", "or name another"),
    extents_are_open_to_all: ("extents_directory {place}/far is not safe", "chmod 0700"),
    extents_are_closed_for_writing: ("extents_directory {place}/far can't be written", "or name"),
    extents_cannot_be_made: ("extents_directory {place}/far can't be", "name a"),
    socket_is_open_to_all: ("the socket's directory {place}/run is not safe", "chmod +t"),
    port_is_roots: ("http_port 80", "choose another --http-port"),
}


@needs_root
@pytest.mark.parametrize("stand", IN_THE_WAY, ids=lambda stand: stand.__name__)
def test_another_user_hears_what_is_in_the_way(
    open_place: Path, stand: Callable[[Path, dict[str, str]], None]
) -> None:
    flags = {
        "--pool-directory": str(open_place / "pool"),
        "--socket": str(open_place / "run" / "kvd.sock"),
        "--pool-bytes": "64MiB",
        "--http-port": "0",
        "--config": os.devnull,
    }
    stand(open_place, flags)
    words = [word for pair in flags.items() for word in pair]
    status, *both = as_outsider(*words)
    assert status == 31, both  # 3: faults found; 1: it did not start
    problem, fix = IN_THE_WAY[stand]
    for said in both:
        assert problem.format(place=open_place) in said
        assert fix in said


def check(*words: str) -> int:
    return main(["serve", "--check", "--config", os.devnull, "--pool-bytes", "64MiB", *words])


@pytest.fixture
def place(shared_directory: Path) -> list[str]:
    return [
        "--socket",
        str(shared_directory / "kvd.sock"),
        "--pool-directory",
        str(shared_directory / "new"),
    ]


def test_a_pool_that_the_daemon_would_make_is_no_fault(
    place: list[str], shared_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*place, "--http-port", "0") == 0, capsys.readouterr().out
    assert list(shared_directory.iterdir()) == []


def test_a_pool_that_would_be_made_must_fit(
    place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*place, "--http-port", "0", "--pool-bytes", "7TiB") == 3
    assert "enlarge it" in capsys.readouterr().out


def test_an_http_port_that_is_taken_is_told(
    place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    with daemon("--http-port", str(port)):
        assert check(*place, "--http-port", str(port)) == 3
    said = capsys.readouterr().out
    assert f"http_port {port}" in said
    assert "address already in use" in said
    assert check(*place, "--http-port", str(port)) == 0


def test_a_pool_of_another_daemon_is_told_and_not_disturbed(
    place: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with daemon() as running:
        pool = str(running.pool)
        words = [*place[:2], "--pool-directory", pool, "--http-port", "0"]
        assert check(*words) == 3
        said = capsys.readouterr().out
        assert f"pool_directory {pool} is owned by another kvd (pid {running.process.pid})" in said
        # On its own socket the daemon itself is what is in the way, once.
        assert check("--socket", running.socket, *words[2:]) == 3
        said = capsys.readouterr().out
        assert "another daemon answers" in said
        assert "owned by another kvd" not in said


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("disk", '{directory = "/x"}', "directory: no such option"),
        ("disk", '{directories = ["/x"]}', "directory_bytes: is needed"),
        ("mooncake", "{}", "master: is needed"),
        ("valkey", '{addresses = "a"}', "addresses: 'a' is not"),
        ("s3", '{bucket = "ab", retries = 99}', "retries: 99 is not"),
    ],
)
def test_options_that_a_tier_would_not_take_are_told(
    place: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    options: str,
    said: str,
) -> None:
    file = tmp_path / "kvd.toml"
    file.write_text(f'[[tiers]]\nname = "below"\nkind = "{kind}"\noptions = {options}\n')
    words = ["serve", "--check", "--pool-bytes", "64MiB", "--http-port", "0", *place]
    assert main([*words, "--config", str(file)]) == 3
    assert f"tier below could not start: {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "options"),
    [("s3", 'bucket = "cache"'), ("mooncake", 'master = "127.0.0.1:1"')],
)
def test_a_library_that_a_tier_lacks_is_told_with_what_to_install(
    place: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: str,
) -> None:
    module = {"s3": "obstore", "mooncake": "mooncake.store"}[kind]
    for loaded in ("kvd.tiers.s3.store", "kvd.tiers.s3.bucket"):
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    file = tmp_path / "kvd.toml"
    file.write_text(f'[[tiers]]\nname = "below"\nkind = "{kind}"\noptions = {{{options}}}\n')
    words = ["serve", "--check", "--pool-bytes", "64MiB", "--http-port", "0", *place]
    assert main([*words, "--config", str(file)]) == 3
    said = capsys.readouterr().out
    assert "tier below could not start" in said
    assert f"fix: in kvd's source tree, pip install ./client '.[{kind}]'" in said


def test_a_directory_in_the_place_of_a_table_is_found_by_the_check(
    place: list[str], shared_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shared_directory / "new" / "slots.table"
    path.mkdir(parents=True, mode=0o700)
    path.parent.chmod(0o700)
    assert check(*place, "--http-port", "0") == 3
    assert f"{path} is no plain file" in capsys.readouterr().out


@pytest.mark.parametrize("lacking", ["inodes", "room for checksums"])
def test_what_the_pools_file_system_lacks_is_found_by_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lacking: str
) -> None:
    wanted = PoolConfig(tmp_path, 64 << 20, extent_bytes=4 << 20)
    room = wanted.pool_bytes + wanted.table_bytes + wanted.reserve_bytes + (16 << 10)
    more = ",nr_inodes=20" if lacking == "inodes" else ""
    with small_tmpfs(tmp_path / "mount", room, more) as mount:
        words = ["--pool-directory", str(mount), "--http-port", "0"]
        words += ["--socket", str(tmp_path / "kvd.sock"), "--payload-checksums"]
        assert check(*words, "on") == 3
        assert ("nr_inodes" if more else "enlarge it") in capsys.readouterr().out
        assert check(*words, "auto") == (3 if more else 0)


@pytest.mark.parametrize("words", [[], ["--check"]])
def test_a_python_without_assertions_runs_no_daemon(tmp_path: Path, words: list[str]) -> None:
    flags = ["--pool-directory", str(tmp_path / "pool"), "--socket", str(tmp_path / "kvd.sock")]
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "serve", *flags, *words],
        env=os.environ | {"PYTHONOPTIMIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "unset PYTHONOPTIMIZE" in done.stderr
    assert list(tmp_path.iterdir()) == []


@needs_root
@pytest.mark.parametrize("words", [[], ["--check"]])
@pytest.mark.parametrize(
    ("behind", "said"),
    [
        (NO_PROC, "/proc is not there, or is another pid namespace's"),
        (ANOTHERS_PROC, "/proc is not there, or is another pid namespace's"),
        (ONLY_PROCESSES, "leave systemd's ProcSubset=pid out"),
    ],
    ids=["none", "another's", "without the machine"],
)
def test_a_daemon_whose_proc_lacks_what_it_needs_does_not_run(
    tmp_path: Path, behind: tuple[str, ...], said: str, words: list[str]
) -> None:
    """In another namespace's a mover's pid is of some other process: that one would be ended."""
    flags = ["--pool-directory", str(tmp_path / "pool"), "--socket", str(tmp_path / "kvd.sock")]
    done = serve_behind(behind, *flags, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_a_share_of_memory_that_no_proc_tells_is_refused_with_its_setting() -> None:
    done = serve_behind(NO_PROC, "--check", "--pool-bytes", "50%")
    assert done.returncode == 2
    assert "--pool-bytes" in done.stderr
    assert "in bytes: /proc/meminfo has no MemTotal" in done.stderr


def serve_behind(behind: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    """What a start says and how it ends; a skip where this machine makes no such namespace."""
    if subprocess.run([*behind, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no such namespace can be made")
    return subprocess.run(
        [*behind, sys.executable, "-m", "kvd", "serve", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("short", ["bytes", "files"])
def test_the_command_that_is_advised_makes_the_room_whatever_others_have_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], short: str
) -> None:
    more = ",nr_inodes=8" if short == "files" else ""
    with small_tmpfs(tmp_path / "a pool's", 60 << 20, more) as mount:
        if short == "bytes":
            (mount / "a neighbour's").write_bytes(bytes(40 << 20))
        flags = {"--pool-directory": str(mount / "pool"), "--pool-bytes": "32MiB"}
        flags |= {"--socket": str(tmp_path / "kvd.sock"), "--http-port": "0"}
        check = ["serve", "--check", *(word for pair in flags.items() for word in pair)]
        assert main(check) == 3
        said = capsys.readouterr().out
        (advised,) = re.findall(r"\((mount -o remount,.*?)(?:\)|, or)", said)
        subprocess.run(["sh", "-c", advised], check=True, timeout=30)
        assert main(check) == 0, capsys.readouterr().out


def test_what_stands_where_the_pools_directory_is_to_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    flags = ["--pool-directory", str(tmp_path / "file" / "pool"), "--http-port", "0"]
    assert main(["serve", "--check", *flags, "--socket", str(tmp_path / "kvd.sock")]) == 3
    said = capsys.readouterr().out
    assert f"{tmp_path}/file is no directory" in said
    assert "fix: remove that, or name another pool_directory" in said
    assert "mkdir" not in said
