"""A daemon, probe engines beside it, and what can be seen of both from outside."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvd_proto.v1 import operator_pb2
from tests.client.content import block_hashes, last_word
from tests.control.daemon_rig import Caller
from tests.daemon_process import DaemonProcess
from tests.faults.probe import Probe
from tests.waiting import wait_until

MIB = 1 << 20
PATIENCE_SECONDS = 15.0
# An engine's end is what releases what it held, and no deadline of its jobs, of 30 s each. A sound
# daemon takes two seconds at most, a busy machine longer.
RELEASE_SECONDS = PATIENCE_SECONDS
PULSE_SECONDS = 0.0002
LONGEST_PULSE_SECONDS = 0.05  # on a busy machine a process that may run waits for its turn
ATTEMPTS = 60  # at catching a copy half-way: how long a pulse really is, the machine decides

Clean = tuple[int, int, int, int]


class Scene:
    """One daemon over one pool; remembers the probes so that none is left behind."""

    def __init__(self, **flags: object) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvd-test."))
        pool = tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir="/dev/shm")
        self._pool = Path(pool)
        self.daemon = DaemonProcess(self.directory, self._pool)
        self.daemon.flags = flags
        self.probes: list[Probe] = []
        self._caller: Caller | None = None

    @property
    def directory_of_pool(self) -> Path:
        """Where another daemon than the scene's own may have its pool."""
        path = self._pool / "another"
        path.mkdir(exist_ok=True)
        return path

    # -- engines ----------------------------------------------------------------------------

    def engine(self, engine_id: str, **changes: Any) -> Probe:
        """A probe engine, usable."""
        probe = self.start_engine(engine_id, **changes)
        probe.wait_usable()
        return probe

    def engines(self, *engine_ids: str, **changes: Any) -> list[Probe]:
        """Several, started at once."""
        started = [self.start_engine(engine_id, **changes) for engine_id in engine_ids]
        for probe in started:
            probe.wait_usable()
        return started

    def start_engine(self, engine_id: str, **changes: Any) -> Probe:
        log = self.directory / f"{engine_id}.log"
        probe = Probe(self.daemon.socket, engine_id, log, **changes)
        self.probes.append(probe)
        return probe

    def end_engines(self, *but: Probe) -> None:
        """End every probe but these, and wait until the daemon has forgotten the others."""
        probes, self.probes = self.probes, list(but)
        for probe in probes:
            if probe not in but:
                probe.kill()
        left = {probe.engine_id for probe in but}

        def are_alone() -> bool:
            sessions = self.status().sessions
            movers = {rank.mover_pid for session in sessions for rank in session.ranks}
            names = {session.engine_id for session in sessions}
            return names == left and movers == set(self.daemon.movers())

        wait_until(are_alone, "their ends")

    # -- what the daemon says ---------------------------------------------------------------

    @property
    def caller(self) -> Caller:
        if self._caller is None:
            self._caller = Caller(self.daemon.socket)
        return self._caller

    def status(self) -> operator_pb2.StatusResponse:
        return self.caller.status()

    def session_of(self, probe: Probe) -> operator_pb2.SessionStatus:
        return next(s for s in self.status().sessions if s.engine_id == probe.engine_id)

    def movers_of(self, probe: Probe) -> list[int]:
        """Its movers' pids, by rank."""
        return [rank.mover_pid for rank in self.session_of(probe).ranks]

    def wait_replaced(self, probe: Probe, mover: int) -> None:
        """Wait until the engine of this dead mover is registered again and knows it."""
        wait_until(lambda: mover not in self.daemon.movers(), "the mover's end")

        def is_back() -> bool:
            session, said = self.session_of(probe), probe.ask("status")
            pids = [rank.mover_pid for rank in session.ranks]
            back = session.usable and mover not in pids
            return back and said["usable"] and not any(said["rank_problems"])

        wait_until(is_back, "the rank's registration")

    def clear(self, namespace_id: int = 0) -> None:
        """One namespace, or with 0 every one."""
        request = operator_pb2.ClearRequest(namespace_id=namespace_id)
        self.caller.call(self.caller.operator.Clear, request)

    def forget_caller(self) -> None:
        """Before the daemon goes: its next life needs a new introduction."""
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.close()

    def kill_daemon(self) -> None:
        """Kill -9; engines and pool are as they were."""
        self.forget_caller()
        self.daemon.kill()

    def end_daemon(self) -> None:
        """Stop it in order; engines and pool are as they were."""
        self.forget_caller()
        self.daemon.end()

    def busy_slots(self) -> int:
        """Those that a store has, or had and nobody may have yet."""
        pool = self.status().pool
        return int(pool.slots_reserved + pool.slots_quarantined)

    # -- what the kernel says ---------------------------------------------------------------

    def wait_released(self, probe: Probe, since: float, before: Clean) -> float:
        """Seconds from `since` until the daemon holds nothing of this engine any more."""
        deadline = since + PATIENCE_SECONDS
        while (now := self.figures()) != before:
            assert time.monotonic() < deadline, f"{probe.engine_id} left {now}, not {before}"
            time.sleep(0.01)
        spent = time.monotonic() - since
        mapped = self.who_maps(probe)
        assert not mapped, f"memory of {probe.engine_id} is still held by {mapped}"
        return spent

    def figures(self) -> Clean:
        """What an engine's end must bring back: movers, sessions, descriptors, busy slots."""
        status = self.status()
        busy = status.pool.slots_reserved + status.pool.slots_quarantined
        busy += sum(s.leases + s.jobs_in_flight for s in status.sessions)
        # Index pages stay: they belong to namespaces, which outlive their engines.
        fds = sum("kvd-page" not in target(link) for link in links(self.daemon.pid))
        return len(self.daemon.movers()), len(status.sessions), fds, busy

    def lasting_figures(self) -> Clean:
        """The same, without what the daemon has open for a moment, as to look who is connected."""
        seen, now = None, self.figures()
        while now != seen:
            time.sleep(0.05)
            seen, now = now, self.figures()
        return now

    def who_maps(self, probe: Probe) -> list[str]:
        """Daemon processes that map the engine's memory or hold a descriptor of it."""
        name = f"memfd:kv-{probe.engine_id} "
        holders = []
        for pid in [self.daemon.pid, *self.daemon.movers()]:
            held = [target(link) for link in links(pid)]
            held += Path(f"/proc/{pid}/maps").read_text().splitlines()
            holders += [f"{pid}: {each}" for each in held if name in each]
        return holders

    def copied_blocks(self, prefix: str, count: int, block_bytes: int, rank: int = 0) -> int:
        """How many of a prompt's blocks are wholly in the pool's files, READY or not."""
        found: set[int] = set()
        for path in (self.daemon.pool / "extents").glob("*.kv"):
            words = np.memmap(path, dtype=np.uint64, mode="r")
            size = block_bytes // 8
            found.update(words[size - 1 :: size].tolist())
        keys = block_hashes(prefix, count)
        return sum(last_word(key, rank, block_bytes) in found for key in keys)

    def pin_mid_store(self, engine: Probe, mover: int, count: int, block_bytes: int) -> str:
        """Have a store's mover frozen in the middle of its copy; the prompt that it stores."""
        for attempt in range(ATTEMPTS):
            prefix = f"{engine.engine_id} attempt {attempt}"
            copied = partial(self.copied_blocks, prefix, count, block_bytes)
            freeze(mover)
            engine.ask("store", prefix=prefix, count=count, wait=False)
            if run_until(mover, copied, count, attempt):
                return prefix
            thaw(mover)
            engine.ask("pump")
        raise AssertionError("no copy could be caught half-way")

    # -- end --------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything and remove every file."""
        self.forget_caller()
        try:
            for probe in self.probes:
                probe.kill()
            self.daemon.end()
        finally:
            self.daemon.kill()
            if os.environ.get("KVD_TEST_SHOW_LOGS"):
                print(self.daemon.log.read_text())  # noqa: T201 - asked for
            shutil.rmtree(self.directory, ignore_errors=True)
            shutil.rmtree(self._pool, ignore_errors=True)


