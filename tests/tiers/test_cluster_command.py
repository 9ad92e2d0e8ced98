"""`make cluster-up` and `make cluster-down`: a Mooncake Store to try the tier with."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from examples.cluster.mooncake import free_port
from kvd.tiers.mooncake.store import MooncakeStore
from tests.tidy.source import ROOT
from tests.tiers.contract import has, keep

pytest.importorskip("mooncake.store", reason="needs the mooncake extra", exc_type=ImportError)


ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'client' / 'src'}"}
TOO_MUCH = str(1 << 27)  # MiB: a node never begins to lend it


def cluster(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "examples.cluster", *words],
        cwd=directory,
        env=ENVIRONMENT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted_leaves_nothing_running(
    number: signal.Signals, tmp_path: Path
) -> None:
    port = free_port()
    ports = ("--port", str(port), "--metrics-port", str(free_port()))
    with subprocess.Popen(
        [sys.executable, "-m", "examples.cluster", "up", "--megabytes", TOO_MUCH, *ports],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        assert any("starting a node" in line for line in running.stdout)
        running.send_signal(number)
        running.communicate(timeout=60)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize(
    ("flag", "value"), [("--megabytes", "-1"), ("--port", "99999"), ("--metrics-port", "x")]
)
def test_a_number_that_will_not_do_is_refused_by_its_flag(
    flag: str, value: str, tmp_path: Path
) -> None:
    ran = cluster(tmp_path, "up", flag, value)
    assert ran.returncode == 2
    assert f"argument {flag}: '{value}' is no whole number from 1 to" in ran.stderr
    assert "starting" not in ran.stdout


def test_a_cluster_starts_once_serves_and_ends(tmp_path: Path) -> None:
    port, metrics_port = free_port(), free_port()

    def command(*words: str) -> str:
        ran = cluster(tmp_path, *words)
        ran.check_returncode()
        return ran.stdout

    assert "no Mooncake Store" in command("down")
    ports = ("--port", str(port), "--metrics-port", str(metrics_port))
    said = command("up", "--megabytes", "32", *ports)
    try:
        assert "starting the master" in said
        assert f'master = "127.0.0.1:{port}"' in said
        again = command("up", *ports)
        assert "starting" not in again
        assert f"runs at 127.0.0.1:{port}" in again
        store = MooncakeStore({"master": f"127.0.0.1:{port}"})
        keep(store, [1])
        assert has(store, 1)
        store.close()
    finally:
        assert "has ended" in command("down")
    assert "no Mooncake Store" in command("down")
