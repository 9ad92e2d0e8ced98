"""Who gets room in a full pool: `python -m benchmarks.fairness`.

A real daemon with a small pool, and engines in processes of their own, each with a namespace of its
own: one that stores at full rate and had all of the pool to itself, one that stores once a second,
one whose blocks have two shards and that stores ten times a second. Each store is tried once. What
counts is how many of those are accepted, from a second after an engine's first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rig import MIB, BenchEngine, daemon, keys

POOL_BYTES = 64 * MIB
EXTENT_BYTES = 4 * MIB
PART_BYTES = MIB // 4  # of a block on each rank; 16 blocks a row
STORE_BLOCKS = 8
FIRST_SECONDS = 1.0  # of each engine, not counted
BAR = 0.95
# name: ranks, seconds between stores
ENGINES = {"full rate": (1, 0.0), "once a second": (1, 1.0), "two ranks": (2, 0.1)}
SCENES = (
    ("full rate", "once a second"),
    ("full rate", "two ranks"),
    ("full rate", "once a second", "two ranks"),
)


def be_an_engine(socket: str, name: str) -> None:
    """Another process: fill the pool where told to, store for so many seconds, say how it went."""
    ranks, every_s = ENGINES[name]
    made, seed = 0, sum(name.encode())
    engine = BenchEngine(socket, name, STORE_BLOCKS, PART_BYTES, model=name, world_size=ranks)

    def store(number: int) -> bool:
        """Try to store these blocks, once; whether every rank was told that they are."""
        hashes, blocks = keys(seed, STORE_BLOCKS, number), list(range(STORE_BLOCKS))
        return not engine.run_jobs(*engine.step_of("store", hashes, blocks))

    print("ready", flush=True)
    for line in sys.stdin:
        word, _, argument = line.partition(" ")
        counts = {"tried": 0, "accepted": 0}
        began = time.monotonic()
        if word == "fill":
            for _ in range(int(argument)):
                made += STORE_BLOCKS
                store(made)
        else:
            while (since := time.monotonic() - began) < float(argument):
                made += STORE_BLOCKS
                stored = store(made)
                if since >= FIRST_SECONDS:
                    counts["tried"] += 1
                    counts["accepted"] += stored
                time.sleep(every_s)
        print(json.dumps(counts), flush=True)
    engine.close()


def start(socket: str, name: str) -> subprocess.Popen[str]:
    """An engine's process, ready to be told what to do."""
    engine = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fairness", "--as-engine", name, "--socket", socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    assert engine.stdout.readline().strip() == "ready"
    return engine


def tell(engine: subprocess.Popen[str], order: str) -> None:
    assert engine.stdin is not None
    engine.stdin.write(f"{order}\n")
    engine.stdin.flush()


def answer(engine: subprocess.Popen[str]) -> dict[str, int]:
    assert engine.stdout is not None
    counts: dict[str, int] = json.loads(engine.stdout.readline())
    return counts


def end(engine: subprocess.Popen[str]) -> None:
    assert engine.stdin is not None
    engine.stdin.close()
    engine.wait(30)


def scene(names: tuple[str, ...], seconds: float) -> list[dict[str, Any]]:
    """The first engine fills the pool, then all of them store side by side."""
    with daemon(POOL_BYTES, extent_bytes=EXTENT_BYTES) as running, ExitStack() as stack:
        engines = []
        for number, name in enumerate(names):
            engines.append(start(running.socket, name))
            stack.callback(end, engines[-1])
            if not number:
                tell(engines[0], f"fill {2 * POOL_BYTES // (STORE_BLOCKS * PART_BYTES)}")
                answer(engines[0])
        for engine in engines:
            tell(engine, f"go {seconds}")
        counts = [answer(engine) for engine in engines]
    return [
        {
            "scene": " + ".join(names),
            "engine": name,
            "tried": count["tried"],
            "accepted": count["accepted"],
            "share": count["accepted"] / max(1, count["tried"]),
            "bar": BAR,
        }
        for name, count in zip(names, counts, strict=True)
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Accepted stores of engines in a full pool.")
    parser.add_argument("--quick", action="store_true", help="5 seconds a scene: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/fairness.json)")
    parser.add_argument("--as-engine", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_engine:
        be_an_engine(options.socket, options.as_engine)
        return
    seconds = 5.0 if options.quick else 30.0
    rows = [row for names in SCENES for row in scene(names, seconds)]
    print(report.table(list(rows[0]), [list(row.values()) for row in rows]))
    pool = {"pool_bytes": POOL_BYTES, "extent_bytes": EXTENT_BYTES, "part_bytes": PART_BYTES}
    report.write("fairness", {**pool, "seconds": seconds, "engines": rows}, options.output)


if __name__ == "__main__":
    main()
