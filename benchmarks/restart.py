"""How long a restart takes: rebuilding the pool's books, and from exec to the first hit.

    python -m benchmarks.restart [--slots 100000 1000000] [--scopes 1 20000] [--rounds 5]
                                 [--output FILE]

Lets a daemon make a pool on /dev/shm, kills it with -9, fills the pool with that many READY slots
in another process, kills that, and then times two things, in a fresh process for each round.

Books: imports; opening the pool; reading the slot table into events; the machine taking them and
its orders being carried out (index page and all). The floor is reading the same slot table's bytes
once. Service: from exec of `kvd serve` to its socket, and to the answer HIT of a client's lookup;
the imports that are part of both were timed apart.

Blocks are 4 KiB, the smallest, so that 10^6 slots need 4 GiB only; the bytes of blocks play no
part in a restart. `--scopes`: how many accounts the blocks belong to in turn, so that each row
holds blocks of most of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import report
from kvd.core import actions, events, keys
from kvd.core.machine import Machine, MachineConfig
from kvd.pool import Pool, PoolConfig
from kvd.pool.registry import Registry
from kvd.pool.reserve import Reserve
from kvd.runtime.probes import native_probes
from kvd_client import EngineIdentity, Group, NamespaceFields, SchedulerConnection
from kvd_client.draft import BlockRun, QueryDraft
from kvd_proto.key_status import HIT, MISS, STATUS_BITS
from kvd_proto.v1 import common_pb2

BLOCK_BYTES = 4096
EXTENT_BYTES = 64 << 20
HASH_BYTES = 32
BATCH = 2048
PHASES = ("exec and imports", "open", "events", "machine", "total", "floor")
SERVICE = ("daemon's imports", "exec to socket", "exec to first hit")
ROOT = Path(__file__).parents[1]
DEADLINE_S = 60.0
POLL_S = 0.002
NAMESPACE = NamespaceFields(
    model="bench",
    kv_dtype="float32",
    hash_algorithm="random",
    hash_bytes=HASH_BYTES,
    groups=(Group(tokens_per_block=16, shard_bytes=(BLOCK_BYTES,)),),
)


def main() -> None:
    """Run the parent, or one of the steps that it starts in processes of their own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart")
    parser.add_argument("--slots", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--scopes", type=int, nargs="+", default=[1, 20_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--step", choices=("fill", "rebuild"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step == "fill":
        fill(options.directory, options.slots[0], options.scopes[0])
    elif options.step == "rebuild":
        print(json.dumps(rebuild(options.directory, options.slots[0], options.started)))
    else:
        results = {
            (f"{slots} in {scopes}" if scopes > 1 else str(slots)): measure(
                slots, scopes, options.rounds
            )
            for slots in options.slots
            for scopes in options.scopes
        }
        print(as_table(results))
        report.write("restart", results, options.output)


def measure(slots: int, scopes: int, rounds: int) -> dict[str, report.Spread]:
    """Seconds of each phase over fresh processes, all on one crashed pool."""
    directory = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir="/dev/shm"))
    try:
        print(f"filling {slots} slots in {scopes} scopes ...", flush=True)
        serve(directory, slots, MISS)
        size = ("--slots", str(slots), "--scopes", str(scopes))
        run_step("fill", directory, size, ends=-signal.SIGKILL)
        found = [json.loads(run_step("rebuild", directory, size, ends=0)) for _ in range(rounds)]
        served = [serve(directory, slots, HIT) for _ in range(rounds)]
    finally:
        shutil.rmtree(directory)
    spreads = {phase: report.Spread.of([f[phase] for f in found]) for phase in PHASES}
    return spreads | {phase: report.Spread.of([s[phase] for s in served]) for phase in SERVICE}


def serve(directory: Path, slots: int, status: int) -> dict[str, float]:
    """Start the daemon, open a session, look a hash up until it has this status, kill the daemon.

    On a new pool a MISS is what comes, and the session gives the pool its namespace.
    """
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import kvd.cli.serve"], check=True, cwd=ROOT)
    imports = time.monotonic() - begin
    wanted = hashes_of(0, 1)
    path = directory / "kvd.sock"
    path.unlink(missing_ok=True)
    config = _config(directory, slots)
    command = [sys.executable, "-m", "kvd", "serve", "--socket", str(path), "--http-port", "0"]
    command += ["--pool-directory", str(config.directory), "--pool-bytes", str(config.pool_bytes)]
    command += ["--extent-bytes", str(config.extent_bytes), "--log-level", "warning"]
    begin = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT) as daemon:
        try:
            wait_until(lambda: answers(path))
            at_socket = time.monotonic() - begin
            connection = SchedulerConnection(
                str(path), EngineIdentity("bench", os.urandom(16)), NAMESPACE
            )
            try:
                wait_until(lambda: look_up(connection, wanted) == status)
            finally:
                connection.close()
            at_hit = time.monotonic() - begin
        finally:
            daemon.kill()
    return dict(zip(SERVICE, (imports, at_socket, at_hit), strict=True))


