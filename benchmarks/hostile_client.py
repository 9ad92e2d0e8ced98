"""One hostile client at every bound at once: `python -m benchmarks.hostile_client`.

An engine of one user asks for 16 keys, again and again; without anybody else, and while one
process of another user takes as many connections, sessions, movers, event watchers, namespaces
and scopes as it is let, reads nothing, leaves messages and HTTP requests half said, and floods the
daemon with the largest legal steps, messages over the limit and small calls. It takes everything
anew in each pair and lets it go at its end. Pairs are interleaved, since the machine is noisy. The
same engine asks another daemon, too, which has nothing else to do.

What is measured is the daemon, not who gets the processors: the hostile process runs at SCHED_IDLE,
so that it has only what the others leave. Its movers and the daemon's own threads do not. The
daemon's share of the processors, and its own memory, are read all along.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.hostility import Hostility
from benchmarks.neighbour import SMALL_KEYS, ask
from benchmarks.rig import MIB, BenchEngine, daemon, keys
from tests.daemon_process import DaemonProcess
from tests.faults.stand import resident_kib
from tests.ports import free_port

MODULE = "benchmarks.hostile_client"
BLOCK = 64 * 1024
BAR_RATIO = 2.0
BAR_MIB = 256
VICTIM, HOSTILE = 12345, 12346  # users
TAKING_SECONDS = 3.0  # until most is taken
RELEASE_SECONDS = 4.0  # what it left is worked off
GIVE_UP_SECONDS = 60.0
Tell = Callable[[str], Any]


def serve(work: Callable[[str], Any]) -> None:
    """Another process: does what each line of its input says, and answers with JSON."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(work(line.strip())), flush=True)


def become(user: int) -> None:
    """Run as this user. Python may lie where only root reads: what comes late is imported first."""
    importlib.import_module("encodings.idna")
    importlib.import_module("numpy.random")
    os.setgid(user)
    os.setuid(user)


def be_hostile(path: str, port: int) -> None:
    """Attacks between 'go' and 'stop'."""
    become(HOSTILE)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    hostility = Hostility(path, port)

    def work(word: str) -> dict[str, int]:
        if word == "go":
            hostility.begin()
        elif word == "stop":
            hostility.end()
        return dict(sorted(hostility.done.items()))

    serve(work)


def be_the_victim(path: str, calls: int) -> None:
    """Milliseconds of so many lookups at each line."""
    hashes = keys(1, SMALL_KEYS)
    become(VICTIM)
    engine = BenchEngine(path, "small", 64, BLOCK)
    engine.run("store", hashes, list(range(SMALL_KEYS)))
    serve(lambda _word: [patient(engine, hashes) for _ in range(calls)])


def patient(engine: BenchEngine, hashes: list[bytes]) -> float:
    """Milliseconds until a lookup was answered, however often the client gave one up meanwhile."""
    began = time.perf_counter()
    while time.perf_counter() - began < GIVE_UP_SECONDS:
        with contextlib.suppress(AssertionError):
            ask(engine, hashes)
            break
        time.sleep(0.01)
    millis = (time.perf_counter() - began) * 1e3
    time.sleep(0.002)
    return millis


@contextlib.contextmanager
def another(*arguments: object, module: str = MODULE) -> Iterator[Tell]:
    """A benchmark again as another process; what it gives tells it a word for its answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    say, answers = process.stdin, process.stdout

    def answer() -> Any:
        line = answers.readline()
        assert line, f"{arguments[0]} ended"
        return json.loads(line)

    def tell(word: str) -> Any:
        say.write(f"{word}\n")
        say.flush()
        return answer()

    try:
        assert answer() == "ready"
        yield tell
    finally:
        process.kill()
        process.wait()


class Watch:
    """The most of its own memory that the daemon had since it was last asked."""

    def __init__(self, pid: int) -> None:
        self.pid, self._most_kib = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self._most_kib = max(self._most_kib, resident_kib(self.pid))

    def most_mib(self) -> float:
        most, self._most_kib = self._most_kib, 0
        return most / 1024

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def processor_seconds(pid: int) -> float:
    """Of the control process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Spells:
    """Of the victim: lookups, and what the daemon took of the processors meanwhile."""

    def __init__(self, tell: Tell, pid: int) -> None:
        self._tell, self._pid = tell, pid
        self.p50: list[float] = []
        self.p99: list[float] = []
        self.most: list[float] = []
        self.processors: list[float] = []

    def add(self) -> None:
        began, used = time.perf_counter(), processor_seconds(self._pid)
        millis = self._tell("ask")
        seconds = time.perf_counter() - began
        self.processors.append((processor_seconds(self._pid) - used) / seconds)
        self.p50.append(report.percentile(millis, 50))
        self.p99.append(report.percentile(millis, 99))
        self.most.append(max(millis))

    def figures(self, name: str) -> dict[str, report.Spread]:
        return {
            f"{name}_p50_ms": report.Spread.of(self.p50),
            f"{name}_p99_ms": report.Spread.of(self.p99),
            f"{name}_longest_ms": report.Spread.of(self.most),
            f"{name}_daemon_processors": report.Spread.of(self.processors),
        }


