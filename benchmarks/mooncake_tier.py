"""The Mooncake tier's store beside Mooncake's own client: `python -m benchmarks.mooncake_tier`.

Both move the same bytes between the same registered memory, shared as the pool's slots are, and one
node on the loopback, in batches of 32 MiB, by two callers. The client's are the library's own batch
calls, a block each, by threads that wait for them as the library does: over the same slots, and for
comparison over one warm buffer a caller, which no cache has. The store also asks what is there,
takes a checksum of every block that it writes, and verifies every one that it reads; `x no sums` is
what it does beside itself without checksums, to tell what share they are. The sides take
turns, another first each time. All of it, the node too, shares this machine's processors: the
ratio counts, not the speed.
"""

from __future__ import annotations

import argparse
import functools
import gc
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
from benchmarks.no_sums import no_sums
from examples.cluster.mooncake import MooncakeCluster, free_port
from kvd.tiers.mooncake.client import MooncakeClient
from kvd.tiers.mooncake.options import MooncakeOptions
from kvd.tiers.mooncake.store import MooncakeStore
from kvd.tiers.store import Outcome, TierBlock, TierKey

KIB = 1 << 10
MIB = 1 << 20
SIZES_KIB = (64, 256, 2048)
CALLERS = 2
BATCH_BYTES = 32 * MIB
BAR = 0.9
SCOPE, UNPROVED = b"benchmark".ljust(32), b"no sums".ljust(32)


class Memory:
    """Known to the network, as the pool's is."""

    def __init__(self, nbytes: int, store: MooncakeStore) -> None:
        self.view = memoryview(mmap.mmap(-1, nbytes))
        words = np.frombuffer(self.view, dtype=np.uint64)
        words[:] = np.random.default_rng(1).integers(0, 1 << 63, len(words), dtype=np.uint64)
        self.address = words.ctypes.data
        store.map_memory(self.address, nbytes)


class Sides:
    """The store and the plain client, over one cluster."""

    def __init__(self, master: str, block_bytes: int, total_bytes: int) -> None:
        self._size, self._batches = block_bytes, total_bytes // BATCH_BYTES
        self._per_batch = BATCH_BYTES // block_bytes
        self._total = total_bytes
        client = MooncakeClient.connect(MooncakeOptions(master))
        self._client = client
        self._store = MooncakeStore({"master": master}, lambda _: client)
        self._slots = Memory(total_bytes, self._store)
        self._warm: queue.SimpleQueue[Memory] = queue.SimpleQueue()
        for _ in range(CALLERS):
            self._warm.put(Memory(BATCH_BYTES, self._store))

    def store_writes(self) -> float:
        """MB/s; what the last pass wrote is gone before it."""
        self._store.delete_scopes([SCOPE], time.monotonic() + 60)
        return self._pass(functools.partial(self._stored, self._store.write))

    def store_reads(self) -> float:
        """MB/s of all that the last pass wrote."""
        return self._pass(functools.partial(self._stored, self._store.read))

    def writes_without_sums(self) -> float:
        """As `store_writes`, of other blocks."""
        self._store.delete_scopes([UNPROVED], time.monotonic() + 60)
        with no_sums():
            return self._pass(functools.partial(self._stored, self._store.write, scope=UNPROVED))

    def reads_without_sums(self) -> float:
        """As `store_reads`, of those."""
        with no_sums():
            return self._pass(functools.partial(self._stored, self._store.read, scope=UNPROVED))

    def client_puts(self) -> float:
        """As `store_writes`."""
        return self._puts(self._plain)

    def client_gets(self) -> float:
        """As `store_reads`."""
        return self._gets(self._plain)

    def warm_puts(self) -> float:
        """As `client_puts`, from one buffer for each caller."""
        return self._puts(self._warmly)

    def warm_gets(self) -> float:
        """As `client_gets`, into one buffer for each caller."""
        return self._gets(self._warmly)

    def _puts(self, call: Callable[..., None]) -> float:
        self._client.remove_beginning("plain")
        library = self._client.library
        put = functools.partial(library.batch_put_from, config=self._client.replication)
        return self._pass(functools.partial(call, put))

    def _gets(self, call: Callable[..., None]) -> float:
        return self._pass(functools.partial(call, self._client.library.batch_get_into))

    def close(self) -> None:
        self._store.close()

    def _stored(self, call: Callable[..., list[Outcome]], batch: int, scope: bytes = SCOPE) -> None:
        size, view = self._size, self._slots.view
        blocks = [
            TierBlock(TierKey(scope, b"%32d" % at), (view[at * size : (at + 1) * size],))
            for at in range(batch * self._per_batch, (batch + 1) * self._per_batch)
        ]
        outcomes = set(call(blocks, time.monotonic() + 60))
        assert outcomes == {Outcome.DONE}, self._store.usage()

    def _plain(self, call: Callable[..., list[int]], batch: int) -> None:
        self._called(call, batch, self._slots.address + batch * BATCH_BYTES)

    def _warmly(self, call: Callable[..., list[int]], batch: int) -> None:
        memory = self._warm.get()
        try:
            self._called(call, batch, memory.address)
        finally:
            self._warm.put(memory)

    def _called(self, call: Callable[..., list[int]], batch: int, address: int) -> None:
        numbers = range(self._per_batch)
        found = call(
            [f"plain{batch * self._per_batch + at:0124d}" for at in numbers],
            [address + at * self._size for at in numbers],
            [self._size] * self._per_batch,
        )
        assert set(found) <= {0, self._size}

    def _pass(self, call: Callable[[int], None]) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(call, range(self._batches)))
        return self._total / (time.perf_counter() - began) / 1e6


