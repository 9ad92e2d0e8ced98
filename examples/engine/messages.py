"""What an engine's own processes say to each other, over pipes that only they hold."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from examples.engine.config import EngineConfig
from examples.engine.lifetime import child_environment


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence to compute in this step."""

    tokens: tuple[int, ...]
    first: int  # position of tokens[0]; all before it lie in the blocks already
    blocks: tuple[int, ...]  # block table, long enough for the last token


@dataclass(frozen=True)
class RankStart:
    """First message to a rank's worker process."""

    config: EngineConfig
    rank: int
    boot_nonce: bytes
    exchange_fd: int  # -1 when the rank is alone
    peer_fd: int


@dataclass(frozen=True)
class RunStep:
    """Compute the spans and do this rank's part of the offload plan."""

    spans: tuple[Span, ...]
    plan: Any  # kvd_client.StepPlan, or None


@dataclass(frozen=True)
class StepDone:
    """One token per span (empty but on rank 0), and the rank's offload report."""

    sampled: tuple[int, ...]
    report: Any  # kvd_client.WorkerReport, or None


@dataclass(frozen=True)
class TakeDigests:
    """Answer with the hex digest of each block's bytes as they lie in memory now."""

    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Stop:
    """Unregister from kvd and end."""


def start_process(
    module: str, arguments: Sequence[str], inherited: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run `python -m module FD arguments…`; FD is its end of a new two-way pipe.

    By exec, with only the named descriptors; in a session of its own, so that Ctrl-C reaches
    the starting process alone, which then ends it in order.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=(theirs.fileno(), *inherited),
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, Connection(ours.detach())
