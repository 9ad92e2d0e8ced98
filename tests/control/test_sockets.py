"""Two daemons that want the same socket: one serves there, and its files are its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.control.sockets import SocketTaken, refuse_taken
from tests.control.daemon_rig import Caller
from tests.control.running_daemon import RunningDaemon
from tests.waiting import wait_until


@pytest.fixture
def pair() -> Iterator[tuple[RunningDaemon, RunningDaemon]]:
    """Two daemons, not started, of one socket and of a pool each."""
    one, two = RunningDaemon(), RunningDaemon()
    two.socket = one.socket
    try:
        yield one, two
    finally:
        two.remove()
        one.remove()


def serves(daemon: RunningDaemon) -> bool:
    return "serves on" in daemon.log.read_text()


def test_a_daemon_that_ends_leaves_its_successors_sockets_alone(
    pair: tuple[RunningDaemon, RunningDaemon],
) -> None:
    old, new = pair
    old.start()
    for path in Path(old.socket).parent.glob("kvd.sock*"):
        path.unlink()
    new.start()
    wait_until(lambda: serves(new), "the new one")
    assert old.stop() == 0
    caller = Caller(new.socket)
    assert caller.status().pool.slots_ready == 0
    caller.close()
    assert new.stop() == 0
    assert list(Path(new.socket).parent.glob("kvd.sock*")) == []


def test_of_two_daemons_that_start_at_once_one_serves() -> None:
    place = Path(tempfile.mkdtemp(prefix="kvd-test."))
    shared = Path(tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir="/dev/shm"))
    lock = os.open(place, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # so that both get to the door before it opens
    started = [begin(place, shared / f"pool {number}") for number in range(2)]
    logs = [place / f"pool {number}.log" for number in range(2)]
    try:
        wait_until(lambda: all("recovered" in log.read_text() for log in logs), "both")
        os.close(lock)
        wait_until(lambda: any("serves on" in log.read_text() for log in logs), "one of them")
        wait_until(lambda: any(each.poll() is not None for each in started), "the other's end")
        assert sorted("serves on" in log.read_text() for log in logs) == [False, True]
        said = f"another daemon answers on {place / 'kvd.sock'};"
        assert sorted(said in log.read_text() for log in logs) == [False, True]
        caller = Caller(str(place / "kvd.sock"))
        assert caller.status().pool.slots_ready == 0
        caller.close()
    finally:
        for each in started:
            each.kill()
            each.wait()
        shutil.rmtree(place)
        shutil.rmtree(shared)


def test_a_daemon_takes_no_companion_socket_of_another_for_its_own(
    pair: tuple[RunningDaemon, RunningDaemon],
) -> None:
    one, slip = pair
    one.start()
    slip.socket = f"{one.socket}.companion"
    slip.launch()
    wait_until(lambda: serves(slip) or slip.has_ended, "the second one")
    assert f"another daemon answers on {slip.socket};" in slip.log.read_text()
    caller = Caller(one.socket)
    assert caller.status().pool.slots_ready == 0
    caller.close()


def begin(place: Path, pool: Path) -> subprocess.Popen[bytes]:
    flags = ["--pool-directory", str(pool), "--pool-bytes", str(8 << 20), "--http-port", "0"]
    command = [sys.executable, "-m", "kvd", "serve", "--socket", str(place / "kvd.sock"), *flags]
    with (place / f"{pool.name}.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


@pytest.mark.parametrize("kind", [socket.SOCK_DGRAM, socket.SOCK_SEQPACKET])
def test_a_live_socket_of_another_kind_is_left_alone(kind: int, tmp_path: Path) -> None:
    place = tmp_path / "kvd.sock"
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(place))
        if kind == socket.SOCK_SEQPACKET:
            other.listen()
        with pytest.raises(SocketTaken, match="choose another --socket"):
            refuse_taken(place, tmp_path / "kvd.sock.companion")
    refuse_taken(place, tmp_path / "kvd.sock.companion")  # nobody's by now
