"""examples/vllm-two-engines as a user runs it, with the tiny model: all of it, and its Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import leaks
from tests.daemons import DAEMON_PYTHON, ROOT

EXAMPLE = ROOT / "examples" / "vllm-two-engines" / "two_engines.py"
PATIENCE_SECONDS = 900.0  # three starts of vLLM's server
DEATH_SECONDS = 10.0  # until the kernel has ended those whose starter is gone

pytestmark = pytest.mark.slow


def start(output: Path, *more: str) -> subprocess.Popen[str]:
    """The example, by kvd's own Python; its engines run by this one."""
    return subprocess.Popen(
        [DAEMON_PYTHON, str(EXAMPLE), "--model", "tiny", "--output", str(output), *more],
        env=os.environ | {"PYTHONPATH": str(ROOT), "KVD_VLLM_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_it_shows_warm_answers_in_every_stage(tmp_path: Path) -> None:
    running = start(tmp_path, "--prompts", "2")
    told, _ = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 0, told
    stages = json.loads((tmp_path / "first-token.json").read_text())["stages"]
    assert [stage["is_warm"] for stage in stages] == [False, True, True, True, True]
    for stage in stages:
        for answer, cold in zip(stage["answers"], stages[0]["answers"], strict=True):
            assert answer["text"] == cold["text"]
            assert (answer["cached_tokens"] > 1000) == stage["is_warm"]
            assert answer["first_token_s"] > 0


def test_ctrl_c_ends_all_that_it_started(tmp_path: Path) -> None:
    before = leaks.look()
    running = start(tmp_path)
    assert running.stdout is not None
    for line in running.stdout:
        if "starting two vLLM servers" in line:
            break
    started = leaks.look().since(before).get("processes", [])
    assert any("kvd" in process or "python" in process for process in started), started
    running.send_signal(signal.SIGINT)
    told, _ = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 130, told
    deadline = time.monotonic() + DEATH_SECONDS
    while (living := [process for process in started if is_alive(process)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not living


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--vllm-python", "/nowhere/python", "can't be run (No such file or directory)"),
        ("--vllm-python", DAEMON_PYTHON, "has no vLLM"),
        ("--output", "/dev/null", "can't be used (File exists)"),
        ("--output", "/proc/nowhere", "can't be used (No such file or directory)"),
    ],
)
def test_what_it_cannot_use_it_says_before_it_starts_anything(
    flag: str, value: str, why: str, tmp_path: Path
) -> None:
    running = start(tmp_path, flag, value)
    told, _ = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 2
    assert f"argument {flag}: {value} {why}: " in told
    assert "preparing the model" not in told


def is_alive(process: str) -> bool:
    """Whether a process of `leaks.look` runs: one that nobody has waited for yet does not."""
    try:
        status = (leaks.PROC / process.split(maxsplit=1)[0] / "stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
