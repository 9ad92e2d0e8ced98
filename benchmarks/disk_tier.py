"""The disk tier's store beside fio: `python -m benchmarks.disk_tier [--quick]`.

Both read and write the same number of bytes on the same file system past the page cache
(O_DIRECT), in blocks of one size, as many of them at once. The store's batches come from two
callers, its rows are written beside, what is new takes the place of what is oldest, and every
checksum is taken and verified. Everything is interleaved.

How fast a disk moves bytes depends on where they go to: the kernel pins every page of a call and
cuts what it asks of the disk at so many pieces of memory that lie apart, and a virtual machine's
disk is a copy by a processor, which is faster into a few buffers that stay in its cache. So the
store is compared with three, for memory of small pages and of huge pages, as a pool has them:

- fio as it is mostly run: its psync engine, a thread each and in a file laid out beforehand. Each
  thread has one buffer of one block, of small pages, and uses it again and again.
- fio over the very memory that the store's blocks lie in (`mmapshared`). For that it must have so
  many requests under way that they take all of it (libaio): its queue is far deeper.
- the same depth over the same memory, which fio can't do: plain preadv and pwritev, a block each.

And how long the store takes to start with a million blocks, and the memory that they take.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import mmap
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from kvd.linux.calls import give_memory_back
from kvd.tiers.disk.disk import Disk
from kvd.tiers.disk.files import SystemFiles
from kvd.tiers.disk.index_file import ROW_WORDS, Changes, IndexFile, check_of
from kvd.tiers.disk.options import DiskOptions
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import Outcome, TierBlock, TierKey

KIB = 1 << 10
MIB = 1 << 20
SIZES = (64 * KIB, 256 * KIB, 2 * MIB)
DEPTH = 4
LANES = range(DEPTH)
CALLERS = 2  # one batch is made ready while another is moved; never more than DEPTH calls below
BATCH_BYTES = 16 * MIB  # a memory of its own for each lane
SLACK = 4 * KIB  # fio wants it, to align its buffers
BAR = 0.9
MILLION = 1_000_000
START_BAR_SECONDS = 2.0
SCOPE = b"benchmark".ljust(32)
SHARED_MEMORY = Path("/dev/shm")
Call = Callable[[Sequence[TierBlock], float], list[Outcome]]


class Memories:
    """Files in shared memory, one for each lane, which everybody maps whose bytes go there."""

    def __init__(self, directory: Path) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="kvd-disk-tier-", dir=directory))
        self.views = [self._view(lane) for lane in LANES]

    def lend(self, lane: int) -> Path:
        """A name for fio, which may unlink it."""
        name = self._place / f"fio-{lane}"
        if not name.exists():
            os.link(self._place / str(lane), name)
        return name

    def close(self) -> None:
        shutil.rmtree(self._place)

    def _view(self, lane: int) -> memoryview:
        with (self._place / str(lane)).open("xb+") as file:
            file.truncate(BATCH_BYTES + 2 * MIB)  # whole huge pages
            view = memoryview(mmap.mmap(file.fileno(), BATCH_BYTES + SLACK))[:BATCH_BYTES]
        words = np.frombuffer(view, dtype=np.uint64)
        words[:] = np.random.default_rng(lane).integers(0, 1 << 63, len(words), dtype=np.uint64)
        return view


class Store:
    """One store, whose blocks are all replaced by every pass of writing."""

    def __init__(
        self, directory: Path, memories: Memories, block_bytes: int, total_bytes: int
    ) -> None:
        self._block_bytes, self._total = block_bytes, total_bytes
        room = total_bytes + 64 * MIB
        self._store = DiskStore(
            {"directories": [str(directory)], "directory_bytes": room, "threads": DEPTH}
        )
        self._memories: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for view in memories.views:
            self._memories.put(view)
        self._round = 0
        self.processor_seconds: list[float] = []  # a GB, of the last passes

    def write(self) -> float:
        """MB/s."""
        self._round += 1
        return self._pass(self._store.write)

    def read(self) -> float:
        """MB/s of all that the last pass wrote."""
        return self._pass(self._store.read)

    def close(self) -> None:
        self._store.close()

    def _pass(self, call: Call) -> float:
        busy, began = time.process_time(), time.perf_counter()
        with ThreadPoolExecutor(CALLERS) as pool:
            firsts = range(self._total // BATCH_BYTES)
            outcomes = set().union(*pool.map(partial(self._call, call), firsts))
        took = time.perf_counter() - began
        self.processor_seconds.append((time.process_time() - busy) / self._total * 1e9)
        assert outcomes == {Outcome.DONE}
        return self._total / took / 1e6

    def _call(self, call: Call, number: int) -> set[Outcome]:
        """One batch, in a part of the memory that nobody else uses meanwhile."""
        size, memory = self._block_bytes, self._memories.get()
        per_batch = BATCH_BYTES // size
        blocks = [
            TierBlock(
                TierKey(SCOPE, b"%16d%16d" % (self._round, number * per_batch + at)),
                (memory[at * size : (at + 1) * size],),
            )
            for at in range(per_batch)
        ]
        outcomes = call(blocks, time.monotonic() + 60)
        self._memories.put(memory)
        return set(outcomes)


class Plain:
    """Plain calls to the kernel, a block each, of DEPTH threads."""

    def __init__(self, path: Path, memories: Memories, block_bytes: int, total_bytes: int) -> None:
        self._block_bytes, self._total = block_bytes, total_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)  # fio's
        self._memories = memories.views

    def run(self, kind: str) -> float:
        """MB/s."""
        began = time.perf_counter()
        with ThreadPoolExecutor(DEPTH) as pool:
            list(pool.map(partial(self._part, os.preadv if kind == "read" else os.pwritev), LANES))
        return self._total / (time.perf_counter() - began) / 1e6

    def _part(self, call: Callable[[int, list[memoryview], int], int], lane: int) -> None:
        part, size = self._total // DEPTH, self._block_bytes
        for at in range(0, part, size):
            start = at % BATCH_BYTES
            call(self._fd, [self._memories[lane][start : start + size]], lane * part + at)

    def close(self) -> None:
        os.close(self._fd)


def fio(
    path: Path, block_bytes: int, total_bytes: int, kind: str, memories: Memories | None = None
) -> float:
    """MB/s of DEPTH threads, each with its part of one file; `memories`: over all of these."""
    each = total_bytes // DEPTH
    command = [
        "fio", f"--rw={kind}", f"--bs={block_bytes}", f"--size={each}", "--thread", "--direct=1",
        "--fallocate=native", "--overwrite=1", "--group_reporting", "--output-format=json",
        "--randrepeat=0", "--invalidate=0",
    ]  # fmt: skip
    if memories is None:
        command.append("--ioengine=psync")
    else:  # each round of its queue fills all of the memory; the first one maps it
        queued = BATCH_BYTES // block_bytes
        command += ["--ioengine=libaio", f"--iodepth={queued}", f"--iodepth_batch={queued}"]
        command += ["--iodepth_low=0", "--time_based", "--ramp_time=200ms", "--runtime=300ms"]
    for lane in LANES:
        command += [f"--name=lane{lane}", f"--filename={path}", f"--offset={lane * each}"]
        if memories is not None:
            command.append(f"--mem=mmapshared:{memories.lend(lane)}")
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    told = json.loads(said[said.index("{") :])["jobs"][0][kind]
    return float(told["bw_bytes"]) / 1e6


def beside_fio(
    directory: Path, pages: tuple[str, Path], block_bytes: int, total: int, rounds: int
) -> list[dict[str, Any]]:
    """Both ways of one block size, in memory of some pages."""
    place, beside = directory / f"store-{block_bytes}", directory / "fio"
    memories = Memories(pages[1])
    store = Store(place, memories, block_bytes, total)
    fio(beside, block_bytes, total, "write")  # lays its file out
    store.write()
    plain = Plain(beside, memories, block_bytes, total)
    rows = []
    for kind, ours in (("write", store.write), ("read", store.read)):
        store.processor_seconds.clear()
        left, *others = _in_turns(
            [
                ours,
                partial(fio, beside, block_bytes, total, kind),
                partial(fio, beside, block_bytes, total, kind, memories),
                partial(plain.run, kind),
            ],
            rounds,
        )
        names = ("to_fio", "to_fio_deep_same_memory", "to_plain_same_memory")
        rows.append(
            {"pages": pages[0], "block_kib": block_bytes // KIB, "kind": kind}
            | {"store_mb_s": report.Spread.of(left), "fio_mb_s": report.Spread.of(others[0])}
            | {name: report.ratios(left, right) for name, right in zip(names, others, strict=True)}
            | {"processor_s_per_gb": report.Spread.of(store.processor_seconds)}
        )
    store.close()
    plain.close()
    memories.close()
    shutil.rmtree(place)
    beside.unlink()
    return rows


def _in_turns(measures: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """What each gave, by round; each round takes them in another order."""
    found: list[list[float]] = [[] for _ in measures]
    for number in range(rounds):
        turn = number % len(measures)
        for at in [*range(turn, len(measures)), *range(turn)]:
            found[at].append(measures[at]())
    return found


@contextlib.contextmanager
def _huge_memory(directory: Path | None) -> Iterator[Path | None]:
    """A directory of memory of huge pages: the one given, or one mounted for now by root."""
    if directory is not None:
        yield directory
        return
    place = Path(tempfile.mkdtemp(prefix="kvd-huge-"))
    mount = ["mount", "-t", "tmpfs", "-o", "huge=always,mode=700", "none", str(place)]
    is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield place if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)
        place.rmdir()


def start_warm(directory: Path, blocks: int) -> dict[str, Any]:
    """A start over an index of so many blocks of 64 KiB; no byte of them is there."""
    place = directory / "warm"
    size = 64 * KIB
    regions = -(-blocks * size // (64 * MIB))
    options = DiskOptions((place,), regions * 64 * MIB)
    files = _Unreserved()
    disk = Disk(place, options, files, ())
    identity = disk.slab.identity
    disk.begin([disk.seed], 0)
    disk.close()
    rows = np.zeros((blocks, ROW_WORDS), dtype=np.uint64)
    rows[:, :3] = np.random.default_rng(2).integers(0, 1 << 63, (blocks, 3), dtype=np.uint64)
    rows[:, 3] = np.arange(blocks) * (size // 4096) + MIB // 4096
    rows[:, 4] = 1 | 1 << 32
    rows[:, 5] = np.arange(blocks)
    rows[:, 6] = check_of(rows, identity)
    index = IndexFile(place / "index.sqlite", identity)
    index.open()
    records = dict(zip(rows[:, 3].tolist(), map(np.ndarray.tobytes, rows), strict=True))
    index.commit(Changes(records, {1: SCOPE}, set(), {1: size.to_bytes(8, "little")}))
    index.close()
    del rows, records
    seconds = []
    gc.collect()
    give_memory_back()
    before = _resident()
    for _ in range(3):
        disk = Disk(place, options, files, ())
        began = time.perf_counter()
        disk.begin([disk.seed], 0)
        seconds.append(time.perf_counter() - began)
        assert disk.usage()[0] == blocks
        give_memory_back()
        grown = _resident() - before
        disk.close()
        del disk
        gc.collect()  # it refers to itself
    shutil.rmtree(place)
    return {
        "blocks": blocks,
        "seconds": report.Spread.of(seconds),
        "process_grew_bytes_per_block": grown / blocks,
    }


class _Unreserved(SystemFiles):
    """A slab of holes: only the index is looked at."""

    def reserve(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description="The disk tier's store beside fio.")
    parser.add_argument("--quick", action="store_true", help="little and few: a smoke test")
    parser.add_argument("--directory", type=Path, help="where the slab lies (default: a new one)")
    parser.add_argument(
        "--huge", type=Path, help="a tmpfs of huge pages (default: one is mounted, by root)"
    )
    parser.add_argument("--output", type=Path, help="JSON file (default: results/disk_tier.json)")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    total, rounds = (128 * MIB, 2) if options.quick else (512 * MIB, 8)
    sys.setswitchinterval(0.0005)  # as the daemon's processes do
    results: dict[str, Any] = {}
    try:
        warm = start_warm(directory, MILLION // (10 if options.quick else 1))
        results["warm_start"] = [warm]
        if shutil.which("fio") is None:
            print("fio is missing (apt-get install fio): nothing to compare with")
        else:
            with _huge_memory(options.huge) as huge:
                kinds = {"huge": huge, "small": SHARED_MEMORY}
                if huge is None:
                    print("no huge pages: --huge names no tmpfs of them, and none can be mounted")
                results["beside_fio"] = [
                    row
                    for pages, where in kinds.items()
                    for size in SIZES
                    if where is not None
                    for row in beside_fio(directory, (pages, where), size, total, rounds)
                ]
    finally:
        shutil.rmtree(directory)
    _say(results)
    report.write("disk_tier", results, options.output)


def _say(results: dict[str, Any]) -> None:
    for title, found in results.items():
        print(f"\n{title.replace('_', ' ')}")
        print(report.table(list(found[0]), [list(row.values()) for row in found]))
    for row in results.get("beside_fio", []):
        for other in ("to_fio", "to_plain_same_memory"):
            if row[other].median < BAR:
                what = f"{row['kind']} of {row['block_kib']} KiB, {row['pages']} pages"
                print(f"below {BAR} {other.replace('_', ' ')}: {what}")
    if results["warm_start"][0]["seconds"].median > START_BAR_SECONDS:
        print(f"the start takes more than {START_BAR_SECONDS} s")


if __name__ == "__main__":
    main()
