"""The Valkey tier's store beside Valkey's own client: `python -m benchmarks.valkey_tier [--quick]`.

Both write and read the same blocks to and from three servers of a cluster on loopback. The client
does it by its batches: SET from memory, MGET into memory, first all blocks in one batch, then in
batches of a megabyte from as many threads, each with a client of its own, as the store has. The
store does more: it asks whether a block is there, takes and verifies every checksum, and keeps a
record beside each block. Interleaved pairs; the servers are emptied before each pass of writing.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from glide_sync import (
    ClusterBatch,
    GlideClusterClient,
    GlideClusterClientConfiguration,
    Logger,
    LogLevel,
    NodeAddress,
)

from benchmarks import report
from kvd.tiers.store import Outcome, TierBlock, TierKey
from kvd.tiers.valkey.store import ValkeyStore
from tests.tiers.valkey_rig import ValkeyCluster

KIB = 1 << 10
MIB = 1 << 20
SIZES = (64 * KIB, 256 * KIB, 2 * MIB)
SERVERS = 3
THREADS = 4
UNIT_BYTES = MIB
TOTAL_BYTES = 64 * MIB
BAR = 0.9
SCOPE = b"benchmark".ljust(32)


class Own:
    """The client by itself."""

    def __init__(self, cluster: ValkeyCluster, blocks: Sequence[TierBlock]) -> None:
        places = [NodeAddress("127.0.0.1", server.port) for server in cluster.servers]
        self._clients = [
            GlideClusterClient.create(
                GlideClusterClientConfiguration(places, request_timeout=30_000)
            )
            for _ in range(THREADS)
        ]
        self._pool = ThreadPoolExecutor(THREADS)
        self._names: list[Any] = [b"own{%s}" % block.key.block.hex().encode() for block in blocks]
        self._views = [block.parts[0] for block in blocks]
        size = max(1, UNIT_BYTES // self._views[0].nbytes)
        bounds = range(0, len(blocks), size)
        self._units = [(begin, min(begin + size, len(blocks))) for begin in bounds]

    def write_once(self) -> None:
        self._write(self._clients[0], 0, len(self._names))

    def read_once(self) -> None:
        self._read(self._clients[0], 0, len(self._names))

    def write_threads(self) -> None:
        self._side_by_side(self._write)

    def read_threads(self) -> None:
        self._side_by_side(self._read)

    def close(self) -> None:
        self._pool.shutdown()
        for client in self._clients:
            client.close()

    def _side_by_side(self, call: Callable[[GlideClusterClient, int, int], None]) -> None:
        def run(thread: int) -> None:
            for begin, end in itertools.islice(self._units, thread, None, THREADS):
                call(self._clients[thread], begin, end)

        list(self._pool.map(run, range(THREADS)))

    def _write(self, client: GlideClusterClient, begin: int, end: int) -> None:
        batch = ClusterBatch(is_atomic=False)
        for name, view in zip(self._names[begin:end], self._views[begin:end], strict=True):
            batch.set(name, view)
        client.exec(batch, raise_on_error=True)

    def _read(self, client: GlideClusterClient, begin: int, end: int) -> None:
        lengths = client.mget(self._names[begin:end], buffers=self._views[begin:end])
        assert None not in lengths


def beside_own(cluster: ValkeyCluster, block_bytes: int, pairs: int) -> list[dict[str, Any]]:
    """MB/s of the store and of the client, each written and then read, in turn."""
    memory = memoryview(mmap.mmap(-1, TOTAL_BYTES))
    np.frombuffer(memory, dtype=np.uint8)[:] = np.frombuffer(os.urandom(TOTAL_BYTES), np.uint8)
    blocks = [
        TierBlock(TierKey(SCOPE, b"%16d" % at), (memory[at : at + block_bytes],))
        for at in range(0, TOTAL_BYTES, block_bytes)
    ]
    own, store = Own(cluster, blocks), ValkeyStore({"addresses": cluster.addresses})
    deadline = time.monotonic() + 3600

    def all_done(call: Callable[[Sequence[TierBlock], float], list[Outcome]]) -> None:
        assert set(call(blocks, deadline)) == {Outcome.DONE}

    runs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "store": (lambda: all_done(store.write), lambda: all_done(store.read)),
        "one batch": (own.write_once, own.read_once),
        "threads": (own.write_threads, own.read_threads),
    }
    speeds: dict[tuple[str, str], list[float]] = {}
    for pair in range(pairs + 1):
        for name, calls in runs.items():
            cluster.empty()
            for kind, call in zip(("write", "read"), calls, strict=True):
                began = time.perf_counter()
                call()
                speed = TOTAL_BYTES / (time.perf_counter() - began) / 1e6
                if pair:  # the first warms connections and the servers' memory
                    speeds.setdefault((kind, name), []).append(speed)
    store.close()
    own.close()
    rows = []
    for kind in ("write", "read"):
        mine, *theirs = (speeds[kind, name] for name in runs)
        row: dict[str, Any] = {"kind": kind, "block_kib": block_bytes // KIB}
        row |= {f"{name} MB/s": round(statistics.median(speeds[kind, name])) for name in runs}
        for name, each in zip(("one batch", "threads"), theirs, strict=True):
            ratios = [a / b for a, b in zip(mine, each, strict=True)]
            row[f"of {name}"] = round(statistics.median(ratios), 2)
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="The Valkey tier's store beside its client.")
    parser.add_argument("--quick", action="store_true", help="few pairs: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/valkey_tier.json)")
    options = parser.parse_args()
    Logger.set_logger_config(LogLevel.OFF)
    sys.setswitchinterval(0.0005)  # as the daemon's processes do
    with tempfile.TemporaryDirectory() as place:
        cluster = ValkeyCluster(Path(place), SERVERS)
        try:
            pairs = 3 if options.quick else 9
            rows = [row for size in SIZES for row in beside_own(cluster, size, pairs)]
        finally:
            cluster.kill()
    print(report.table(list(rows[0]), [list(row.values()) for row in rows]))
    for row in rows:
        if min(row["of one batch"], row["of threads"]) < BAR:
            print(f"below {BAR} of the client: {row['kind']} of {row['block_kib']} KiB")
    report.write("valkey_tier", {"beside_client": rows}, options.output)


if __name__ == "__main__":
    main()
