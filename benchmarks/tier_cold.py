"""A cold request on a node with a disk below: empty, and full of other blocks, beside none.

The prompt is nowhere. Timed is what the engine's scheduler thread spends on it in its steps, from
the request's arrival until it is known that nothing of it can be loaded and the request is over,
and how long that takes with a step each 2 ms. Nothing is computed or stored. In interleaved pairs
with a daemon without tiers.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rig import MIB, TOKENS_PER_BLOCK, BenchEngine, daemon, keys
from benchmarks.tier_neighbour import processor_seconds
from kvd.cli.status import ask as ask_status
from kvd_client import Scheduler
from kvd_proto.v1 import operator_pb2
from tests.daemon_process import DaemonProcess
from tests.waiting import wait_until

BLOCK = 4096
POOL_BYTES = 64 * MIB
DISK_BYTES = 32 * MIB
REGION_BYTES = 8 * MIB
FILLED_AT_ONCE = 512
PROMPTS = (256, 1024, 4096)  # blocks of 16 tokens: 4k, 16k and 64k tokens
STEP_S = 0.002
SILENT_AFTER_S = 10.0
BAR = 1.1

EMPTY = 'write = "reuse"\nreuse = 255'  # nothing is used so often
FULL = 'write = "through"'


@dataclass
class Costs:
    """Of some requests, milliseconds each."""

    blocked_ms: list[float] = field(default_factory=list)  # of the scheduler's thread, waits too
    known_ms: list[float] = field(default_factory=list)  # from arrival on
    control_ms: list[float] = field(default_factory=list)  # processor time of the daemon's control


class Side:
    """An engine's scheduler before one of the daemons."""

    def __init__(self, running: DaemonProcess, prefixes: Iterator[int]) -> None:
        self.running = running
        # A loaded machine must not make the client leave the daemon alone for a while.
        self.engine = BenchEngine(
            running.socket, "cold", FILLED_AT_ONCE, BLOCK, silent_after_s=SILENT_AFTER_S
        )
        self._scheduler = Scheduler(self.engine.connection)
        self._prefixes = prefixes

    def fill(self) -> None:
        """Store until the disk is full, and more."""
        places = list(range(FILLED_AT_ONCE))
        while (tier := self.tier()).bytes < 0.99 * tier.capacity_bytes:
            self.engine.run("store", keys(next(self._prefixes), FILLED_AT_ONCE), places)
        wait_until(lambda: not self.tier().bytes_down, "the disk", 60.0)

    def tier(self) -> operator_pb2.TierStatus:
        """What the daemon says of its tier."""
        return ask_status(self.running.socket, 10.0).tiers[0]

    def cold(self, costs: Costs, blocks: int) -> float:
        """A request of so many blocks that are nowhere; milliseconds of the scheduler's thread."""
        hashes = keys(next(self._prefixes), blocks)
        before_s = processor_seconds(self.running.pid)
        ask = partial(self._scheduler.get_num_new_matched_tokens, "cold", 0)
        spent: list[float] = []
        arrived = time.perf_counter()
        tokens = TOKENS_PER_BLOCK * blocks + 1
        _timed(spent, partial(self._scheduler.on_new_request, "cold", tokens, [hashes]))
        found = _timed(spent, ask)
        while found is None:
            _timed(spent, partial(self._scheduler.build_step, []))
            time.sleep(STEP_S)
            found = _timed(spent, ask)
        costs.known_ms.append((time.perf_counter() - arrived) * 1e3)
        assert found == 0, "it is nowhere"
        _timed(spent, partial(self._scheduler.request_finished, "cold", [()]))
        _timed(spent, partial(self._scheduler.build_step, []))
        time.sleep(2 * STEP_S)  # what the daemon does for it is done
        costs.control_ms.append((processor_seconds(self.running.pid) - before_s) * 1e3)
        costs.blocked_ms.append(sum(spent))
        return sum(spent)


def _timed(spent: list[float], call: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = call()
    spent.append((time.perf_counter() - began) * 1e3)
    return result


@contextlib.contextmanager
def with_disk(write: str) -> Iterator[DaemonProcess]:
    """A daemon with a disk tier, on the file system of temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-bench-cold-"))
    file = folder / "kvd.toml"
    file.write_text(
        f'[[tiers]]\nname = "disk"\nkind = "disk"\n{write}\n[tiers.options]\n'
        f'directories = ["{folder}/disk"]\ndirectory_bytes = {DISK_BYTES}\n'
        f"region_bytes = {REGION_BYTES}\n"
    )
    try:
        with daemon(POOL_BYTES, extent_bytes=4 * MIB, config=file) as running:
            yield running
    finally:
        shutil.rmtree(folder)


def measure(name: str, write: str, pairs: int) -> list[dict[str, Any]]:
    """One row a length of the prompt."""
    prefixes = itertools.count(1)
    rows = []
    with contextlib.ExitStack() as stack:
        plain = Side(stack.enter_context(daemon(POOL_BYTES, extent_bytes=4 * MIB)), prefixes)
        stack.callback(plain.engine.close)
        tiered = Side(stack.enter_context(with_disk(write)), prefixes)
        stack.callback(tiered.engine.close)
        wait_until(lambda: tiered.tier().serving, "the disk", 30.0)
        if write is FULL:
            tiered.fill()
        held = int(tiered.tier().blocks)
        for blocks in PROMPTS:
            beside, without, warm = Costs(), Costs(), Costs()
            for side in (plain, tiered):
                side.cold(warm, blocks)
            ours, theirs = report.interleaved(
                partial(tiered.cold, beside, blocks), partial(plain.cold, without, blocks), pairs
            )
            rows.append(
                {
                    "disk": name,
                    "blocks_on_it": held,
                    "blocks": blocks,
                    "blocked": report.ratios(ours, theirs),
                    "blocked_ms": report.Spread.of(ours),
                    "blocked_ms_without": report.Spread.of(theirs),
                    "known_ms": report.Spread.of(beside.known_ms),
                    "known_ms_without": report.Spread.of(without.known_ms),
                    "control_ms": report.Spread.of(beside.control_ms),
                    "control_ms_without": report.Spread.of(without.control_ms),
                }
            )
            print(f"{name}, {blocks} blocks: {rows[-1]['blocked']}", flush=True)
    return rows


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tier_cold", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few pairs: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON (default: results/tier_cold.json)")
    options = parser.parse_args()
    pairs = 15 if options.quick else 300
    rows = measure("empty", EMPTY, pairs) + measure("full", FULL, pairs)
    print(report.table(list(rows[0]), [list(row.values()) for row in rows]))
    report.write("tier_cold", {"bar": BAR, "rows": rows}, options.output)


if __name__ == "__main__":
    main()
