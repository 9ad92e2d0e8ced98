"""Who connects again and again is kept out by the socket's file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvd.control.access import gate
from kvd.control.access.gate import (
    LONGEST_SHUT_OUT_SECONDS,
    MAX_SHUT_OUT,
    NEW_A_SECOND,
    SHUT_OUT_SECONDS,
    Gate,
)
from kvd.control.sockets import SocketFile
from kvd.linux import acl
from tests.control.running_daemon import RunningDaemon

GREEDY, OTHER = 12346, 12347
AT_ONCE = 8
# Connects and closes until it is kept out, and then until it may come back; or only once.
CONNECT = """
import os, socket, sys, time
path, user, again = sys.argv[1], *map(int, sys.argv[2:])
os.setgid(user); os.setuid(user)
def connect():
    with socket.socket(socket.AF_UNIX) as some:
        some.connect(path)
        return some.getsockname()
connect()
until = time.monotonic() + 60
while again and time.monotonic() < until:
    try:
        connect()
    except PermissionError:
        print("kept out", flush=True)
        break
while again and time.monotonic() < until:
    time.sleep(0.05)
    try:
        connect()
    except PermissionError:
        continue
    print("back", flush=True)
    break
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "socket"
    path.touch()
    path.chmod(0o660)
    try:
        acl.keep_out(path, [1])
        acl.keep_out(path, [])
    except OSError:
        pytest.skip("the file system has no access lists")
    return path


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def connecting(path: str, user: int, *, again: bool) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CONNECT, path, str(user), str(int(again))],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_who_connects_again_and_again_is_kept_out_for_a_while_and_nobody_else(file: Path) -> None:
    running = RunningDaemon("--socket-mode", "0666")
    running.directory.chmod(0o755)
    try:
        running.start()
        socket = Path(running.socket)
        with connecting(running.socket, GREEDY, again=True) as greedy:
            assert greedy.stdout is not None
            assert greedy.stdout.readline() == "kept out\n"
            assert socket.stat().st_mode & 0o777 == 0o666
            assert connecting(running.socket, OTHER, again=False).wait(60) == 0
            assert greedy.stdout.readline() == "back\n"
        assert not acl.has_list(socket)
        assert f"uid {GREEDY} connects again and again" in running.log.read_text()
    finally:
        running.remove()


def test_all_clients_of_a_user_may_come_at_once_and_few_more(file: Path, now: list[float]) -> None:
    some = Gate(SocketFile.of(file), AT_ONCE)
    assert some.note({1: AT_ONCE, 2: AT_ONCE}) == []
    now[0] += 2 / NEW_A_SECOND
    assert some.note({1: 2, 2: 3}) == [2]
    assert acl.has_list(file)
    now[0] += SHUT_OUT_SECONDS
    assert some.note({}) == []
    assert not acl.has_list(file)


def test_who_goes_on_is_kept_out_for_longer_and_is_forgotten_in_the_end(
    file: Path, now: list[float]
) -> None:
    some = Gate(SocketFile.of(file), AT_ONCE)
    seconds = SHUT_OUT_SECONDS
    for _ in range(6):
        assert some.note({1: 2 * AT_ONCE}) == [1]
        now[0] += seconds - 0.01
        assert some.note({1: 2 * AT_ONCE}) == []  # those that had come before
        assert acl.has_list(file)
        now[0] += 0.01
        seconds = min(2 * seconds, LONGEST_SHUT_OUT_SECONDS)
    assert some.note({1: 1}) == []
    assert not acl.has_list(file)
    now[0] += 1 / NEW_A_SECOND
    some.note({})
    assert len(some) == 0


def test_no_more_users_are_kept_out_than_a_list_may_name(file: Path, now: list[float]) -> None:
    some = Gate(SocketFile.of(file), AT_ONCE)
    some.note(dict.fromkeys(range(1, 2 * MAX_SHUT_OUT), AT_ONCE + 1))
    assert len(os.getxattr(file, "system.posix_acl_access")) == 4 + 8 * (MAX_SHUT_OUT + 4)


def test_list_of_somebody_else_stays(file: Path, now: list[float]) -> None:
    acl.keep_out(file, [7])
    before = os.getxattr(file, "system.posix_acl_access")
    some = Gate(SocketFile.of(file), AT_ONCE)
    assert some.note({1: AT_ONCE + 1}) == []
    assert os.getxattr(file, "system.posix_acl_access") == before
    assert not some.wants_a_look


def test_later_daemons_file_keeps_its_own_list(file: Path, now: list[float]) -> None:
    some = Gate(SocketFile.of(file), AT_ONCE)
    assert some.note({1: AT_ONCE + 1}) == [1]
    file.rename(file.with_name("old"))  # else the next may have its inode
    file.touch()
    acl.keep_out(file, [7])
    before = os.getxattr(file, "system.posix_acl_access")
    now[0] += SHUT_OUT_SECONDS
    assert some.note({2: AT_ONCE + 1}) == []
    assert os.getxattr(file, "system.posix_acl_access") == before
    assert not some.wants_a_look


def test_nobody_is_named_on_the_file_of_a_later_daemon(file: Path, now: list[float]) -> None:
    some = Gate(SocketFile.of(file), AT_ONCE)
    file.rename(file.with_name("old"))
    file.touch()
    assert some.note({1: AT_ONCE + 1}) == []
    assert not acl.has_list(file)


def test_pause_before_a_burst_forgives_none_of_it(file: Path, now: list[float]) -> None:
    some = Gate(SocketFile.of(file), AT_ONCE)
    assert some.note({1: 1}) == []
    now[0] += 3600
    assert some.note({1: AT_ONCE + 1}) == [1]


def test_nobody_is_said_to_be_out_whom_no_list_keeps_out(file: Path, now: list[float]) -> None:
    some = Gate(SocketFile.of(file), AT_ONCE)
    assert some.note({0: 2 * AT_ONCE, os.geteuid(): 2 * AT_ONCE}) == []
    assert not acl.has_list(file)
    assert some.note({0: 2 * AT_ONCE, GREEDY: AT_ONCE + 1}) == [GREEDY]
