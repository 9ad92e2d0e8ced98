"""Host memory beside a tier that idles, is frozen, dead, missing or slow, and beside none.

Two daemons, one without tiers. An engine of each stores, loads and looks up in host memory, in
interleaved pairs of spells; each pair's ratios are of the p99 of lookups, and of the rates of
stores and loads. Control's processor time is told too: others at work move it less. Whoever seeks a
block below is timed until it knows. In the end the tier comes back, and what status says is held is
counted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rig import MIB, BenchEngine, daemon, keys
from benchmarks.tier_process import ArenaStore
from kvd.cli.status import ask as ask_status
from kvd.tiers.store import Outcome, TierBlock, TierKey, TierOptions
from kvd_client.draft import BlockRun, QueryDraft, StepDraft
from kvd_proto.v1 import common_pb2, operator_pb2
from tests.daemon_process import DaemonProcess, is_alive
from tests.waiting import wait_until

BLOCK = 64 * 1024
POOL_BYTES = 128 * MIB
HOT_KEYS = 16
ROUND_BLOCKS = 64
LOOKUPS_A_ROUND = 25
DEADLINE_S = 1.0
LATE_S = 0.05  # that an answer may be after its deadline
BAR = 1.2
SLOW_CALL_S = 0.2
PENDING = 2
REPOSITORY = Path(__file__).resolve().parent.parent


class SlowStore(ArenaStore):
    """Answers everything late, but before its deadline."""

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        time.sleep(SLOW_CALL_S)
        return super().exists(keys, deadline)

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        time.sleep(SLOW_CALL_S)
        return super().write(blocks, deadline)

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        time.sleep(SLOW_CALL_S)
        return super().read(blocks, deadline)


def slow(options: TierOptions) -> SlowStore:
    """Opens it, for a tier's process."""
    return SlowStore(options)


ARENA = "benchmarks.tier_process:ArenaStore"
SLOW = "benchmarks.tier_neighbour:slow"
MISSING = "kvd.tiers.disk.store:DiskStore"  # without options, so that it can't be opened


def table_of(store: str, write: str = 'write = "through"') -> str:
    return f'[[tiers]]\nname = "t"\nstore = "{store}"\ndeadline_seconds = {DEADLINE_S}\n{write}\n'


class TierHands:
    """What is done to the process of the one daemon's tier."""

    def __init__(self, running: DaemonProcess) -> None:
        self._running = running
        self._killing = threading.Event()
        self._killer: threading.Thread | None = None

    def pids(self) -> list[int]:
        found = []
        for path in Path(f"/proc/{self._running.pid}/task").glob("*/children"):
            for text in path.read_text().split():
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{text}/comm").read_text()
                    found += [int(text)] if "kvd-tier" in name and is_alive(int(text)) else []
        return found

    def signal(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self) -> None:
        """Serve, and stop: a tier that is frozen in the midst of its work."""
        self.thaw()
        self.wait_serving()
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill_ever_again(self) -> None:
        """Kill whichever process comes, until `spare`."""
        self._killing.set()

        def kill() -> None:
            while self._killing.is_set():
                self.signal(signal.SIGKILL)
                time.sleep(0.05)

        self._killer = threading.Thread(target=kill)
        self._killer.start()

    def spare(self) -> None:
        self._killing.clear()
        if self._killer is not None:
            self._killer.join()

    def wait_serving(self) -> None:
        wait_until(lambda: self.status().tiers[0].serving, "the tier's process", 90.0)

    def status(self) -> operator_pb2.StatusResponse:
        return ask_status(self._running.socket, 10.0)

    def descriptors(self) -> int:
        """Of control, the fewest of two seconds: whoever asks for status has some for a moment."""
        folder, fewest = Path(f"/proc/{self._running.pid}/fd"), 1 << 20
        for _ in range(20):
            fewest = min(fewest, len(list(folder.iterdir())))
            time.sleep(0.1)
        return fewest


def nothing(_hands: TierHands) -> None:
    """Leave the tier as it is."""


@dataclass(frozen=True)
class Plight:
    """What becomes of the tier before a spell, and after it."""

    table: str
    before: Callable[[TierHands], None] = nothing
    after: Callable[[TierHands], None] = nothing
    serves: bool = True  # before and after all of it
    seeks: bool = True  # somebody waits for it during the spell


