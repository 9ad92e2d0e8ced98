"""Replay traces for long and see whether anything grows: `make soak MINUTES=60`.

Two engines replay traces with real bytes, each of which is checked; a third does, too, and is
killed every so often. Every few seconds the daemon's memory, descriptors, processes and files
and the engines' latencies are read. In the end each series' slope is printed with whether it is
to be told from zero (Mann-Kendall, 1 %), and all are drawn. Exit status 1: a wrong byte, a failed
load, or a series of the daemon's that rises.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks import report
from benchmarks.footprint import anonymous_mib
from benchmarks.rig import MIB, daemon
from benchmarks.soak.trend import LEAST_WINDOWS, by_windows, trend
from tests.daemon_process import DaemonProcess

POOL_MIB = 256
EXTENT_MIB = 1
BLOCK_BYTES = 16384
SAMPLE_SECONDS = 5.0
WARM_SHARE = 0.25  # of the time, not looked at: memory is still being taken for the first time
WINDOWS = 15
PROGRESS_SECONDS = 60.0
RESULTS = Path(__file__).parent.parent / "results"

GROWS = ("control_mib", "control_descriptors", "processes", "movers_mib", "files")
LATENCIES = ("lookup_p50_ms", "lookup_p99_ms", "load_p50_ms", "load_p99_ms")


@dataclass
class Series:
    """What was read, and when."""

    seconds: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.seconds.append(at)
        self.values.append(value)


class Engine:
    """An engine's process, begun anew when it was killed."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self.totals: dict[str, int] = defaultdict(int)
        self._latencies: dict[str, list[float]] = defaultdict(list)
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak.engine", json.dumps(self._told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    def _listen(self, lines: IO[bytes]) -> None:
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:  # the last one of a killed engine
                return
            with self._lock:
                for name, value in said.items():
                    if isinstance(value, list):
                        self._latencies[name] += value
                    else:
                        self.totals[name] += value

    def take_latencies(self) -> dict[str, list[float]]:
        """Those since the last call."""
        with self._lock:
            taken, self._latencies = self._latencies, defaultdict(list)
        return taken

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()


def main() -> int:
    """Run, print, draw, and write the JSON."""
    arguments = _arguments()
    names = [path.name if path else "made up" for path in arguments.traces]
    series: dict[str, Series] = defaultdict(Series)
    with daemon(POOL_MIB * MIB, EXTENT_MIB * MIB) as running, _engines(running, arguments) as all_:
        print(f"soak: {arguments.minutes:g} minutes, traces: {', '.join(names)}", flush=True)
        _watch(running, all_, arguments, series)
        totals = {name: sum(e.totals[name] for e in all_) for name in all_[0].totals}
    rows = [_row(name, series[name]) for name in (*GROWS, *LATENCIES)]
    _print(rows, totals)
    picture = (arguments.output or RESULTS / "soak.json").with_suffix(".png")
    print(f"drawn to {picture}" if plot(series, picture) else "not drawn: matplotlib is missing")
    results = {
        "minutes": arguments.minutes,
        "traces": names,
        "totals": totals,
        "trends": rows,
        "series": {name: [each.seconds, each.values] for name, each in series.items()},
    }
    report.write("soak", results, arguments.output)
    grown = [row["name"] for row in rows if row["name"] in GROWS and row["rises"]]
    return 1 if totals["wrong"] or totals["failed"] or grown else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--trace",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a trace to replay; twice: one for each engine (default: those beside this checkout,"
        " else made-up conversations)",
    )
    parser.add_argument("--requests-per-second", type=float, default=20.0, metavar="N")
    parser.add_argument(
        "--kill-seconds", type=float, default=60.0, metavar="S", help="between kills of the third"
    )
    parser.add_argument("--output", type=Path, help="JSON file (default: benchmarks/results)")
    arguments = parser.parse_args()
    if arguments.minutes * 60 * (1 - WARM_SHARE) < 2 * WINDOWS * SAMPLE_SECONDS:
        parser.error(f"--minutes {arguments.minutes:g} is too short for {WINDOWS} windows; try 4")
    shared = Path(__file__).parents[3] / "shared" / "traces"
    found = arguments.trace or [
        path
        for path in (shared / "conversation.jsonl.gz", shared / "agents_dev.jsonl.gz")
        if path.exists()
    ]
    if not found:
        print(f"soak: no traces in {shared}: conversations are made up", flush=True)
    arguments.traces = [*found, None, None][:2]
    return arguments


