"""The core alone: stores with eviction, lookups and memory a block, at 10^4 and 10^6 resident.

`store` is `Machine.handle` of one StoreRequested of 2048 new keys that evicts 2048 blocks;
`ready` is the TransferFinished that makes them readable. Both sizes run in
interleaved pairs, and each policy beside `lru`.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import report
from kvd.core import actions, events, keys
from kvd.core.machine import Machine, MachineConfig
from kvd.core.policy import POLICY_NAMES
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd.runtime.probes import native_probes
from kvd_proto.groups import GroupKind

BATCH = 2048
BLOCK_BYTES = 4096
EXTENT_BYTES = 64 * 2**20
HASH_BYTES = 32
SIZES = (10_000, 1_000_000)
LOOKUPS = (16, 256, 2048)
CONTEXT = events.RequestContext(keys.RequestId("bench"))
SESSION = keys.SessionId(1)
MOVER = keys.MoverId(1)


@dataclass
class Filled:
    """A machine whose pool is full of `resident` blocks, and how to go on storing."""

    policy: str
    resident: int
    stored: int = 0
    job: int = 0
    bytes_per_block: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Rows hold as many slots as the wanted number of blocks divides into.
        slots = min(EXTENT_BYTES // BLOCK_BYTES, self.resident // 4)
        extents = -(-self.resident // slots)
        before = _resident_bytes()
        config = MachineConfig(
            extents, slots * BLOCK_BYTES, policy=self.policy, tag_secret=b"bench" * 3
        )
        self.machine = Machine(config, native_probes())
        group = GroupSpec(GroupKind.FULL_ATTENTION, 1, (BLOCK_BYTES,))
        spec = NamespaceSpec("bench", keys.TenantId("bench"), HASH_BYTES, (group,))
        self.machine.handle(events.SessionOpened(SESSION, spec, "", 1), 0)
        self.machine.handle(events.RankAttached(SESSION, MOVER, 0, 0, True), 0)
        capacity = extents * slots
        while self.stored < capacity:
            self.store(min(BATCH, capacity - self.stored))
        self.store()
        gc.collect()
        self.bytes_per_block = (_resident_bytes() - before) / capacity
        self.seconds = {}

    def store(self, count: int = BATCH) -> None:
        """Store the next keys and report their copy's end."""
        self.job += 1
        batch = _keys(self.stored, count)
        self.stored += count
        blocks = np.arange(count, dtype=np.uint32).reshape(-1, 1)
        run = events.Run(0, batch, blocks)
        context = events.RequestContext(keys.RequestId(f"request-{self.job}"))
        request = events.StoreRequested(SESSION, keys.JobId(self.job), context, (run,))
        ordered = self.timed("store", request)
        (start,) = (o for o in ordered if isinstance(o, actions.StartTransfer))
        end = events.TransferFinished(
            MOVER, start.transfer, events.TransferOutcome.DONE, count * BLOCK_BYTES, 1
        )
        self.timed("ready", end)
        self.machine.handle(events.RequestsEnded(SESSION, (context.request,)), self.job)

    def lookup(self, count: int, *, hit: bool, lease: bool = False) -> None:
        """Look up the last keys stored, or as many that never were."""
        first = self.stored - count if hit else 2**40 + self.job * BATCH
        mode = events.LeaseMode.PREFIX if lease else events.LeaseMode.NONE
        query = events.Query(CONTEXT, 0, _keys(first, count), mode)
        name = f"lookup {count} {'leased' if lease else 'hit' if hit else 'miss'}"
        request = events.LookupRequested(SESSION, (query,))
        (reply,) = self.timed(name, request)
        assert isinstance(reply, actions.Reply)
        found = reply.payload[0].statuses[0] & 3
        assert found == (1 if hit else 0), "the lookup found something else"
        if lease:
            self.machine.handle(events.RequestsEnded(SESSION, (CONTEXT.request,)), self.job)

    def timed(self, name: str, event: events.Event) -> list[actions.Action]:
        begin, worked = time.perf_counter(), time.thread_time()
        ordered = self.machine.handle(event, self.job)
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)
        # What a machine without neighbours would show.
        self.seconds.setdefault(f"{name}, processor", []).append(time.thread_time() - worked)
        return ordered


