"""What a step costs the engine's scheduler thread, with a real daemon.

    python -m benchmarks.client_step --socket /run/kvd/kvd.sock

Prints a table and, with --json, one object. `build_step` is everything on the calling thread:
choosing what to store, one message into the writer's queue, the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence

from kvd_client import (
    EngineIdentity,
    Fragment,
    Group,
    GroupLayout,
    Namespace,
    ScheduledRequest,
    Scheduler,
    SchedulerConnection,
    SharedMemory,
    Worker,
)

TOKENS = 16
BLOCK_BYTES = 64
HASH_BYTES = 32
STEPS = 300
# (name, requests in the step, tokens that each computes in it)
CASES = (
    ("1 request decodes", 1, 1),
    ("16 requests decode", 16, 1),
    ("64 requests decode", 64, 1),
    ("256 requests decode", 256, 1),
    ("1 request prefills 2048 tokens", 1, 2048),
    ("1 request prefills 8192 tokens", 1, 8192),
)


class Engine:
    """As much of an engine as a step needs: the copies are real but tiny."""

    def __init__(self, socket: str) -> None:
        identity = EngineIdentity(f"bench-{os.getpid()}", os.urandom(16))
        namespace = Namespace(
            model="bench",
            kv_dtype="uint8",
            hash_algorithm="random",
            hash_bytes=HASH_BYTES,
            groups=(Group(tokens_per_block=TOKENS, shard_bytes=(BLOCK_BYTES,)),),
            unshared=True,
        )
        self.num_blocks = 1 << 18
        size = self.num_blocks * BLOCK_BYTES
        fd = os.memfd_create("bench-kv")
        os.ftruncate(fd, size)
        self.worker = Worker(socket, identity)
        fragment = Fragment(0, 0, BLOCK_BYTES, BLOCK_BYTES)
        self.worker.register(
            [SharedMemory(fd, 0, size)], [GroupLayout(self.num_blocks, [fragment], 1)]
        )
        os.close(fd)
        self.connection = SchedulerConnection(socket, identity, namespace)
        self.scheduler = Scheduler(self.connection)
        if not self.connection.wait_usable(30.0):
            raise SystemExit(f"no daemon at {socket}: {self.connection.problem}")

    def close(self) -> None:
        self.worker.close()
        self.connection.close()


def step_us(engine: Engine, requests: int, tokens: int) -> list[float]:
    """Microseconds of each build_step."""
    blocks = -(-STEPS * tokens // TOKENS) + 2
    fitting = min(blocks, engine.num_blocks // requests)
    names = [f"{requests}-{tokens}-{number}" for number in range(requests)]
    tables = [[list(range(n * fitting, (n + 1) * fitting))] for n in range(requests)]
    hashes = [[[os.urandom(HASH_BYTES) for _ in range(fitting)]] for _ in names]
    scheduler = engine.scheduler
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
        engine.worker.start_step(plan)
        engine.worker.finish_step(plan)
        time.sleep(0.002)  # the model
        scheduler.update_from_workers([engine.worker.get_finished()])
    for name, table in zip(names, tables, strict=True):
        scheduler.request_finished(name, table)
    while scheduler.has_pending_work():
        plan = scheduler.build_step([])
        engine.worker.start_step(plan)
        engine.worker.finish_step(plan)
        scheduler.update_from_workers([engine.worker.get_finished()])
        time.sleep(0.001)
    return taken


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    engine = Engine(options.socket)
    rows = {}
    for name, requests, tokens in CASES:
        taken = sorted(step_us(engine, requests, tokens))
        p99 = taken[int(len(taken) * 0.99) - 1]
        rows[name] = {"p50_us": statistics.median(taken), "p99_us": p99, "steps": len(taken)}
    engine.close()
    if options.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        print(f"{name:34} p50 {row['p50_us']:8.1f} us   p99 {row['p99_us']:8.1f} us")


if __name__ == "__main__":
    main(sys.argv[1:])