PLIGHTS = {
    "idle": Plight(table_of(ARENA, 'write = "reuse"\nreuse = 255'), seeks=False),
    "frozen": Plight(table_of(ARENA), TierHands.freeze, TierHands.thaw),
    "dead": Plight(table_of(ARENA), TierHands.kill_ever_again, TierHands.spare),
    "missing": Plight(table_of(MISSING), serves=False),
    "slow": Plight(table_of(SLOW)),
}


@dataclass
class Spell:
    """What one spell of work came to."""

    lookups_ms: list[float] = field(default_factory=list)
    stores_s: list[float] = field(default_factory=list)
    loads_s: list[float] = field(default_factory=list)
    sought_s: list[float] = field(default_factory=list)  # until who sought knew
    control_s: float = 0.0  # of processor time

    def rate(self, seconds: list[float]) -> float:
        """Blocks a second."""
        return len(seconds) * ROUND_BLOCKS / sum(seconds)


class Side:
    """An engine of one of the daemons, and its work."""

    def __init__(self, running: DaemonProcess) -> None:
        self._running = running
        self.engine = BenchEngine(running.socket, "side", ROUND_BLOCKS, BLOCK)
        self._hot = keys(1, HOT_KEYS)
        self._prefix = 10
        self.engine.run("store", self._hot, list(range(HOT_KEYS)))
        self.work(40)  # the pool is full from then on

    def work(self, rounds: int) -> Spell:
        """Rounds of a store, a load and some lookups."""
        spell = Spell()
        before_s = processor_seconds(self._running.pid)
        for _ in range(rounds):
            self._prefix += 1
            hashes = keys(self._prefix, ROUND_BLOCKS)
            places = list(range(ROUND_BLOCKS))
            spell.stores_s.append(self.engine.run("store", hashes, places))
            spell.loads_s.append(self.engine.run("load", hashes, places))
            for _ in range(LOOKUPS_A_ROUND):
                began = time.perf_counter()
                statuses = self._look_up(self._hot, "small")
                spell.lookups_ms.append((time.perf_counter() - began) * 1e3)
                assert all(status & 3 == 1 for status in statuses), "a block in use was evicted"
                time.sleep(0.001)
        spell.control_s = processor_seconds(self._running.pid) - before_s
        return spell

    def seek(self) -> float:
        """Ask for what is nowhere until it is known; seconds."""
        self._prefix += 1
        hashes = keys(self._prefix, ROUND_BLOCKS)
        name = f"seek {self._prefix}"
        began = time.perf_counter()
        while PENDING in [status & 3 for status in self._look_up(hashes, name)]:
            self.engine.connection.send_step(StepDraft())
            time.sleep(0.002)
        seconds = time.perf_counter() - began
        self.engine.connection.send_step(StepDraft(finished=[name]))
        return seconds

    def _look_up(self, hashes: list[bytes], name: str) -> bytes:
        connection = self.engine.connection
        context = common_pb2.ReqContext(request_id=name)
        query = QueryDraft(context, BlockRun(0, 0, hashes), lease_all=False)
        call = connection.start_lookup([query])
        connection.gather([call], 5.0)
        answers = connection.take_answers(call)
        assert answers, "the lookup was lost"
        if answers[0].lease_id:
            connection.send_step(StepDraft(released_leases=[answers[0].lease_id]))
        return bytes(answers[0].statuses)


def processor_seconds(pid: int) -> float:
    """What the process's threads that live have run so far."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def leaks(hands: TierHands) -> dict[str, int]:
    """What is held though nobody does anything."""
    status = hands.status()
    held = {
        "slots reserved": status.pool.slots_reserved,
        "slots quarantined": status.pool.slots_quarantined,
        "bytes down": sum(tier.bytes_down for tier in status.tiers),
        "bytes up": sum(tier.bytes_up for tier in status.tiers),
        "bytes pinned": sum(t.bytes_used - t.bytes_evictable for t in status.tenants),
        "leases": sum(session.leases for session in status.sessions),
        "jobs": sum(session.jobs_in_flight for session in status.sessions),
    }
    return {name: int(count) for name, count in held.items() if count}


def settle(hands: TierHands) -> None:
    """Let the tier do what it is behind with, lest that be the next spell's neighbour."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not leaks(hands), "what is held", 30.0)


