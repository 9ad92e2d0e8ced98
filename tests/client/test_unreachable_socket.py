"""Why no daemon is reached is said with what an operator has most likely forgotten."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_client.backoff import problem_of
from kvd_client.companion import CompanionSocket

# What is imported lies where an outsider may not look.
ASK = """
import os, sys
from kvd_client.backoff import problem_of
from kvd_client.companion import CompanionSocket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    CompanionSocket(sys.argv[1], 1.0)
except PermissionError as error:
    print(problem_of(error, sys.argv[1]))
"""


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A socket whose queue of connections is full, and who listens there."""
    path = str(tmp_path / "kvd.sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as neighbour:
        listener.bind(f"{path}.companion")
        listener.listen(0)
        neighbour.connect(f"{path}.companion")
        yield path, listener


def problem(path: str) -> str:
    with pytest.raises(OSError, match=r"\[Errno") as raised:
        CompanionSocket(path, 1.0)
    return problem_of(raised.value, path)


def test_a_directory_that_is_not_mounted_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "kvd.sock")
    said = problem(path)
    assert said.startswith(f"{path}: [Errno 2] No such file or directory; no daemon runs there")
    assert "not mounted" in said


def test_a_socket_without_its_companion_is_not_called_missing(tmp_path: Path) -> None:
    """As where a container has the one file mounted, and not the directory."""
    path = str(tmp_path / "kvd.sock")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
    said = problem(path)
    assert "its .companion is not beside it: mount the directory of both" in said
    assert "no daemon" not in said


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_socket_is_not_called_missing(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "kvd.sock"
    place.touch() if kind == "file" else place.mkdir()
    said = problem(str(place))
    assert said.startswith(f"{place}: [Errno 88] it is there and is no socket: name the daemon's")


def test_a_socket_that_a_daemon_left_behind_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "kvd.sock")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{path}.companion")
    assert "[Errno 111] Connection refused; the daemon that made it is gone" in problem(path)


def test_a_full_queue_of_connections_is_waited_for(crowded: tuple[str, socket.socket]) -> None:
    """It failed at once, and the daemon only had many callers."""
    path, listener = crowded

    def accept() -> None:
        listener.accept()[0].close()

    accepting = threading.Timer(0.3, accept)
    accepting.start()
    CompanionSocket(path, 30.0).close()
    accepting.join()


def test_a_daemon_that_accepts_nobody_is_told(crowded: tuple[str, socket.socket]) -> None:
    path, _ = crowded
    with pytest.raises(TimeoutError, match="too many callers") as raised:
        CompanionSocket(path, 0.1)
    assert "stopped" in problem_of(raised.value, path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_user_out_of_the_group_is_told_of_the_group(shared_directory: Path) -> None:
    shared_directory.chmod(0o750)
    path = str(shared_directory / "kvd.sock")
    done = subprocess.run(
        [sys.executable, "-c", ASK, path], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.startswith(f"{path}: [Errno 13] Permission denied; this user must be in")
    assert "supplementalGroups" in done.stdout
