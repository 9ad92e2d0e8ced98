"""One user's flood of calls, beside another's new ones: `python -m benchmarks.call_flood`.

A client of one user makes a call each 5 ms; without anybody else, and while a process of another
user keeps so many connections full of calls of the same method: of each that is answered it makes
another. gRPC hands the calls of a method over in the order in which they came, so what is to be
seen is whether the one call waits for all of the others'. Pairs are interleaved, since the machine
is noisy. The flood's process runs at SCHED_IDLE: what is measured is the daemon, not who gets the
processors.
"""

from __future__ import annotations

import argparse
import math
import os
import select
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.hostile_client import HOSTILE, VICTIM, Spells, another, as_one_of, become, serve
from benchmarks.rig import MIB, daemon
from kvd.control.access.gate import NEW_A_SECOND
from kvd.control.server import MAX_STREAMS
from kvd_client.companion import CompanionSocket
from kvd_proto.v1 import companion_pb2, operator_pb2
from tests.control.daemon_rig import Caller
from tests.control.raw_http2 import RawHttp2, message
from tests.daemon_process import DaemonProcess
from tests.faults.stand import resident_kib

MODULE = "benchmarks.call_flood"
METHOD = "/kvd.v1.OperatorService/ListNamespaces"
CONNECTIONS = (20, 200)
FIRST_SECONDS = 3.0  # until all that came first is in its line
BAR = 3.0


class Flood:
    """Connections that a thread keeps full of calls."""

    def __init__(self, path: str, count: int) -> None:
        self.answered = 0
        self._companion = CompanionSocket(path, 5.0)  # the token lives as long
        self._token = self._companion.hello(companion_pb2.PEER_ROLE_TOOL, "flood").token
        self._connections = [RawHttp2(path) for _ in range(count)]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        by_fd = {each.fileno(): each for each in self._connections}
        for fd, each in by_fd.items():
            poll.register(fd, select.POLLIN)
            self._call(each, MAX_STREAMS)
        while not self._ended.is_set():
            for fd, _ in poll.poll(20):
                each = by_fd[fd]
                each.read(0.0)
                answered, each.reset = len(each.reset), set()
                self.answered += answered
                self._call(each, answered)

    def _call(self, connection: RawHttp2, count: int) -> None:
        for _ in range(count):
            connection.send(connection.begin(METHOD, self._token), message(b""))

    def end(self) -> None:
        """Close all."""
        self._ended.set()
        self._thread.join()
        for each in self._connections:
            each.close()
        self._companion.close()


def be_the_flood(path: str, count: int) -> None:
    """A flood between 'go' and 'stop', which says how many calls a second were answered."""
    become(HOSTILE)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    flood: Flood | None = None
    began = -math.inf

    def work(word: str) -> float:
        nonlocal flood, began
        if word == "go":
            # Who connects more often than this is kept out, and this is to measure calls alone.
            time.sleep(max(0.0, began + count / NEW_A_SECOND - time.monotonic()))
            flood, began = Flood(path, count), time.monotonic()
            return 0.0
        assert flood is not None
        a_second = flood.answered / (time.monotonic() - began)
        flood.end()
        return a_second

    serve(work)


def be_the_victim(path: str, calls: int) -> None:
    """Milliseconds of so many calls at each line."""
    become(VICTIM)
    caller = Caller(path)

    def ask() -> float:
        began = time.perf_counter()
        caller.call(caller.operator.ListNamespaces, operator_pb2.ListNamespacesRequest())
        millis = (time.perf_counter() - began) * 1e3
        time.sleep(0.005)
        return millis

    ask()
    serve(lambda word: [ask() for _ in range(1 if word == "first" else calls)])


def measure(running: DaemonProcess, connections: int, pairs: int, calls: int) -> dict[str, Any]:
    """Pairs of spells of the victim's, without and with the flood."""
    path = running.socket
    most, rates, first = [], [], []
    with (
        another("--as-victim", path, calls, module=MODULE) as victim,
        another("--as-flood", path, connections, module=MODULE) as flood,
    ):
        alone, beside = Spells(victim, running.pid), Spells(victim, running.pid)
        victim("warm up")
        idle = resident_kib(running.pid) / 1024
        for _ in range(pairs):
            alone.add()
            flood("go")
            first += victim("first")
            time.sleep(FIRST_SECONDS)
            beside.add()
            most.append(resident_kib(running.pid) / 1024 - idle)
            rates.append(flood("stop"))
            time.sleep(1.0)
    return {
        "connections": connections,
        "calls_under_way": connections * MAX_STREAMS,
        "flood_calls_a_second": report.Spread.of(rates),
        **alone.figures("alone"),
        **beside.figures("beside"),
        "as_it_begins_ms": report.Spread.of(first),
        "ratio_of_p99": report.ratios(beside.p99, alone.p99),
        "bar_of_the_ratio": BAR,
        "mib_above_idle": report.Spread.of(most),
    }


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description="One user's flood of calls beside another's.")
    parser.add_argument("--quick", action="store_true", help="2 pairs: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/call_flood.json)")
    options = as_one_of(parser, flood=be_the_flood, victim=be_the_victim)
    if options is None:
        return
    pairs, calls = (2, 100) if options.quick else (10, 400)
    results = []
    flags: dict[str, object] = {"socket-mode": "0666"}
    with daemon(64 * MIB, extent_bytes=4 * MIB, **flags) as running:
        Path(running.socket).parent.chmod(0o755)
        for connections in CONNECTIONS:
            results.append(measure(running, connections, pairs, calls))
            print(f"beside {connections} connections: {results[-1]['ratio_of_p99']}", flush=True)
    rows = [[name.replace("_", " "), *(each[name] for each in results)] for name in results[0]]
    print(report.table(["figure", *("value" for _ in results)], rows))
    report.write("call_flood", {"floods": results}, options.output)


if __name__ == "__main__":
    main()
