"""How soon what the dead held is free again: `python -m benchmarks.release`.

An engine of two processes, scheduler and worker. It has a session, holds a lease, and a load and a
store of its are under way in a mover that is frozen, so nothing but the end of that process ends
them: slots are reserved and blocks pinned. Then scheduler, worker or mover is killed with -9.
Counted is the time from that until `Status` shows none of it any more, asked every few
milliseconds. The session and its leases are the scheduler's, and stay where another process dies.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import report
from benchmarks.rig import MIB, POLL_SECONDS, REGISTER_SECONDS, daemon, keys
from kvd_client import EngineIdentity, SchedulerConnection, StepPlan, Worker
from kvd_client.draft import BlockRun, JobDraft, QueryDraft, StepDraft
from kvd_proto.v1 import common_pb2
from tests.client.kv_memory import HostMemory
from tests.client.small_engine import EngineSettings
from tests.control.daemon_rig import Caller
from tests.daemon_process import DaemonProcess

POOL_BYTES = 256 * MIB
EXTENT_BYTES = 4 * MIB
BLOCK_BYTES = 64 * 1024
BLOCKS = 32  # of each prompt
LEASED, PINNED, NEW = range(3)  # prompts: that with a lease, that being loaded, that being stored
BAR_SECONDS = 2.0
PATIENCE_SECONDS = 30.0
LOOK_SECONDS = 0.002
VICTIMS = ("scheduler", "worker", "mover")
KINDS = ("session", "leases", "pins", "slots", "mover")
OF_THE_SCHEDULER = ("session", "leases")


# -- the engine's two processes ------------------------------------------------------------------


def be_the_scheduler(socket: str, name: str) -> None:
    """Open a session, and do what standard input says: `fill`, then `hold`."""
    namespace = EngineSettings(model="bench-release", block_bytes=BLOCK_BYTES).namespace()
    connection = SchedulerConnection(socket, identity_of(name), namespace)
    assert connection.wait_usable(REGISTER_SECONDS), connection.problem
    print("ready", flush=True)
    prompts = [keys(int(name) * 3 + prompt, BLOCKS) for prompt in (LEASED, PINNED, NEW)]
    for line in sys.stdin:
        step = StepDraft()
        if line.strip() == "fill":
            step.stores += [job(1, prompts[LEASED], LEASED), job(2, prompts[PINNED], PINNED)]
        else:
            context = common_pb2.ReqContext(request_id="leases")
            query = QueryDraft(context, BlockRun(0, 0, prompts[LEASED]), lease_all=False)
            call = connection.start_lookup([query])
            connection.gather([call], REGISTER_SECONDS)
            answers = connection.take_answers(call)
            assert answers, "the lookup was lost"
            assert answers[0].lease_id, "no lease"
            step.loads.append(job(3, prompts[PINNED], PINNED))
            step.stores.append(job(4, prompts[NEW], NEW))
        assert connection.send_step(step)
        print("sent", flush=True)


def be_the_worker(socket: str, name: str) -> None:
    """Register memory for three prompts and be ready for the scheduler's jobs, in its order."""
    worker = Worker(socket, identity_of(name))
    HostMemory("bench-release", 3 * BLOCKS, BLOCK_BYTES, layers=1).register(worker)
    assert worker.wait_registered(REGISTER_SECONDS), worker.problem
    print("ready", flush=True)
    for line in sys.stdin:
        fills = line.strip() == "fill"
        plan = StepPlan(stores=(1, 2)) if fills else StepPlan(loads=(3,), stores=(4,))
        worker.start_step(plan)
        worker.finish_step(plan)
        left = len(plan.stores) if fills else 0
        while left:
            ended = worker.get_finished().ended
            assert all(one.done for one in ended)
            left -= len(ended)
            time.sleep(POLL_SECONDS)
        print("done", flush=True)
    worker.close()


def identity_of(name: str) -> EngineIdentity:
    """The same in both processes, since each engine is started once."""
    return EngineIdentity(f"engine {name}", name.encode().rjust(16, b"n"))


def job(number: int, hashes: list[bytes], place: int) -> JobDraft:
    """A prompt's blocks, which lie in a place of their own in the worker's memory."""
    first = place * BLOCKS
    run = BlockRun(0, 0, hashes, list(range(first, first + BLOCKS)))
    return JobDraft(number, common_pb2.ReqContext(request_id=f"r{number}"), [run])


# -- one death -----------------------------------------------------------------------------------


