"""Hit ratios on traces with small host memory and a tier below, beside an infinite cache.

Traces are named on the command line or in KVD_TRACES (paths with ':' between them); without
any, a made-up one is replayed, and the bar, which is of real traces, is not judged. Of a tier's
copies none takes time: what is missing is what the core leaves out, evicts or refuses.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.hit_ratio import MADE_UP, made_up_trace
from kvd.cli.replay.command import capacity_of, replay
from kvd.cli.replay.engine import BLOCK_BYTES
from kvd.cli.replay.tiers import ReplayTiers, TierSpec
from kvd.cli.replay.trace import TraceError, TraceRequest, read_trace
from kvd.config.tiers import WRITES

HOST, DISK = 0.05, 1.0  # of the distinct blocks


def measure(name: str, requests: Sequence[TraceRequest], host: float) -> list[dict[str, Any]]:
    """One row a write rule, and one without a tier."""
    capacity = capacity_of(requests, host)
    rows = []
    for write in ("", *WRITES):
        print(f"{name}: {write or 'no tier'}", file=sys.stderr, flush=True)
        specs = [TierSpec(capacity_of(requests, DISK), write=write)] if write else []
        result = replay(requests, "lru", capacity, below=ReplayTiers(specs, BLOCK_BYTES))
        rows.append(asdict(result) | {"trace": name, "write": write or "no tier"})
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each, with its part of the infinite cache's ratio."""
    lines = []
    for row in rows:
        tier = row["tiers"][0] if row["tiers"] else None
        lines.append(
            [
                row["trace"],
                row["write"],
                f"{row['hit_ratio']:.4f}",
                f"{row['host_ratio']:.4f}",
                f"{row['infinite_ratio']:.4f}",
                f"{row['reachable_ratio']:.4f}",
                f"{row['hit_ratio'] / row['reachable_ratio']:.1%}",
                f"{tier['blocks_written']:,}" if tier else "",
                f"{tier['blocks_read']:,}" if tier else "",
            ]
        )
    header = ["trace", "write", "together", "host", "infinite", "reachable", "of it"]
    return report.table([*header, "written", "read"], lines)


def main() -> int:
    """Replay, print, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tier_hit_ratio")
    parser.description = __doc__
    parser.add_argument("traces", nargs="*", type=Path, help="JSON lines, plain or gzip")
    parser.add_argument("--host", type=float, default=HOST, help="of the distinct blocks")
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    paths = args.traces or [Path(p) for p in os.environ.get("KVD_TRACES", "").split(":") if p]
    rows = []
    try:
        for path in paths:
            name = path.name.removesuffix(".gz").removesuffix(".jsonl")
            rows += measure(name, read_trace(path), args.host)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    if not paths:
        said = "No trace was named (arguments, or KVD_TRACES): a made-up one shows no real use."
        print(said, file=sys.stderr)
        rows += measure(MADE_UP, made_up_trace(), args.host)
    print(shown(rows))
    report.write("tier_hit_ratio", {"rows": rows}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
