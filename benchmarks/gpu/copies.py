"""GPU copies beside their bars: `python3 -m benchmarks.gpu.copies [--quick]`.

An engine's process holds KV of 2 MiB blocks, whole and as fragments of 32 and 8 KiB. Every round
moves the same bytes once by each contender, the order turning, so that a ratio is one of the same
round. Ours: `mover` is the mover's CopyEngine in a second process, for the copy alone; `daemon`
is kvd as a whole, a real mover behind it, from `Step` to the board's word; `daemon, told before`
the same from the worker's submission on, of a step that the daemon got while a model ran, as it
does with an engine. Theirs, all in the engine's process: `large` is one pinned copy (two at once
for both directions), `plain` one cudaMemcpyAsync a fragment, `batch` one cuMemcpyBatchAsync,
`gather` torch's index and one copy. Then what the engine's matrix products lose meanwhile, and
what a job costs beyond its copy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu import places, verdicts
from benchmarks.gpu.cuda import Cuda, Failed
from benchmarks.gpu.engine_side import TOLD_SECONDS, GpuEngine
from benchmarks.gpu.peers import DeviceMemory, Pass, Peers
from benchmarks.gpu.probing.nvml import ClockLog
from benchmarks.gpu.probing.products import Marks, Products, by_phase
from benchmarks.gpu.probing.remote import Refused, Remote
from benchmarks.rig import daemon
from kvd.processes.mappings import ExtentFiles

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
BLOCK_BYTES = 2 * MIB
MOVER = "benchmarks.gpu.mover_side"
MOST_LOG = 2000  # characters of a daemon's log that are shown when it failed us
STORE, LOAD, BOTH = ["store"], ["load"], ["store", "load"]
BROKEN = (Refused, TimeoutError, Failed, AssertionError, OSError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Sizes:
    """How much is measured. `totals`: bytes moved by a pass, by fragment."""

    totals: dict[int, int]
    rounds: int
    extent_bytes: int
    product_width: int
    phase_seconds: float
    one_block_jobs: int
    limit_s: float
    torch: bool = True  # which takes seconds to import

    def fitted(self) -> Sizes:
        """The same with totals that shared memory can hold: the mover's extents and a pool of
        twice as much lie there at once."""
        room = shutil.disk_usage("/dev/shm").free // 4 // self.extent_bytes * self.extent_bytes
        totals = {size: min(total, room) for size, total in self.totals.items()}
        return replace(self, totals=totals)


FULL = Sizes(
    totals={2 * MIB: 2 * GIB, 32 * KIB: GIB, 8 * KIB: GIB // 2},
    rounds=15,
    extent_bytes=64 * MIB,
    product_width=8192,
    phase_seconds=0.2,
    one_block_jobs=200,
    limit_s=115,
)
QUICK = replace(FULL, totals={2 * MIB: GIB // 2, 32 * KIB: GIB // 4}, rounds=5, one_block_jobs=50)
TINY = Sizes(
    totals={32 * KIB: 8 * MIB},
    rounds=2,
    extent_bytes=4 * MIB,
    product_width=64,
    phase_seconds=0.02,
    one_block_jobs=3,
    limit_s=90,
    torch=False,
)


@contextlib.contextmanager
def mover_side(memory: DeviceMemory, cuda: Cuda, fragments: int, size: Sizes) -> Iterator[Any]:
    """A mover's CopyEngine that has the memory open, and the facts that it told."""
    folder = Path(tempfile.mkdtemp(prefix=f"kvd-bench-{os.getpid()}-", dir="/dev/shm"))
    (folder / "extents").mkdir()
    files = ExtentFiles(folder / "extents", 0, size.extent_bytes)
    count = memory.bytes // size.extent_bytes
    for extent in range(count):
        path = files.path(extent)
        path.touch()
        os.truncate(path, size.extent_bytes)
    base, _ = cuda.range_of(memory.address)
    told = {"handle": cuda.export(base).hex(), "offset": memory.address - base}
    told |= {"bytes": memory.bytes, "uuid": cuda.uuid()}
    told |= {"block_bytes": BLOCK_BYTES, "fragments": fragments}
    pool = {"directory": str(folder), "extent_bytes": size.extent_bytes, "extents": count}
    sees = {"CUDA_VISIBLE_DEVICES": cuda.uuid()}
    remote = Remote(module=MOVER, environment=sees)
    try:
        yield remote, remote.call("open", memory=told, pool=pool)
        remote.call("finish")
    finally:
        remote.end()
        shutil.rmtree(folder)


@contextlib.contextmanager
def served(memory: DeviceMemory, fragments: int, size: Sizes) -> Iterator[GpuEngine]:
    """The engine at a daemon of its own, whose pool holds twice the engine's KV."""
    with daemon(2 * memory.bytes, size.extent_bytes) as running:
        engine = None
        try:
            engine = GpuEngine(running.socket, memory, BLOCK_BYTES, fragments)
            for _ in range(4):  # the pool is full, and all of it pinned, from then on
                engine.move(STORE, list(range(engine.blocks)))
            yield engine
        except BaseException:
            print(running.log.read_text()[-MOST_LOG:], file=sys.stderr)
            raise
        finally:
            if engine is not None:
                engine.close()


