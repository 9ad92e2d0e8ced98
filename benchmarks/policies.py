"""What each policy finds on traffic of many kinds, in pools of several sizes, beside the best.

Rows are traces, their halves, and made-up workloads (`workloads.py`), each replayed through the
daemon's own core, or with --alone through the policy without the core around it. Traces are named
on the command line or in KVD_TRACES (paths with ':' between them); those that are missing are
named, and the others are replayed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.policy_driver import leading_ratio
from benchmarks.workloads import WORKLOADS
from kvd.cli.replay.command import capacity_of, replay
from kvd.cli.replay.trace import TraceError, TraceRequest, read_trace
from kvd.core.policy import POLICY_NAMES

FRACTIONS = (0.01, 0.05, 0.20)
WHOLE, FIRST_HALF, SECOND_HALF = "", " 1st half", " 2nd half"
NEAR_THE_BEST = 0.99


class Traffic(NamedTuple):
    """A row of the table: a trace or a part of it, or a workload by its name."""

    trace: Path | None
    part: str  # of the trace; else the workload

    @property
    def name(self) -> str:
        if self.trace is None:
            return self.part
        return self.trace.name.removesuffix(".gz").removesuffix(".jsonl") + self.part


@cache
def requests_of(traffic: Traffic) -> list[TraceRequest]:
    """All its requests. Raises TraceError."""
    if traffic.trace is None:
        return WORKLOADS[traffic.part]()
    requests = read_trace(traffic.trace)
    half = len(requests) // 2
    match traffic.part:
        case _ if traffic.part == FIRST_HALF:
            return requests[:half]
        case _ if traffic.part == SECOND_HALF:
            return requests[half:]
        case _:
            return requests


def measure(traffic: Traffic, fraction: float, policy: str) -> dict[str, Any]:
    """Replay it with one policy in a pool of such a part of the distinct blocks."""
    requests = requests_of(traffic)
    result = replay(requests, policy, capacity_of(requests, fraction))
    return asdict(result) | {"traffic": traffic.name, "capacity_fraction": fraction}


def measure_alone(traffic: Traffic, fraction: float, policy: str) -> dict[str, Any]:
    """Drive the policy without the core around it."""
    requests = requests_of(traffic)
    capacity = capacity_of(requests, fraction)
    return {
        "traffic": traffic.name,
        "policy": policy,
        "capacity_blocks": capacity,
        "capacity_fraction": fraction,
        "hit_ratio": leading_ratio(requests, policy, capacity),
    }


Measure = Callable[[Traffic, float, str], dict[str, Any]]


def measured(
    rows: Sequence[Traffic],
    fractions: Sequence[float],
    policies: Sequence[str],
    jobs: int,
    measure_one: Measure = measure,
) -> Iterator[dict[str, Any]]:
    """One result for each row, size and policy, in this order."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        under_way = [
            pool.submit(measure_one, row, fraction, policy)
            for row in rows
            for fraction in fractions
            for policy in policies
        ]
        for result in under_way:
            found = result.result()
            size = f"{found['traffic']} at {found['capacity_fraction']:.0%}"
            print(f"{size}: {found['policy']} {found['hit_ratio']:.4f}", file=sys.stderr)
            yield found


def shown(results: Sequence[dict[str, Any]], policies: Sequence[str], field: str) -> str:
    """A line for each row and size: each policy's ratio, and in brackets its part of the best."""
    lines = []
    for place in range(0, len(results), len(policies)):
        group = results[place : place + len(policies)]
        best = max(row[field] for row in group)
        cells = [f"{row[field]:.4f} ({row[field] / max(best, 1e-9):.3f})" for row in group]
        first = group[0]
        size = f"{first['capacity_fraction']:.0%}"
        lines.append([first["traffic"], size, f"{first['capacity_blocks']:,}", *cells])
    return report.table(["traffic", "size", "blocks", *policies], lines)


def worst(results: Sequence[dict[str, Any]], policies: Sequence[str], field: str) -> str:
    """For each policy its least part of the best, its mean one, and how often it is near it."""
    parts: dict[str, list[float]] = {policy: [] for policy in policies}
    for place in range(0, len(results), len(policies)):
        group = results[place : place + len(policies)]
        best = max(row[field] for row in group)
        for row in group:
            parts[row["policy"]].append(row[field] / max(best, 1e-9))
    lines = [
        [
            policy,
            f"{min(found):.3f}",
            f"{sum(found) / len(found):.3f}",
            f"{sum(part >= NEAR_THE_BEST for part in found)} of {len(found)}",
        ]
        for policy, found in parts.items()
    ]
    return report.table(["policy", "least", "mean", f"at least {NEAR_THE_BEST}"], lines)


def rows_of(paths: Sequence[Path], workloads: Sequence[str]) -> list[Traffic]:
    """Of each trace that is there three rows; says on stderr which are not."""
    rows = []
    for path in paths:
        if path.is_file():
            rows += [Traffic(path, part) for part in (WHOLE, FIRST_HALF, SECOND_HALF)]
        else:
            print(f"{path} is missing: its rows are left out", file=sys.stderr)
    if not paths:
        print("No trace was named, so made-up workloads only are replayed.", file=sys.stderr)
    return rows + [Traffic(None, name) for name in workloads]


def main() -> int:
    """Replay, print, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="JSON lines, plain or gzip")
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICY_NAMES, default=POLICY_NAMES)
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS)
    parser.add_argument("--jobs", type=int, default=1, help="replays at once (default: 1)")
    parser.add_argument(
        "--alone", action="store_true", help="the policy without the core: a fifth of the time"
    )
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    named = [Path(path) for path in os.environ.get("KVD_TRACES", "").split(":") if path]
    rows = rows_of(args.traces or named, args.workloads)
    try:
        way = measure_alone if args.alone else measure
        results = list(measured(rows, args.fractions, args.policies, args.jobs, way))
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    for field in ("hit_ratio",) if args.alone else ("hit_ratio", "compute_ratio"):
        print(f"\n{field} (part of the best)\n{shown(results, args.policies, field)}")
        print(f"\n{worst(results, args.policies, field)}")
    report.write("policies", {"rows": results}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
