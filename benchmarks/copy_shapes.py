"""The native library's shapes beside each other: `python -m benchmarks.copy_shapes`.

Which shape of the copying loop is faster is a matter of the processor's caches, and the library
takes it by the processor's maker. This says whether it does so rightly here. One thread moves
512 MiB between an engine's memory and slots, at every level that the processor has, with and
without sums; as `SUM`, slots are only read. Each shape's turn comes in each of the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.copies import BLOCK_BYTES, FRAGMENTS, MIB
from kvd import native
from kvd.core.keys import U64
from kvd.mover.checksums import empty_sums
from kvd.native import Kind, Library, Stretches, address_of

TOTAL_BYTES = 512 * MIB


class Work:
    """Every block of an engine's memory to or from slots in another order."""

    def __init__(self, layout: str) -> None:
        rng = np.random.default_rng(1)
        # On pages, as both lie in real life. Elsewhere each line of a sum has ends of its own.
        self._memory = [mmap.mmap(-1, TOTAL_BYTES) for _ in ("engine", "slots")]
        for memory in self._memory:
            np.frombuffer(memory, dtype=np.uint8)[:] = 1
        engine, slots = map(address_of, self._memory)
        fragments = FRAGMENTS[layout]
        size, share = BLOCK_BYTES // fragments, TOTAL_BYTES // fragments
        self._rows: U64 = np.array(
            [[engine + n * share, share, size, size, n * size] for n in range(fragments)],
            dtype=np.uint64,
        )
        order = rng.permutation(TOTAL_BYTES // BLOCK_BYTES)
        self._blocks: U64 = np.array(
            [[slots, TOTAL_BYTES, slot * BLOCK_BYTES, n, 0, n] for n, slot in enumerate(order)],
            dtype=np.uint64,
        )

    def by(self, library: Library, kind: Kind, *, summed: bool) -> Stretches:
        """The same work by one shape."""
        sums = empty_sums(len(self._blocks), BLOCK_BYTES // 8) if summed else None
        return Stretches(library, kind, self._rows, self._blocks, sums)


def speed(work: Stretches) -> float:
    """GB/s of all of it."""
    began = time.perf_counter()
    work.run(0, TOTAL_BYTES // BLOCK_BYTES)
    return TOTAL_BYTES / (time.perf_counter() - began) / 1e9


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    library = native.library()
    if library is None:
        sys.exit(f"there is no native library here: {native.why_not()}")
    rows: list[dict[str, Any]] = []
    for layout in FRAGMENTS:
        work = Work(layout)
        ways = itertools.product(library.levels()[1:], Kind, (False, True))
        for level, kind, summed in ways:
            if kind is Kind.SUM and not summed:
                continue
            near, far = (work.by(library.at(level, s), kind, summed=summed) for s in native.SHAPES)
            speed(near), speed(far)
            left, right = report.interleaved(
                lambda far=far: speed(far),  # type: ignore[misc]
                lambda near=near: speed(near),  # type: ignore[misc]
                options.rounds,
            )
            rows.append(
                {
                    "layout": layout,
                    "level": level,
                    "kind": kind.name.lower(),
                    "sums": summed,
                    "near_gb_per_s": report.Spread.of(right),
                    "far_gb_per_s": report.Spread.of(left),
                    "far_over_near": report.ratios(left, right),
                }
            )
            print(f"{len(rows)} measured", end="\r", file=sys.stderr)
    print(report.table([name.replace("_", " ") for name in rows[0]], [[*r.values()] for r in rows]))
    print(f"the shape that is used here: {library.shape}")
    report.write("copy_shapes", {"shape_used": library.shape, "rows": rows}, options.output)


if __name__ == "__main__":
    main()
