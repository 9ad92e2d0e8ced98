"""One hostile client at every bound at once: `python -m benchmarks.hostile_client`.

Another engine asks for 16 keys, again and again; alone, and while one process holds as many
connections, sessions and event watchers as it is let, reads nothing, leaves HTTP requests half
said, sends messages over the limit, messages that stop half-way, and the largest steps that are
legal. In interleaved pairs, since the machine is noisy; the daemon's memory is read all along.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks import report
from benchmarks.neighbour import SMALL_KEYS, spell
from benchmarks.rig import MIB, BenchEngine, daemon, keys
from kvd_client.companion import CompanionRefused
from kvd_proto.layout import MAX_MESSAGE_BYTES
from kvd_proto.v1 import common_pb2, engine_pb2, events_pb2
from tests.control.daemon_rig import Caller, RawScheduler, group, identity, namespace
from tests.control.running_daemon import free_port
from tests.faults.stand import resident_kib

BLOCK = 64 * 1024
BAR_RATIO = 2.0
BAR_MIB = 256
SESSIONS = 28  # of the 32 that a user may have: the honest engine is the same user here
WATCHERS = 60
CONNECTIONS = 120
HALF_SAID = 60
HASH = bytes(32)


def largest_steps() -> list[engine_pb2.Step]:
    """Legal ones that take the longest to read, to check and to work off."""
    context = common_pb2.ReqContext(request_id="r")
    run = common_pb2.KeyRun(hashes=np.random.default_rng(5).bytes(32))
    values = context.__class__(request_id="r")
    while values.hints.ByteSize() < 16_000:
        values.hints.fields[format(len(values.hints.fields), "x")].SetInParent()
    hashes = np.random.default_rng(6).bytes(32 * 4096)
    transfer = common_pb2.TransferRun(hashes=hashes, engine_blocks=bytes(4 * 4096))
    store = engine_pb2.StoreJob(job_id=1, context=context, runs=[transfer])
    names = [f"{n:08x}" for n in range(16384)]
    return [
        engine_pb2.Step(touches=[engine_pb2.Touch(context=context, runs=[run] * 16)] * 1024),
        engine_pb2.Step(touches=[engine_pb2.Touch(context=values, runs=[run])] * 300),
        engine_pb2.Step(stores=[store] * 4),
        engine_pb2.Step(completed_loads=range(1, 16385), released_leases=range(1, 16385)),
        engine_pb2.Step(preempted_request_ids=names, finished_request_ids=names),
    ]


class Hostile:
    """Everything at once, on threads; `attack` is set while it may."""

    def __init__(self, path: str, port: int) -> None:
        self.path, self.port = path, port
        self.attack = threading.Event()
        self.done: dict[str, int] = {}
        self._held: list[Any] = []

    def start(self) -> None:
        """Take what can be taken, then begin the threads."""
        for number in range(SESSIONS):
            self._held.append(
                RawScheduler(
                    self.path,
                    identity=identity(f"hostile{number}"),
                    namespace=namespace(model=f"h{number}", groups=[group()] * 8),
                )
            )
        steps = largest_steps()
        for session in self._held:
            assert session.opened.session_id
            self._thread("rounds of steps", partial(self._send_steps, session, steps))
        for _ in range(4):
            self._thread("over the limit", self._send_too_much)
        for _ in range(8):
            self._thread("half a message", self._stop_half_way)
        self._thread("connections", self._take_connections)
        self._thread("half a request", self._say_half)

    def _thread(self, name: str, work: Callable[[], int]) -> None:
        def run() -> None:
            while True:
                self.attack.wait()
                with contextlib.suppress(grpc.RpcError, OSError, CompanionRefused):
                    self.done[name] = self.done.get(name, 0) + work()

        threading.Thread(target=run, daemon=True).start()

    def _send_steps(self, session: RawScheduler, steps: list[engine_pb2.Step]) -> int:
        for template in steps:
            session.sequence += 1
            step = engine_pb2.Step()
            step.CopyFrom(template)
            step.sequence = session.sequence
            for store in step.stores:
                session.highest_job += 1
                store.job_id = session.highest_job
            session.send(step=step)
            while (answer := session.responses.get(timeout=60)) is not None:
                if isinstance(answer, grpc.RpcError):
                    raise answer
                if answer.WhichOneof("kind") in ("step", "refused"):
                    break
            self.done["steps"] = self.done.get("steps", 0) + 1
            if not self.attack.is_set():
                break
        return 0

    def _send_too_much(self) -> int:
        with contextlib.closing(Caller(self.path)) as caller:
            call: Any = caller.channel.unary_unary("/kvd.v1.OperatorService/Status")
            with contextlib.suppress(grpc.RpcError):
                call(bytes(64 * MIB), metadata=caller.metadata, timeout=20)
        return 1

    def _stop_half_way(self) -> int:
        """A message of the largest size, of which the last bytes never come."""
        time.sleep(0.2)
        with contextlib.closing(Caller(self.path)) as caller:
            call: Any = caller.channel.unary_unary("/kvd.v1.EngineService/Lookup")
            waiting = call.future(
                b"\x12" * MAX_MESSAGE_BYTES, metadata=caller.metadata, timeout=0.01
            )
            with contextlib.suppress(grpc.RpcError):
                waiting.result()
        return 1

    def _take_connections(self) -> int:
        callers = []
        with contextlib.ExitStack() as stack:
            request = events_pb2.WatchEventsRequest()
            for number in range(CONNECTIONS):
                try:
                    caller = Caller(self.path)
                except (OSError, CompanionRefused):
                    break
                stack.callback(caller.close)
                if number < WATCHERS:
                    callers.append(caller.events.WatchEvents(request, metadata=caller.metadata))
            for _ in range(20):
                if not self.attack.is_set():
                    break
                time.sleep(0.1)
        return CONNECTIONS

    def _say_half(self) -> int:
        with contextlib.ExitStack() as stack:
            for _ in range(HALF_SAID):
                each = socket.create_connection(("127.0.0.1", self.port), 5)
                stack.callback(each.close)
                each.sendall(b"GET /metrics HTTP/1.1\r\n")
            time.sleep(0.5)
        return HALF_SAID


def be_hostile(path: str, port: int) -> None:
    """Another process: attacks between 'go' and 'stop', until its input ends."""
    hostile = Hostile(path, port)
    hostile.start()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "go":
            hostile.attack.set()
        else:
            hostile.attack.clear()
        print(json.dumps(hostile.done), flush=True)


@contextlib.contextmanager
def hostile_process(path: str, port: int) -> Iterator[Callable[[str], str]]:
    """Starts it; gives what tells it a word and returns what it has done so far."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.hostile_client", "--as-hostile", path, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"

    def tell(word: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        yield tell
    finally:
        process.kill()
        process.wait()


class MemoryWatch:
    """The most of its own memory that the daemon had."""

    def __init__(self, pid: int) -> None:
        self.pid, self.most_kib = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            self.most_kib = max(self.most_kib, resident_kib(self.pid))

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most_kib


def measure(path: str, port: int, pid: int, pairs: int, calls: int) -> dict[str, Any]:
    """Pairs of spells, without and with the hostile client, and the daemon's memory."""
    engine = BenchEngine(path, "small", 64, BLOCK)
    hashes = keys(1, SMALL_KEYS)
    engine.run("store", hashes, list(range(SMALL_KEYS)))
    idle_kib = resident_kib(pid)
    watch = MemoryWatch(pid)
    alone, beside = [], []
    with hostile_process(path, port) as tell:
        for _ in range(pairs):
            alone.append(spell(engine, hashes, calls))
            tell("go")
            time.sleep(0.2)
            beside.append(spell(engine, hashes, calls))
            did = tell("stop")
            time.sleep(1.5)  # what it began is worked off
    time.sleep(5.0)
    most_kib, left_kib = watch.end(), resident_kib(pid)
    engine.close()
    p99 = [[report.percentile(s, 99) for s in spells] for spells in (alone, beside)]
    p50 = [[report.percentile(s, 50) for s in spells] for spells in (alone, beside)]
    return {
        "calls_a_spell": calls,
        "alone_p50_ms": report.Spread.of(p50[0]),
        "alone_p99_ms": report.Spread.of(p99[0]),
        "beside_p50_ms": report.Spread.of(p50[1]),
        "beside_p99_ms": report.Spread.of(p99[1]),
        "ratio_of_p99": report.ratios(p99[1], p99[0]),
        "bar_of_the_ratio": BAR_RATIO,
        "idle_mib": idle_kib / 1024,
        "most_mib_above_idle": (most_kib - idle_kib) / 1024,
        "left_mib_above_idle": (left_kib - idle_kib) / 1024,
        "bar_mib": BAR_MIB,
        "hostile": did,
    }


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description="One hostile client at every bound at once.")
    parser.add_argument("--quick", action="store_true", help="3 pairs: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--as-hostile", nargs=2, metavar=("SOCKET", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_hostile:
        be_hostile(options.as_hostile[0], int(options.as_hostile[1]))
        return
    pairs, calls = (3, 100) if options.quick else (10, 300)
    port = free_port()
    with daemon(1024 * MIB, extent_bytes=4 * MIB, **{"http-port": port}) as running:
        results = measure(running.socket, port, running.pid, pairs, calls)
    print(report.table(["figure", "value"], [[k.replace("_", " "), v] for k, v in results.items()]))
    report.write("hostile_client", results, options.output)


if __name__ == "__main__":
    main()
