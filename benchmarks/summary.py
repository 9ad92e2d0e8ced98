"""The measured figures beside their bars, as Markdown: `python -m benchmarks.summary`.

Reads the JSON that the benchmarks wrote to benchmarks/results/ and prints the table of
docs/benchmarks.md. Measures nothing; a figure that was not measured is said to be missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Line:
    """One figure; `met` is None where there is no bar."""

    what: str
    figure: str
    bar: str
    met: bool | None


def spread(value: dict[str, float], digits: int = 2) -> str:
    """Median and range of a Spread."""
    low, high = value["low"], value["high"]
    return f"{value['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def at_least(what: str, value: dict[str, float], bar: float) -> Line:
    return Line(what, spread(value), f"≥ {bar}", value["median"] >= bar)


def throughput(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["steady"]:
        engines = "one engine" if row["engines"] == 1 else "two engines"
        what = f"{row['direction']}, {row['layout']}, {engines}, × memcpy"
        yield at_least(what, row["ratio"], row["bar"])
    for row in results["fresh_pool"]:
        what = f"first 256 MiB into a fresh pool, {row['layout']}, × later ones"
        yield at_least(what, row["ratio"], row["bar"])


def capacity(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["loops"]:
        bar = row["bar"]
        figure = f"{row['later_passes']:.1%}"
        share = f"{row['share_of_pool']:.0%} of the pool in a loop, hits from the second pass on"
        met = None if bar is None else row["later_passes"] >= bar
        yield Line(share, figure, "100%" if bar else "", met)


def calls(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["step_on_the_calling_thread"]:
        p50, p99 = row["p50_us"] / 1e3, row["p99_us"] / 1e3
        what = f"sending a Step of {row['blocks_stored']} stores, calling thread, ms p50 (p99)"
        yield Line(what, f"{p50:.3f} ({p99:.3f})", "≤ 0.1", p50 <= 0.1)
    for row in results["lookups"]:
        what = f"lookup of {row['keys']} keys, {row['outcome']}, ms p50: page / call / dict"
        figures = (row["page_p50_ms"], row["call_p50_ms"], row["dict_p50_ms"])
        yield Line(what, " / ".join(f"{f:.3f}" for f in figures), "", None)
    fastest = min(results["round_trips"], key=lambda row: row["p50_ms"])
    slowest = max(results["round_trips"], key=lambda row: row["p50_ms"])
    what = f"round trip of a small RPC, ms p50: {fastest['rpc']} to {slowest['rpc']}"
    yield Line(what, f"{fastest['p50_ms']:.2f} to {slowest['p50_ms']:.2f}", "", None)


def neighbour(results: dict[str, Any]) -> Iterator[Line]:
    ratio, bar = results["ratio_of_p99"], results["bar"]
    what = "16-key lookup beside a big neighbour, p99 × idle p99"
    yield Line(what, spread(ratio), f"≤ {bar:g}", ratio["median"] <= bar)


def footprint(results: dict[str, Any]) -> Iterator[Line]:
    for row in results["idle"]:
        name, cpu = row["process"], row["idle_cpu_percent"]
        pss = row["pss_without_pool_mib"]
        yield Line(f"idle {name}, % of a core", f"{cpu:.2f}", "< 1", cpu < 1)
        what = f"{name}, PSS without pool, MiB"
        yield Line(what, f"{pss:.0f}", f"< {row['bar_mib']:.0f}", pss < row["bar_mib"])
    for row in results["start_up"]:
        if row["pool_mib"] != "imports":
            what = f"start with a pool of {row['pool_mib']} MiB, cold, s"
            yield Line(what, spread(row["cold_s"]), "", None)


READERS: dict[str, Callable[[dict[str, Any]], Iterator[Line]]] = {
    "throughput": throughput,
    "capacity": capacity,
    "calls": calls,
    "neighbour": neighbour,
    "footprint": footprint,
}


def print_summary() -> None:
    """One table for each benchmark, with where and of what commit its figures are."""
    for name, read in READERS.items():
        path = RESULTS / f"{name}.json"
        print(f"\n`python -m benchmarks.{name}`", end="")
        if not path.exists():
            print(": not measured\n")
            continue
        document = json.loads(path.read_text())
        machine = document["machine"]
        print(f", commit {machine['commit']}, load {machine['load_1m']:.1f}\n")
        print("| figure | measured | bar | |\n|---|---|---|---|")
        for line in read(document["results"]):
            met = {None: "", True: "met", False: "**missed**"}[line.met]
            print(f"| {line.what} | {line.figure} | {line.bar} | {met} |")


if __name__ == "__main__":
    print_summary()