class Case:
    """One fragment size: its memory, and all contenders over it. What can't be had is in `failed`
    by its name, and the others run. `without` says why a daemon is not to be tried (again)."""

    def __init__(self, cuda: Cuda, fragment: int, size: Sizes, without: str = "") -> None:
        self.fragment, self.size = fragment, size
        self.total, self.fragments = size.totals[fragment], BLOCK_BYTES // fragment
        self._stack = contextlib.ExitStack()
        self.memory = DeviceMemory(cuda, self.total, size.torch)
        self._stack.callback(self.memory.free)
        host = cuda.pinned(self.total)
        self._stack.callback(lambda: cuda.call("cuMemFreeHost", host))
        self.peers = Peers(cuda, self.memory, host)
        self.failed: dict[str, str] = {}
        self.mover: Remote | None = None
        self.engine: GpuEngine | None = None
        self.facts: dict[str, Any] = {}
        try:
            made = mover_side(self.memory, cuda, self.fragments, size)
            self.mover, self.facts = self._stack.enter_context(made)
        except BROKEN as error:
            self.failed["mover"] = f"{type(error).__name__}: {error}"
        if without:
            self.failed |= dict.fromkeys(verdicts.DAEMON, without)
            return
        try:
            self.engine = self._stack.enter_context(served(self.memory, self.fragments, size))
        except BROKEN as error:
            self.failed |= dict.fromkeys(verdicts.DAEMON, f"{type(error).__name__}: {error}")

    def passes(self, kinds: list[str]) -> dict[str, Pass]:
        """Every contender's pass, by name."""
        found = self.peers.passes(kinds, self.fragment, self.total)
        mover, engine = self.mover, self.engine
        if mover is not None:
            found["mover"] = lambda: float(mover.call("copy", kinds=kinds))
        if engine is not None:
            order = [number * 7919 % engine.blocks for number in range(engine.blocks)]
            engine.move(STORE, order)  # what loads load
            for name, told_s in zip(verdicts.DAEMON, (0.0, TOLD_SECONDS), strict=True):
                found[name] = partial(engine.move, kinds, order, told_s)
        return found

    def close(self) -> None:
        """Give everything back. A failure here is told, and no result is lost by it."""
        try:
            self._stack.close()
        except BROKEN as error:
            print(f"  closing {self.fragment}: {type(error).__name__}: {error}", file=sys.stderr)


def race(case: Case, kinds: list[str], rounds: int, only: set[str] | None = None) -> dict[str, Any]:
    """Seconds of every contender's passes, `rounds` each after one to warm up."""
    passes = case.passes(kinds)
    passes = {name: act for name, act in passes.items() if only is None or name in only}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    failed = dict(case.failed)
    for number in range(rounds + 1):
        names = list(seconds)
        for name in names[:: -1 if number % 2 else 1]:
            try:
                took = passes[name]()
            except BROKEN as error:
                failed[name] = f"{type(error).__name__}: {error}"
                del seconds[name]
                continue
            if number:
                seconds[name].append(took)
    row = {"fragment": case.fragment, "kinds": kinds, "total": case.total, "busy": False}
    return row | {"seconds": seconds, "failed": failed}


def slowdown(cuda: Cuda, case: Case, rounds: int) -> dict[str, Any]:
    """The engine's products by phase: idle, beside a store, beside a store and a load at once."""
    row: dict[str, Any] = {"fragment": case.fragment, "copies_bytes_per_s": []}
    if case.mover is None:
        return row | {"failed": case.failed["mover"]}
    try:
        products = Products(cuda, case.size.product_width, case.size.torch)
    except BROKEN as error:
        return row | {"failed": str(error)}
    clocks, marks = ClockLog(), list[Marks]()
    time.sleep(0.3)
    phases = {"idle": [], "store": STORE, "store+load": BOTH}
    try:
        for number in range(rounds):
            marks.append({})
            for name in list(phases)[:: -1 if number % 2 else 1]:
                time.sleep(0.02)
                began = time.monotonic()
                if phases[name]:
                    order = {"kinds": phases[name], "seconds": case.size.phase_seconds}
                    row["copies_bytes_per_s"].append(case.mover.call("copy_for", **order))
                else:
                    time.sleep(case.size.phase_seconds)
                marks[-1][name] = (began, time.monotonic())
    except BROKEN as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    row |= {"library": products.library, "phases": by_phase(marks[:rounds], products.end())}
    return row | {"clocks": clocks.end()}


