"""How much of the pool can be used: `python -m benchmarks.capacity`.

A working set of a given share of the pool's configured bytes, in one group, is asked for in a
loop: each block in turn is looked up, and stored when it missed. With LRU and eviction at
allocation all of it is found from the second pass on as long as it fits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.rig import BLOCK_BYTES, MIB, BenchEngine, daemon, keys

PASSES = 4
BATCH = 32  # blocks asked for at a time


def hit_ratios(socket: str, pool_bytes: int, share: float) -> list[float]:
    """Share of hits in each pass."""
    count = int(pool_bytes * share) // BLOCK_BYTES
    engine = BenchEngine(socket, f"loop-{share}", BATCH)
    session = engine.connection.session
    assert session is not None
    working_set = keys(int(share * 1000), count)
    found = []
    for _ in range(PASSES):
        hits = 0
        for at in range(0, count, BATCH):
            batch = working_set[at : at + BATCH]
            there = session.present(0, "", batch)
            hits += int(there.sum())
            wanted = [key for key, known in zip(batch, there, strict=True) if known]
            if wanted:
                engine.run("load", wanted, list(range(len(wanted))))
            missing = [key for key, known in zip(batch, there, strict=True) if not known]
            if missing:
                engine.run("store", missing, list(range(len(missing))))
        found.append(hits / count)
    engine.close()
    return found


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Hits of a loop over a share of the pool.")
    parser.add_argument("--quick", action="store_true", help="256 MiB instead of 2 GiB")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/capacity.json)")
    options = parser.parse_args()
    pool_bytes = (256 if options.quick else 2048) * MIB
    rows: list[dict[str, Any]] = []
    for share in (0.75, 0.95, 1.0, 1.05):
        with daemon(pool_bytes) as running:
            passes = hit_ratios(running.socket, pool_bytes, share)
        rows.append(
            {
                "share_of_pool": share,
                "first_pass": passes[0],
                "later_passes": float(np.min(passes[1:])),
                "bar": 1.0 if share <= 0.95 else None,
            }
        )
    print(report.table(list(rows[0]), [list(row.values()) for row in rows]))
    report.write("capacity", {"pool_bytes": pool_bytes, "loops": rows}, options.output)


if __name__ == "__main__":
    main()
