"""An engine that asks in batches: SGLang's side of the client, with threads that call it at once.

Each thread has blocks of its own. It finds, loads and stores, and looks whether what came is right
and whether anything is copied behind its back; all amid what befalls the daemon.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from kvd_client import EngineIdentity, batches, lease_renewal, leased_answers
from kvd_client.draft import BlockRun
from tests.simulation.whole.client import (
    DRAINED_S,
    STEP_S,
    ClientEngine,
    ClientSide,
    WatchedConnection,
    namespace_of,
)
from tests.simulation.whole.client_device import Device
from tests.simulation.whole.client_threads import Lock, Threads
from tests.simulation.whole.drawn import HASH_BYTES, hash_of
from tests.simulation.whole.hazards import replaced
from tests.simulation.whole.ranks import Wish

THREADS = 3
KEYS = 48  # that all such engines of a model have in common
MOST_KEYS = 6  # in one call, of one group
REPEATED = 0.1  # of the calls have a key twice
RESETS = 0.01  # of the turns with nothing under way
LONGEST_CALL_S = 30.0  # whatever the daemon does

Call = Callable[[], object]


@dataclass(eq=False)
class BatchEngine(ClientEngine):
    """A scheduler and only rank in one, and threads that wait for it."""

    # -- its life -----------------------------------------------------------------------------

    def start(self) -> None:
        self._begin_process()
        identity = EngineIdentity(self.name, self.boot_nonce)
        self.batches = made = batches.BlockBatches(
            self.name, identity, namespace_of(self.model, self.groups)
        )
        connection: Any = made._connection
        self.side = ClientSide(self.loop, connection, made._worker, Device)
        self.side.take(self.memory[0])
        made.register([self.shared_memory(0)], self.layouts())
        self.drawn = random.Random(hash_of(self.name) + self.starts)
        self.version = ""
        self.asked: list[Call | None] = [None] * THREADS
        threading = self.threads.as_threading()
        for number in range(THREADS):
            threading.Thread(target=partial(self._serve, number), name="batches").start()

    def _serve(self, number: int) -> None:
        while True:
            self.threads.wait_until(lambda: self.asked[number] is not None, None)
            call = self.asked[number]
            assert call is not None
            began, jumps = self.loop.now, self.loop.jumps
            call()
            took = self.loop.now - began
            assert took < LONGEST_CALL_S or jumps != self.loop.jumps, f"{took:.1f} s (I6)"
            self.asked[number] = None

    @property
    def is_idle(self) -> bool:
        return not any(self.asked)

    # -- what it does -------------------------------------------------------------------------

    def act(self) -> None:
        """A thread that has nothing to do begins with something."""
        self._begin_turn()
        if self.is_idle and not self.is_plain and self.drawn.random() < RESETS:
            self._forget(f"{self.name}+{self.starts}+{self.loop.now}")
        number = self.drawn.randrange(THREADS)
        what = self.drawn.choice((self._store, self._load, self._load, self._find))
        self._ask(number, partial(what, number))

    def _ask(self, number: int, call: Call) -> None:
        if self.asked[number] is None:
            self.asked[number] = call
            self.threads.news()

    def _forget(self, version: str) -> None:
        """As where weights change."""
        self.version = version
        self.batches.reset(version)

    def session_epoch(self, epoch: str) -> None:
        self._begin_turn()
        if self.is_idle:
            self._forget(epoch)

    def press(self) -> None:
        self._begin_turn()
        self.pressed += 1
        names = [f"{self.name} presses {self.starts} {self.pressed} {n}" for n in range(MOST_KEYS)]
        self._ask(self.pressed % THREADS, partial(self.keep, self.pressed % THREADS, 0, names))

    # -- calls --------------------------------------------------------------------------------

    def _draw(self) -> tuple[int, list[str]]:
        """A group and names of blocks in it: some of a prompt, as they follow one another."""
        group = self.drawn.randrange(len(self.groups))
        most = min(MOST_KEYS, self.blocks // THREADS // self.groups[group].blocks_per_block)
        first, count = self.drawn.randrange(KEYS), self.drawn.randint(1, most)
        names = [str((first + n) % KEYS) for n in range(count)]
        if self.drawn.random() < REPEATED:
            names[-1] = names[0]
        return group, names

    def _store(self, number: int) -> None:
        self.keep(number, *self._draw())

    def _find(self, number: int) -> None:
        group, names = self._draw()
        leading = self.drawn.random() < 0.5
        found = self.batches.find([self._sought(group, names, leading=leading)])[0]
        assert len(found) == len(names)

    def _load(self, number: int) -> None:
        self.bring(number, *self._draw())

    def keep(self, number: int, group: int, names: list[str]) -> bool:
        """Compute these in the thread's own blocks and store them."""
        run = self._run(number, group, names)
        memory, width = self.memory[0], self.groups[group].blocks_per_block
        for place, block in enumerate(run.engine_blocks):
            memory.write(group, block, self._content(group, names[place // width], place % width))
        (done,) = self.batches.store([run])
        self._write_over(group, run)
        return done

    def bring(self, number: int, group: int, names: list[str]) -> bool:
        """Find these and load those that are there; whether all came."""
        sought = self._sought(group, names, leading=True)
        count = int(self.batches.find([sought])[0].sum())
        if not count:
            return False
        run = self._run(number, group, names[:count])
        self._write_over(group, run)
        (come,) = self.batches.load([run])
        assert len(come) == count
        memory, width = self.memory[0], self.groups[group].blocks_per_block
        for place, block in enumerate(run.engine_blocks):
            memory.loading[group].pop(block, None)  # what comes now is copied behind its back
            if come[place // width]:
                right = self._content(group, names[place // width], place % width)
                found = memory.read(group, block)
                assert found == right, f"{self.name} loads {found} for {right} (I2)"
        self.loads_done += any(come)
        self._write_over(group, run)
        return all(come) and count == len(names)

    def _sought(self, group: int, names: list[str], *, leading: bool) -> batches.SoughtKeys:
        return batches.SoughtKeys(group, [self._key(name) for name in names], leading=leading)

    def _run(self, number: int, group: int, names: list[str]) -> BlockRun:
        first = number * (self.blocks // THREADS)
        blocks = list(range(first, first + len(names) * self.groups[group].blocks_per_block))
        self.drawn.shuffle(blocks)
        return BlockRun(group, 0, [self._key(name) for name in names], blocks)

    def _key(self, name: str) -> bytes:
        return hashlib.blake2b(name.encode(), digest_size=HASH_BYTES).digest()

    def _content(self, group: int, name: str, place: int) -> tuple[object, ...]:
        return (self.version, group, name, place)

    def _write_over(self, group: int, run: BlockRun) -> None:
        """The engine has these blocks again."""
        for block in run.engine_blocks:
            self.memory[0].write(group, block, ("of something else", self.loop.now))

    # -- the end ------------------------------------------------------------------------------

    def wish(self) -> Wish:
        return BatchWish(self)

    def take_memory_back(self) -> None:
        self.batches.close()
        self._withdraw_memory()

    def leave(self) -> None:
        deadline = self.loop.now + DRAINED_S
        while not self.is_idle:
            assert self.loop.now < deadline, "a call does not return"
            self.loop.run_for(STEP_S * 10)
        made = self.batches
        assert not made._jobs, "a job is kept for nobody"
        assert not self.side.connection._lookups._answers, "an answer of a lookup is kept"
        answers = made._answers
        leased = sum(map(len, answers._leased.values()))
        assert leased == sum(claim.left for claim in answers._claims.values()), "claims and leases"
        assert not self.side.worker._jobs._open, "a rank's job never ended"
        self.take_memory_back()


class BatchWish(Wish):
    """Blocks of its own in each group are stored, found and loaded."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._left = list(range(len(engine.groups)))

    @property
    def is_served(self) -> bool:
        return not self._left

    def ask(self) -> None:
        self._engine._begin_turn()
        if self._left:
            self._engine._ask(0, self._call)

    def _call(self) -> None:
        engine, group = self._engine, self._left[0]
        names = [f"{engine.name} wants {engine.starts} {n}" for n in range(2)]
        if engine.keep(0, group, names) and engine.bring(0, group, names):
            self._left.pop(0)

    def told(self) -> str:
        problem = self._engine.batches.problem or "connected"
        return f"{problem}, groups left {self._left}, movers {len(self._engine.movers)}"


def in_force(threads: Threads) -> AbstractContextManager[None]:
    """Within, what batches ask of time and threads is the simulation's, besides the client's."""
    threading = SimpleNamespace(**vars(threads.as_threading()) | {"Lock": partial(Lock, threads)})
    return replaced(
        [
            (batches, "threading", threading),
            (lease_renewal, "threading", threading),
            (batches, "time", threads.as_time()),
            (leased_answers, "time", threads.as_time()),
            (batches, "SchedulerConnection", WatchedConnection),
        ]
    )
