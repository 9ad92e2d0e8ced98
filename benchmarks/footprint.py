"""Start-up, idle CPU and memory: `python -m benchmarks.footprint`.

Start-up is from exec to the first connection that the socket takes. Idle CPU is read from /proc
over some seconds with one engine registered and doing nothing. Memory is the proportional set
size without the mappings of the pool, of engine memory and of index pages.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.rig import MIB, BenchEngine, daemon

BARS = {"control": 150.0, "mover": 100.0}
BAR_IDLE_PERCENT = 1.0
_SHARED = re.compile(r"kvd-bench|memfd:")  # the pool's files, engine memory, pages, boards, rings


def private_mib(pid: int) -> float:
    """PSS without the shared mappings of pool and engine, MiB."""
    total, counted = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            counted = not _SHARED.search(line)
        elif counted and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total / 1024


def anonymous_mib(pid: int) -> float:
    """What the process alone has written, MiB: no file's pages, whoever else maps them.

    The proportional set size moves with others: a process that shares Python's libraries ends, and
    all that are left seem to have grown.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    if found is None:
        raise ProcessLookupError(f"{pid} has ended")
    return int(found[1]) / 1024


def cpu_seconds(pid: int) -> float:
    """User and system time of the process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(seconds: float) -> list[dict[str, Any]]:
    """Control and one mover with nothing to do."""
    rows = []
    with daemon(1024 * MIB) as running:
        engine = BenchEngine(running.socket, "idle", 64)
        engine.run("store", [b"k" * 32], [0])
        time.sleep(1.0)
        processes = {"control": running.pid, "mover": running.movers()[0]}
        before = {name: cpu_seconds(pid) for name, pid in processes.items()}
        time.sleep(seconds)
        for name, pid in processes.items():
            rows.append(
                {
                    "process": name,
                    "idle_cpu_percent": 100 * (cpu_seconds(pid) - before[name]) / seconds,
                    "bar_percent": BAR_IDLE_PERCENT,
                    "pss_without_pool_mib": private_mib(pid),
                    "bar_mib": BARS[name],
                }
            )
        engine.close()
    return rows


def start_up(rounds: int) -> list[dict[str, Any]]:
    """Seconds from exec until the socket answers, cold and warm, and of the imports alone."""
    rows: list[dict[str, Any]] = []
    for pool_mib in (64, 1024, 4096):
        cold, warm = [], []
        for _ in range(rounds):
            began = time.perf_counter()
            with daemon(pool_mib * MIB) as running:
                cold.append(time.perf_counter() - began)
                running.end()
                began = time.perf_counter()
                running.start()
                warm.append(time.perf_counter() - began)
        rows.append(
            {
                "pool_mib": pool_mib,
                "cold_s": report.Spread.of(cold),
                "warm_s": report.Spread.of(warm),
            }
        )
    imports = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", "import kvd.cli.serve, kvd.control.server"], check=True
        )
        imports.append(time.perf_counter() - began)
    rows.append({"pool_mib": "imports", "cold_s": report.Spread.of(imports), "warm_s": "-"})
    return rows


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description="Start-up, idle CPU and memory.")
    parser.add_argument("--quick", action="store_true", help="short spells: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/footprint.json)")
    options = parser.parse_args()
    results = {
        "idle": idle(3.0 if options.quick else 30.0),
        "start_up": start_up(1 if options.quick else 5),
    }
    for title, rows in results.items():
        print(f"\n{title.replace('_', ' ')}")
        print(report.table(list(rows[0]), [list(row.values()) for row in rows]))
    report.write("footprint", results, options.output)


if __name__ == "__main__":
    main()