def answers(path: Path) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def look_up(connection: SchedulerConnection, wanted: bytes) -> int | None:
    """Status of one hash; None while there is no session, or no answer."""
    query = QueryDraft(common_pb2.ReqContext(request_id="r"), BlockRun(0, 0, [wanted]), False)
    call = connection.start_lookup([query])
    if not call:
        return None
    connection.gather([call], 1.0)
    found = connection.take_answers(call)
    return found[0].statuses[0] & STATUS_BITS if found else None


def wait_until(done: Callable[[], bool]) -> None:
    """Poll often enough not to show in the figures."""
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("the daemon did not come up")
        time.sleep(POLL_S)


def run_step(step: str, directory: Path, size: Sequence[str], ends: int) -> str:
    """Run one step in a process of its own; what it printed."""
    command = [sys.executable, "-m", "benchmarks.restart", "--step", step]
    command += ["--directory", str(directory), *size, "--started", str(time.monotonic())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    if done.returncode != ends:
        raise SystemExit(f"{step} ended with {done.returncode}")
    return done.stdout


def fill(directory: Path, slots: int, scopes: int) -> None:
    """Fill the daemon's pool with this many READY slots through the orders of a core, and die."""
    config = _config(directory, slots)
    registry = Registry.open(
        config.directory / "registry.jsonl", Reserve(config.directory / "reserve", 0)
    )
    (known,), (scope,) = registry.namespaces.values(), registry.scopes.values()
    pool = Pool.open(config, lambda _done, _total: None)
    namespace = known.namespace
    order = actions.OpenNamespace(namespace, known.spec, page_blocks=slots)
    pool.open_namespace(order, known.fields)
    for number in range(scopes):
        account = f"account-{number}" if number else scope.account
        pool.open_scope(replace(scope, scope=keys.ScopeId(scope.scope + number), account=account))
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
        hashes = keys.KeyBatch.from_bytes(hashes_of(first, count), HASH_BYTES)
        numbers = np.arange(first, first + count)
        of = (scope.scope + numbers % scopes).astype(np.uint32)
        pool.write_ready(actions.WriteReady(numbers, of, hashes, numbers.astype(np.uint64)))
    os.kill(os.getpid(), signal.SIGKILL)


def rebuild(directory: Path, slots: int, started: float) -> dict[str, float]:
    """Seconds of each phase of one restart. `started`: this clock at exec."""
    gc.disable()  # as the daemon does while it starts
    clock = time.monotonic
    imported = clock()
    pool = Pool.open(_config(directory, slots), lambda _done, _total: None)
    opened = clock()
    found_events = list(pool.recovered())
    read = clock()
    machine = Machine(
        MachineConfig(
            extents=pool.extents, extent_bytes=pool.extent_bytes, tag_secret=pool.tag_secret
        ),
        native_probes(),
    )
    for event in found_events:
        carry_out(pool, machine.handle(event, 0))
    end = clock()
    found = sum(len(e.ordinals) for e in found_events if isinstance(e, events.RowsRecovered))
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
    """Seconds, one line for each number of slots; the books, then the service."""
    tables = []
    for phases in (PHASES, SERVICE):
        rows = [[slots, *(spreads[p] for p in phases)] for slots, spreads in results.items()]
        tables.append(report.table(["slots in scopes", *(f"{phase} s" for phase in phases)], rows))
    return "\n\n".join(tables)


def _config(directory: Path, slots: int) -> PoolConfig:
    extents = -(-slots * BLOCK_BYTES // EXTENT_BYTES)
    return PoolConfig(directory / "pool", extents * EXTENT_BYTES, extent_bytes=EXTENT_BYTES)


def hashes_of(first: int, count: int) -> bytes:
    """The hashes of a batch, told by its first slot."""
    return np.random.default_rng(first).bytes(count * HASH_BYTES)


if __name__ == "__main__":
    main()
