"""A test that fails shows what the processes wrote that it had started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.process_logs import MOST_LINES
from tests.tidy.source import ROOT

SOURCE = f"""
import os

def test_good(tmp_path):
    (tmp_path / "earlier.log").write_text("of another test")
    os.utime(tmp_path / "earlier.log", (1, 1))

def test_bad(tmp_path):
    lines = [f"line {{n}}" for n in range({MOST_LINES + 1})]
    (tmp_path / "daemon.log").write_bytes("\\n\\n".join(lines).encode() + b"\\xff")
    raise AssertionError
"""


def test_of_a_failed_test_the_logs_end_is_shown(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SOURCE)
    words = ["-p", "tests.process_logs", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words, tmp_path, tmp_path],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    shown = ran.stdout.partition("the end of test_bad0/daemon.log")[2]
    assert "\nline 1\nline 2\n" in shown, ran.stdout
    assert f"\nline {MOST_LINES}\N{REPLACEMENT CHARACTER}\n" in shown, ran.stdout
    assert "line 0\n" not in ran.stdout
    assert "earlier.log" not in ran.stdout
