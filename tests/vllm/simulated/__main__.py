"""Worlds with an engine of vLLM's, by seed: --seeds 20 --steps 2000; --seed N tells one journal.

With --planted: how many worlds it takes to see each bug that is planted in the connector.

vLLM's scheduler, the connector and the client are real, the daemon as in the other worlds; time,
threads, sockets, movers and the model are not (tests/vllm/simulated/engine.py).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.simulation.whole.__main__ import told
from tests.simulation.whole.world import SimFailure
from tests.vllm.simulated import planted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="this one alone, with its whole journal")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--planted", nargs="?", const="", metavar="WORDS", help="plant bugs with this in their name"
    )
    parser.add_argument("--bug", type=int, help="number of the bug to plant in this process")
    asked = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # vLLM's sets of names have an order by it
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONHASHSEED": "0"})
    os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
    if asked.planted is not None:
        return plant_all(asked.planted, asked.seeds, asked.steps)
    if asked.bug is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(planted.live_with(asked.bug, asked.seeds, asked.steps, Path(folder)))
        return 0
    seeds = range(asked.first, asked.first + asked.seeds) if asked.seed is None else [asked.seed]
    with tempfile.TemporaryDirectory() as folder:
        return run(seeds, asked.steps, Path(folder), tells_all=asked.seed is not None)


def plant_all(words: str, seeds: int, steps: int) -> int:
    """Each bug with these words in its name, in a process of its own; how many were missed."""
    chosen = [number for number, bug in enumerate(planted.BUGS) if words in bug.name]
    caught = 0
    for number in chosen:
        said = planted.ask_for(number, seeds, steps)
        caught += said.startswith(planted.CAUGHT)
        print(f"{planted.BUGS[number].name}: {said}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return min(1, len(chosen) - caught)


def run(seeds: range | list[int], steps: int, folder: Path, *, tells_all: bool) -> int:
    """A line for each, and one for all of them; 1 where one has failed."""
    from tests.vllm.simulated.node import VllmWorld, model_in

    model = model_in(folder)
    failed = stores = loads = 0
    began = time.monotonic()
    for seed in seeds:
        world = VllmWorld(seed, steps, model)
        try:
            world.run()
        except SimFailure as failure:
            failed += 1
            print(told(failure), flush=True)
        else:
            engine = world.served
            stores += engine.stores_done
            loads += engine.loads_done
            if tells_all:
                print("\n".join(world.journal))
            print(
                f"seed {seed}: {world.events} events, vLLM started {engine.starts} times,"
                f" {engine.stores_done} stores, {engine.loads_done} loads, {world.journal.digest}",
                flush=True,
            )
        gc.collect()
    print(
        f"{len(seeds)} seeds of {steps} steps: {failed} failed; {stores} stores, {loads} loads,"
        f" {time.monotonic() - began:.0f} s"
    )
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
