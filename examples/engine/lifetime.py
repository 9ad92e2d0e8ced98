"""Processes that end with the one that started them.

Run as `python -m examples.engine.lifetime ARGUMENTS…` it becomes `python ARGUMENTS…`, which the
kernel kills when its starter is gone, even by kill -9.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def child_environment() -> dict[str, str]:
    """Environment in which a child finds this package, wherever the parent was started."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread a rank: two ranks and the daemon share a small machine.
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
