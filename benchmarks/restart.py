"""How long a restart takes: rebuilding the pool's books, and from exec to the first hit.

    python -m benchmarks.restart [--slots 100000 1000000] [--rounds 5] [--output FILE]

Fills a pool on /dev/shm with that many READY slots in one process, kills it with -9, and then, in
a fresh process for each round, times: imports; opening the pool; reading the slot table into
events; the machine taking them and its orders being carried out (index page and all). The floor is
reading the same slot table's bytes once. Blocks are 4 KiB, the smallest, so that 10^6 slots need
4 GiB only; the bytes of blocks play no part in a restart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import report
from kvd.core import actions, events, keys
from kvd.core.machine import Machine, MachineConfig
from kvd.pool import Pool, PoolConfig

BLOCK_BYTES = 4096
EXTENT_BYTES = 64 << 20
HASH_BYTES = 32
BATCH = 2048
PHASES = ("exec and imports", "open", "events", "machine", "total", "floor")


def main() -> None:
    """Run the parent, or one of the steps that it starts in processes of their own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart")
    parser.add_argument("--slots", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--step", choices=("fill", "rebuild"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step == "fill":
        fill(options.directory, options.slots[0])
    elif options.step == "rebuild":
        print(json.dumps(rebuild(options.directory, options.slots[0], options.started)))
    else:
        results = {str(slots): measure(slots, options.rounds) for slots in options.slots}
        print(as_table(results))
        report.write("restart", results, options.output)


def measure(slots: int, rounds: int) -> dict[str, report.Spread]:
    """Seconds of each phase over fresh processes, all on one crashed pool."""
    directory = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir="/dev/shm"))
    try:
        print(f"filling {slots} slots ...", flush=True)
        run_step("fill", directory, slots, ends=-signal.SIGKILL)
        found = [json.loads(run_step("rebuild", directory, slots, ends=0)) for _ in range(rounds)]
    finally:
        shutil.rmtree(directory)
    return {phase: report.Spread.of([f[phase] for f in found]) for phase in PHASES}


def run_step(step: str, directory: Path, slots: int, ends: int) -> str:
    """Run one step in a process of its own; what it printed."""
    command = [sys.executable, "-m", "benchmarks.restart", "--step", step]
    command += ["--directory", str(directory), "--slots", str(slots)]
    command += ["--started", str(time.monotonic())]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=root)
    if done.returncode != ends:
        raise SystemExit(f"{step} ended with {done.returncode}")
    return done.stdout


def fill(directory: Path, slots: int) -> None:
    """Make a pool with this many READY slots through the orders of a core, and die."""
    pool = Pool.open(_config(directory, slots), lambda _done, _total: None)
    namespace, scope = keys.NamespaceId(1), keys.ScopeId(1)
    pool.open_namespace(actions.OpenNamespace(namespace, _spec(), page_blocks=slots), {})
    pool.open_scope(actions.OpenScope(scope, namespace, "", "", 0))
    per_row = EXTENT_BYTES // BLOCK_BYTES
    for extent in range(pool.extents):
        row = keys.RowId(extent)
        pool.grant_row(
            actions.GrantRow(
                row, namespace, 0, (extent,), (BLOCK_BYTES,), extent * per_row, per_row
            )
        )
    for first in range(0, slots, BATCH):
        count = min(BATCH, slots - first)
        hashes = keys.KeyBatch.from_bytes(os.urandom(count * HASH_BYTES), HASH_BYTES)
        scopes = np.full(count, scope, dtype=np.uint32)
        numbers = np.arange(first, first + count)
        pool.write_ready(actions.WriteReady(numbers, scopes, hashes, numbers.astype(np.uint64)))
    os.kill(os.getpid(), signal.SIGKILL)


def rebuild(directory: Path, slots: int, started: float) -> dict[str, float]:
    """Seconds of each phase of one restart. `started`: this clock at exec."""
    clock = time.monotonic
    imported = clock()
    pool = Pool.open(_config(directory, slots), lambda _done, _total: None)
    opened = clock()
    found_events = list(pool.recovered())
    read = clock()
    machine = Machine(
        MachineConfig(
            extents=pool.extents, extent_bytes=pool.extent_bytes, tag_secret=pool.tag_secret
        )
    )
    for event in found_events:
        carry_out(pool, machine.handle(event, 0))
    end = clock()
    found = sum(len(e.ordinals) for e in found_events if isinstance(e, events.RowRecovered))
    if pool.cold_reason or found != slots:
        raise SystemExit(f"{found} of {slots} slots came back {pool.cold_reason}")
    pool.close()
    floor_begin = clock()
    # As warm as the rebuild found it: the table lies in memory, but nothing maps it yet.
    table = np.memmap(directory / "pool" / "slots.table", dtype=np.uint64, mode="r")
    int(table.sum())
    return {
        "exec and imports": imported - started,
        "open": opened - imported,
        "events": read - opened,
        "machine": end - read,
        "total": end - imported,
        "floor": clock() - floor_begin,
    }


def carry_out(pool: Pool, orders: Sequence[actions.Action]) -> None:
    """What the driver does with the orders of a recovery."""
    for order in orders:
        match order:
            case actions.OpenNamespace():
                pool.open_namespace(order, {})
            case actions.OpenScope():
                pool.open_scope(order)
            case actions.GrantRow():
                pool.grant_row(order)
            case actions.PublishTags():
                pool.publish(order)
            case actions.AnnounceStored():
                pass
            case _:
                raise SystemExit(f"a recovery ordered {order}")


def as_table(results: dict[str, dict[str, report.Spread]]) -> str:
    """Seconds, one line for each number of slots."""
    rows = [[slots, *(spreads[p] for p in PHASES)] for slots, spreads in results.items()]
    return report.table(["slots", *(f"{phase} s" for phase in PHASES)], rows)


def _config(directory: Path, slots: int) -> PoolConfig:
    extents = -(-slots * BLOCK_BYTES // EXTENT_BYTES)
    return PoolConfig(directory / "pool", extents * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)


def _spec() -> events.NamespaceSpec:
    group = events.GroupSpec(events.GroupKind.FULL_ATTENTION, 1, (BLOCK_BYTES,))
    return events.NamespaceSpec("bench", keys.TenantId("bench"), HASH_BYTES, (group,))


if __name__ == "__main__":
    main()
