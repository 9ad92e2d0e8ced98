"""A test that hangs ends, wherever it hangs, and so does the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.tidy.source import ROOT

HANGS = """
import signal, threading, time
import pytest

def test_call():
    name_of_the_place()

def name_of_the_place():
    threading.Event().wait()

@pytest.fixture
def never_torn_down():
    yield
    threading.Event().wait()

def test_teardown_after_a_failure(never_torn_down):
    assert False

def test_good():
    pass
"""
DEAF = """
import signal, time

def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    place_without_signals()

def place_without_signals():
    time.sleep(600)
"""


def run_of(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words = ("-p", "tests.hangs", "-p", "no:cacheprovider", "-c", "/dev/null", *words)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--rootdir", place, place],
        cwd=ROOT,
        env={**os.environ, "TEST_HANG_SECONDS": "5"},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_hangs_are_told_and_ended(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    ran = run_of(tmp_path, "--reruns", "1", "-n", "1")
    assert "in name_of_the_place" in ran.stdout
    assert "hung for 5 s" in ran.stdout
    for name in ("test_call", "test_teardown_after_a_failure"):
        assert f"test_it.py::{name}" in ran.stdout
    assert "1 passed" in ran.stdout.splitlines()[-1], ran.stdout


def test_a_hang_that_no_signal_reaches_ends_its_worker_and_the_run_fails(tmp_path: Path) -> None:
    (tmp_path / "test_deaf.py").write_text(DEAF)
    for n in range(5):
        (tmp_path / f"test_good_{n}.py").write_text("def test_good():\n    pass\n")
    beside = re.search(r"^BESIDE := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert beside is not None
    ran = run_of(tmp_path, *beside.group(1).split(), "2")
    assert ran.returncode == 1, ran.stdout
    assert "in place_without_signals" in ran.stderr
    assert "test_deaf.py::test_deaf" in ran.stdout
    assert "1 failed" in ran.stdout.splitlines()[-1], ran.stdout
