"""The disk tier's store beside fio: `python -m benchmarks.disk_tier [--quick]`.

Both read and write the same number of bytes on the same file system past the page cache
(O_DIRECT), in blocks of one size, as many of them at once: fio by its psync engine, a thread each
and in a file laid out beforehand. The store's batches come from two callers and page-aligned
memory, and its rows are written beside; every checksum is taken and verified. Interleaved pairs.

fio's threads use one buffer each, again and again. Where the disk is as fast as memory, as a
virtual machine's may be, that is faster than blocks that lie where the pool has them; so plain
preadv and pwritev, in as many threads and over as much memory as the store's, are timed too.

And how long the store takes to start with a million blocks, and the memory that they take.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Sequence
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
BATCH_BYTES = 32 * MIB
BAR = 0.9
MILLION = 1_000_000
START_BAR_SECONDS = 2.0
SCOPE = b"benchmark".ljust(32)
Call = Callable[[Sequence[TierBlock], float], list[Outcome]]


class Store:
    """One store, filled anew by every pass of writing."""

    def __init__(self, directory: Path, block_bytes: int, total_bytes: int) -> None:
        self._block_bytes, self._total = block_bytes, total_bytes
        room = total_bytes + 64 * MIB
        self._store = DiskStore(
            {"directories": [str(directory)], "directory_bytes": room, "threads": DEPTH}
        )
        self._memories: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for seed in range(CALLERS):
            memory = memoryview(mmap.mmap(-1, BATCH_BYTES))
            words = np.frombuffer(memory, dtype=np.uint64)
            words[:] = np.random.default_rng(seed).integers(0, 1 << 63, len(words), dtype=np.uint64)
            self._memories.put(memory)
        self._round = 0

    def write(self) -> float:
        """MB/s; what was there is forgotten first."""
        self._store.delete_scopes([SCOPE], time.monotonic() + 60)
        self._round += 1
        return self._pass(self._store.write)

    def read(self) -> float:
        """MB/s of all that the last pass wrote."""
        return self._pass(self._store.read)

    def close(self) -> None:
        self._store.close()

    def _pass(self, call: Call) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(CALLERS) as pool:
            firsts = range(self._total // BATCH_BYTES)
            outcomes = set().union(*pool.map(partial(self._call, call), firsts))
        assert outcomes == {Outcome.DONE}
        return self._total / (time.perf_counter() - began) / 1e6

    def _call(self, call: Call, number: int) -> set[Outcome]:
        """One batch, in the caller's own part of the memory."""
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

    def __init__(self, path: Path, block_bytes: int, total_bytes: int) -> None:
        self._block_bytes, self._total = block_bytes, total_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_DIRECT)  # fio's
        self._memory = memoryview(mmap.mmap(-1, CALLERS * BATCH_BYTES))
        np.frombuffer(self._memory, dtype=np.uint8)[:] = 1

    def run(self, kind: str) -> float:
        """MB/s."""
        began = time.perf_counter()
        with ThreadPoolExecutor(DEPTH) as pool:
            list(pool.map(partial(self._part, os.preadv if kind == "read" else os.pwritev), LANES))
        return self._total / (time.perf_counter() - began) / 1e6

    def _part(self, call: Callable[[int, list[memoryview], int], int], lane: int) -> None:
        part, size = self._total // DEPTH, self._block_bytes
        own = len(self._memory) // DEPTH
        for at in range(0, part, size):
            start = lane * own + at % own
            call(self._fd, [self._memory[start : start + size]], lane * part + at)

    def close(self) -> None:
        os.close(self._fd)


def fio(directory: Path, block_bytes: int, total_bytes: int, kind: str) -> float:
    """MB/s of DEPTH threads, each with its part of one file."""
    each = total_bytes // DEPTH
    command = [
        "fio", "--name=beside", f"--filename={directory / 'fio'}", f"--rw={kind}",
        f"--bs={block_bytes}", f"--size={each}", f"--offset_increment={each}",
        f"--numjobs={DEPTH}", "--thread", "--ioengine=psync", "--direct=1",
        "--fallocate=native", "--overwrite=1", "--group_reporting", "--output-format=json",
        "--randrepeat=0", "--invalidate=0",
    ]  # fmt: skip
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    told = json.loads(said[said.index("{") :])["jobs"][0][kind]
    return float(told["bw_bytes"]) / 1e6


def beside_fio(directory: Path, block_bytes: int, total: int, pairs: int) -> list[dict[str, Any]]:
    """Both ways of one block size."""
    place = directory / f"store-{block_bytes}"
    store = Store(place, block_bytes, total)
    fio(directory, block_bytes, total, "write")  # lays its file out
    store.write()
    plain = Plain(directory / "fio", block_bytes, total)
    rows = []
    for kind, ours in (("write", store.write), ("read", store.read)):
        theirs = partial(fio, directory, block_bytes, total, kind)
        left, right = report.interleaved(ours, theirs, pairs)
        rows.append(
            {
                "block_bytes": block_bytes,
                "kind": kind,
                "store_mb_s": report.Spread.of(left),
                "fio_mb_s": report.Spread.of(right),
                "ratio": report.ratios(left, right),
                "to_plain": report.ratios(
                    *report.interleaved(ours, partial(plain.run, kind), pairs)
                ),
            }
        )
    store.close()
    plain.close()
    shutil.rmtree(place)
    (directory / "fio").unlink()
    return rows


def start_warm(directory: Path, blocks: int) -> dict[str, Any]:
    """A start over an index of so many blocks of 64 KiB; no byte of them is there."""
    place = directory / "warm"
    size = 64 * KIB
    regions = -(-blocks * size // (64 * MIB))
    options = DiskOptions((place,), regions * 64 * MIB)
    files = _Unreserved()
    disk = Disk(place, options, files)
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
        disk = Disk(place, options, files)
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
    parser.add_argument("--output", type=Path, help="JSON file (default: results/disk_tier.json)")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    total, pairs = (128 * MIB, 2) if options.quick else (512 * MIB, 5)
    sys.setswitchinterval(0.0005)  # as the daemon's processes do
    results: dict[str, Any] = {}
    try:
        warm = start_warm(directory, MILLION // (10 if options.quick else 1))
        results["warm_start"] = [warm]
        if shutil.which("fio") is None:
            print("fio is missing (apt-get install fio): nothing to compare with")
        else:
            rows = [beside_fio(directory, size, total, pairs) for size in SIZES]
            results["beside_fio"] = [row for each in rows for row in each]
    finally:
        shutil.rmtree(directory)
    for title, found in results.items():
        print(f"\n{title.replace('_', ' ')}")
        print(report.table(list(found[0]), [list(row.values()) for row in found]))
    for row in results.get("beside_fio", []):
        if row["ratio"].median < BAR:
            print(f"below {BAR} of fio: {row['kind']} of {row['block_bytes'] // KIB} KiB")
    if warm["seconds"].median > START_BAR_SECONDS:
        print(f"the start takes more than {START_BAR_SECONDS} s")
    report.write("disk_tier", results, options.output)


if __name__ == "__main__":
    main()
