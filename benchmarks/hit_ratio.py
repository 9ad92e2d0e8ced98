"""Hit ratios on traces by policy and capacity, beside Belady's bound.

Traces are named on the command line or in KVD_TRACES (paths with ':' between them); without
any, a made-up one is replayed, which shows that the figures move and nothing about real use.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from kvd.cli.replay.command import BELADY, ReplayResult, capacity_of, replay
from kvd.cli.replay.trace import TraceError, TraceRequest, read_trace
from kvd.core.policy import POLICY_NAMES

FRACTIONS = (0.01, 0.05, 0.10, 0.20, 0.50)
ORDER = (*POLICY_NAMES, BELADY)
MADE_UP = "made-up"
RESULTS = Path(__file__).parent / "results"


def made_up_trace(requests: int = 800) -> list[TraceRequest]:
    """Conversations that share system prompts, grow turn by turn and end; always the same."""
    rng = np.random.default_rng(20)
    fresh = itertools.count(1000)
    live: list[list[int]] = []
    trace = []
    for number in range(requests):
        if not live or rng.random() < 0.3:
            system = int(rng.zipf(1.5)) % 20
            live.append(list(range(system * 10, system * 10 + 10)))
        chosen = int(len(live) * rng.power(3))  # the latest ones go on most often
        history = live[chosen]
        history += itertools.islice(fresh, int(rng.integers(1, 12)))
        blocks = np.array(history, np.int64)
        trace.append(TraceRequest(1000 * number, 512 * blocks.size, 100, blocks))
        if rng.random() < 0.15:
            live.pop(chosen)
    return trace


def measure(
    name: str, requests: Sequence[TraceRequest], fractions: Sequence[float]
) -> list[dict[str, Any]]:
    """One row a capacity and policy."""
    rows = []
    for fraction in fractions:
        capacity = capacity_of(requests, fraction)
        for policy in ORDER:
            print(f"{name}: {policy} at {fraction:.0%}", file=sys.stderr, flush=True)
            result: ReplayResult = replay(requests, policy, capacity)
            rows.append(asdict(result) | {"trace": name, "capacity_fraction": fraction})
    return rows


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """One a trace: capacities down, policies across, each with its share of the bound."""
    shown = []
    for name, group in itertools.groupby(rows, key=lambda row: row["trace"]):
        lines = []
        for fraction, same in itertools.groupby(group, key=lambda row: row["capacity_fraction"]):
            by_policy = {row["policy"]: row for row in same}
            bound = by_policy[BELADY]["hit_ratio"]
            capacity = by_policy[BELADY]["capacity_blocks"]
            ratios = [by_policy[policy]["hit_ratio"] for policy in POLICY_NAMES]
            cells = [f"{ratio:.4f} ({ratio / max(bound, 1e-9):.0%})" for ratio in ratios]
            lines.append([f"{fraction:.0%}", f"{capacity:,}", *cells, f"{bound:.4f}"])
        title = f"{name}: leading blocks found / blocks offered (share of belady)"
        shown.append(f"{title}\n{report.table(['capacity', 'blocks', *ORDER], lines)}")
    return "\n\n".join(shown)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draw ratio over capacity, one panel a trace; False when matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    names = list(dict.fromkeys(row["trace"] for row in rows))
    figure, panels = plt.subplots(1, len(names), figsize=(5 * len(names), 4), squeeze=False)
    for name, panel in zip(names, panels[0], strict=True):
        for policy in ORDER:
            line = [row for row in rows if row["trace"] == name and row["policy"] == policy]
            panel.plot(
                [100 * row["capacity_fraction"] for row in line],
                [row["hit_ratio"] for row in line],
                marker="o",
                linestyle="--" if policy == BELADY else "-",
                label=policy,
            )
        panel.set(title=name, xscale="log", xlabel="capacity, % of distinct blocks", ylim=(0, None))
        panel.set_ylabel("leading blocks found / offered")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


def main() -> int:
    """Replay, print, write JSON and, with matplotlib, a PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hit_ratio", description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="JSON lines, plain or gzip")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS)
    parser.add_argument("--output", type=Path, help="JSON; the picture lies beside it")
    args = parser.parse_args()
    paths = args.traces or [Path(p) for p in os.environ.get("KVD_TRACES", "").split(":") if p]
    rows = []
    try:
        for path in paths:
            name = path.name.removesuffix(".gz").removesuffix(".jsonl")
            rows += measure(name, read_trace(path), args.fractions)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    if not paths:
        print("No trace was named, so a made-up one is replayed.", file=sys.stderr)
        rows += measure(MADE_UP, made_up_trace(), args.fractions)
    print(tables(rows))
    report.write("hit_ratio", {"rows": rows}, args.output)
    picture = (args.output or RESULTS / "hit_ratio.json").with_suffix(".png")
    print(f"drawn to {picture}" if plot(rows, picture) else "not drawn: matplotlib is missing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
