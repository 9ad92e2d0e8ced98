"""What a tenant learns of another's blocks by time: lookups and stores of keys that another holds.

    python -m benchmarks.foreign_keys [--pairs 1500] [--stores 200] [--output FILE]

Two tenants have engines of one model. One holds blocks; the other asks for them, and for keys that
nobody holds, in pairs whose order is drawn. `told apart` is how often a call for held keys takes
longer than one for others, of all pairs of such calls: 50 % says nothing. Beside it is the same
for keys that the asker holds itself, which shows that a difference would be seen.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import report
from kvd_proto.v1 import engine_pb2
from tests.control import daemon_rig as raw
from tests.faults.scene import MIB, Scene

KEYS = 4096  # of a lookup: so many, that what a key costs is seen
SETS = 1  # of keys that are held
AT_ONCE = raw.NUM_BLOCKS // 2
UNHELD = 1 << 40  # the first key that nobody holds
OWN = 1 << 20  # the first that the asker holds


class Stand:
    """A daemon, the one who holds blocks and the one who asks for them."""

    def __init__(self, dice: random.Random) -> None:
        self._scene, self._dice = Scene(), dice
        config = self._scene.directory / "kvd.toml"
        uids = f"uids = [{os.getuid()}]\n"
        config.write_text(f"[tenants.holder]\n{uids}[tenants.asker]\n{uids}")
        self._scene.daemon.flags["config"] = config
        self._scene.daemon.pool_bytes = 256 * MIB
        self._scene.daemon.start()
        self.holder, self.asker = (self._engine(name) for name in ("holder", "asker"))
        self._next = UNHELD

    def _engine(self, tenant: str) -> raw.RawEngine:
        names = raw.namespace(tenant=tenant)
        path = self._scene.daemon.socket
        return raw.RawEngine(path, identity=raw.identity(tenant), namespace=names)

    def hold(self, engine: raw.RawEngine, first: int) -> None:
        for start in range(first, first + SETS * KEYS, AT_ONCE):
            engine.store({key: raw.block(key % 64) for key in range(start, start + AT_ONCE)})

    def unheld(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def held(self, first: int) -> list[int]:
        start = first + KEYS * self._dice.randrange(SETS)
        return list(range(start, start + KEYS))

    def lookup(self, keys: list[int]) -> float:
        """Microseconds of one."""
        scheduler = self.asker.scheduler
        queries = [raw.query(keys, 0)]
        request = engine_pb2.LookupRequest(session_id=scheduler.id, queries=queries)
        began = time.perf_counter()
        scheduler.call(scheduler.engine.Lookup, request)
        return (time.perf_counter() - began) * 1e6

    def store(self, keys: list[int]) -> float:
        """Microseconds until a store has ended."""
        began = time.perf_counter()
        self.asker.store(dict.fromkeys(keys, b"x"))
        return (time.perf_counter() - began) * 1e6

    def close(self) -> None:
        for engine in (self.holder, self.asker):
            engine.close()
        self._scene.close()


def told_apart(held: list[float], others: list[float]) -> float:
    """How often, in percent, one of the first is the longer of two."""
    ranks = np.argsort(np.argsort(np.array(held + others))) + 1
    count = len(held)
    above = ranks[:count].sum() - count * (count + 1) / 2
    return float(100 * above / (count * len(others)))


def compared(
    one: Callable[[], float], other: Callable[[], float], pairs: int, dice: random.Random
) -> dict[str, object]:
    """Both, one after the other, the first of them drawn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for which in dice.sample([0, 1], 2):
            times[which].append((one, other)[which]())
    by_chance = 100 * (1 / (6 * pairs)) ** 0.5  # a standard deviation of what 50 % varies by
    return {
        "held, us": report.Spread.of(times[0]),
        "of nobody, us": report.Spread.of(times[1]),
        "told apart, %": round(told_apart(*times), 1),
        "by chance, +- %": round(2 * by_chance, 1),
    }


def measure(pairs: int, stores: int) -> dict[str, dict[str, object]]:
    """By what is done and who holds the keys."""
    dice = random.Random(1)
    stand = Stand(dice)
    try:
        stand.hold(stand.holder, 0)
        stand.hold(stand.asker, OWN)
        fresh = iter(range(SETS * KEYS))
        return {
            "lookup, another tenant holds": compared(
                lambda: stand.lookup(stand.held(0)),
                lambda: stand.lookup(stand.unheld(KEYS)),
                pairs,
                dice,
            ),
            "lookup, the asker holds": compared(
                lambda: stand.lookup(stand.held(OWN)),
                lambda: stand.lookup(stand.unheld(KEYS)),
                pairs,
                dice,
            ),
            "lookup, an eighth fewer keys": compared(
                lambda: stand.lookup(stand.unheld(KEYS - KEYS // 8)),
                lambda: stand.lookup(stand.unheld(KEYS)),
                pairs,
                dice,
            ),
            "store, another tenant holds": compared(
                lambda: stand.store([next(fresh)]),
                lambda: stand.store(stand.unheld(1)),
                stores,
                dice,
            ),
        }
    finally:
        stand.close()


def main() -> None:
    """Run it and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--stores", type=int, default=800)
    parser.add_argument("--output", type=Path, help="JSON file (default: results/)")
    given = parser.parse_args()
    found = measure(given.pairs, given.stores)
    rows = [[name, *figures.values()] for name, figures in found.items()]
    print(report.table(["call", *next(iter(found.values()))], rows))
    report.write("foreign_keys", found, given.output)


if __name__ == "__main__":
    main()
