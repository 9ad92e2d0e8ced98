"""Planted bugs: all can be planted still; `make planted` asks whether each is caught."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulation.planted.__main__ import ask_for
from tests.simulation.planted.bug import Bug
from tests.simulation.planted.bugs import BUGS
from tests.simulation.planted.plant import changed, source_of

NAMES = [bug.name for bug in BUGS]


@pytest.mark.parametrize("bug", BUGS, ids=NAMES)
def test_bug_can_be_planted(bug: Bug) -> None:
    compile(changed(bug, source_of(bug)), bug.module, "exec")


def test_bugs_have_names_of_their_own() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert len(BUGS) >= 40


def test_planted_bug_is_caught() -> None:
    said = ask_for(NAMES.index("pending said to be a hit"), seeds=2, steps=300)
    assert said.startswith("caught with"), said
    assert "HIT for a block that is not readable" in said


def test_bug_whose_source_moved_on_is_told() -> None:
    gone = Bug("gone", "kvd.core.sparse", "no such line anywhere", "pass")
    with pytest.raises(AssertionError, match="its source stands 0 times"):
        changed(gone, source_of(gone))


def test_command_tells_the_score() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.planted"]
    asked = ["--only", "page that lacks the last tag", "--seeds", "3", "--steps", "300"]
    done = subprocess.run([*command, *asked], capture_output=True, text=True, check=False)
    assert "all: 1 of 1" in done.stdout, done.stdout + done.stderr
