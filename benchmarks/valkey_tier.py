"""The Valkey tier's store beside Valkey's own client: `python -m benchmarks.valkey_tier [--quick]`.

Both write and read the same blocks, in shared memory as the pool's slots are, to and from three
servers of a cluster on loopback. The client does it by its batches: SET from memory, MGET into
memory, first all blocks in one batch, then in batches of a megabyte from as many threads, each with
a client of its own, as the store has. It does so over the same slots, and for comparison over one
warm buffer a batch, which no cache has. The store does more: it asks whether a block is there, and
takes and verifies every checksum. `no sums` is the store without checksums, to tell what share that
is: `x no sums` is what it costs. The sides take turns, another first each time; the servers are
emptied before each pass of writing. The second table has the processor time of client and servers
together, which a busy machine changes little.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import mmap
import os
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
from benchmarks.no_sums import no_sums
from benchmarks.tier_neighbour import processor_seconds
from kvd.tiers.store import Outcome, TierBlock, TierKey
from kvd.tiers.valkey.store import ValkeyStore
from tests.tiers.valkey_rig import ValkeyCluster

KIB = 1 << 10
MIB = 1 << 20
SIZES_KIB = (64, 256, 2048)
SERVERS = 3
THREADS = 4
UNIT_BYTES = MIB
TOTAL_BYTES = 64 * MIB
BAR = 0.9
SCOPE = b"benchmark".ljust(32)

Call = Callable[[], None]


class Own:
    """The client by itself, over these views of memory."""

    def __init__(self, cluster: ValkeyCluster, views: list[memoryview]) -> None:
        places = [NodeAddress("127.0.0.1", server.port) for server in cluster.servers]
        self._clients = [
            GlideClusterClient.create(
                GlideClusterClientConfiguration(places, request_timeout=30_000)
            )
            for _ in range(THREADS)
        ]
        self._pool = ThreadPoolExecutor(THREADS)
        self._names: list[Any] = [b"own{%032x}" % number for number in range(len(views))]
        self._views = views
        size = max(1, UNIT_BYTES // views[0].nbytes)
        bounds = range(0, len(views), size)
        self._units = [(begin, min(begin + size, len(views))) for begin in bounds]

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


def slots_of(memory: memoryview, block_bytes: int) -> list[memoryview]:
    """As many as TOTAL_BYTES are; over and over the same where the memory is less."""
    places = range(0, TOTAL_BYTES, block_bytes)
    return [memory[(at % memory.nbytes) :][:block_bytes] for at in places]


def random_memory(nbytes: int) -> memoryview:
    memory = memoryview(mmap.mmap(-1, nbytes))
    np.frombuffer(memory, dtype=np.uint8)[:] = np.frombuffer(os.urandom(nbytes), np.uint8)
    return memory


def beside_own(cluster: ValkeyCluster, block_bytes: int, pairs: int) -> list[dict[str, Any]]:
    """MB/s of the store and of the client, each written and then read, in turn."""
    slots = slots_of(random_memory(TOTAL_BYTES), block_bytes)
    blocks = [TierBlock(TierKey(SCOPE, b"%32d" % at), (slot,)) for at, slot in enumerate(slots)]
    warm_bytes = max(UNIT_BYTES, block_bytes)
    own = Own(cluster, slots)
    warm = Own(cluster, slots_of(random_memory(warm_bytes), block_bytes))
    store = ValkeyStore({"addresses": cluster.addresses})
    deadline = time.monotonic() + 3600

    def all_done(call: Callable[[Sequence[TierBlock], float], list[Outcome]]) -> None:
        assert set(call(blocks, deadline)) == {Outcome.DONE}

    def without_sums(call: Callable[[Sequence[TierBlock], float], list[Outcome]]) -> None:
        with no_sums():
            all_done(call)

    sides: dict[str, tuple[Call, Call]] = {
        "store": (lambda: all_done(store.write), lambda: all_done(store.read)),
        "no sums": (lambda: without_sums(store.write), lambda: without_sums(store.read)),
        "one batch": (own.write_once, own.read_once),
        "threads": (own.write_threads, own.read_threads),
        "one batch, warm": (warm.write_once, warm.read_once),
        "threads, warm": (warm.write_threads, warm.read_threads),
    }
    speeds: dict[tuple[str, str], list[float]] = {}
    costs: dict[tuple[str, str], list[float]] = {}
    pids = [os.getpid(), *(server.process.pid for server in cluster.servers)]
    names = list(sides)
    for pair in range(pairs + 1):
        at = pair % len(names)
        for name in (*names[at:], *names[:at]):
            cluster.empty()
            for kind, call in zip(("write", "read"), sides[name], strict=True):
                used, began = sum(map(processor_seconds, pids)), time.perf_counter()
                call()
                speed = TOTAL_BYTES / (time.perf_counter() - began) / 1e6
                used = sum(map(processor_seconds, pids)) - used
                if pair:  # the first warms connections and the servers' memory
                    speeds.setdefault((kind, name), []).append(speed)
                    costs.setdefault((kind, name), []).append(used / len(blocks) * 1e6)
    for each in (store, own, warm):
        each.close()
    rows = []
    for kind in ("write", "read"):
        row: dict[str, Any] = {"kind": kind, "block_kib": block_bytes // KIB}
        row["store MB/s"] = report.Spread.of(speeds[kind, "store"])
        for name in names[1:]:
            row[f"x {name}"] = report.ratios(speeds[kind, "store"], speeds[kind, name])
        row["processor us"] = {name: report.Spread.of(costs[kind, name]) for name in names}
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="The Valkey tier's store beside its client.")
    parser.add_argument("--quick", action="store_true", help="few pairs: a smoke test")
    parser.add_argument("--pairs", type=int, help="instead of 15, or 3")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_KIB, help="blocks, in KiB")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/valkey_tier.json)")
    options = parser.parse_args()
    Logger.set_logger_config(LogLevel.OFF)
    sys.setswitchinterval(0.0005)  # as the daemon's processes do
    gc.freeze()  # likewise
    with tempfile.TemporaryDirectory() as place:
        cluster = ValkeyCluster(Path(place), SERVERS)
        try:
            pairs = options.pairs or (3 if options.quick else 15)
            rows = [row for size in options.sizes for row in beside_own(cluster, size * KIB, pairs)]
        finally:
            cluster.kill()
    print(report.table(list(rows[0])[:-1], [list(row.values())[:-1] for row in rows]))
    print()
    costs = [{"kind": r["kind"], "block_kib": r["block_kib"]} | r["processor us"] for r in rows]
    print(report.table([*costs[0]], [[*cost.values()] for cost in costs]))
    for row in rows:
        for name in ("x one batch", "x threads"):
            if row[name].median < BAR:
                print(f"{row['kind']} of {row['block_kib']} KiB: {name[2:]}, {row[name]} < {BAR}")
    report.write("valkey_tier", {"beside_client": rows}, options.output)


if __name__ == "__main__":
    main()
