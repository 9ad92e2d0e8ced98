"""The hit ratio through Prometheus, beside the clients' own count: two engines on traces.

Two engines share a real daemon and run requests of traces in turn, one after the other; each counts
the blocks that it looked for and found. Then `/metrics` is read, as Prometheus would.

Beside it: the control process's processor time a request, and what the miss-ratio curve's sample
takes of that (measured by replaying the same requests through the core in this process).
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import report
from benchmarks.reuse_curve import sample_seconds
from benchmarks.rig import MIB, daemon
from benchmarks.soak.engine import SoakEngine, key_of, made_up
from kvd.cli.replay.trace import TraceRequest, read_trace
from tests.client.content import TOKENS
from tests.ports import free_port

REGISTER_SECONDS = 60.0
SCRAPE_SECONDS = 30.0
BLOCK_BYTES = 4096  # a pool of few bytes has many blocks
MAX_BLOCKS = 512  # of a request: longer ones are cut
BAR = 0.001
BAR_COST = 0.03


class CountingEngine(SoakEngine):
    """Counts what it looks for and finds."""

    offered = found = 0

    def serve(self, name: str, hashes: list[bytes]) -> None:
        self.offered += len(hashes)
        super().serve(name, hashes)

    def match(self, request_id: str, computed: int = 0) -> int:
        tokens = super().match(request_id, computed)
        self.found += tokens // TOKENS
        return tokens


def drive(socket: str, traces: Sequence[Iterator[list[int]]], requests: int) -> dict[str, int]:
    """So many requests, dealt out to an engine for each trace; their own counts."""
    engines = [
        CountingEngine(socket, f"ratio-{number}", num_blocks=MAX_BLOCKS, block_bytes=BLOCK_BYTES)
        for number in range(len(traces))
    ]
    try:
        for engine in engines:
            engine.wait_usable(REGISTER_SECONDS)
        for number in range(requests):
            each = number % len(engines)
            blocks = next(traces[each])[:MAX_BLOCKS]
            engines[each].serve(f"r{number}", [key_of(block) for block in blocks])
        assert not any(engine.wrong_blocks or engine.failed for engine in engines), "wrong bytes"
        return {
            "offered": sum(engine.offered for engine in engines),
            "found": sum(engine.found for engine in engines),
        }
    finally:
        for engine in engines:
            engine.close()


def scraped(port: int, requests: int) -> dict[str, int]:
    """What Prometheus reads, once it has heard of so many requests."""
    deadline = time.monotonic() + SCRAPE_SECONDS
    while True:
        url = f"http://127.0.0.1:{port}/metrics"
        page = urllib.request.urlopen(url, timeout=SCRAPE_SECONDS).read().decode()
        sums = {
            family.name: sum(s.value for s in family.samples if s.name.endswith("_total"))
            for family in text_string_to_metric_families(page)
        }
        if sums["kvd_offered_requests"] >= requests:
            return {
                "offered": int(sums["kvd_offered_blocks"]),
                "found": int(sums["kvd_found_blocks"]),
            }
        assert time.monotonic() < deadline, f"only {sums['kvd_offered_requests']} requests are told"
        time.sleep(0.1)


def measure(traces: dict[str, list[list[int]]], requests: int, pool_mib: int) -> dict[str, Any]:
    """Both counts, and the control process's time."""
    port = free_port()
    with daemon(pool_mib * MIB, 4 * MIB, **{"http-port": port}) as running:
        before = _seconds(running.pid)
        own = drive(running.socket, [iter(each) for each in traces.values()], requests)
        spent = _seconds(running.pid) - before
        said = scraped(port, requests)
    dealt = list(itertools.chain.from_iterable(zip(*traces.values(), strict=False)))[:requests]
    served = [
        TraceRequest(1000 * n, 0, 0, np.array(list(dict.fromkeys(blocks[:MAX_BLOCKS])), np.int64))
        for n, blocks in enumerate(dealt)
    ]
    sample = sample_seconds(served, max(1, pool_mib * MIB // BLOCK_BYTES))
    return {
        "requests": requests,
        "own": own,
        "scraped": said,
        "own_ratio": own["found"] / max(1, own["offered"]),
        "scraped_ratio": said["found"] / max(1, said["offered"]),
        "control_ms_a_request": 1000 * spent / requests,
        "sample_share": sample / spent if spent else 0.0,
    }


def _seconds(pid: int) -> float:
    """Processor time of the control process; its movers are processes of their own."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", type=Path, help="one for each engine")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--pool-mib", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    named = {
        path.name.split(".")[0]: [r.blocks.tolist() for r in read_trace(path)[: options.requests]]
        for path in options.traces
    } or {f"made up {n}": list(itertools.islice(made_up(n), options.requests)) for n in (1, 2)}
    found = measure(named, options.requests, options.pool_mib)
    apart = abs(found["own_ratio"] - found["scraped_ratio"])
    rows = [
        ["clients' own hit ratio, of blocks", f"{found['own_ratio']:.4%}"],
        ["through Prometheus", f"{found['scraped_ratio']:.4%}"],
        [f"apart (bar {BAR:.1%})", f"{apart:.4%}"],
        ["control process, ms of processor a request", f"{found['control_ms_a_request']:.2f}"],
        [f"of that for the miss-ratio curve (bar {BAR_COST:.0%})", f"{found['sample_share']:.2%}"],
    ]
    print(report.table([" and ".join(named), f"{found['requests']} requests"], rows))
    report.write("told_ratio", found, options.output)


if __name__ == "__main__":
    main()
