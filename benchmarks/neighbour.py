"""Small calls beside a big neighbour: `python -m benchmarks.neighbour`.

One engine asks for 16 keys, again and again; alone, and while another process's engine loops
2048-key lookups and stores at full rate. In interleaved rounds, since the machine is noisy: one
spell alone, one beside the neighbour, and one beside it at another daemon, which has nothing else
to do. The bar is of the first two's p99. The third says what of it is the daemon's doing, and what
comes of four busy processes on the machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rig import MIB, BenchEngine, daemon, keys
from kvd_client.draft import BlockRun, QueryDraft, StepDraft
from kvd_proto.v1 import common_pb2

BLOCK = 64 * 1024
SMALL_KEYS = 16
BIG_KEYS = 2048
BAR = 2.5


def ask(engine: BenchEngine, hashes: list[bytes]) -> float:
    """One lookup with a lease, and the lease given back; milliseconds of the lookup."""
    connection = engine.connection
    context = common_pb2.ReqContext(request_id="small")
    began = time.perf_counter()
    call = connection.start_lookup([QueryDraft(context, BlockRun(0, 0, hashes), lease_all=False)])
    connection.gather([call], 5.0)
    millis = (time.perf_counter() - began) * 1e3
    answers = connection.take_answers(call)
    assert answers, "the lookup was lost"
    if answers[0].lease_id:
        connection.send_step(StepDraft(released_leases=[answers[0].lease_id]))
    return millis


def spell(engine: BenchEngine, hashes: list[bytes], calls: int) -> list[float]:
    """Milliseconds of `calls` lookups, one each 2 ms."""
    millis = []
    for _ in range(calls):
        millis.append(ask(engine, hashes))
        time.sleep(0.002)
    return millis


def be_the_neighbour(socket: str) -> None:
    """Another process: lookups of 2048 keys and full-rate stores while told 'go', until 'end'."""
    engine = BenchEngine(socket, "neighbour", BIG_KEYS, BLOCK)
    prefix, looked_up, stored = 10, 0, 0
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        until = time.monotonic() + float(line)
        while time.monotonic() < until:
            prefix += 1
            hashes = keys(prefix, BIG_KEYS)
            engine.run("store", hashes, list(range(BIG_KEYS)), check=False)
            stored += BIG_KEYS
            for _ in range(4):
                ask(engine, hashes)
                looked_up += BIG_KEYS
        print(json.dumps({"keys_looked_up": looked_up, "blocks_stored": stored}), flush=True)
    engine.close()


def measure(socket: str, other: str, rounds: int, calls: int) -> dict[str, Any]:
    """Rounds of spells: alone, beside the neighbour, and beside it at another daemon."""
    engine, elsewhere = (BenchEngine(each, "small", 64, BLOCK) for each in (socket, other))
    hashes = keys(1, SMALL_KEYS)
    for each in (engine, elsewhere):
        each.run("store", hashes, list(range(SMALL_KEYS)))
    neighbour = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.neighbour", "--as-neighbour", socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert neighbour.stdin is not None
    assert neighbour.stdout is not None
    assert neighbour.stdout.readline().strip() == "ready"
    spells: list[list[list[float]]] = [[], [], []]
    did = ""
    for _ in range(rounds):
        spells[0].append(spell(engine, hashes, calls))
        for place, asked in ((1, engine), (2, elsewhere)):
            neighbour.stdin.write(f"{calls * 0.004}\n")
            neighbour.stdin.flush()
            time.sleep(0.05)
            spells[place].append(spell(asked, hashes, calls))
            did = neighbour.stdout.readline()
    neighbour.stdin.write("end\n")
    neighbour.stdin.close()
    neighbour.wait(30)
    engine.close()
    elsewhere.close()
    p99 = [[report.percentile(s, 99) for s in some] for some in spells]
    p50 = [[report.percentile(s, 50) for s in some] for some in spells]
    everything = [[ms for s in some for ms in s] for some in spells]
    return {
        "calls_a_spell": calls,
        "alone_p50_ms": report.Spread.of(p50[0]),
        "alone_p99_ms": report.Spread.of(p99[0]),
        "beside_p50_ms": report.Spread.of(p50[1]),
        "beside_p99_ms": report.Spread.of(p99[1]),
        "elsewhere_p50_ms": report.Spread.of(p50[2]),
        "elsewhere_p99_ms": report.Spread.of(p99[2]),
        "ratio_of_p99": report.ratios(p99[1], p99[0]),
        "elsewhere_ratio_of_p99": report.ratios(p99[2], p99[0]),
        "pooled_ratio_of_p99": report.percentile(everything[1], 99)
        / report.percentile(everything[0], 99),
        "bar": BAR,
        "neighbour": json.loads(did),
    }


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description="Small calls beside a big neighbour.")
    parser.add_argument("--quick", action="store_true", help="3 rounds: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/neighbour.json)")
    parser.add_argument("--as-neighbour", metavar="SOCKET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_neighbour:
        be_the_neighbour(options.as_neighbour)
        return
    rounds, calls = (3, 100) if options.quick else (15, 500)
    with contextlib.ExitStack() as stack:
        one, other = (
            stack.enter_context(daemon(256 * MIB, extent_bytes=16 * MIB, **{"lease-share": 0.9}))
            for _ in range(2)
        )
        results = measure(one.socket, other.socket, rounds, calls)
    print(report.table(["figure", "value"], [[k.replace("_", " "), v] for k, v in results.items()]))
    report.write("neighbour", results, options.output)


if __name__ == "__main__":
    main()
