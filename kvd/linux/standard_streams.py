"""The standard streams of a process that was started without some of them (`kvd status >&-`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAST = 2  # of their descriptors: standard error's


def fill() -> None:
    """Have those that are closed lead to /dev/null.

    A socket would get the descriptor, whatever is printed would go to its peer, and libuv aborts
    the process where it closes one of these.
    """
    while (made := os.open(os.devnull, os.O_RDWR)) <= LAST:
        os.set_inheritable(made, True)
    os.close(made)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - for good
