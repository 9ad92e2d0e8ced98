"""Starts mover processes: by exec, and with nothing left when it fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import kvd
import kvd_proto
from kvd.linux.proc import start_time_of
from kvd.mover.layout import GpuConfig

# Copies past this size bypass the cache, so that two movers don't fight over it.
GLIBC_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x100000"


@dataclass(frozen=True, slots=True)
class Launched:
    """A mover process that was started, and control's end of its socket pair."""

    child: subprocess.Popen[bytes]
    end: socket.socket
    pidfd: int
    start_time: int

    def discard(self) -> None:
        """End the child and wait for that; the pidfd stays the caller's."""
        self.end.close()
        self.child.kill()
        self.child.wait()


def launch(fds: Iterable[int], gpu: GpuConfig | None = None) -> Launched:
    """Start a mover that inherits these descriptors under their numbers. OSError leaves nothing.

    It sees this GPU and no other, or none.

    To be called from the thread that lives as long as control: the child's parent-death signal
    follows the thread that started it. Popen starts it by vfork and exec, without any code of
    ours in between, so gRPC's threads don't matter.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvd.mover", str(theirs.fileno()), str(os.getpid())],
            env=_environment(gpu),
            pass_fds=tuple({theirs.fileno(), *fds}),
            stdin=subprocess.DEVNULL,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    try:
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
    reason = f"killed by {signal.Signals(-status).name}"
    if -status == signal.SIGBUS:
        reason += ": the engine's memory was truncated or could not be had"
    return reason


def _environment(gpu: GpuConfig | None) -> dict[str, str]:
    """Ours, with the very packages that run here, and libc set up for copying."""
    environment = dict(os.environ)
    roots = (Path(kvd.__file__).parents[1], Path(kvd_proto.__file__).parents[1])
    paths = [*map(str, roots), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["GLIBC_TUNABLES"] = GLIBC_TUNABLES
    environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy is for copying only
    # By UUID: numbers of GPUs mean another one in every process that was given a choice of them.
    environment["CUDA_VISIBLE_DEVICES"] = "" if gpu is None else gpu.uuid
    environment["CUPY_CACHE_IN_MEMORY"] = "1"  # a daemon has no home to keep kernels in
    return environment
