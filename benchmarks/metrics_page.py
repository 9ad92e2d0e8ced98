"""What a scrape of `/metrics` costs the control process, with many namespaces and sessions.

In one process: the core with its namespaces, sessions and blocks, what clients told, and the ranks'
movers as stand-ins. The page is made again and again as the daemon makes it, in turns with others
on the event loop and partly in a thread: milliseconds until it is there, those of processor, and
the longest that another coroutine waited for its turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import uvloop

from benchmarks import report
from kvd.cli.serve import SWITCH_SECONDS
from kvd.core import events, keys
from kvd.core.engines.layouts import RankPlacement
from kvd.core.machine import Machine, MachineConfig
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd.mover.facts import MoverFacts
from kvd.observability.metrics import Metrics
from kvd.runtime.fleet import AttachedMover
from kvd.runtime.told_lookups import LookupFigures, ToldLookups
from kvd_proto.groups import GroupKind

BLOCK_BYTES = 4096
EXTENT_BYTES = 1 << 20
BLOCKS = 64  # that each session stores
BAR_MS = 20.0
TURN_SECONDS = 0.001


def filled(namespaces: int, sessions: int) -> tuple[Machine, ToldLookups]:
    """A machine whose sessions have stored something, and what their clients told."""
    config = MachineConfig(4 * namespaces, EXTENT_BYTES, tag_secret=b"bench" * 3)
    machine = Machine(config)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 1, (BLOCK_BYTES,))
    told = ToldLookups(machine.knows)
    for number in range(sessions):
        name = number % namespaces
        tenant = keys.TenantId(f"tenant-{name % 8}")
        session = keys.SessionId(number + 1)
        spec = NamespaceSpec(f"namespace-{name}", tenant, 32, (group,))
        machine.handle(events.SessionOpened(session, spec, "", 1), 0)
        mover = keys.MoverId(number + 1)
        machine.handle(events.RankAttached(session, mover, 0, 0, True), 0)
        words = np.arange(4 * BLOCKS, dtype=np.uint64).reshape(-1, 4) + np.uint64(number << 32)
        run = events.Run(
            0, keys.KeyBatch(words, 32), np.arange(BLOCKS, dtype=np.uint32).reshape(-1, 1)
        )
        context = events.RequestContext(keys.RequestId("bench"))
        machine.handle(events.StoreRequested(session, keys.JobId(1), context, (run,)), 0)
        known = machine.state.sessions[session].namespace
        told.add(known, tenant, LookupFigures(1, 1, BLOCKS, BLOCKS, 16 * BLOCKS, 16 * BLOCKS))
    return machine, told


def ranks(sessions: int) -> list[AttachedMover]:
    """Stand-ins for the movers of as many ranks."""
    facts = SimpleNamespace(facts=MoverFacts())
    return [
        cast(
            AttachedMover,
            SimpleNamespace(
                process=facts, placement=RankPlacement(0, 0, True), session=keys.SessionId(n + 1)
            ),
        )
        for n in range(sessions)
    ]


def measure(namespaces: int, sessions: int, rounds: int) -> dict[str, Any]:
    """Milliseconds and bytes of one page."""
    machine, told = filled(namespaces, sessions)
    metrics = Metrics("bench")
    metrics.watch(machine.statistics)
    metrics.watch_lookups(told)
    attached = ranks(sessions)
    metrics.watch_ranks(lambda: attached)
    return uvloop.run(scraped(metrics, rounds))


async def scraped(metrics: Metrics, rounds: int) -> dict[str, Any]:
    """What the rounds took, each without and with another coroutine that wants its turn."""
    wall, worked, waited, page = [], [], [], b""
    for _ in range(rounds):
        began, worked_before = time.perf_counter(), time.process_time()
        page = await metrics.exposition()
        worked.append(1000 * (time.process_time() - worked_before))
        wall.append(1000 * (time.perf_counter() - began))
        making = asyncio.create_task(metrics.exposition())
        longest = 0.0
        while not making.done():
            began = time.perf_counter()
            await asyncio.sleep(TURN_SECONDS)
            longest = max(longest, time.perf_counter() - began - TURN_SECONDS)
        waited.append(1000 * longest)
    return {
        "wall": report.Spread.of(wall),
        "processor": report.Spread.of(worked),
        "longest_wait": report.Spread.of(waited),
        "bytes": len(page),
        "lines": page.count(b"\n"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--namespaces", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)
    found = measure(options.namespaces, options.sessions, options.rounds)
    shape = f"{options.namespaces} namespaces, {options.sessions} sessions"
    rows = [
        [f"{shape}: until it is there, ms (bar {BAR_MS:g})", found["wall"]],
        ["processor, ms", found["processor"]],
        ["the longest that others waited, ms", found["longest_wait"]],
        ["bytes", found["bytes"]],
    ]
    print(report.table(["/metrics", ""], rows))
    report.write("metrics_page", found, options.output)


if __name__ == "__main__":
    main()
