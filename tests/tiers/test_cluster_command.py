"""`make cluster-up` and `make cluster-down`: a Mooncake Store to try the tier with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.cluster.mooncake import free_port
from kvd.tiers.mooncake.store import MooncakeStore
from tests.tidy.source import ROOT
from tests.tiers.contract import has, keep

pytest.importorskip("mooncake.store", reason="needs the mooncake extra", exc_type=ImportError)


def test_a_cluster_starts_once_serves_and_ends(tmp_path: Path) -> None:
    port, metrics_port = free_port(), free_port()

    def command(*words: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "examples.cluster", *words],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'client' / 'src'}"},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
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