def measure(
    running: DaemonProcess, port: int, other: DaemonProcess, pairs: int, calls: int
) -> dict[str, Any]:
    """Pairs of spells, without and with the hostile client, and the daemon's memory.

    In each pair one more at another daemon, which has nothing else to do: what comes of the
    machine's processors being busy.
    """
    most, left = [], []
    did: dict[str, int] = {}
    with (
        another("--as-victim", running.socket, calls) as victim,
        another("--as-victim", other.socket, calls) as bystander,
        another("--as-hostile", running.socket, port) as hostile,
    ):
        alone, beside = Spells(victim, running.pid), Spells(victim, running.pid)
        elsewhere = Spells(bystander, other.pid)
        for each in victim, bystander:
            each("warm up")
        idle = resident_kib(running.pid) / 1024
        watch = Watch(running.pid)
        for _ in range(pairs):
            alone.add()
            watch.most_mib()
            hostile("go")
            time.sleep(TAKING_SECONDS)
            beside.add()
            elsewhere.add()
            did = hostile("stop")
            most.append(watch.most_mib() - idle)
            time.sleep(RELEASE_SECONDS)
            left.append(resident_kib(running.pid) / 1024 - idle)
        time.sleep(5.0)
        watch.end()
    return {
        "calls_a_spell": calls,
        **alone.figures("alone"),
        **beside.figures("beside"),
        **elsewhere.figures("elsewhere"),
        "ratio_of_p99": report.ratios(beside.p99, alone.p99),
        "elsewhere_ratio_of_p99": report.ratios(elsewhere.p99, alone.p99),
        "bar_of_the_ratio": BAR_RATIO,
        "idle_mib": idle,
        "most_mib_above_idle": report.Spread.of(most),
        "left_mib_above_idle": report.Spread.of(left),
        "in_the_end_mib_above_idle": resident_kib(running.pid) / 1024 - idle,
        "bar_mib": BAR_MIB,
        "hostile": did,
    }


def as_one_of(
    parser: argparse.ArgumentParser, **roles: Callable[[str, int], None]
) -> argparse.Namespace | None:
    """The options; None where `--as-ROLE SOCKET NUMBER` told this process to be one, and it was.

    Else it must be root, which alone can be two other users.
    """
    for role in roles:
        parser.add_argument(f"--as-{role}", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for role, play in roles.items():
        if given := getattr(options, f"as_{role}"):
            path, number = given
            play(path, int(number))
            return None
    if os.getuid() != 0:
        parser.error("it needs root, to be two other users")
    return options


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description="One hostile client at every bound at once.")
    parser.add_argument("--quick", action="store_true", help="3 pairs: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = as_one_of(parser, hostile=be_hostile, victim=be_the_victim)
    if options is None:
        return
    pairs, calls = (3, 400) if options.quick else (10, 1000)
    port = free_port()
    flags: dict[str, object] = {"socket-mode": "0666"}
    with (
        daemon(1024 * MIB, extent_bytes=4 * MIB, **flags, **{"http-port": port}) as running,
        daemon(64 * MIB, extent_bytes=4 * MIB, **flags) as other,
    ):
        for each in running, other:
            Path(each.socket).parent.chmod(0o755)
        results = measure(running, port, other, pairs, calls)
    hostile = results.pop("hostile")
    print(report.table(["figure", "value"], [[k.replace("_", " "), v] for k, v in results.items()]))
    print(report.table(["the hostile client", "times"], [[k, v] for k, v in hostile.items()]))
    report.write("hostile_client", {**results, "hostile": hostile}, options.output)


if __name__ == "__main__":
    main()
