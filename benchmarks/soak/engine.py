"""An engine in a process of its own that replays a trace over and over, and checks every byte.

Each second it writes a line of JSON: what it did since the last one.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvd.cli.replay.trace import read_trace
from kvd_client import ScheduledRequest
from tests.client.content import TOKENS
from tests.client.small_engine import IDLE_S, WAIT_S, SmallEngine

MAX_REQUEST_BLOCKS = 96  # longer prompts are cut
REPORT_SECONDS = 1.0
REGISTER_SECONDS = 60.0


def made_up(seed: int) -> Iterator[list[int]]:
    """Conversations: each turn repeats what was said and adds to it. Without end."""
    chance = np.random.default_rng(seed)
    talks: list[list[int]] = []
    last = 0
    while True:
        if not talks or chance.random() < 0.2:
            talks.append([])
            del talks[:-200]
        talk = talks[int(chance.integers(len(talks)))]
        more = int(chance.integers(1, 8))
        talk += range(last, last + more)
        last += more
        yield list(talk)


def replayed(path: Path) -> Iterator[list[int]]:
    """The requests of a trace, again and again."""
    requests = [request.blocks.tolist() for request in read_trace(path)]
    while True:
        yield from requests


class SoakEngine(SmallEngine):
    """Runs one request after the other: look up, load, check, compute the rest, store."""

    def __init__(self, socket: str, name: str, **changes: Any) -> None:
        super().__init__(socket, name, **changes)
        self.fresh()

    def fresh(self) -> None:
        """Nothing to report."""
        self.requests = self.loaded = self.computed = self.wrong_blocks = self.failed = 0
        self.lookups: list[float] = []
        self.loads: list[float] = []

    def serve(self, name: str, hashes: list[bytes]) -> None:
        """One request, from its arrival to its end."""
        table = self.table(len(hashes), 0)
        self.scheduler.on_new_request(name, len(hashes) * TOKENS + 1, [hashes])
        began = time.perf_counter()
        found = self.match(name) // TOKENS
        self.lookups.append(time.perf_counter() - began)
        if found:
            began = time.perf_counter()
            self.start_load(name, found * TOKENS, table)
            self.step_until_loaded(name)
            self.loads.append(time.perf_counter() - began)
            if name in self.failed_loads:
                self.failed += 1
                found = 0
            self.wrong_blocks += len(self.wrong(table[:found], hashes[:found]))
        else:
            self.scheduler.update_state_after_alloc(name, [table], 0)
        self.step(
            ScheduledRequest(name, [table], len(table) * TOKENS),
            overwrite=lambda: self.compute(table[found:], hashes[found:]),
        )
        self.scheduler.request_finished(name, [table])
        self.step_until_idle()
        self.requests += 1
        self.loaded += found
        self.computed += len(hashes) - found
        for done in (self.finished_loads, self.failed_loads, self.stored):
            done.clear()

    def report(self) -> dict[str, Any]:
        """What was done since the last report; seconds of each lookup and load."""
        said = {
            "requests": self.requests,
            "loaded": self.loaded,
            "computed": self.computed,
            "wrong": self.wrong_blocks,
            "failed": self.failed,
            "lookups": self.lookups,
            "loads": self.loads,
        }
        self.fresh()
        return said


def key_of(number: int) -> bytes:
    """A block hash as an engine's: its number decides it."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def main() -> int:
    """Serve until standard input ends or the process is ended."""
    told = json.loads(sys.argv[1])
    requests = replayed(Path(told["trace"])) if told["trace"] else made_up(told["seed"])
    engine = SoakEngine(
        told["socket"],
        told["name"],
        num_blocks=MAX_REQUEST_BLOCKS,
        block_bytes=told["block_bytes"],
        model=told["model"],
    )
    engine.wait_usable(REGISTER_SECONDS)
    pause = 1.0 / told["requests_per_second"]
    began = reported = time.monotonic()
    for number, blocks in enumerate(requests):
        ahead = began + number * pause - time.monotonic()
        if ahead > 0:
            time.sleep(max(IDLE_S, ahead))
        elif ahead < -WAIT_S:  # it can't keep up, and goes on from here
            began -= ahead
        hashes = [key_of(block) for block in blocks[:MAX_REQUEST_BLOCKS]]
        engine.serve(f"r{number}", hashes)
        if time.monotonic() - reported >= REPORT_SECONDS:
            reported = time.monotonic()
            print(json.dumps(engine.report()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
