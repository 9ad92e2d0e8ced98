"""`make` lists what it can do, and says plainly what it can't."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.tidy.source import ROOT

TARGETS = {
    "bench", "bench-lmcache", "bench-sglang", "bench-vllm", "chaos", "clean",
    "cluster-down", "cluster-up", "conformance-sglang", "conformance-vllm", "demo", "demo-gpu",
    "fuzz", "gpu-check", "help", "lint", "mutants", "planted", "proto", "release", "sim",
    "sim-vllm", "soak", "test", "test-sglang", "test-vllm", "type", "venv",
}  # fmt: skip


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Run make here; never a target that would install anything."""
    return subprocess.run(
        ["make", "--no-print-directory", *words],
        cwd=ROOT,
        # `make test ARGS=...` would hand its arguments on to whatever is made here.
        env={
            k: v for k, v in os.environ.items() if k not in ("ARGS", "MAKEFLAGS", "MAKEOVERRIDES")
        },
        check=False,
        capture_output=True,
        text=True,
    )


def test_make_alone_lists_every_target() -> None:
    listed = re.findall(r"^  make ([a-z-]+) +\S", make().stdout, re.MULTILINE)
    assert set(listed) == TARGETS
    assert len(listed) == len(TARGETS)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there may be a GPU here")
def test_the_gpu_check_says_that_there_is_no_gpu() -> None:
    ran = make("gpu-check")
    assert "There is no GPU here" in ran.stdout
    assert "make test" in ran.stdout, "it says what covers that code instead"
    assert ran.returncode != 0, "nothing was checked, so nothing passed"