def busy_race(cuda: Cuda, case: Case) -> list[dict[str, Any]]:
    """The large copy and ours while the engine multiplies matrices."""
    try:
        products = Products(cuda, case.size.product_width, case.size.torch)
    except BROKEN:
        return []  # the slowdown's row says why there is no busy engine
    try:
        chosen = {"large", "mover", "batch"}
        rows = [race(case, kinds, max(2, case.size.rounds // 3), chosen) for kinds in (STORE, LOAD)]
        return [row | {"busy": True} for row in rows]
    finally:
        products.end()


def overhead(case: Case) -> list[dict[str, Any]]:
    """Jobs of one block: seconds until their end is seen, beside the plain copy of as much.

    `seconds` from the worker's submission on, `from_step_s` from the scheduler's step on.
    """
    rows: list[dict[str, Any]] = []
    for kind in ("store", "load"):
        row: dict[str, Any] = {"kind": kind, "bytes": BLOCK_BYTES}
        try:
            if case.engine is None:
                raise Failed(case.failed["daemon"])
            count = case.size.one_block_jobs
            row["plain_copy_s"] = case.peers.seconds_of_one(kind, BLOCK_BYTES, count)
            case.engine.move(STORE, [0])
            row |= {"seconds": [], "from_step_s": []}
            for _ in range(count):
                time.sleep(0.001)
                row["from_step_s"].append(case.engine.move_one(kind, is_known=False))
                row["seconds"].append(case.engine.move_one(kind, is_known=True))
            if case.mover is not None:
                told = case.mover.call("copy_one_block", kind=kind, count=count)
                row["copy_engine_s"] = told
        except BROKEN as error:
            row = {"kind": kind, "failed": f"{type(error).__name__}: {error}"}
        rows.append(row)
    return rows


def measure(cuda: Cuda, size: Sizes, found: dict[str, Any]) -> None:
    """Add all rows to `found`; what the time did not reach is named in `left_out`."""
    began = time.monotonic()
    found |= {"races": [], "slowdown": [], "overhead": [], "mover": {}, "left_out": []}

    def is_late(what: str) -> bool:
        late = time.monotonic() - began > size.limit_s
        if late:
            found["left_out"].append(what)
        return late

    without = ""
    for fragment in size.totals:
        name = verdicts.named(fragment)
        if is_late(name):
            continue
        case = Case(cuda, fragment, size, without)
        without = case.failed.get("daemon", "")  # each attempt costs half a minute
        try:
            found["mover"][name] = case.facts
            for kinds in (STORE, LOAD, BOTH):
                if not is_late(f"{name}, {'+'.join(kinds)}"):
                    found["races"].append(race(case, kinds, size.rounds))
            if fragment == max(size.totals) and not is_late("overhead"):
                found["overhead"] = overhead(case)
            if fragment >= 32 * KIB and not is_late(f"{name}, slowdown"):
                found["slowdown"].append(slowdown(cuda, case, size.rounds))
            if fragment < BLOCK_BYTES and not is_late(f"{name}, busy"):
                found["races"] += busy_race(cuda, case)
        finally:
            case.close()
        print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)


def judge(found: dict[str, Any]) -> list[verdicts.Verdict]:
    """Every figure of a run beside its bar."""
    return [
        *verdicts.of_races(found["races"]),
        *verdicts.of_slowdown(found["slowdown"]),
        *verdicts.of_overhead(found["overhead"]),
    ]


def main() -> int:
    """Measure, print every bar with its verdict, write the JSON; 1 if a bar was missed, or what
    it asks for was not measured."""
    parser = argparse.ArgumentParser(description="GPU copies beside their bars.")
    parser.add_argument("--quick", action="store_true", help="less of everything: a smoke test")
    parser.add_argument("--tiny", action="store_true", help="sizes that only try the benchmark")
    parser.add_argument("--output", type=Path, help="JSON file (default: by the device's name)")
    options = parser.parse_args()
    if (reason := places.no_device()) is not None:
        print(f"no GPU to measure: {reason}", file=sys.stderr)
        return 1
    size = (TINY if options.tiny else QUICK if options.quick else FULL).fitted()
    if not all(size.totals.values()):
        print(f"no room to measure in: {places.flaw_of_shared_memory()}", file=sys.stderr)
        return 1
    cuda = Cuda()
    cuda.open_device()
    found: dict[str, Any] = {}
    try:
        measure(cuda, size, found)
    except KeyboardInterrupt:  # what was measured is told all the same
        found["left_out"].append("interrupted: all that is not in the table")
    judged = judge(found)
    print(report.table(("figure", "measured", "bar", ""), [v.line() for v in judged]))
    for what in found["left_out"]:
        print(f"not measured, the time was up: {what}")
    document = {
        "benchmark": "gpu.copies",
        "device": {"name": cuda.name(), "uuid": cuda.uuid(), "cuda": cuda.version()},
        "machine": report.machine(),
        "rounds": size.rounds,
        "verdicts": [verdict.plain() for verdict in judged],
        "results": found,
    }
    print(f"written to {places.write(document, cuda.name(), 'gpu-copies', options.output)}")
    missed = [v for v in judged if v.bar and v.met is not True]
    print(f"{len(missed)} of {sum(bool(v.bar) for v in judged)} bars missed or not measured")
    return 1 if missed or found["left_out"] else 0


if __name__ == "__main__":
    sys.exit(main())
