"""What each signal means to the daemon and its movers, so that none ends them half-way.

By default nearly every signal ends a process where it stands. Those that ask for an end stop the
daemon in order; those that have no meaning for it are ignored: a timer's, a profiler's, one that
was meant for another program. SIGUSR1 changes the log's level. SIGHUP has the
settings read again; from a terminal that closes it is an end, and under nohup it is ignored.
Movers ignore all of them: a terminal sends its signals to the whole group, and control ends its
movers itself.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGXCPU, signal.SIGPWR)
IGNORED = (
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGUSR2,
    signal.SIGIO,
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGSTKFLT,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)


HELD = (signal.SIGHUP, signal.SIGUSR1, *IGNORED)


def hold() -> None:
    """A daemon begins: signals that don't ask for its end wait until `take_held`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """The same, and whatever comes of the start, none waits any longer after it."""
    hold()
    try:
        yield
    finally:
        take_held()


def take_held() -> None:
    """From now on signals come at once; each has its handler by now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def ignore_meaningless() -> None:
    """From now on, in this process and in those that it starts; main thread only."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def ignore_all() -> None:
    """For a process that only its parent ends; main thread only."""
    ignore_meaningless()
    for number in (*STOPPING, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
