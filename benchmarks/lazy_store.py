"""What storing lazily finds on traces, beside storing eagerly and at the second sighting.

Replays each trace with a device and host memory of several sizes, as shares of the trace's
distinct blocks; a device is never smaller than the longest request. Traces are named on the
command line or in KVD_TRACES (paths with ':' between them); without any, a made-up one is
replayed.
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
from kvd.cli.replay.command import capacity_of, distinct_blocks, replay
from kvd.cli.replay.device import STORES, StoreRule
from kvd.cli.replay.trace import TraceError, TraceRequest, read_trace

DEVICES = (0.05, 0.1, 0.2)  # of the distinct blocks
HOSTS = (0.5, 1, 2, 4)  # of the device


def measure(name: str, requests: Sequence[TraceRequest]) -> list[dict[str, Any]]:
    """One row for each size and each way to store."""
    longest = max(request.blocks.size for request in requests)
    rows = []
    for device in sorted({max(longest, capacity_of(requests, share)) for share in DEVICES}):
        for times in HOSTS:
            print(f"{name}: {device} and {times} times that", file=sys.stderr, flush=True)
            for store in STORES:
                host = round(device * times)
                result = replay(requests, "lru", host, StoreRule.of(device, store))
                rows.append(asdict(result) | {"trace": name})
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each size: found together with each way to store, and what was stored."""
    lines = []
    for place in range(0, len(rows), len(STORES)):
        group = rows[place : place + len(STORES)]
        first = group[0]
        cells = [first["trace"], f"{first['device_blocks']:,}", f"{first['capacity_blocks']:,}"]
        cells.append(f"{first['device_ratio']:.4f}")
        cells += [f"{row['hit_ratio']:.4f} ({row['external_ratio']:.3f})" for row in group]
        cells += [f"{row['blocks_stored']:,}" for row in group]
        lines.append(cells)
    stored = [f"stored {store}" for store in STORES]
    return report.table(["trace", "device", "host", "device alone", *STORES, *stored], lines)


def main() -> int:
    """Replay, print, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lazy_store")
    parser.description = __doc__
    parser.add_argument("traces", nargs="*", type=Path, help="JSON lines, plain or gzip")
    parser.add_argument("--output", type=Path, help="JSON")
    args = parser.parse_args()
    paths = args.traces or [Path(p) for p in os.environ.get("KVD_TRACES", "").split(":") if p]
    try:
        traces = [(p.name.removesuffix(".gz").removesuffix(".jsonl"), read_trace(p)) for p in paths]
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for name, requests in traces or [(MADE_UP, made_up_trace())]:
        print(f"{name}: {distinct_blocks(requests):,} distinct blocks", file=sys.stderr)
        rows += measure(name, requests)
    print(shown(rows))
    report.write("lazy_store", {"rows": rows}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
