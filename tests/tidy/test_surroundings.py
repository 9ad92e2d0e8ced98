"""Where and how the tests are started makes no difference to them."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.tidy.source import ROOT

AS_IN_THE_BACKGROUND = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_what_tests_start_takes_signals_also_where_they_run_in_the_background() -> None:
    same = f"{__file__}::{test_what_a_test_starts_takes_signals.__name__}"
    flags = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    words = [sys.executable, "-c", AS_IN_THE_BACKGROUND, *flags, same]
    ran = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_what_a_test_starts_takes_signals() -> None:
    for number in (signal.SIGINT, signal.SIGQUIT):
        with subprocess.Popen(["sleep", "60"]) as sleeper:
            sleeper.send_signal(number)
            assert sleeper.wait(20) == -number
