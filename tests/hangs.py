"""A test that hangs fails, and every thread's stack is told.

pytest-timeout and pytest's own `faulthandler_timeout` set one timer for all of a test, and take it
away at its first failure: a teardown after a failure, and the run after that, may hang for ever.
Here each phase has a timer of its own.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

SECONDS = float(os.environ.get("TEST_HANG_SECONDS", "300"))
"""What no set-up, call or teardown takes: the slowest takes 40 s, on a busy machine longer."""
GRACE_SECONDS = max(5, SECONDS / 5)
"""After so long more the process ends: no signal is heeded where the thread hangs."""


_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr: while a test runs, descriptor 2 is a file that ends with it."""
    config.stash[_STDERR] = os.dup(2)


def _fail(_signal: int, _frame: FrameType | None) -> None:
    faulthandler.dump_traceback(file=2)
    pytest.fail(f"hung for {SECONDS:g} s; captured stderr shows the stacks of all threads")


@contextmanager
def _timed(item: pytest.Item) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _fail)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    stderr = item.config.stash[_STDERR]
    faulthandler.dump_traceback_later(SECONDS + GRACE_SECONDS, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _timed(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _timed(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _timed(item):
        return (yield)
