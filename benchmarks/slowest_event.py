"""The slowest event of each kind, in a daemon as large as any: 10^6 blocks, 1,000 namespaces.

    python -m benchmarks.slowest_event [--shape small large] [--policy lru] [--blocks 1000000]
                                       [--rounds 15] [--output FILE]

A real driver with a real core and a real pool: slot table, row headers, registry, index pages and
event log are written as in a daemon, and count. Left out are the extents' files, whose bytes
control never touches, and the movers: what an event tells them is a frame each, and goes nowhere.

One namespace holds most of the blocks, of 20,000 accounts; 63 others of 64 groups have sessions;
the rest have none. The pool is full, of blocks of 2 MiB where the others leave room. In `small`
most blocks are of 4 KiB, 16,384 in a row; in `large` of 2 MiB, as all others are, 32 in a row, and
so 500 times as many rows. Each kind of event is handed over `--rounds` times at the size of its
bound; those that change everything, once. The bar is for milliseconds of processor time, because
what else the machine runs plays no part in what an event costs; wall time stands beside it.

`rooms` is what follows every event: how much could be stored now, written to the index pages.
After that the driver is ended and another reads back what is in the pool. That is before it serves
anybody, so nothing waits for one of these events and none is marked; but they are many, so that a
start has a beat. `of another` is an event that followed from one within the same call, and is part
of it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import report
from benchmarks import slowest_event_drive as drive
from benchmarks.slowest_event_rig import BLOCK_BYTES, Rig, Scale, Shape
from benchmarks.slowest_event_tiers import drive_tiers
from kvd.cli.serve import settle_memory
from kvd.core import events
from kvd.core.policy import POLICY_NAMES
from kvd.pool import Pool, capacity_check
from kvd.pool.extents import Extents

BAR_MS = 5.0
BEFORE_SERVING = (
    events.ScopesRecovered.__name__,
    events.RowsRecovered.__name__,
    events.PoolRecovered.__name__,
    "driver.recover",
)
Figures = dict[str, dict[str, report.Spread]]


async def measure(shape: Shape, policy: str, rounds: int) -> Figures:
    """Milliseconds by kind: of the processor, and of the wall's clock."""
    directory = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir="/dev/shm"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory)
        rig = Rig(shape, policy, directory)
        stack.callback(rig.close_pool)
        began = time.monotonic()
        sessions = drive.filled(rig)
        settle_memory()
        figures = rig.machine.statistics()
        print(
            f"{shape.name}, {policy}: {figures.slots.ready} blocks, {len(figures.namespaces)}"
            f" namespaces, {len(rig.machine.state.classes)} classes,"
            f" {len(rig.machine.state.scopes)} scopes, {figures.rows} rows;"
            f" filled in {time.monotonic() - began:.0f} s, {_resident_mib()} MiB resident",
            flush=True,
        )
        rig.silent = False
        for _ in range(rounds):
            drive.drive_verbs(rig, sessions)
            rig.call(events.TimerTicked())
            drive.drive_reads(rig, sessions[0])
        for number in range(max(2, min(rounds, 8))):
            drive.drive_starved(rig, number)
        for number in range(min(rounds, 3)):
            drive.drive_private(rig, number)
            drive.drive_life(rig, number)
            drive_tiers(rig, sessions[0])
        _collect()
        sessions = drive.drive_restart(rig)
        settle_memory()
        drive.drive_upheaval(rig, sessions)
        return {
            kind: {
                "processor": report.Spread.of(rig.processor[kind]),
                "wall": report.Spread.of(rig.wall[kind]),
            }
            for kind in rig.processor
        }


def _collect() -> None:
    """As a daemon does that starts: what is read back is all kept, so that nothing looks at it."""
    gc.unfreeze()
    gc.disable()


def without_extents() -> ExitStack:
    """No file of an extent is made: nobody here touches its bytes. Around the whole loop: what it
    has begun goes on after what was measured."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(Extents, "create_all"))
    stack.enter_context(mock.patch.object(Extents, "missing", return_value=""))
    stack.enter_context(mock.patch.object(capacity_check, "require_space"))
    # Records of slots that no row has take no memory here.
    stack.enter_context(mock.patch("kvd.pool.mapped_table.have_all", _sparse))
    stack.enter_context(mock.patch.object(Pool, "zero_row"))
    return stack


def _sparse(descriptor: int, size: int, _path: Path) -> None:
    os.ftruncate(descriptor, size)


def _resident_mib() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def _remark(kind: str, slowest_ms: float) -> str:
    if kind.startswith(BEFORE_SERVING):
        return "before serving"
    return "OVER" if slowest_ms > BAR_MS else ""


def as_table(found: Figures) -> str:
    """Kinds of events, the slowest first."""
    ranked = sorted(found.items(), key=lambda item: -item[1]["processor"].high)
    rows = [
        [
            kind,
            spreads["processor"].count,
            f"{spreads['processor'].median:.2f}",
            f"{spreads['processor'].high:.2f}",
            f"{spreads['wall'].high:.2f}",
            _remark(kind, spreads["processor"].high),
        ]
        for kind, spreads in ranked
    ]
    return report.table(["event", "times", "median ms", "slowest ms", "slowest wall ms", ""], rows)


def _chosen(options: argparse.Namespace) -> Iterator[tuple[Shape, str]]:
    for shape in options.shape:
        for policy in options.policy:
            yield Shape(shape, replace(Scale(), blocks=options.blocks)), policy


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slowest_event")
    parser.add_argument("--shape", nargs="+", choices=BLOCK_BYTES, default=list(BLOCK_BYTES))
    parser.add_argument("--policy", nargs="+", choices=POLICY_NAMES, default=["lru"])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for shape, policy in _chosen(options):
        with without_extents():
            found = asyncio.run(measure(shape, policy, options.rounds))
        print(as_table(found), flush=True)
        results[f"{shape.name}, {policy}"] = found
    report.write("slowest_event", results, options.output)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