@contextlib.contextmanager
def _engines(running: DaemonProcess, arguments: argparse.Namespace) -> Iterator[list[Engine]]:
    """Two that live on, and one that is killed."""
    told = [
        {
            "socket": running.socket,
            "name": name,
            "trace": str(trace) if trace else "",
            "seed": seed,
            "block_bytes": BLOCK_BYTES,
            "model": model,
            "requests_per_second": arguments.requests_per_second,
        }
        for seed, (name, trace, model) in enumerate(
            (
                ("first", arguments.traces[0], "one"),
                ("second", arguments.traces[1], "other"),
                ("mortal", arguments.traces[0], "one"),
            )
        )
    ]
    engines: list[Engine] = []
    try:
        engines += [Engine(each) for each in told]
        yield engines
    finally:
        for engine in engines:
            engine.kill()


def _watch(
    running: DaemonProcess,
    engines: Sequence[Engine],
    arguments: argparse.Namespace,
    series: dict[str, Series],
) -> None:
    began = time.monotonic()
    ends = began + 60 * arguments.minutes
    told = killed = began
    while (now := time.monotonic()) < ends:
        for name, value in _of_daemon(running).items():
            series[name].add(now - began, value)
        for name, value in _of_engines(engines).items():
            series[name].add(now - began, value)
        for engine in engines:
            assert engine.process.poll() is None, "an engine ended by itself; its error is above"
        if now - killed >= arguments.kill_seconds:
            killed = now
            engines[-1].restart()
        if now - told >= PROGRESS_SECONDS:
            told = now
            requests = sum(engine.totals["requests"] for engine in engines)
            print(
                f"soak: {(now - began) / 60:.0f} of {arguments.minutes:g} minutes, {requests}"
                f" requests, {sum(e.totals['wrong'] for e in engines)} wrong blocks,"
                f" control has {series['control_mib'].values[-1]:.1f} MiB",
                flush=True,
            )
        time.sleep(SAMPLE_SECONDS)


def _of_daemon(running: DaemonProcess) -> dict[str, float]:
    """Memory, descriptors and processes of control and its movers; files of pool and socket."""
    read: dict[str, float] = {
        "control_mib": anonymous_mib(running.pid),
        "control_descriptors": count_descriptors(running.pid),
        "files": sum(len(files) for _, _, files in os.walk(running.pool)),
    }
    movers = running.movers()
    read["processes"] = 1 + len(movers)
    read["movers_mib"] = 0.0
    for pid in movers:
        with contextlib.suppress(OSError):  # it has just ended
            read["movers_mib"] += anonymous_mib(pid)
    return read


def count_descriptors(pid: int) -> int:
    """Of a process, now."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _of_engines(engines: Sequence[Engine]) -> dict[str, float]:
    """Latencies of the two that live on, in milliseconds."""
    taken: dict[str, list[float]] = defaultdict(list)
    for engine in engines[:2]:
        for name, values in engine.take_latencies().items():
            taken[name] += values
    engines[-1].take_latencies()
    return {
        f"{kind[:-1]}_p{percent}_ms": 1e3 * report.percentile(values, percent)
        for kind, values in taken.items()
        if values
        for percent in (50, 99)
    }


def _row(name: str, series: Series) -> dict[str, Any]:
    last = series.seconds[-1]
    warm = [
        (at, value)
        for at, value in zip(series.seconds, series.values, strict=True)
        if at >= WARM_SHARE * last
    ]
    seconds, values = zip(*warm, strict=True)
    hours, medians = by_windows(seconds, values, WINDOWS)
    assert len(medians) >= LEAST_WINDOWS, f"{name} has {len(medians)} windows"
    found = trend(hours, medians)
    return {
        "name": name,
        "median": found.median,
        "slope_per_hour": found.slope_per_hour,
        "z": found.z,
        "rises": found.rises,
    }


def _print(rows: Sequence[dict[str, Any]], totals: dict[str, int]) -> None:
    print(
        report.table(
            ("series", "median", "slope an hour", "z", "rises"),
            [
                (
                    row["name"],
                    f"{row['median']:.4g}",
                    f"{row['slope_per_hour']:+.3g}",
                    f"{row['z']:+.2f}",
                    "yes" if row["rises"] else "no",
                )
                for row in rows
            ],
        )
    )
    print(", ".join(f"{value} {name}" for name, value in totals.items()))


def plot(series: dict[str, Series], picture: Path) -> bool:
    """A panel a series; False when matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    names = [*GROWS, *LATENCIES]
    figure, panels = plt.subplots(3, 3, figsize=(12, 8), sharex=True, layout="constrained")
    for name, panel in zip(names, panels.flat, strict=True):
        each = series[name]
        panel.plot([s / 60 for s in each.seconds], each.values, linewidth=1)
        panel.axvspan(0, WARM_SHARE * each.seconds[-1] / 60, alpha=0.1)
        panel.set_title(name.replace("_", " "), fontsize=10)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("minutes (shaded: warming up)")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    return True


if __name__ == "__main__":
    sys.exit(main())
