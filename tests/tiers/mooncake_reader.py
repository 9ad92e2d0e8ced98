"""A process that writes blocks to a Mooncake Store and reads them back, and who watches it.

Mooncake may wait 60 s for a node that dies in the middle of a call, and then the store never
returns (`kvd/tiers/mooncake/client.py`). So what reads meanwhile is a process that can be ended, as
it is in kvd.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvd.linux.calls import die_with_parent
from kvd.tiers.mooncake.store import MooncakeStore
from kvd.tiers.store import OptionValue, Outcome, TierError
from tests.tiers.contract import BLOCK_BYTES, ONE, content, key, soon, source, target

ROOT = Path(__file__).resolve().parents[2]
THREADS = 3
BLOCKS = 1000
BLOCKS_A_ROUND = 8
SILENT_S = 10.0  # of a thread; Mooncake may take a second for each value of a round


class WatchedReader:
    """Such a process; another takes its place once one of its threads is silent."""

    def __init__(self, options: dict[str, OptionValue]) -> None:
        self.right = self.wrong = self.starts = 0
        self._options = json.dumps(options)
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end()

    def look(self) -> int:
        """Hear what it says; how many blocks were read right in all."""
        assert self._process.poll() is None, f"it ended with {self._process.returncode}"
        self._hear()
        if self._heard and min(self._heard.values()) < time.monotonic() - SILENT_S:
            self._end()
            self._start()
        return self.right

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.tiers.mooncake_reader", self._options]
        self._process = subprocess.Popen(
            [*command, str(self.starts)], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard: dict[str, float] = {}  # of each thread when
        self._begun = b""  # of a line
        self.starts += 1

    def _end(self) -> None:
        """Returns when it has ended and all that it said counts."""
        self._process.kill()
        self._process.wait()
        self._hear()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        *lines, self._begun = (self._begun + (self._process.stdout.read() or b"")).split(b"\n")
        for line in lines:
            thread, right, wrong = line.decode().split()
            self._heard[thread] = time.monotonic()
            self.right += int(right)
            self.wrong += int(wrong)


def _work(store: MooncakeStore, number: int, seed: int) -> None:
    draw = np.random.default_rng((seed, number))
    while True:
        _say(
            number, *_one_round(store, [int(n) for n in draw.choice(BLOCKS, BLOCKS_A_ROUND, False)])
        )


def _one_round(store: MooncakeStore, some: list[int]) -> tuple[int, int]:
    """How many of these blocks were read right, and how many wrong."""
    right = wrong = 0
    with contextlib.suppress(TierError):
        store.write([source(key(n), content((n, ONE))) for n in some], soon())
        blocks = [target(key(n), BLOCK_BYTES) for n in some]
        for n, block, outcome in zip(some, blocks, store.read(blocks, soon()), strict=True):
            if outcome is Outcome.DONE:
                same = bytes(block.parts[0]) == content((n, ONE))
                right, wrong = right + same, wrong + (not same)
    return right, wrong


def _say(thread: int, right: int, wrong: int) -> None:
    os.write(sys.stdout.fileno(), f"{thread} {right} {wrong}\n".encode())  # one line at a time


def _broken(given: threading.ExceptHookArgs) -> None:
    traceback.print_exception(given.exc_value)
    os._exit(1)


if __name__ == "__main__":
    die_with_parent()
    threading.excepthook = _broken
    opened = MooncakeStore(json.loads(sys.argv[1]))
    for own in range(THREADS):
        _say(own, 0, 0)
        threading.Thread(target=_work, args=(opened, own, int(sys.argv[2]))).start()
