"""A step's small stores, together and one by one: processor of control and mover, and time.

A round is a Step with 256 stores of a block each, as of 256 requests that decode and fill a block
in the same step; it ends when the last of them has ended for the rank. *One by one* is the same
round without the client's word that its worker is ready for all of them at once: each has an event
and a copy of its own. *By accounts* is the first round again, but each store has an account of its
own, and so a scope. The pool is full, so every block evicts one.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rig import MIB, BenchEngine, daemon, keys
from benchmarks.tier_neighbour import processor_seconds
from kvd_client.draft import AFTER_THE_STEP, ALONE, StepDraft
from kvd_client.scheduler.plan import StepPlan

STORES = 256
BLOCK_BYTES = 32 * 1024
POOL_BYTES = 64 * MIB
TOKENS = 16
POLL_S = 0.0005


@dataclass
class Costs:
    """Of one way, in ms: processor of control and mover, and from the step to the last end."""

    control: list[float] = field(default_factory=list)
    mover: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


class Rounds:
    """One engine that stores, and the processes that it keeps busy."""

    def __init__(self, engine: BenchEngine, control: int, mover: int) -> None:
        self._engine = engine
        self._processes = {"control": control, "mover": mover}
        self._prompt = 0
        engine.job_blocks = 1

    def fill(self) -> None:
        """Store more than the pool holds."""
        for _ in range(2 * POOL_BYTES // BLOCK_BYTES // STORES):
            self.run(Costs())

    def run(self, costs: Costs, *, together: bool = True, by_accounts: bool = False) -> float:
        """A round; control's ms."""
        self._prompt += 1
        step, plan = self._engine.step_of("store", keys(self._prompt, STORES), range(STORES))
        for number, job in enumerate(step.stores):
            job.ready_together = AFTER_THE_STEP if together else ALONE
            job.context.account = f"user {number}" if by_accounts else ""
        time.sleep(0.02)  # what the last round left is done
        before = {name: processor_seconds(pid) for name, pid in self._processes.items()}
        costs.wall.append(1e3 * self._timed(step, plan))
        time.sleep(0.02)
        spent = {
            name: 1e3 * (processor_seconds(pid) - before[name])
            for name, pid in self._processes.items()
        }
        costs.control.append(spent["control"])
        costs.mover.append(spent["mover"])
        return spent["control"]

    def _timed(self, step: StepDraft, plan: StepPlan) -> float:
        began = time.perf_counter()
        failed = self._engine.run_jobs(step, plan, POLL_S)
        assert not failed, f"{failed} of {STORES} stores failed"
        return time.perf_counter() - began


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="A step's small stores, together and one by one.")
    parser.add_argument("--pairs", type=int, default=41, help="rounds of each (default 41)")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    with daemon(POOL_BYTES, extent_bytes=4 * MIB) as running:
        engine = BenchEngine(running.socket, "decodes", STORES, BLOCK_BYTES)
        rounds = Rounds(engine, running.pid, running.movers()[0])
        rounds.fill()
        alone = beside(rounds, "one_by_one", options.pairs, together=False)
        accounts = beside(rounds, "by_accounts", options.pairs, by_accounts=True)
        engine.close()
    for results in (alone, accounts):
        rows = [[name, *row.values()] for name, row in results.items()]
        print(report.table(["", *results["wall"]], rows))
    report.write("small_stores", {**alone, "accounts": accounts}, options.output)


def beside(rounds: Rounds, way: str, pairs: int, **terms: bool) -> dict[str, dict[str, Any]]:
    """Rounds together and in another way, in turn: ms of each and their ratio, by cost."""
    together, other = Costs(), Costs()
    report.interleaved(partial(rounds.run, together), partial(rounds.run, other, **terms), pairs)
    results = {}
    for name in ("control", "mover", "wall"):
        ours, theirs = getattr(together, name), getattr(other, name)
        results[name] = {
            "together_ms": report.Spread.of(ours),
            f"{way}_ms": report.Spread.of(theirs),
            "ratio": report.ratios(ours, theirs),
        }
    return results


if __name__ == "__main__":
    main()
