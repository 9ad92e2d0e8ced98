"""A test that hangs ends, wherever it hangs, and the rest is run."""

from __future__ import annotations

import os
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

def test_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    place_without_signals()

def place_without_signals():
    time.sleep(600)

def test_good():
    pass
"""


def test_hangs_are_told_and_ended(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    words = ["-p", "tests.hangs", "-p", "no:cacheprovider", "-c", "/dev/null", "--reruns", "1"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-n", "1", "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        env={**os.environ, "TEST_HANG_SECONDS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "in name_of_the_place" in ran.stdout
    assert "hung for 1 s" in ran.stdout
    assert "in place_without_signals" in ran.stderr
    for name in ("test_call", "test_teardown_after_a_failure", "test_deaf"):
        assert f"test_it.py::{name}" in ran.stdout
    assert "1 passed" in ran.stdout.splitlines()[-1], ran.stdout
