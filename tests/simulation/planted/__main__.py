"""Plants each bug in turn, and tells how many seeds the simulation takes to catch it.

A process a bug: python -m tests.simulation.planted --seeds 40; `--only WORDS` for some.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tests.simulation.planted.bug import Bug
from tests.simulation.planted.bugs import BUGS
from tests.simulation.planted.plant import plant

LONGEST_S = 900  # of one bug's worlds: beyond it the bug counts as one that goes on for ever
CAUGHT = "caught"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="bugs with this in their layer or name")
    parser.add_argument("--one", type=int, help="number of the bug to plant in this process")
    asked = parser.parse_args()
    if asked.one is not None:
        return live_with(BUGS[asked.one], asked.seeds, asked.steps)
    chosen = [number for number, bug in enumerate(BUGS) if asked.only in f"{bug.layer} {bug.name}"]
    began = time.monotonic()
    with ThreadPoolExecutor(asked.processes) as pool:
        ask = partial(ask_for, seeds=asked.seeds, steps=asked.steps)
        said = {}
        for number, words in zip(chosen, pool.map(ask, chosen), strict=True):
            said[number] = words
            print(f"{BUGS[number].layer:8} {BUGS[number].name}: {words}", flush=True)
    return score(said, time.monotonic() - began)


def score(said: dict[int, str], seconds: float) -> int:
    """By layer; how many were missed."""
    planted = Counter(BUGS[number].layer for number in said)
    caught = Counter(BUGS[n].layer for n, words in said.items() if words.startswith(CAUGHT))
    for layer, count in planted.items():
        print(f"{layer}: {caught[layer]} of {count}")
    ours = [n for n in said if BUGS[n].was_ours]
    found = sum(said[n].startswith(CAUGHT) for n in ours)
    print(f"of kvd's own former defects: {found} of {len(ours)}")
    print(f"all: {caught.total()} of {planted.total()}, in {seconds:.0f} s")
    return planted.total() - caught.total()


def ask_for(number: int, seeds: int, steps: int) -> str:
    """What a process with this bug in it says."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.planted"]
    asked = ["--one", str(number), "--seeds", str(seeds), "--steps", str(steps)]
    try:
        done = subprocess.run(
            [*command, *asked], capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{CAUGHT}: it goes on for ever"
    lines = done.stdout.splitlines()
    return lines[-1] if lines else f"it could not be planted: {done.stderr.strip()[-300:]}"


def live_with(bug: Bug, seeds: int, steps: int) -> int:
    """Worlds with the bug, until one fails."""
    plant(bug)
    from tests.simulation.whole.world import (
        BATCHES_IN,
        CLIENTS_EVERY,
        CLIENTS_IN,
        SimFailure,
        World,
    )

    first, every = (CLIENTS_IN, CLIENTS_EVERY) if bug.needs_clients else (0, 1)
    if bug.needs_batches:
        first = BATCHES_IN
    for lived in range(seeds):
        try:
            World(first + every * lived, steps).run()
        except SimFailure as failure:
            print(
                f"{CAUGHT} with {lived + 1} seed{'s' if lived else ''}, step {failure.step}:"
                f" {failure.kind}"
            )
            return 0
        gc.collect()
    print(f"not caught with {seeds} seeds")
    return 0


if __name__ == "__main__":
    sys.exit(min(1, main()))
