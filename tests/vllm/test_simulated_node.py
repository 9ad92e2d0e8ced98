"""Some worlds of the simulation with an engine of vLLM's in each."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.simulation.planted.bug import Bug
from tests.simulation.planted.plant import changed, source_of
from tests.vllm.simulated import planted

SEEDS, STEPS = 4, 1500
SECONDS = 300.0


def test_what_vllm_stores_and_loads_is_right_whatever_befalls_the_node() -> None:
    command = [sys.executable, "-m", "tests.vllm.simulated"]
    command += ["--seeds", str(SEEDS), "--steps", str(STEPS)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = ran.stdout.splitlines()[-1]
    stores, loads = map(int, re.findall(r"(\d+) stores, (\d+) loads", summary)[0])
    assert stores > 10 * SEEDS, summary
    assert loads > SEEDS, summary


def test_a_seed_says_all_that_happens() -> None:
    command = [sys.executable, "-m", "tests.vllm.simulated"]
    command += ["--first", "3", "--seeds", "3", "--steps", "500"]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
        for _ in range(2)
    )
    assert first.stdout.splitlines()[:3] == second.stdout.splitlines()[:3]


@pytest.mark.parametrize("bug", planted.BUGS, ids=[bug.name for bug in planted.BUGS])
def test_bug_can_be_planted(bug: Bug) -> None:
    compile(changed(bug, source_of(bug)), bug.module, "exec")


def test_a_planted_bug_is_caught() -> None:
    assert planted.ask_for(0, seeds=1, steps=1000).startswith(f"{planted.CAUGHT} in world 1")
