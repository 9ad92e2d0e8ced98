"""kvd beside LMCache's server in the same run: `python -m benchmarks.lmcache [PART ...]`.

LMCache runs from its wheel in an environment of its own (`.ci/venv lmcache`): its server is a
process, over ZMQ, with the settings it ships with; its engine is another one, by LMCache's own
client classes. kvd's daemon is a process too; its engine's workers run in this one. Every figure is
from interleaved rounds, after one as warm-up.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.lmcache.capacity import PASSES, capacity
from benchmarks.lmcache.chart import draw
from benchmarks.lmcache.copies import copies
from benchmarks.lmcache.lookups import lookups
from benchmarks.lmcache.rounds import THEM

Measure = Callable[[int, float], list[dict[str, Any]]]
Show = Callable[[list[dict[str, Any]]], str]

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements" / "lmcache.txt"


RESULTS = Path(__file__).resolve().parents[1] / "results"
QUICK = (2, 0.1)  # rounds, share of the calls
FULL = (15, 1.0)


def show_lookups(rows: list[dict[str, Any]]) -> str:
    """One line for each side of each row."""
    lines = []
    for row in rows:
        for side, figures in _sides(row):
            p99 = f"{figures['p99_of_all_ms']:.3g}"
            beside = figures.get("times_as_long", "")
            about = (row["chunk_tokens"], row["keys"], row["outcome"])
            lines.append([*about, side, figures["p50_ms"], p99, beside])
    header = ["chunk", "keys", "outcome", "side", "p50 ms", "p99 ms", f"{THEM} takes x"]
    return report.table(header, lines)


def show_copies(rows: list[dict[str, Any]]) -> str:
    """One line for each side of each row."""
    lines = [
        [row["direction"], side, figures["gb_s"], figures.get("kvd_times_the_rate", "")]
        for row in rows
        for side, figures in _sides(row)
    ]
    return report.table(["direction", "side", "GB/s", "kvd has x"], lines)


def show_capacity(rows: list[dict[str, Any]]) -> str:
    """One line for each side of each row."""
    lines = [
        [f"{row['share_of_pool']:.0%}", side, *(f"{hits:.0%}" for hits in figures["hits_by_pass"])]
        for row in rows
        for side, figures in _sides(row)
    ]
    passes = [f"hits, pass {number}" for number in range(1, PASSES + 1)]
    return report.table(["working set / pool", "side", *passes], lines)


def _sides(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(side, figures) for side, figures in row.items() if isinstance(figures, dict)]


PARTS: dict[str, tuple[Measure, Show]] = {
    "lookups": (lookups, show_lookups),
    "copies": (copies, show_copies),
    "capacity": (capacity, show_capacity),
}


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lmcache", description="kvd beside LMCache's server."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--quick", action="store_true", help="2 rounds, few calls: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON (default: results/lmcache.json)")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    lines = REQUIREMENTS.read_text().splitlines()
    results: dict[str, Any] = {"of": next(line for line in lines if line.startswith("lmcache=="))}
    for name in options.parts or PARTS:
        measure, show = PARTS[name]
        results[name] = measure(*(QUICK if options.quick else FULL))
        print(f"\n{name}\n{show(results[name])}", flush=True)
    report.write("lmcache", results, options.output)
    if "lookups" in results:
        picture = (options.output or RESULTS / "lmcache.json").with_suffix(".png")
        drawn = draw(results["lookups"], picture)
        print(f"drawn to {picture}" if drawn else "not drawn: matplotlib is missing")


if __name__ == "__main__":
    main()
