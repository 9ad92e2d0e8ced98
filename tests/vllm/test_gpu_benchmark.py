"""The benchmark of vLLM on a GPU runs, here on the CPU: a mistake in it is met before a GPU is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KVD_PYTHON = ROOT / ".venv" / "bin" / "python"


def test_what_is_loaded_has_the_bytes_that_were_computed(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    command = [str(KVD_PYTHON), "-m", "benchmarks.gpu.vllm_first_token", "--device", "cpu"]
    told = subprocess.run(
        [*command, "--model=gemma", "--quick", "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"KVD_VLLM_PYTHON": sys.executable, "KVD_GPU_RESULTS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    found = json.loads(output.read_text())
    assert found["blocks_compared"] == 7
    assert found["same_tokens"] == 1
    assert [row["tokens"] for row in found["rows"]] == [256]
    killed = [(row["killed"], row["same_tokens"]) for row in found["deaths"]]
    assert killed == [("mover", True)] * 3 + [("daemon", True)] * 3
    assert all(seconds > 0 for taken in found["rows"][0]["seconds"].values() for seconds in taken)