@contextlib.contextmanager
def with_tier(table: str) -> Iterator[DaemonProcess]:
    """A daemon with this tier, whose process finds the stores of this file."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-bench-tier-"))
    file = folder / "kvd.toml"
    file.write_text(table)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    try:
        with daemon(POOL_BYTES, extent_bytes=16 * MIB, config=file) as running:
            yield running
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
        shutil.rmtree(folder)


def measure(plight: Plight, pairs: int, rounds: int) -> dict[str, Any]:
    """Pairs of spells, without a tier and beside one of which this becomes."""
    plain_flags = contextlib.ExitStack()
    with plain_flags as stack:
        plain = stack.enter_context(daemon(POOL_BYTES, extent_bytes=16 * MIB))
        tiered = stack.enter_context(with_tier(plight.table))
        hands = TierHands(tiered)
        if plight.serves:
            hands.wait_serving()
        without, beside = Side(plain), Side(tiered)
        stack.callback(without.engine.close)
        stack.callback(beside.engine.close)
        wait_until(lambda: not leaks(hands), "an idle daemon", 60.0)
        descriptors = hands.descriptors()

        def beside_it() -> Spell:
            plight.before(hands)
            try:
                spell = beside.work(rounds)
                spell.sought_s += [beside.seek()] if plight.seeks else []
            finally:
                plight.after(hands)
            settle(hands)
            return spell

        spells = [
            (without.work(rounds), beside_it())
            if pair % 2 == 0
            else (beside_it(), without.work(rounds))[::-1]
            for pair in range(pairs)
        ]
        if plight.serves:
            hands.wait_serving()
        return figures(spells) | {
            "leaked": leaks(hands),
            "descriptors more": hands.descriptors() - descriptors,
        }


def figures(spells: Sequence[tuple[Spell, Spell]]) -> dict[str, Any]:
    """Ratios over the pairs; above 1 is dearer beside the tier."""
    p99 = [[report.percentile(spell.lookups_ms, 99) for spell in pair] for pair in spells]
    p50 = [[report.percentile(spell.lookups_ms, 50) for spell in pair] for pair in spells]
    stores = [[spell.rate(spell.stores_s) for spell in pair] for pair in spells]
    loads = [[spell.rate(spell.loads_s) for spell in pair] for pair in spells]
    sought = [seconds for _, spell in spells for seconds in spell.sought_s]
    every = [[ms for pair in spells for ms in pair[side].lookups_ms] for side in (0, 1)]
    return {
        "lookup_p99_ms_without": report.Spread.of([without for without, _ in p99]),
        "lookup_p99_ms_beside": report.Spread.of([beside for _, beside in p99]),
        "lookup_p99": report.Spread.of([beside / without for without, beside in p99]),
        "lookup_p99_pooled": report.percentile(every[1], 99) / report.percentile(every[0], 99),
        "lookup_p50": report.Spread.of([beside / without for without, beside in p50]),
        "store": report.Spread.of([without / beside for without, beside in stores]),
        "load": report.Spread.of([without / beside for without, beside in loads]),
        "control_cpu": report.Spread.of([b.control_s / a.control_s for a, b in spells]),
        "longest_call_ms_beside": max(every[1]),
        "longest_search_s": max(sought, default=0.0),
        "deadline_s": DEADLINE_S,
    }


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tier_neighbour")
    parser.description = __doc__
    parser.add_argument("plights", nargs="*", metavar="PLIGHT", help=", ".join(PLIGHTS))
    parser.add_argument("--quick", action="store_true", help="3 pairs: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON (default: results/tier_neighbour.json)")
    options = parser.parse_args()
    if unknown := set(options.plights) - PLIGHTS.keys():
        parser.error(f"no such plight: {', '.join(sorted(unknown))}")
    pairs, rounds = (3, 8) if options.quick else (15, 24)
    results = {}
    for name in options.plights or PLIGHTS:
        results[name] = measure(PLIGHTS[name], pairs, rounds)
        print(f"{name}: {results[name]['lookup_p99']}", flush=True)
    rows = [
        [figure, *(results[name][figure] for name in results)] for figure in results_of(results)
    ]
    print(report.table(["figure", *results], rows))
    late = {n: r["longest_search_s"] for n, r in results.items()}
    met = all(seconds <= DEADLINE_S + LATE_S for seconds in late.values())
    print(f"answered within the deadline of {DEADLINE_S} s and {LATE_S} s more: {met}")
    report.write(
        "tier_neighbour", {"bar": BAR, "late_s": LATE_S, "plights": results}, options.output
    )


def results_of(results: dict[str, dict[str, Any]]) -> list[str]:
    return list(next(iter(results.values())))


if __name__ == "__main__":
    main()