MakeScene = Callable[..., Scene]


@contextmanager
def scenes() -> Iterator[MakeScene]:
    """Makes scenes and ends them; each daemon is started, unless the test is to do that."""
    made: list[Scene] = []

    def make(
        pool_bytes: int = 32 * MIB, extent_bytes: int = MIB, starts: bool = True, **flags: object
    ) -> Scene:
        scene = Scene(**{name.replace("_", "-"): value for name, value in flags.items()})
        made.append(scene)
        scene.daemon.pool_bytes, scene.daemon.extent_bytes = pool_bytes, extent_bytes
        if starts:
            scene.daemon.start()
        return scene

    try:
        yield make
    finally:
        for scene in made:
            scene.close()


def links(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it ended meanwhile
        return []


def target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""


def freeze(pid: int) -> None:
    """SIGSTOP; returns once every thread has stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state == "T" for state in thread_states(pid)), f"{pid} to stop")


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def thread_states(pid: int) -> list[str]:
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def pin_mid_load(engine: Probe, mover: int, prefix: str, count: int) -> str:
    """Have a load's mover frozen in the middle of its copy; the request that loads."""
    for attempt in range(ATTEMPTS):
        request = f"attempt {attempt}"
        assert engine.ask("match", request=request, prefix=prefix, count=count)["found"] == count
        freeze(mover)
        engine.ask("start_load", request=request, found=count, first_block=0)

        def copied() -> int:
            return int(engine.ask("check", prefix=prefix, count=count, first_block=0)["right"])

        if run_until(mover, copied, count, attempt):
            return request
        thaw(mover)
        engine.ask("pump")
        engine.ask("finish", request=request)
    raise AssertionError("no copy could be caught half-way")


def run_until(pid: int, copied: Callable[[], int], whole: int, attempt: int) -> bool:
    """Let a frozen mover run in short pulses until it is in the middle of a copy, frozen.

    False: the machine let it run too long and the copy is through. Every further attempt begins
    with shorter pulses, down to none between two signals; they grow until it copies something.
    """
    pulse = PULSE_SECONDS / 2 ** (attempt % 8) if attempt % 8 < 7 else 0.0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        thaw(pid)
        time.sleep(pulse)
        freeze(pid)
        done = copied()
        if done:
            return done < whole
        pulse = min(1.01 * pulse + PULSE_SECONDS / 256, LONGEST_PULSE_SECONDS)
    raise AssertionError("the mover copies nothing")
