"""The Mooncake tier's store beside Mooncake's own client: `python -m benchmarks.mooncake_tier`.

Both move the same bytes between the same registered memory and one node on the loopback, in
batches of 32 MiB, by two callers. The client's are the library's own batch calls, a block each,
by threads that wait for them as the library does. The store
also asks what is there, takes a checksum of every block that it writes, and verifies every one
that it reads. Interleaved pairs. All of it, the node too, shares this machine's processors: the
ratio counts, not the speed.
"""

from __future__ import annotations

import argparse
import functools
import mmap
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from examples.cluster.mooncake import MooncakeCluster, free_port
from kvd.tiers.mooncake.client import MooncakeClient
from kvd.tiers.mooncake.options import MooncakeOptions
from kvd.tiers.mooncake.store import MooncakeStore
from kvd.tiers.store import Outcome, TierBlock, TierKey

KIB = 1 << 10
MIB = 1 << 20
SIZES = (64 * KIB, 256 * KIB, 2 * MIB)
CALLERS = 2
BATCH_BYTES = 32 * MIB
BAR = 0.9
SCOPE = b"benchmark".ljust(32)


class Memory:
    """Each caller's own, known to the network as the pool's would be."""

    def __init__(self, seed: int) -> None:
        self.view = memoryview(mmap.mmap(-1, BATCH_BYTES))
        words = np.frombuffer(self.view, dtype=np.uint64)
        words[:] = np.random.default_rng(seed).integers(0, 1 << 63, len(words), dtype=np.uint64)
        self.address = words.ctypes.data


class Sides:
    """The store and the plain client, over one cluster."""

    def __init__(self, master: str, block_bytes: int, total_bytes: int) -> None:
        self._size, self._batches = block_bytes, total_bytes // BATCH_BYTES
        self._per_batch = BATCH_BYTES // block_bytes
        self._total = total_bytes
        client = MooncakeClient.connect(MooncakeOptions(master))
        self._client = client
        self._store = MooncakeStore({"master": master}, lambda _: client)
        self._free: queue.SimpleQueue[Memory] = queue.SimpleQueue()
        for seed in range(CALLERS):
            memory = Memory(seed)
            self._store.map_memory(memory.address, BATCH_BYTES)
            self._free.put(memory)

    def store_writes(self) -> float:
        """MB/s; what the last pass wrote is gone before it."""
        self._store.delete_scopes([SCOPE], time.monotonic() + 60)
        return self._pass(lambda batch, memory: self._stored(self._store.write, batch, memory))

    def store_reads(self) -> float:
        """MB/s of all that the last pass wrote."""
        return self._pass(lambda batch, memory: self._stored(self._store.read, batch, memory))

    def client_puts(self) -> float:
        """As `store_writes`."""
        self._client.remove_beginning("plain")
        library = self._client.library
        put = functools.partial(library.batch_put_from, config=self._client.replication)
        return self._pass(lambda batch, memory: self._plain(put, batch, memory))

    def client_gets(self) -> float:
        """As `store_reads`."""
        get = self._client.library.batch_get_into
        return self._pass(lambda batch, memory: self._plain(get, batch, memory))

    def close(self) -> None:
        self._store.close()

    def _stored(self, call: Callable[..., list[Outcome]], batch: int, memory: Memory) -> None:
        size, view = self._size, memory.view
        blocks = [
            TierBlock(
                TierKey(SCOPE, b"%32d" % (batch * self._per_batch + at)),
                (view[at * size : (at + 1) * size],),
            )
            for at in range(self._per_batch)
        ]
        outcomes = set(call(blocks, time.monotonic() + 60))
        assert outcomes == {Outcome.DONE}, self._store.usage()

    def _plain(self, call: Callable[..., list[int]], batch: int, memory: Memory) -> None:
        numbers = range(self._per_batch)
        found = call(
            [f"plain{batch * self._per_batch + at:0124d}" for at in numbers],
            [memory.address + at * self._size for at in numbers],
            [self._size] * self._per_batch,
        )
        assert set(found) <= {0, self._size}

    def _pass(self, call: Callable[[int, Memory], None]) -> float:
        def one(batch: int) -> None:
            memory = self._free.get()
            try:
                call(batch, memory)
            finally:
                self._free.put(memory)

        began = time.perf_counter()
        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(one, range(self._batches)))
        return self._total / (time.perf_counter() - began) / 1e6


def beside_client(master: str, block_bytes: int, total: int, pairs: int) -> list[dict[str, Any]]:
    """Both ways of one block size."""
    sides = Sides(master, block_bytes, total)
    sides.store_writes()  # the node's memory is touched, and what is read is there
    sides.client_puts()
    rows = []
    for kind, ours, theirs in (
        ("write", sides.store_writes, sides.client_puts),
        ("read", sides.store_reads, sides.client_gets),
    ):
        left, right = report.interleaved(ours, theirs, pairs)
        rows.append(
            {
                "block_bytes": block_bytes,
                "kind": kind,
                "store_mb_s": report.Spread.of(left),
                "client_mb_s": report.Spread.of(right),
                "ratio": report.ratios(left, right),
            }
        )
    sides.close()
    return rows


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="The Mooncake tier's store beside its client.")
    parser.add_argument("--quick", action="store_true", help="little and few: a smoke test")
    parser.add_argument("--pairs", type=int, help="instead of 7, or 2")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: results/mooncake_tier.json)"
    )
    options = parser.parse_args()
    total, pairs = (128 * MIB, 2) if options.quick else (512 * MIB, 7)
    pairs = options.pairs or pairs
    sys.setswitchinterval(0.0005)  # as the daemon's processes do
    with tempfile.TemporaryDirectory() as logs:
        cluster = MooncakeCluster(Path(logs), free_port(), free_port(), node_bytes=4 * total)
        try:
            cluster.start_master()
            cluster.start_node()
            rows = [
                row for size in SIZES for row in beside_client(cluster.address, size, total, pairs)
            ]
        finally:
            cluster.end()
    print(report.table(list(rows[0]), [list(row.values()) for row in rows]))
    for row in rows:
        if row["ratio"].median < BAR:
            print(f"below {BAR} of the client: {row['kind']} of {row['block_bytes'] // KIB} KiB")
    report.write("mooncake_tier", {"beside_client": rows}, options.output)


if __name__ == "__main__":
    main()
