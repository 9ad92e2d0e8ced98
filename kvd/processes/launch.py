"""Starts processes of control's: by exec, and with nothing left when it fails."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import kvd
import kvd_proto
from kvd.linux.proc import let_end_sooner, start_time_of
from kvd.processes import release

# Where memory is short one of these costs one rank its cache for a moment, and control all ranks
# theirs. In a control group of 320 MiB, the least that there is, these are 96 MiB: control has 75.
_SOONER_THAN_CONTROL = 300


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that was started, and control's end of its socket pair."""

    child: subprocess.Popen[bytes]
    end: socket.socket
    pidfd: int
    start_time: int

    def discard(self) -> None:
        """End the child and wait for that; the pidfd stays the caller's."""
        self.end.close()
        self.child.kill()
        self.child.wait()


def require_pidfds() -> None:
    """OSError with the fix where the kernel or a sandbox lets no process be watched.

    Then no engine could have a mover.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):  # a shortage, which may be over soon
            raise
        raise OSError(
            f"the daemon may not watch its movers ({error.strerror}): let it call pidfd_open(2), in"
            " its seccomp profile, SystemCallFilter or sandbox"
        ) from None


def launch(room: str, fds: Iterable[int], changes: Mapping[str, str]) -> Launched:
    """Start a room's process, which inherits these descriptors under their numbers.

    It is given the number of its descriptor of control, and control's pid. `changes`: of its
    environment. OSError leaves nothing; it is ReleaseChangedError where another release was
    installed since this one started.

    To be called from the thread that lives as long as control: the child's parent-death signal
    follows the thread that started it. Popen starts it by vfork and exec, without any code of
    ours in between, so gRPC's threads don't matter. Where vfork fails it forks: `kvd serve` has
    told gRPC to have no part in that.
    """
    release.OURS.require_unchanged()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", room, str(theirs.fileno()), str(os.getpid())],
            env={**_environment(), **changes},
            pass_fds=tuple({theirs.fileno(), *fds}),
            stdin=subprocess.DEVNULL,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    try:
        let_end_sooner(child.pid, _SOONER_THAN_CONTROL)
        started = start_time_of(child.pid)
        assert started is not None, "a child that nobody waited for is in /proc"
        return Launched(child, ours, os.pidfd_open(child.pid), started)
    except BaseException:
        ours.close()
        child.kill()
        child.wait()
        raise


def how_it_ended(status: int) -> str:
    """A reason for logs and events, from what Popen.wait returned."""
    if status >= 0:
        return f"exited with status {status}"
    return f"killed by {signal.Signals(-status).name}"


def _environment() -> dict[str, str]:
    """Ours, with the very packages that run here."""
    environment = dict(os.environ)
    roots = (Path(kvd.__file__).parents[1], Path(kvd_proto.__file__).parents[1])
    paths = [*map(str, roots), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy is for copying only
    return environment
