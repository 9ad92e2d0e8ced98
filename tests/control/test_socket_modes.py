"""Who may open the sockets: their mode and group say so, and the kernel holds to it."""

from __future__ import annotations

import grp
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.running_daemon import RunningDaemon, daemon

OUTSIDER = 65534  # nobody
CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[2]))
for path in sys.argv[3:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("in")
    except PermissionError:
        print("refused")
"""


def as_outsider(*paths: str, group: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", CONNECT, str(group), str(OUTSIDER), *paths],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("mode", "group", "outcome"),
    [("0660", OUTSIDER, "refused"), ("0660", 0, "in"), ("0600", 0, "refused")],
)
def test_only_who_the_mode_and_the_group_name_may_open_the_sockets(
    mode: str, group: int, outcome: str
) -> None:
    with daemon("--socket-mode", mode) as running:
        running.directory.chmod(0o755)
        paths = [running.socket, running.socket + ".companion"]
        assert {Path(path).stat().st_mode & 0o777 for path in paths} == {int(mode, 8)}
        assert as_outsider(*paths, group=group) == [outcome, outcome]


@pytest.fixture
def grouped() -> Iterator[RunningDaemon]:
    """A daemon, not yet started, whose sockets are a group's of which the daemon's user is none."""
    running = RunningDaemon("--socket-group", grp.getgrgid(OUTSIDER).gr_name)
    running.directory.chmod(0o755)
    try:
        yield running
    finally:
        running.remove()


def test_the_sockets_group_may_enter_the_directories_that_are_made_for_it(
    grouped: RunningDaemon,
) -> None:
    grouped.socket = str(grouped.directory / "made" / "too" / "kvd.sock")
    grouped.behind = ("sh", "-c", 'umask 077; exec "$@"', "sh")
    grouped.start()
    assert as_outsider(grouped.socket, group=OUTSIDER) == ["in"]
    assert as_outsider(grouped.socket, group=OUTSIDER - 1) == ["refused"]
    assert "keeps users" not in grouped.log.read_text()


def test_a_directory_that_was_there_is_left_as_it_is_and_the_log_says_whom_it_keeps_out(
    grouped: RunningDaemon,
) -> None:
    directory = grouped.directory / "standing"
    directory.mkdir(mode=0o750)
    grouped.socket = str(directory / "kvd.sock")
    grouped.start()
    assert as_outsider(grouped.socket, group=OUTSIDER) == ["refused"]
    name = grp.getgrgid(OUTSIDER).gr_name
    assert f"{directory} keeps users of socket_group {name} out" in grouped.log.read_text()
    assert directory.stat().st_gid == os.getegid()
