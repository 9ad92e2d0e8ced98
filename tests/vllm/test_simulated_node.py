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


def worlds(first: int, count: int) -> list[str]:
    """A line for each of these worlds, and one for all."""
    command = [sys.executable, "-m", "tests.vllm.simulated", "--steps", str(STEPS)]
    command += ["--first", str(first), "--seeds", str(count)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def run() -> list[str]:
    return worlds(0, SEEDS)


@pytest.mark.slow
def test_what_vllm_stores_and_loads_is_right_whatever_befalls_the_node(run: list[str]) -> None:
    stores, loads = map(int, re.findall(r"(\d+) stores, (\d+) loads", run[-1])[0])
    assert stores > 10 * SEEDS, run[-1]
    assert loads > SEEDS, run[-1]


def test_a_seed_says_all_that_happens(run: list[str]) -> None:
    assert len(run) == SEEDS + 1
    assert worlds(SEEDS - 1, 1)[0] == run[SEEDS - 1]


@pytest.mark.parametrize("bug", planted.BUGS, ids=[bug.name for bug in planted.BUGS])
def test_bug_can_be_planted(bug: Bug) -> None:
    compile(changed(bug, source_of(bug)), bug.module, "exec")


def test_a_planted_bug_is_caught() -> None:
    assert planted.ask_for(0, seeds=1, steps=1000).startswith(f"{planted.CAUGHT} in world 1")
