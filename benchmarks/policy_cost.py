"""Cost of one policy call with 2048 slots, at ten thousand and at a million resident blocks.

Each round evicts 2048, puts them in again under new tags, and touches 2048 others at random. The
policies take turns, round by round; a round's sum is compared with that of `lru`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import report
from kvd.core.keys import U64, Slots
from kvd.core.policy import POLICY_NAMES, PolicyMemory, Sight, make_policy

BATCH = 2048
SIZES = (10_000, 1_000_000)
REQUEST_EVERY_NS = 100_000_000
CALLS = ("evict", "insert", "touch", "missed")


def all_may_go(slots: Slots) -> npt.NDArray[np.bool_]:
    return np.ones(slots.size, np.bool_)


class Driven:
    """One policy of a full pool, and the milliseconds that each of its calls took."""

    def __init__(self, name: str, resident: int) -> None:
        self._rng = np.random.default_rng(1)
        self._resident = resident
        self._policy = make_policy(name, lambda: resident, PolicyMemory(resident))
        self._requests = 0
        self.taken: dict[str, list[float]] = {call: [] for call in CALLS}
        order = self._rng.permutation(resident)
        for first in range(0, resident, BATCH):
            slots = order[first : first + BATCH]
            self._policy.insert(slots, self._tags(slots.size), self._next_request())

    def round(self) -> None:
        """Miss, evict, insert and touch."""
        policy, missed, fresh = self._policy, self._tags(BATCH), self._tags(BATCH)
        touched = self._rng.choice(self._resident, BATCH, replace=False)
        stores, loads = self._next_request(), self._next_request()
        t0 = time.perf_counter()
        policy.missed(missed)
        t1 = time.perf_counter()
        victims = policy.evict(BATCH, all_may_go, stores.now_ns)
        t2 = time.perf_counter()
        assert victims is not None
        policy.insert(victims, fresh, stores)
        t3 = time.perf_counter()
        policy.touch(touched, loads)
        t4 = time.perf_counter()
        for call, seconds in zip(CALLS, (t2 - t1, t3 - t2, t4 - t3, t1 - t0), strict=True):
            self.taken[call].append(1000 * seconds)

    def sums(self) -> list[float]:
        """Milliseconds of all calls of each round."""
        return [sum(calls) for calls in zip(*self.taken.values(), strict=True)]

    def _tags(self, count: int) -> U64:
        return self._rng.integers(1, 1 << 63, count, dtype=np.uint64)

    def _next_request(self) -> Sight:
        self._requests += 1
        return Sight(self._requests * REQUEST_EVERY_NS, self._requests)


def drive(size: int, rounds: int) -> dict[str, Driven]:
    """All policies, each with so many blocks."""
    by_name = {name: Driven(name, size) for name in POLICY_NAMES}
    for _ in range(rounds):
        for driven in by_name.values():
            driven.round()
    return by_name


def of_lru(by_name: dict[str, Driven], name: str) -> report.Spread:
    """What the policy takes of what `lru` takes, round by round."""
    pairs = zip(by_name[name].sums(), by_name["lru"].sums(), strict=True)
    return report.Spread.of([mine / lru for mine, lru in pairs])


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=301)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    by_size = {size: drive(size, options.rounds) for size in SIZES}
    results: dict[str, Any] = {}
    rows: list[list[object]] = []
    for name in POLICY_NAMES:
        for call in CALLS:
            taken = [by_size[size][name].taken[call] for size in SIZES]
            spreads = [report.Spread.of(each) for each in taken]
            tails = [report.percentile(each, 99) for each in taken]
            results[f"{name} {call}"] = {"ms": spreads, "p99 ms": tails, "resident": SIZES}
            cells = [f"{s.median:.3f} ({t:.3f})" for s, t in zip(spreads, tails, strict=True)]
            growth = spreads[-1].median / spreads[0].median
            rows.append([name, call, *cells, f"{growth:.2f}"])
        ratios = [of_lru(by_size[size], name) for size in SIZES]
        results[f"{name} of lru"] = {"ratio": ratios, "resident": SIZES}
        rows.append([name, "all / lru's", *(f"{ratio.median:.2f}" for ratio in ratios), ""])
    header = ["policy", f"{BATCH} slots", *(f"ms p50 (p99) at {s:,}" for s in SIZES), "growth"]
    print(report.table(header, rows))
    report.write("policy_cost", results, options.output)


if __name__ == "__main__":
    main()
