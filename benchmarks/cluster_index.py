"""What a cluster's engine keeps and answers for each block: `python -m benchmarks.cluster_index`.

Through kvd's own stores, with small blocks, so that the index is what is measured and not the
bytes: the memory of whoever keeps the index, the blocks a second that one of them takes in and is
asked for, and the bytes on the wire for each key. One server of each engine, one node that calls.
docs/scaling.md reckons with it.

All on one machine, so that the callers and the engine share its processors: a server of its own
does better. The bytes on the wire are those of the loopback, in which other programs may talk too;
`unshare --net` gives a loopback of one's own.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import report
from examples.cluster.mooncake import MooncakeCluster
from kvd.tiers.mooncake.store import MooncakeStore
from kvd.tiers.store import Outcome, TierBlock, TierKey, TierStore
from kvd.tiers.valkey.store import ValkeyStore
from tests.ports import free_port
from tests.tiers.valkey_rig import ValkeyServer

MIB = 1 << 20
BATCH = 512
CALLERS = 2
BLOCK_BYTES = 512
DEADLINE_S = 60.0
SCOPE = b"benchmark".ljust(32)


@dataclass(frozen=True)
class Index:
    """What one engine came to."""

    engine: str
    blocks: int
    written_a_second: float
    asked_a_second: float  # of blocks that are there
    asked_in_vain_a_second: float
    index_bytes_a_block: float
    wire_bytes_to_write: float  # a block, without its own bytes
    wire_bytes_to_ask: float  # a key


class Caller:
    """A store, and the blocks that it is given."""

    def __init__(self, store: TierStore, pool: ThreadPoolExecutor) -> None:
        self._store, self._pool = store, pool
        self._memory = memoryview(mmap.mmap(-1, BATCH * BLOCK_BYTES))
        if hasattr(store, "map_memory"):
            address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
            store.map_memory(address, len(self._memory))

    def write(self, numbers: range) -> float:
        """Blocks a second."""
        parts = [
            self._memory[at : at + BLOCK_BYTES] for at in range(0, len(self._memory), BLOCK_BYTES)
        ]

        def call(batch: range) -> None:
            blocks = [TierBlock(key(n), (part,)) for n, part in zip(batch, parts, strict=False)]
            outcomes = self._store.write(blocks, time.monotonic() + DEADLINE_S)
            wrong = [outcome for outcome in outcomes if outcome is not Outcome.DONE]
            assert not wrong, f"{len(wrong)} blocks were not written: {wrong[0]!r}"

        return self._timed(call, numbers)

    def ask(self, numbers: range, *, there: bool) -> float:
        """Keys a second."""

        def call(batch: range) -> None:
            found = self._store.exists([key(n) for n in batch], time.monotonic() + DEADLINE_S)
            assert set(found) == {there}, f"{sum(found)} of {len(found)} are there"

        return self._timed(call, numbers)

    def _timed(self, call: Callable[[range], None], numbers: range) -> float:
        batches = [numbers[at : at + BATCH] for at in range(0, len(numbers), BATCH)]
        began = time.perf_counter()
        list(self._pool.map(call, batches))
        return len(numbers) / (time.perf_counter() - began)


def key(number: int) -> TierKey:
    return TierKey(SCOPE, number.to_bytes(32, "big"))


def measured(engine: str, caller: Caller, blocks: int, memory: Callable[[], int]) -> Index:
    """Some blocks to begin with, since a server grows in steps; then as many as are asked for."""
    warm = blocks // 10
    caller.write(range(warm))
    before, wire = memory(), loopback()
    written = caller.write(range(warm, warm + blocks))
    written_wire = loopback() - wire
    index = (memory() - before) / blocks
    wire = loopback()
    asked = caller.ask(range(warm, warm + blocks), there=True)
    asked_wire = loopback() - wire
    vain = caller.ask(range(10 * blocks, 11 * blocks), there=False)
    return Index(
        engine,
        blocks,
        written,
        asked,
        vain,
        index,
        written_wire / blocks - BLOCK_BYTES,
        asked_wire / blocks,
    )


def loopback() -> int:
    """Bytes that have gone over the loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def resident(pid: int) -> int:
    """Bytes of a process that are its own, and not of files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def mooncake(place: Path, blocks: int, pool: ThreadPoolExecutor) -> Index:
    """Its master has the index; the bytes are with its node."""
    node_bytes = max(256 * MIB, 4 * blocks * BLOCK_BYTES)
    cluster = MooncakeCluster(place, free_port(), free_port(), node_bytes=node_bytes)
    try:
        master = cluster.start_master()
        cluster.start_node()
        store = MooncakeStore({"master": cluster.address})
        try:
            caller = Caller(store, pool)
            return measured("Mooncake", caller, blocks, lambda: resident(master.pid))
        finally:
            store.close()
    finally:
        cluster.end()


def valkey(place: Path, blocks: int, pool: ThreadPoolExecutor) -> Index:
    """The server has both: the blocks' own bytes are taken off."""
    server = ValkeyServer(place, in_cluster=False)
    try:
        server.wait()
        store = ValkeyStore({"addresses": [server.address]})

        def memory() -> int:
            info = server.call("INFO", "memory")
            return int(info.split("used_memory:")[1].split()[0])

        try:
            found = measured("Valkey", Caller(store, pool), blocks, memory)
        finally:
            store.close()
    finally:
        server.kill()
    return Index(
        **{**asdict(found), "index_bytes_a_block": found.index_bytes_a_block - BLOCK_BYTES}
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, and JSON on request."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200_000, help="blocks of 512 bytes (200000)")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    options = parser.parse_args(arguments)
    if options.blocks < 10 * BATCH:
        parser.error(f"--blocks: at least {10 * BATCH}")
    found: list[Index] = []
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(CALLERS) as pool:
        for engine in (mooncake, valkey):
            print(f"{engine.__name__}: {options.blocks} blocks ...", file=sys.stderr, flush=True)
            found.append(engine(Path(place) / engine.__name__, options.blocks, pool))
    header = [
        "engine",
        "written/s",
        "asked/s",
        "in vain/s",
        "index B",
        "wire write B",
        "wire ask B",
    ]
    rows = [
        [row.engine, *(f"{each:,.0f}" for each in list(asdict(row).values())[2:])] for row in found
    ]
    print(report.table(header, rows))
    report.write("cluster_index", {row.engine: asdict(row) for row in found}, options.output)


if __name__ == "__main__":
    main()
