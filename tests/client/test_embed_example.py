"""The example that engine authors start from runs against a real daemon."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from examples import embed_engine
from tests.daemon_process import DaemonProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed_engine.py"


def run(socket: str) -> str:
    command = [sys.executable, str(EXAMPLE), socket]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_the_second_run_loads_what_the_first_stored(daemon: DaemonProcess) -> None:
    assert run(daemon.socket) == "loaded 0 of 80 tokens, KV as computed\n"
    # On a loaded machine it rightly goes on without an answer that takes too long.
    said = [run(daemon.socket)]
    while len(said) < 5 and said[-1] == "loaded 0 of 80 tokens, KV as computed\n":
        said.append(run(daemon.socket))
    assert said[-1] == "loaded 80 of 80 tokens, KV as computed\n", said


def test_it_runs_without_a_daemon(tmp_path: Path) -> None:
    assert run(f"{tmp_path}/nobody.sock") == "loaded 0 of 80 tokens, KV as computed\n"


def test_it_does_not_wait_for_a_daemon_that_was_killed(tmp_path: Path) -> None:
    for name in ("kvd.sock", "kvd.sock.companion"):
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(f"{tmp_path}/{name}")
    assert embed_engine.answers(f"{tmp_path}/kvd.sock") is False
    assert run(f"{tmp_path}/kvd.sock") == "loaded 0 of 80 tokens, KV as computed\n"


def test_without_a_socket_it_says_how_it_is_called() -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False
    )
    assert ended.stderr.startswith("usage: python examples/embed_engine.py SOCKET ")
