"""Cost of one policy call with 2048 slots, at ten thousand and at a million resident blocks.

Each round evicts 2048, puts them in again under new tags, and touches 2048 others at random.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import report
from kvd.core.keys import Slots
from kvd.core.policy import POLICY_NAMES, PolicyMemory, make_policy

BATCH = 2048
SIZES = (10_000, 1_000_000)
CALLS = ("evict", "insert", "touch", "missed")


def all_may_go(slots: Slots) -> npt.NDArray[np.bool_]:
    return np.ones(slots.size, np.bool_)


def measure(name: str, resident: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by call, after one full turn of the blocks."""
    rng = np.random.default_rng(1)
    policy = make_policy(name, lambda: resident, PolicyMemory(resident))
    order = rng.permutation(resident)
    for first in range(0, resident, BATCH):
        slots = order[first : first + BATCH]
        policy.insert(slots, slots.astype(np.uint64) + np.uint64(1))
    taken: dict[str, list[float]] = {call: [] for call in CALLS}
    for number in range(1, rounds + 1):
        tags = rng.integers(1, 4 * resident, BATCH, dtype=np.uint64)
        touched = rng.integers(0, resident, BATCH)
        t0 = time.perf_counter()
        policy.missed(tags)
        t1 = time.perf_counter()
        victims = policy.evict(BATCH, all_may_go)
        t2 = time.perf_counter()
        assert victims is not None
        fresh = np.arange(BATCH, dtype=np.uint64) + np.uint64(resident + BATCH * number)
        t3 = time.perf_counter()
        policy.insert(victims, fresh)
        t4 = time.perf_counter()
        policy.touch(touched)
        t5 = time.perf_counter()
        for call, seconds in zip(CALLS, (t2 - t1, t4 - t3, t5 - t4, t1 - t0), strict=True):
            taken[call].append(1000 * seconds)
    return taken


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=301)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    rows: list[list[object]] = []
    for name in POLICY_NAMES:
        by_size = {size: measure(name, size, options.rounds) for size in SIZES}
        for call in CALLS:
            spreads = [report.Spread.of(by_size[size][call]) for size in SIZES]
            tails = [report.percentile(by_size[size][call], 99) for size in SIZES]
            results[f"{name} {call}"] = {"ms": spreads, "p99 ms": tails, "resident": SIZES}
            cells = [f"{s.median:.3f} ({t:.3f})" for s, t in zip(spreads, tails, strict=True)]
            growth = spreads[-1].median / spreads[0].median
            rows.append([name, call, *cells, f"{growth:.2f}"])
    header = ["policy", f"{BATCH} slots", *(f"ms p50 (p99) at {s:,}" for s in SIZES), "growth"]
    print(report.table(header, rows))
    report.write("policy_cost", results, options.output)


if __name__ == "__main__":
    main()
