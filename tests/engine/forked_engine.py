"""`examples.engine.engine` as it is, but for its ranks, which are forked from it.

Most of a rank's start is PyTorch's import. Run by `start_engine`, in a process that has it done.
"""

from __future__ import annotations

import multiprocessing.context
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from examples.engine import engine, lifetime, rank_processes
from tests import forked


def start_engine(
    _module: str, arguments: Sequence[str]
) -> tuple[forked.ForkedProcess | subprocess.Popen[bytes], Connection]:
    """For `start_process`: the engine ends with what forked it, which ends with these tests."""
    environment = lifetime.child_environment()
    del environment[lifetime.STARTER]
    ours, theirs = socket.socketpair()
    with theirs, open(1, "wb", closefd=False) as output, open(2, "wb", closefd=False) as errors:
        process = forked.start(
            [str(theirs.fileno()), *arguments],
            output=output,
            errors=errors,
            environment=environment,
            module=__name__,
            inherited=(theirs.fileno(),),
            own_session=True,
        )
    return process, Connection(ours.detach())


class Rank(multiprocessing.context.ForkProcess):
    """What an engine uses of a `subprocess.Popen`."""

    def wait(self, timeout: float | None = None) -> None:
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)


def start_rank(
    module: str, arguments: Sequence[str], inherited: Sequence[int] = ()
) -> tuple[Rank, Connection]:
    """For `start_process`, within the engine."""
    ours, theirs = socket.socketpair()
    with theirs:
        words = [str(theirs.fileno()), *arguments]
        rank = Rank(target=_be_rank, args=(module, words, (theirs.fileno(), *inherited)))
        rank.start()
    return rank, Connection(ours.detach())


def _be_rank(module: str, words: Sequence[str], inherited: Sequence[int]) -> None:
    os.setsid()
    forked.close_all_but({0, 1, 2, *inherited})
    os.environ[lifetime.STARTER] = str(os.getppid())
    sys.modules.pop(module, None)  # else it is said to run a second time
    forked.run_as_main(module, words)


def main() -> int:
    vars(rank_processes)["start_process"] = start_rank
    return engine.main()


if __name__ == "__main__":
    sys.exit(main())