def _keys(first: int, count: int) -> keys.KeyBatch:
    """Keys that a hash function could have made, named by number."""
    words = np.arange(4 * first, 4 * (first + count), dtype=np.uint64).reshape(-1, 4)
    return keys.KeyBatch(words * np.uint64(0x9E3779B97F4A7C15), HASH_BYTES)


def _resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(policy: str, rounds: int, held: dict[bytes, int]) -> dict[str, object]:
    """Milliseconds by size and operation, the ratio of stores, and bytes a block."""
    small, large = measured = [Filled(policy, size) for size in SIZES]
    lru = Filled("lru", SIZES[1])
    probes = []
    for number in range(rounds):
        # Once more while all of it is in the cache, as nothing of a store's is: the harder floor.
        probes.append(min(probed(held, BATCH) for _ in range(3)))
        driven = [*measured, lru]
        for filled in driven if number % 2 else reversed(driven):
            filled.store()
            for count in LOOKUPS:
                filled.lookup(count, hit=True)
                filled.lookup(count, hit=False)
                filled.lookup(count, hit=True, lease=True)
    results: dict[str, object] = {}
    for filled in measured:
        results[str(filled.resident)] = {
            name: report.Spread.of([1000 * s for s in seconds])
            for name, seconds in filled.seconds.items()
        }
    results["store, large over small"] = report.ratios(
        large.seconds["store, processor"], small.seconds["store, processor"]
    )
    results["store, over lru's"] = report.ratios(
        large.seconds["store, processor"], lru.seconds["store, processor"]
    )
    for name, operation in (("store", "store"), ("leased lookup", f"lookup {BATCH} leased")):
        spent = large.seconds[f"{operation}, processor"]
        results[f"{name}, over a dict probe of {BATCH}"] = report.ratios(spent, probes)
    results["bytes a block"] = large.bytes_per_block
    return results


def probed(held: dict[bytes, int], count: int) -> float:
    """Seconds in which a plain dict is probed for as many keys, always the same."""
    asked = [n.to_bytes(32, "little") for n in range(count)]
    worked = time.thread_time()
    [held.get(key) for key in asked]
    return time.thread_time() - worked


def dict_floor(rounds: int, held: dict[bytes, int]) -> dict[str, report.Spread]:
    """Milliseconds for a plain dict to be probed for as many keys."""
    floors = {}
    for count in LOOKUPS:
        spent = [1000 * probed(held, count) for _ in range(rounds)]
        floors[f"dict probe of {count}"] = report.Spread.of(spent)
    return floors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--policy", action="append", choices=POLICY_NAMES)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, object] = {}
    rows: list[list[object]] = []
    held = {n.to_bytes(32, "little"): n for n in range(SIZES[1])}
    for policy in options.policy or POLICY_NAMES:
        found = measure(policy, options.rounds, held)
        results[policy] = found
        by_size = [found[str(size)] for size in SIZES]
        names = by_size[0]
        assert isinstance(names, dict)
        for name in names:
            cells = [spreads[name] for spreads in by_size if isinstance(spreads, dict)]
            rows.append([policy, f"{name} ms", *cells])
        names = ["store, large over small", "store, over lru's"]
        names += [name for name in found if f"a dict probe of {BATCH}" in name]
        rows += [[policy, name, "", found[name]] for name in names]
        rows.append([policy, "bytes a block", "", f"{found['bytes a block']:.0f}"])
    floors = dict_floor(options.rounds, held)
    results["floor"] = floors
    rows += [["floor", f"{name} ms", "", spread] for name, spread in floors.items()]
    header = ["policy", f"{BATCH} keys a store", *(f"{size} resident" for size in SIZES)]
    print(report.table(header, rows))
    report.write("core_store", results, options.output)


if __name__ == "__main__":
    main()
