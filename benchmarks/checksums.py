"""Checksums of slots' bytes: the movers' own beside numpy's way to them, beside zlib's CRC-32 and
beside copying, by size.

Each side reads the same memory, too much for any cache, slot by slot in one thread.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from kvd.core.keys import U64
from kvd.mover.checksums import PIECE_BYTES, by_numpy, checksums

TOTAL_BYTES = 256 << 20
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)

Pass = Callable[[U64], object]


def sum_up(parts: U64) -> None:
    step = max(1, PIECE_BYTES // parts[0].nbytes)  # as many at once as a mover sums
    for start in range(0, len(parts), step):
        checksums(parts[start : start + step])


def numpys(parts: U64) -> None:
    step = max(1, PIECE_BYTES // parts[0].nbytes)
    for start in range(0, len(parts), step):
        by_numpy(parts[start : start + step])


def crc32(parts: U64) -> None:
    for part in parts:
        zlib.crc32(part)


def copier(target: U64) -> Pass:
    def copy(parts: U64) -> None:
        room = target.reshape(parts.shape)
        for source, place in zip(parts, room, strict=True):
            np.copyto(place, source)

    return copy


def speed(run: Pass, parts: U64) -> float:
    """GB/s of one pass."""
    started = time.perf_counter()
    run(parts)
    return parts.nbytes / (time.perf_counter() - started) / 1e9


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    words = np.random.default_rng(1).integers(0, 1 << 63, TOTAL_BYTES // 8, dtype=np.uint64)
    copy = copier(np.zeros_like(words))
    results: list[dict[str, Any]] = []
    for size in SIZES:
        parts = words.reshape(-1, size // 8)
        row: dict[str, Any] = {"part_bytes": size}
        for name, theirs in (("numpy", numpys), ("crc32", crc32), ("copy", copy)):
            ours, other = report.interleaved(
                lambda parts=parts: speed(sum_up, parts),  # type: ignore[misc]
                lambda run=theirs, parts=parts: speed(run, parts),  # type: ignore[misc]
                options.pairs,
            )
            row["gb_per_s"] = report.Spread.of(ours)
            row[f"{name}_gb_per_s"] = report.Spread.of(other)
            row[f"x_{name}"] = report.ratios(ours, other)
        results.append(row)
    print(report.table(list(results[0]), [list(row.values()) for row in results]))
    report.write("checksums", {"by_size": results}, options.output)


if __name__ == "__main__":
    main()
