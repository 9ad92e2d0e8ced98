"""Processes that end with the one that started them.

Run as `python -m examples.engine.lifetime ARGUMENTS…` it becomes `python ARGUMENTS…`, which the
kernel kills when its starter is gone, even by kill -9.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

REPOSITORY = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
STARTER = "KVD_EXAMPLE_STARTER"  # process id of who started the child, in the child's environment


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; end if it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    starter = os.environ.get(STARTER)
    if starter is not None and os.getppid() != int(starter):
        sys.exit("the process that started this one has ended")


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM that come meanwhile take effect at the end of the `with` block.

    Around a start, so that whoever ends the child knows of it. Only the main thread is
    interrupted, so elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        for each in before:
            signal.signal(each, note)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    for number in came:
        signal.raise_signal(number)


def child_environment() -> dict[str, str]:
    """Environment in which a child finds this package, wherever the parent was started."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread a rank: two ranks and the daemon share a small machine.
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", STARTER: str(os.getpid())}


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