class Part:
    """One of the engine's processes."""

    def __init__(self, role: str, socket: str, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks.release", "--as", role]
        self.process = subprocess.Popen(
            [*command, "--socket", socket, "--name", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def engine(socket: str, name: str) -> Iterator[dict[str, Part]]:
    """Both processes, that have stored two prompts."""
    parts: dict[str, Part] = {}
    try:
        for role in ("worker", "scheduler"):
            parts[role] = Part(role, socket, name)
        for part in parts.values():
            part.expect("ready")
        for role, word in (("scheduler", "sent"), ("worker", "done")):
            parts[role].tell("fill")
            parts[role].expect(word)
        yield parts
    finally:
        for part in parts.values():
            part.end()


def held(tool: Caller, running: DaemonProcess, name: str, mover: int) -> dict[str, bool]:
    """What of this engine, the only one, there still is."""
    status = tool.status()
    sessions = [one for one in status.sessions if one.engine_id == f"engine {name}"]
    (tenant,) = status.tenants
    free = tenant.bytes_evictable + tenant.bytes_leased + tenant.bytes_reserved
    jobs = sum(one.jobs_in_flight for one in sessions)
    pool = status.pool
    return {
        "session": bool(sessions),
        "leases": tenant.bytes_leased > 0,
        "pins": jobs > 0 or tenant.bytes_used > free,
        "slots": pool.slots_reserved + pool.slots_quarantined > 0,
        "mover": mover in running.movers(),
    }


def one_death(tool: Caller, running: DaemonProcess, victim: str, name: str) -> dict[str, float]:
    """Seconds from the kill until each kind was last seen to be held, and until none is."""
    with engine(running.socket, name) as parts:
        (session,) = tool.status().sessions
        mover = session.ranks[0].mover_pid
        os.kill(mover, signal.SIGSTOP)
        for role, word in (("scheduler", "sent"), ("worker", "done")):
            parts[role].tell("hold")
            parts[role].expect(word)
        wait_for(tool, running, name, mover, dict.fromkeys(KINDS, True))
        pid = mover if victim == "mover" else parts[victim].process.pid
        goes = [k for k in KINDS if victim == "scheduler" or k not in OF_THE_SCHEDULER]
        os.kill(pid, signal.SIGKILL)
        seconds = wait_for(tool, running, name, mover, dict.fromkeys(goes, False))
    wait_for(tool, running, name, mover, dict.fromkeys(KINDS, False))
    return seconds


def wait_for(
    tool: Caller, running: DaemonProcess, name: str, mover: int, wanted: dict[str, bool]
) -> dict[str, float]:
    """Look until all is as wanted; seconds until each was so for good."""
    began = time.monotonic()
    seconds: dict[str, float] = {}
    while seconds.keys() != wanted.keys():
        now = held(tool, running, name, mover)
        spent = time.monotonic() - began
        assert spent < PATIENCE_SECONDS, f"engine {name} has {now}, not {wanted}"
        seconds = {kind: seconds.get(kind, spent) for kind in wanted if now[kind] == wanted[kind]}
        time.sleep(LOOK_SECONDS)
    return seconds | {"all": max(seconds.values())}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="How soon what the dead held is free again.")
    parser.add_argument("--rounds", type=int, default=10, help="deaths of each kind (10)")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/release.json)")
    parser.add_argument("--as", dest="role", choices=VICTIMS[:2], help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        be = be_the_worker if options.role == "worker" else be_the_scheduler
        be(options.socket, options.name)
        return
    deaths: dict[str, list[dict[str, float]]] = {victim: [] for victim in VICTIMS}
    names = itertools.count(1)
    with daemon(POOL_BYTES, extent_bytes=EXTENT_BYTES) as running:
        tool = Caller(running.socket)
        for _, victim in itertools.product(range(options.rounds), VICTIMS):
            deaths[victim].append(one_death(tool, running, victim, str(next(names))))
        tool.close()
    kinds = (*KINDS, "all")
    results = {
        victim: {kind: report.Spread.of([d[kind] for d in of]) for kind in kinds if kind in of[0]}
        for victim, of in deaths.items()
    }
    rows = [
        [victim, *(of.get(kind, "stays") for kind in kinds), BAR_SECONDS]
        for victim, of in results.items()
    ]
    print(report.table(["killed", *(f"{kind}, s" for kind in kinds), "bar, s"], rows))
    report.write("release", {"bar_seconds": BAR_SECONDS, "deaths": results}, options.output)


if __name__ == "__main__":
    main()