def beside_client(master: str, block_bytes: int, total: int, pairs: int) -> list[dict[str, Any]]:
    """Both ways of one block size."""
    sides = Sides(master, block_bytes, total)
    sides.store_writes()  # the node's memory is touched, and what is read is there
    sides.client_puts()
    rows = []
    for kind, calls in {
        "write": [
            sides.store_writes,
            sides.client_puts,
            sides.warm_puts,
            sides.writes_without_sums,
        ],
        "read": [sides.store_reads, sides.client_gets, sides.warm_gets, sides.reads_without_sums],
    }.items():
        speeds: list[list[float]] = [[] for _ in calls]
        for pair in range(pairs):
            for at in range(len(calls)):
                side = (at + pair) % len(calls)
                speeds[side].append(calls[side]())
        store, slots, warm, unproved = speeds
        rows.append(
            {
                "block_kib": block_bytes // KIB,
                "kind": kind,
                "store MB/s": report.Spread.of(store),
                "client MB/s": report.Spread.of(slots),
                "x client": report.ratios(store, slots),
                "x client, warm": report.ratios(store, warm),
                "x no sums": report.ratios(store, unproved),
            }
        )
    sides.close()
    return rows


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="The Mooncake tier's store beside its client.")
    parser.add_argument("--quick", action="store_true", help="little and few: a smoke test")
    parser.add_argument("--pairs", type=int, help="instead of 15, or 2")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_KIB, help="blocks, in KiB")
    parser.add_argument(
        "--output", type=Path, help="JSON file (default: results/mooncake_tier.json)"
    )
    options = parser.parse_args()
    total, pairs = (128 * MIB, 2) if options.quick else (256 * MIB, 15)
    pairs = options.pairs or pairs
    sys.setswitchinterval(0.0005)  # as the daemon's processes do
    gc.freeze()  # likewise
    with tempfile.TemporaryDirectory() as logs:
        cluster = MooncakeCluster(Path(logs), free_port(), free_port(), node_bytes=6 * total)
        try:
            cluster.start_master()
            cluster.start_node()
            rows = [
                row
                for size in options.sizes
                for row in beside_client(cluster.address, size * KIB, total, pairs)
            ]
        finally:
            cluster.end()
    print(report.table(list(rows[0]), [list(row.values()) for row in rows]))
    for row in rows:
        if row["x client"].median < BAR:
            print(f"below {BAR} of the client: {row['kind']} of {row['block_kib']} KiB")
    report.write("mooncake_tier", {"beside_client": rows}, options.output)


if __name__ == "__main__":
    main()
