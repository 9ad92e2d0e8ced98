"""Store and load through real movers, beside memcpy: `python -m benchmarks.copies [--quick]`.

A Llama-8B-like layout (32 layers, 8 KV heads x 128, bf16, 16-token blocks: 2 MiB a block), whole
and as 64 fragments of 32 KiB, 1 GiB in all, shuffled ids on both sides. The floor is one memcpy
per thread over the same amount of mapped, touched memory, with as many threads as movers, in the
same pairs, under the movers' own libc settings, which let one large memcpy run faster too. A pass
is timed from the workers' `ready` to the last transfer's end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks import report
from kvd.core.events import JobKind, TransferOutcome
from kvd.core.keys import JobId, MoverId, RowId, TransferId
from kvd.mover.process import (
    GLIBC_TUNABLES,
    Finished,
    FragmentSpec,
    GroupMap,
    LocatedPart,
    MoverConfig,
    MoverProcess,
    Region,
)
from kvd.processes.mappings import ExtentFiles
from kvd_proto.board import BoardReader
from kvd_proto.ring import RingWriter

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
EXTENT_BYTES = 64 * MIB
FRAGMENTS = {"whole": 1, "64 x 32 KiB": 64}
JOB_BLOCKS = 64
FRESH_BYTES = 256 * MIB
BARS = {("whole", 1): 0.9, ("64 x 32 KiB", 1): 0.85}
BAR_TWO_MOVERS = 0.85
BAR_FRESH = 0.8
_POPULATE_WRITE = 23  # madvise, linux/mman.h

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Finishing:
    """A sink that says when the awaited number of transfers has ended."""

    def __init__(self) -> None:
        self.left = 0
        self.all_ended = asyncio.Event()

    def expect(self, transfers: int) -> None:
        self.left = transfers
        self.all_ended.clear()

    def process_started(self, mover: MoverId, pid: int, start_time: int) -> None:
        """Nobody comes after us who would have to end it."""

    def process_ended(self, mover: MoverId, pid: int) -> None:
        """As above."""

    def transfer_finished(self, mover: MoverId, finished: Finished) -> None:
        assert finished.outcome is TransferOutcome.DONE, f"{finished} of mover {mover}"
        self.left -= 1
        if self.left == 0:
            self.all_ended.set()

    def row_unmapped(self, mover: MoverId, row: RowId) -> None:
        """Not asked for here."""

    def mover_gone(self, mover: MoverId, reason: str) -> None:
        assert reason == "stopped", f"mover {mover} is gone: {reason}"


@dataclass
class Engine:
    """One engine's mapped memory, its mover, and its worker's end of the channel."""

    mover: MoverProcess
    ring: RingWriter
    board: BoardReader
    fd: int
    blocks: int
    extents: range


class Floor:
    """memcpy between two mapped, touched shared memories in this process."""

    def __init__(self, total: int, threads: int) -> None:
        self.total, self.threads = total, threads
        fds = [os.memfd_create(name) for name in ("floor-from", "floor-to")]
        self.views = []
        for fd in fds:
            os.ftruncate(fd, total)
            self.views.append(np.memmap(f"/proc/self/fd/{fd}", dtype=np.uint8, mode="r+"))
            self.views[-1][:] = 1
            os.close(fd)

    def run(self) -> float:
        """GB/s of one pass."""
        share = self.total // self.threads
        source, target = (view.ctypes.data for view in self.views)
        workers = [
            threading.Thread(target=_libc.memcpy, args=(target + at, source + at, share))
            for at in range(0, self.total, share)
        ]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return self.total / (time.perf_counter() - started) / 1e9


class Stage:
    """A pool directory with prefaulted extents and one mover for each engine over it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, total: int) -> None:
        self.loop = loop
        self.sink = Finishing()
        self.directory = Path(tempfile.mkdtemp(prefix=f"kvd-bench-{os.getpid()}-", dir="/dev/shm"))
        (self.directory / "extents").mkdir()
        self.engines: list[Engine] = []
        self._jobs = iter(range(1, 1 << 40))
        self.extent_files = ExtentFiles(self.directory / "extents", 0, EXTENT_BYTES)
        for extent in range(total // EXTENT_BYTES):
            path = self.extent_files.path(extent)
            path.touch()
            os.truncate(path, EXTENT_BYTES)
            populate(np.memmap(path, dtype=np.uint8, mode="r+"))

    async def add_engine(self, fragments: int, blocks: int) -> Engine:
        """Start an engine with its own memory and its own share of the extents."""
        self.sink.all_ended.clear()
        number = len(self.engines) + 1
        fd = os.memfd_create(f"engine-{number}")
        os.ftruncate(fd, blocks * BLOCK_BYTES)
        np.memmap(f"/proc/self/fd/{fd}", dtype=np.uint8, mode="r+")[:] = number
        size = BLOCK_BYTES // fragments
        specs = tuple(FragmentSpec(0, f * blocks * size, size, size) for f in range(fragments))
        config = MoverConfig(
            MoverId(number),
            (Region(fd, 0, blocks * BLOCK_BYTES),),
            (GroupMap(blocks, 1, BLOCK_BYTES, specs),),
            self.extent_files,
        )
        mover = await MoverProcess.start(config, self.sink)
        per_engine = blocks * BLOCK_BYTES // EXTENT_BYTES
        extents = range((number - 1) * per_engine, number * per_engine)
        for extent in extents:
            mover.map_row(RowId(extent), extent)
        ring, board = RingWriter(mover.ring_fd, mover.event_fd), BoardReader(mover.board_fd)
        self.engines.append(Engine(mover, ring, board, fd, blocks, extents))
        return self.engines[-1]

    def submit(self, engine: Engine, kind: JobKind, seed: int) -> list[int]:
        """Give the mover every block of the engine, both ids shuffled; the jobs."""
        shuffle = np.random.default_rng(seed)
        ids = shuffle.permutation(engine.blocks).astype(np.uint32)
        slots = shuffle.permutation(engine.blocks)
        per_extent = EXTENT_BYTES // BLOCK_BYTES
        extents = (engine.extents[0] + slots // per_extent).astype(np.uint32)
        offsets = (slots % per_extent * BLOCK_BYTES).astype(np.uint64)
        jobs = []
        for at in range(0, engine.blocks, JOB_BLOCKS):
            job = next(self._jobs)
            cut = slice(at, at + JOB_BLOCKS)
            part = LocatedPart(0, extents[cut], offsets[cut], ids[cut].reshape(-1, 1))
            assert engine.mover.start_transfer(TransferId(job), (JobId(job),), kind, [part])
            jobs.append(job)
        return jobs

    async def pass_over(self, kind: JobKind, seed: int) -> float:
        """GB/s of moving everything once, all engines at the same time."""
        jobs = [self.submit(engine, kind, seed) for engine in self.engines]
        self.sink.expect(sum(map(len, jobs)))
        await asyncio.sleep(0.02)  # the movers have the orders and wait for ready
        started = time.perf_counter()
        for engine, ready in zip(self.engines, jobs, strict=True):
            engine.ring.mark_ready(ready)
        await self.sink.all_ended.wait()
        seconds = time.perf_counter() - started
        for engine in self.engines:
            engine.board.poll()
        return sum(e.blocks for e in self.engines) * BLOCK_BYTES / seconds / 1e9

    async def close(self) -> None:
        """End the movers and remove every file."""
        for engine in self.engines:
            engine.ring.close()
            engine.board.close()
            os.close(engine.fd)
            await engine.mover.stop()
        shutil.rmtree(self.directory)


def populate(view: np.memmap[Any, np.dtype[np.uint8]]) -> None:
    """What the pool does with its extents at its start."""
    assert _libc.madvise(view.ctypes.data, len(view), _POPULATE_WRITE) == 0


@contextlib.contextmanager
def stage(loop: asyncio.AbstractEventLoop, total: int) -> Iterator[Stage]:
    made = Stage(loop, total)
    try:
        yield made
    finally:
        loop.run_until_complete(made.close())


def steady(loop: asyncio.AbstractEventLoop, total: int, pairs: int) -> list[dict[str, Any]]:
    """Throughput in pairs with the floor, by layout, number of movers and direction."""
    rows = []
    for movers in (1, 2):
        floor = Floor(total, movers)
        for layout, fragments in FRAGMENTS.items():
            with stage(loop, total) as made:
                for _ in range(movers):
                    add = made.add_engine(fragments, total // movers // BLOCK_BYTES)
                    loop.run_until_complete(add)
                loop.run_until_complete(asyncio.sleep(0.5))
                for kind in JobKind:
                    seeds = iter(range(1, 1000))

                    def ours(
                        made: Stage = made, kind: JobKind = kind, seeds: Iterator[int] = seeds
                    ) -> float:
                        return loop.run_until_complete(made.pass_over(kind, next(seeds)))

                    ours()
                    left, right = report.interleaved(ours, floor.run, pairs)
                    rows.append(_row(layout, movers, kind, (left, right)))
    return rows


def _row(
    layout: str, movers: int, kind: JobKind, speeds: tuple[list[float], list[float]]
) -> dict[str, Any]:
    left, right = speeds
    return {
        "layout": layout,
        "movers": movers,
        "direction": kind.name.lower(),
        "gb_per_s": report.Spread.of(left),
        "memcpy_gb_per_s": report.Spread.of(right),
        "ratio": report.ratios(left, right),
        "bar": BAR_TWO_MOVERS if movers == 2 else BARS[layout, movers],
    }


def fresh(loop: asyncio.AbstractEventLoop, rounds: int) -> list[dict[str, Any]]:
    """The first 256 MiB into a fresh pool against the later ones: once the mover says that its
    rows are warm, which is when a registration returns, and 20 ms after mapping them."""
    rows = []
    for layout, fragments in FRAGMENTS.items():
        for awaited in (True, False):
            ratios, firsts = [], []
            for _ in range(rounds):
                with stage(loop, FRESH_BYTES) as made:
                    adding = made.add_engine(fragments, FRESH_BYTES // BLOCK_BYTES)
                    engine = loop.run_until_complete(adding)
                    if awaited:
                        assert loop.run_until_complete(engine.mover.warm(5.0))
                    passes = [
                        loop.run_until_complete(made.pass_over(JobKind.STORE, seed))
                        for seed in range(6)
                    ]
                firsts.append(passes[0])
                ratios.append(passes[0] / float(np.median(passes[1:])))
            rows.append(
                {
                    "layout": layout,
                    "warm_awaited": awaited,
                    "first_gb_per_s": report.Spread.of(firsts),
                    "ratio": report.Spread.of(ratios),
                    "bar": BAR_FRESH,
                }
            )
    return rows


def latency(loop: asyncio.AbstractEventLoop, jobs: int) -> dict[str, Any]:
    """One-block loads, from ready to the board's word, the board polled every 0.1 ms."""
    millis, copies = [], []
    with stage(loop, EXTENT_BYTES) as made:
        engine = loop.run_until_complete(made.add_engine(1, EXTENT_BYTES // BLOCK_BYTES))
        for job in range(1 << 20, (1 << 20) + jobs):
            one = np.zeros(1, dtype=np.uint32)
            where = np.array([job % engine.blocks * BLOCK_BYTES], dtype=np.uint64)
            part = LocatedPart(0, one, where, np.array([[job % 7]], dtype=np.uint32))
            engine.mover.start_transfer(TransferId(job), (JobId(job),), JobKind.LOAD, [part])
            loop.run_until_complete(asyncio.sleep(0.002))
            started = time.perf_counter()
            engine.ring.mark_ready([job])
            while not (records := engine.board.poll()):
                time.sleep(0.0001)
            millis.append((time.perf_counter() - started) * 1e3)
            copies.append(records[0].duration_ns / 1e6)
    return {
        "jobs": jobs,
        "p50_ms": report.percentile(millis, 50),
        "p99_ms": report.percentile(millis, 99),
        "copy_alone_p50_ms": report.percentile(copies, 50),
    }


def use_the_movers_libc_settings() -> None:
    """Start over with them, so that the floor has them too."""
    if os.environ.get("GLIBC_TUNABLES") != GLIBC_TUNABLES:
        os.environ["GLIBC_TUNABLES"] = GLIBC_TUNABLES
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.copies", *sys.argv[1:]])


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows of equal fields as a table."""
    print(report.table(list(rows[0]), [list(row.values()) for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Copies through movers beside memcpy.")
    parser.add_argument("--quick", action="store_true", help="256 MiB and 5 pairs: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/copies.json)")
    options = parser.parse_args()
    use_the_movers_libc_settings()
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    total, pairs = (256 * MIB, 5) if options.quick else (1024 * MIB, 15)
    results: dict[str, Any] = {
        "total_bytes": total,
        "steady": steady(loop, total, pairs),
        "fresh_pool": fresh(loop, 3 if options.quick else 15),
        "one_block": latency(loop, 100 if options.quick else 1000),
    }
    show(results["steady"])
    print("\nfirst 256 MiB into a fresh pool against later ones")
    show(results["fresh_pool"])
    print("\none-block load, ready to board:", results["one_block"])
    report.write("copies", results, options.output)


if __name__ == "__main__":
    main()
