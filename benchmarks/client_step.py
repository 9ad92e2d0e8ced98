"""What a step costs the engine's scheduler thread, with a real daemon.

    python -m benchmarks client_step

`build_step` is everything on the calling thread: choosing what to store, one message into the
writer's queue, the plan. With --socket it runs against a daemon that is there already.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks import report
from benchmarks.rig import BenchEngine, daemon
from kvd_client import ScheduledRequest
from tests.client.content import HASH_BYTES

TOKENS = 16
BLOCK_BYTES = 64  # the copies are real but tiny
BLOCKS = 1 << 18
STEPS = 300
POOL_BYTES = 256 << 20
# (name, requests in the step, tokens that each computes in it)
CASES = (
    ("1 request decodes", 1, 1),
    ("16 requests decode", 16, 1),
    ("64 requests decode", 64, 1),
    ("256 requests decode", 256, 1),
    ("1 request prefills 2048 tokens", 1, 2048),
    ("1 request prefills 8192 tokens", 1, 8192),
)


def step_us(engine: BenchEngine, requests: int, tokens: int) -> list[float]:
    """Microseconds of each build_step."""
    blocks = -(-STEPS * tokens // TOKENS) + 2
    fitting = min(blocks, engine.blocks // requests)
    names = [f"{requests}-{tokens}-{number}" for number in range(requests)]
    tables = [[list(range(n * fitting, (n + 1) * fitting))] for n in range(requests)]
    hashes = [[[os.urandom(HASH_BYTES) for _ in range(fitting)]] for _ in names]
    scheduler, worker = engine.scheduler, engine.ranks[0].worker
    for name, table, known in zip(names, tables, hashes, strict=True):
        scheduler.on_new_request(name, TOKENS, known)
        scheduler.update_state_after_alloc(name, table, 0)
    taken = []
    for step in range(1, min(STEPS, fitting * TOKENS // tokens)):
        scheduled = [
            ScheduledRequest(name, table, step * tokens + (number % TOKENS if tokens == 1 else 0))
            for number, (name, table) in enumerate(zip(names, tables, strict=True))
        ]
        started = time.perf_counter()
        plan = scheduler.build_step(scheduled)
        taken.append((time.perf_counter() - started) * 1e6)
        worker.start_step(plan)
        worker.finish_step(plan)
        time.sleep(0.002)  # the model
        scheduler.update_from_workers([worker.get_finished()])
    for name, table in zip(names, tables, strict=True):
        scheduler.request_finished(name, table)
    engine.step_until_idle()
    return taken


def measure(socket: str) -> dict[str, report.Spread]:
    """Microseconds of build_step, by case, and the 99th percentile of each."""
    engine = BenchEngine(socket, f"bench-{os.getpid()}", BLOCKS, BLOCK_BYTES, unshared=True)
    found = {}
    for name, requests, tokens in CASES:
        taken = step_us(engine, requests, tokens)
        found[name] = report.Spread.of(taken)
        found[f"{name}, p99"] = report.Spread.of([report.percentile(taken, 99)])
    engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", help="a running daemon's; without it one is started")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.socket:
        found = measure(options.socket)
    else:
        with daemon(POOL_BYTES) as running:
            found = measure(running.socket)
    rows = [
        [name, f"{found[name].median:.1f}", f"{found[f'{name}, p99'].median:.1f}"]
        for name, _, _ in CASES
    ]
    print(report.table(["a step in which", "p50 us", "p99 us"], rows))
    report.write("client_step", found, options.output)


if __name__ == "__main__":
    main()
