"""Worlds by seed: --seeds 100 --steps 2000; --seed N tells one whole journal."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.simulation.whole.shrink import failure_of, shrunk
from tests.simulation.whole.world import SimFailure, World

JOURNAL_TAIL = 40
STORY_TAIL = 30
AT_A_TIME = 5  # seeds that a process takes


def run_one(seed: int, steps: int) -> tuple[str, str, float]:
    """The run's line, what there is to say of its failure, and its processor time."""
    began = time.process_time()
    try:
        world = World(seed, steps).run()
    except SimFailure as failure:
        return str(failure), told(failure), time.process_time() - began
    finally:
        gc.collect()
    line = f"seed {seed}: {world.events} events, {world.restarts} restarts, {world.journal.digest}"
    return line, "", time.process_time() - began


def told(failure: SimFailure) -> str:
    """A failure for whoever must find the cause: the end of the journal, and the block's story."""
    journal, story = failure.journal[-JOURNAL_TAIL:], failure.story[-STORY_TAIL:]
    return "\n".join(["-- journal", *journal, "-- story", *story, "--", str(failure)])


def _ready() -> None:
    """A world makes no garbage that must go while it runs."""
    gc.freeze()
    gc.disable()


def run_many(seeds: range, steps: int, processes: int) -> Iterator[tuple[str, str, float]]:
    """Each seed's run, in order."""
    if processes == 1:
        _ready()
        yield from (run_one(seed, steps) for seed in seeds)
        return
    with ProcessPoolExecutor(processes, initializer=_ready) as pool:
        yield from pool.map(partial(run_one, steps=steps), seeds, chunksize=AT_A_TIME)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="this one alone, with its whole journal")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--each", action="store_true", help="a line for each seed")
    asked = parser.parse_args()
    if asked.seed is not None:
        return replay(asked.seed, asked.steps)
    began, failed, spent = time.monotonic(), 0, 0.0
    seeds = range(asked.first, asked.first + asked.seeds)
    for line, failure, seconds in run_many(seeds, asked.steps, asked.processes):
        spent += seconds
        if failure:
            failed += 1
            print(failure, flush=True)
        elif asked.each:
            print(f"{line}, {seconds:.2f} s", flush=True)
    took = (
        f"{time.monotonic() - began:.0f} s, {spent / max(1, asked.seeds):.2f} s of processor each"
    )
    print(f"{asked.seeds} seeds of {asked.steps} steps: {failed} failed; {took}")
    return min(1, failed)


def replay(seed: int, steps: int) -> int:
    """One seed, with all that is known of it; a failure with as few steps as it takes."""
    failure = failure_of(seed, steps)
    if failure is None:
        world = World(seed, steps).run()
        print("\n".join(world.journal))
        print(f"seed {seed}: {world.events} events, {world.journal.digest}")
        return 0
    print(str(failure), flush=True)
    small = shrunk(seed, steps, failure)
    print("\n".join(["-- shrunk", *small.journal, "-- story", *small.story, "--", str(small)]))
    return 1


if __name__ == "__main__":
    sys.exit(main())
