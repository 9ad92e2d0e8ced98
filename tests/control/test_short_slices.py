"""How the daemon asks Linux for short slices of the processor."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

LISTENS = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 12)
ASK = """
import os, re, subprocess, sys
from kvd.linux.calls import ask_for_short_slices
os.nice(3)
if sys.argv[1] == "batch":
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
said = ask_for_short_slices(100_000)
assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)) == before
child = "print(open('/proc/self/sched').read())"
try:
    shown = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout
except OSError:
    shown = ""
found = re.search(r"se.slice +: +(\\d+)", shown)
print(said, found[1] if found else "unknown")
"""


@pytest.mark.parametrize("policy", ["other", "batch"])
def test_short_slices_change_nothing_else_and_pass_on_to_what_is_started(policy: str) -> None:
    asked = [sys.executable, "-c", ASK, policy]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    said, slice_ns = done.stdout.split()
    if policy == "batch":
        assert said == "False", "the operator's choice was not left alone"
        assert slice_ns != "100000"
    elif slice_ns != "unknown" and LISTENS:
        assert (said, slice_ns) == ("True", "100000")
