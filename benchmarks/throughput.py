"""Store and load through a whole daemon, beside memcpy: `python -m benchmarks.throughput`.

A Llama-8B-like layout (32 layers, 8 KV heads x 128, bf16, 16-token blocks: 2 MiB a block), whole
and as 64 fragments of 32 KiB, 1 GiB in all, shuffled ids, one and two engines at once. A pass is
timed from the first `Step` to the board's last word, so it holds the protocol, the core and the
slot table too. The floor: memcpy of mapped, touched memory in as many threads as there are
movers, in the same pairs, under the movers' own libc settings, which make memcpy of large blocks
faster. Where memory happens to lie is worth a tenth to either side, so a figure is of several
starts of both, a few pairs each. Then two daemons in pairs: with checksums beside without, and the
native library beside numpy; and jobs of 64 blocks beside jobs of 256. Two daemons that are alike
say what such a comparison is worth. Memory that lies scattered is set aside first
(`scattered.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report, scattered
from benchmarks.copies import FRAGMENTS, Floor
from benchmarks.rig import BLOCK_BYTES, MIB, BenchEngine, daemon, keys
from kvd import native
from kvd.mover.process import GLIBC_TUNABLES

Way = tuple[str, str, int]
BARS = {("whole", 1): 0.9, ("64 x 32 KiB", 1): 0.85, ("whole", 2): 0.85, ("64 x 32 KiB", 2): 0.85}
# Two ways beside each other: checksums or not, KVD_NATIVE, blocks a job; and what their ratio
# should be.
UNCHECKED = ("false", "auto", 256)
WAYS: dict[str, tuple[Way, Way, float | None]] = {
    "two alike": (UNCHECKED, UNCHECKED, None),
    "with checksums x without": (("true", "auto", 256), UNCHECKED, 0.95),
    "jobs of 64 x jobs of 256": (("false", "auto", 64), UNCHECKED, 0.9),
    "native x numpy": (UNCHECKED, ("false", "off", 256), 1.0),
}
FRESH_BYTES = 256 * MIB
STARTS = 5  # of a daemon with its engines, and of the floor: each has memory anew


class Pass:
    """Passes over the same blocks: every store is of new keys, every load of the last stored."""

    def __init__(self, engines: list[BenchEngine]) -> None:
        self.engines = engines
        self._shuffle = np.random.default_rng(1)
        self._prefix = 0
        self._stored: list[list[bytes]] = []

    def gb_per_s(self, kind: str) -> float:
        """All engines at once move all their blocks."""
        if kind == "store":
            self._prefix += 1
            self._stored = [
                keys(self._prefix * 8 + number, engine.blocks)
                for number, engine in enumerate(self.engines)
            ]
        steps = [
            engine.step_of(kind, stored, self._shuffle.permutation(engine.blocks).tolist())
            for engine, stored in zip(self.engines, self._stored, strict=True)
        ]
        failed: list[int] = []
        threads = [
            threading.Thread(target=lambda e=e, step=step: failed.append(e.run_jobs(*step)))
            for e, step in zip(self.engines, steps, strict=True)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        assert failed == [0] * len(threads), f"jobs that failed, by engine: {failed}"
        return sum(e.blocks for e in self.engines) * BLOCK_BYTES / seconds / 1e9


def steady(total: int, pairs: int) -> list[dict[str, Any]]:
    """Rows by number of engines, layout and direction."""
    rows = []
    for count, layout in itertools.product((1, 2), FRAGMENTS):
        speeds = {kind: (list[float](), list[float]()) for kind in ("store", "load")}
        for number in range(STARTS):
            with started(total, count, FRAGMENTS[layout], floor_first=number % 2 == 0) as sides:
                passes, floor = sides
                for kind, both in speeds.items():
                    for _ in range(3 if kind == "store" else 1):  # the pool is full from then on
                        passes.gb_per_s(kind)
                    some = report.interleaved(
                        partial(passes.gb_per_s, kind), floor.run, -(-pairs // STARTS)
                    )
                    for speeds_so_far, more in zip(both, some, strict=True):
                        speeds_so_far.extend(more)
        for kind, (ours, memcpy) in speeds.items():
            rows.append(
                {
                    "engines": count,
                    "layout": layout,
                    "direction": kind,
                    "gb_per_s": report.Spread.of(ours),
                    "memcpy_gb_per_s": report.Spread.of(memcpy),
                    "ratio": report.ratios(ours, memcpy),
                    "bar": BARS[layout, count],
                }
            )
            print(f"  {count} engines, {layout}, {kind}: {rows[-1]['ratio']}", flush=True)
    return rows


@contextlib.contextmanager
def started(
    total: int, count: int, fragments: int, *, floor_first: bool
) -> Iterator[tuple[Pass, Floor]]:
    """So many engines at a daemon of theirs, and the floor: its memory is taken first, or last."""
    floor = Floor(total, count) if floor_first else None
    with daemon(2 * total) as running:
        blocks = total // count // BLOCK_BYTES
        engines = [
            BenchEngine(running.socket, f"e{n}", blocks, fragments=fragments) for n in range(count)
        ]
        yield Pass(engines), floor or Floor(total, count)
        for engine in engines:
            engine.close()


def beside(total: int, pairs: int) -> list[dict[str, Any]]:
    """One engine by each of two ways, each with a daemon of its own, in pairs."""
    rows = []
    for title, (ours, theirs, bar) in WAYS.items():
        for layout, fragments in FRAGMENTS.items():
            with by_way(ours, total, fragments) as left, by_way(theirs, total, fragments) as right:
                for kind in ("store", "load"):
                    for passes in (left, right):
                        for _ in range(3 if kind == "store" else 1):
                            passes.gb_per_s(kind)
                    one, other = report.interleaved(
                        partial(left.gb_per_s, kind), partial(right.gb_per_s, kind), pairs
                    )
                    rows.append(
                        {
                            "ways": title,
                            "layout": layout,
                            "direction": kind,
                            "gb_per_s": report.Spread.of(one),
                            "other_gb_per_s": report.Spread.of(other),
                            "ratio": report.ratios(one, other),
                            "bar": bar,
                        }
                    )
                    print(f"  {title}, {layout}, {kind}: {rows[-1]['ratio']}", flush=True)
    return rows


@contextlib.contextmanager
def by_way(way: Way, total: int, fragments: int) -> Iterator[Pass]:
    """Passes of one engine through a daemon that copies in this way."""
    checksums, level, job_blocks = way
    os.environ[native.VARIABLE] = level
    flags: dict[str, Any] = {"payload-checksums": checksums}
    with daemon(2 * total, **flags) as running:
        engine = BenchEngine(running.socket, "e0", total // BLOCK_BYTES, fragments=fragments)
        engine.job_blocks = job_blocks
        del os.environ[native.VARIABLE]
        yield Pass([engine])
        engine.close()


def fresh(rounds: int) -> list[dict[str, Any]]:
    """The first 256 MiB stored into a fresh pool against later passes over the same slots."""
    rows = []
    for layout, fragments in FRAGMENTS.items():
        ratios, firsts = [], []
        for _ in range(rounds):
            with daemon(2048 * MIB) as running:
                engine = BenchEngine(
                    running.socket, "e0", FRESH_BYTES // BLOCK_BYTES, fragments=fragments
                )
                passes = Pass([engine])
                speeds = [passes.gb_per_s("store") for _ in range(14)]
                engine.close()
            # Passes 1..8 fill the pool; from the ninth on every slot has been written before.
            firsts.append(speeds[0])
            ratios.append(speeds[0] / float(np.median(speeds[8:])))
        rows.append(
            {
                "layout": layout,
                "first_gb_per_s": report.Spread.of(firsts),
                "ratio": report.Spread.of(ratios),
                "bar": 0.8,
            }
        )
    return rows


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description="Stores and loads through a daemon.")
    parser.add_argument("--quick", action="store_true", help="256 MiB and 3 pairs: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/throughput.json)")
    parser.add_argument("--only", choices=("steady", "beside", "fresh_pool"), help="one part")
    options = parser.parse_args()
    if os.environ.get("GLIBC_TUNABLES") != GLIBC_TUNABLES:
        os.environ["GLIBC_TUNABLES"] = GLIBC_TUNABLES
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.throughput", *sys.argv[1:]])
    total, pairs = (256 * MIB, 3) if options.quick else (1024 * MIB, 15)
    # A pass of half the bytes takes 35 ms: a median of 15 pairs would vary by 0.03.
    beside_pairs = 3 if options.quick else 41
    parts = {
        "steady": partial(steady, total, pairs),
        "beside": partial(beside, total // 2, beside_pairs),
        "fresh_pool": partial(fresh, 2 if options.quick else 15),
    }
    with scattered.set_aside() as aside:
        print(f"{aside // MIB} MiB of scattered memory set aside", flush=True)
        results = {name: run() for name, run in parts.items() if options.only in (None, name)}
    for title, rows in results.items():
        print(f"\n{title}")
        print(report.table(list(rows[0]), [list(row.values()) for row in rows]))
    report.write("throughput", {**results, "set_aside_bytes": aside}, options.output)


if __name__ == "__main__":
    main()
