"""Whether a mover's memory grows with its jobs: `python -m benchmarks.mover_memory`.

One mover, driven through control's side of it by loads and stores of 1 to 96 blocks, a few at a
time, as fast as it makes them: an hour of `make soak` in some minutes. What it has taken for itself
is printed every so often, and of that what the allocator's heap has: that is where free memory in
pieces too small to be used again shows.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import uvloop

from benchmarks import report
from benchmarks.footprint import anonymous_mib
from kvd.core.events import JobKind
from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart
from tests.control import mover_rig
from tests.control.mover_rig import WorkerEnd, give, rig

BLOCK_BYTES = 16 << 10
BLOCKS = mover_rig.BLOCKS * mover_rig.PART_BYTES // BLOCK_BYTES  # in the rig's memory
SLOTS = mover_rig.EXTENT_BYTES // BLOCK_BYTES
MOST_BLOCKS = 96
MOST_JOBS = 8  # at a time


def heap_mib(pid: int) -> float:
    """What the process has of its heap, the one that grows at its end, MiB."""
    smaps = Path(f"/proc/{pid}/smaps").read_text()
    found = re.search(r"\[heap\]\n(?:\w+:.*\n)*?Anonymous:\s+(\d+) kB", smaps)
    return int(found[1]) / 1024 if found else 0.0


def part(chance: random.Random) -> LocatedPart:
    """Some blocks, each anywhere in engine memory and in the extents."""
    count = chance.randint(1, MOST_BLOCKS)
    slots = np.array(chance.sample(range(SLOTS * mover_rig.EXTENTS), count))
    blocks = np.array(chance.sample(range(BLOCKS), count), dtype=np.uint32)
    extents, ordinals = np.divmod(slots, SLOTS)
    offsets = (ordinals * BLOCK_BYTES).astype(np.uint64)
    return LocatedPart(0, extents.astype(np.uint32), offsets, blocks.reshape(-1, 1))


async def drive(jobs: int, every: int) -> list[tuple[int, float, float]]:
    """Jobs so far, what the mover has taken, and what of it is in the heap."""
    chance, rows, done = random.Random(1), [], 0
    fragment = FragmentSpec(0, 0, BLOCK_BYTES, BLOCK_BYTES)
    group = GroupMap(BLOCKS, 1, BLOCK_BYTES, (fragment,))
    async with rig() as made:
        config = replace(made.config(), groups=(group,), checksums=True)
        mover = await made.start(config)
        worker, sink = WorkerEnd(mover), made.sink
        while done < jobs:
            numbers = range(done + 1, done + 1 + chance.randint(1, MOST_JOBS))
            for number in numbers:
                assert give(mover, number, chance.choice(list(JobKind)), part(chance))
            worker.ring.mark_ready(numbers)
            for number in numbers:
                await sink.outcome(number)
            worker.board.poll()
            for heard in (sink.outcomes, sink.order, sink.bytes, sink.finished):
                heard.clear()
            if numbers[-1] // every > done // every:
                rows.append((numbers[-1], anonymous_mib(mover.pid), heap_mib(mover.pid)))
            done = numbers[-1]
    return rows


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mover_memory", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=10_000, metavar="JOBS")
    arguments = parser.parse_args()
    rows = uvloop.run(drive(arguments.jobs, arguments.every))
    print(
        report.table(
            ("jobs", "MiB", "of it heap"),
            [(f"{jobs}", f"{taken:.2f}", f"{heap:.2f}") for jobs, taken, heap in rows],
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
